"""How few edges carry a behaviour?
================================

After ``if``, the embedded model prefers the argument's name to others. At each point of the line
only the highest-ranked edges are kept, as many as the axis below says; every other edge carries
what it has in a prompt where the argument has another name. At 1 the difference of the two names'
logits is that of the whole model, at 0 that of the other prompt. The ranking is good, because the
line rises at far fewer edges than the grey one (random edges).
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
names = [" name", " value", " key", " data", " text", " path"]
pairs = [(a, b) for a in names for b in names if a != b]
prompts, others = ([f"def get(self,{p[i]}):\n    if" for p in pairs] for i in (0, 1))
inputs = {"counterfactual": others, "answer": pairs, "prepend_bos": True}
scores = tlg.edge_scores(model, prompts, **inputs)
curve = tlg.faithfulness(model, prompts, scores, **inputs)
view = tlg.render.faithfulness_curve(curve)
