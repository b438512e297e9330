"""Can a part of W_QK stand for the whole?
=======================================

Each bar is the rise of the live model's loss when W_QK of all heads is replaced by one part of it.
A part that could stand for the whole would have a bar near zero. Random directions are a control.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
parts = ("structured", "low_rank", "diagonal", "none")
edits = {part: tlg.interventions.surrogate(model, basis, part=part) for part in parts}
edits["random directions"] = tlg.interventions.surrogate(model, basis, random=True)
effect = tlg.effects(model, windows[:16], edits)
view = tlg.render.effect_bars(effect)
