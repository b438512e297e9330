"""Which of position and content drives each head
==============================================

Each bar is a head, split into the shares of its scores (by covariance) that terms of position, of
content, of content beside a constant, and of both make; the shares of a head add up to one, and can
be negative. Beside it stand the type of head that repeated random tokens show, and how much
attention goes to keys that are left out.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
sweep = tlg.sweep_heads(model, windows[:32], basis, progress=False)
view = tlg.render.head_shares(sweep)
