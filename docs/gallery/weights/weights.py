"""Does W_QK of a positional head lie in the positional subspace?
==============================================================

Blue cells are the large entries of W_QK (above a threshold) in the directions of the basis. The
dashed frame holds the leading directions of position; red is the diagonal of W_QK in the model's
own coordinates. The number above a panel says how many times as much of W_QK lies in the frame as
in a random subspace.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
geometry = tlg.weight_geometry(model, basis)
view = tlg.render.weight_blocks(geometry, ["L0H0", "L1H0"])
