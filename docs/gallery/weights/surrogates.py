"""Can a part of W_QK stand for the whole?
=======================================

Each bar is the rise of the live model's loss when W_QK is replaced by one part of it. The
grey bars are controls; a part that could stand for the whole would have a bar near zero.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
effect = tlg.interventions.surrogate_effect(model, windows[:16], basis)
view = tlg.render.surrogate_bars(effect)
