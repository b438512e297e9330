"""What one head wrote, from which token
=====================================

The bars under the text are what the head that copies wrote towards the logit of "ight" after the
second " he", from each token that it read.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
prompt = "def area(width, height):\n    return width * he"
graph = tlg.trace_logit(model, prompt, "ight", prepend_bos=True)
view = tlg.render.induction(graph)
