"""Are position and context orthogonal?
====================================

The points are the mean and the largest cosine between positional and context vectors, state by
state. Where they lie on a dashed line, chance gives the same: random directions, or vectors with
flipped signs.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
report = tlg.contextual_report(basis)
view = tlg.render.measure_curves(report, ["incoherence_avg", "incoherence_max"])
