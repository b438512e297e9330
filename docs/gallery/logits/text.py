"""What an induction head wrote, in the text
=========================================

Each token has the colour of what one head wrote from it towards the logit of "ight" after the
second " he": almost all came from "ight" itself, the token that followed the first " he".
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
prompt = "def area(width, height):\n    return width * he"
graph = tlg.trace_logit(model, prompt, "ight", prepend_bos=True)
view = tlg.render.induction(graph)
