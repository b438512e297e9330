"""Who wrote what a head reads
===========================

Lines run down from the embeddings, heads and MLPs of SmolLM2 to the induction head L18H6, which
reads what they wrote. The wider a line, the larger is its share of the covariance of the head's
scores; a dashed line has a negative share. ``view.null`` says what writers in random directions
would give.
"""

import tl_geometry as tlg

model = tlg.zoo.smollm2()
bos = int(model.to_tokens("", prepend_bos=True)[0, 0])
tokens = tlg.scores.repeated_random_tokens(20, 2, 12, low=1000, high=40000, bos_id=bos)
edges = tlg.composition(model, tokens, heads=["L18H6"], progress=False)
view = tlg.render.composition_figure(edges)
