"""Who wrote the next token, and why they looked there
===================================================

The upper bars add up what all heads wrote from each token towards the logit of "ight" after the
second " he"; each lower bar is one head and one source, with the attention paid and the largest
terms of the score behind it. In the live page, arcs over the text show the same; click a token to
see its own logit.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
prompt = "def area(width, height):\n    return width * height\n"
ids = model.to_tokens(prompt, prepend_bos=True)
places = range(1, ids.shape[1] - 1)  # at each of them the logit of the text's own next token
found = [tlg.explain_logit(model, ids, i, int(ids[0, i + 1]), basis) for i in places]
view = tlg.render.circuitsvis.induction(found)
