"""Which of position and content drives each head
==============================================

Each cell is a head. Its number is the share of its scores (by covariance) that terms of position,
of content, or of both make; the three shares of a head add up to one, and can be negative.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
sweep = tlg.sweep_heads(model, windows[:32], basis, progress=False)
view = tlg.render.head_shares(sweep)
