"""Which wavelengths of a rotary model carry each head
===================================================

Each row is a head of SmolLM2-135M-Instruct, one of the six in which a single rotary plane carries
most. Each bar is the share of a plane in the covariance of its scores, by its wavelength in tokens:
a head whose bars stand at short wavelengths distinguishes tokens a few positions apart.
"""

import tl_geometry as tlg

model = tlg.zoo.smollm2()
windows = tlg.zoo.default_windows(model, 128, n=32)
basis = tlg.decompose(model, windows, progress=False)
sweep = tlg.sweep_heads(model, windows[:4], basis, planes=True, progress=False)
view = tlg.render.head_planes(sweep.planes())
