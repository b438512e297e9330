"""Which wavelengths of a rotary model carry each head
===================================================

Each cell is a head of SmolLM2. Its colour is the band of rotary wavelengths with the largest
share of the covariance of its scores; the stronger the colour, the larger the share. A head in
the colour of *near* distinguishes tokens a few positions apart.
"""

import tl_geometry as tlg

model = tlg.zoo.smollm2()
windows = tlg.zoo.default_windows(model, 128, n=32)
basis = tlg.decompose(model, windows, progress=False)
sweep = tlg.sweep_heads(model, windows[:4], basis, planes=True, progress=False)
view = tlg.render.band_atlas(sweep.planes())
