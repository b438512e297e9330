"""Which edges make a behaviour?
=============================

The embedded model repeats the argument's name after ``if``. Each line keeps the highest-ranked
edges of the running model and gives every other edge what it has with another name as argument: at
1 the difference of the two names' logits is that of the whole model, at 0 that of the other prompt.
A ranking is good because its line rises far left of the grey one, random edges of equal number.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
names = [" name", " value", " key", " data", " text", " path"]
pairs = [(a, b) for a in names for b in names if a != b]
inputs = {
    "prompts": [f"def get(self,{a}):\n    if" for a, _ in pairs],
    "counterfactuals": [f"def get(self,{b}):\n    if" for _, b in pairs],
    "targets": pairs,
    "prepend_bos": True,
}
curves = {}
for method in ("integrated", "gradient"):
    scores = tlg.edge_scores(model, method=method, **inputs)
    curves[method] = tlg.faithfulness(model, scores, **inputs)
view = tlg.render.faithfulness_curve(curves)
