"""What shape position has
=======================

Each dot is the positional vector of one position, on the two leading directions of its state; the
percentage is the share of ``|pos|²``, the size of these vectors, that the two directions hold. The
upper row is the trained model, in which position bends into a curve; the lower row is its untrained
control.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
with tlg.models.reinitialized(model) as control:
    untrained = tlg.decompose(control, windows, progress=False)
view = tlg.render.spirals(basis, control=untrained)
