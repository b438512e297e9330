"""Which heads are previous-token or induction heads
=================================================

Each cell is a head, and each panel a type of head. The number is the attention that the head
pays, on repeated random tokens, to the token before, to what followed earlier copies, or to
earlier copies. The number above a panel is what uniform attention pays.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
sweep = tlg.sweep_heads(model, windows[:32], basis, progress=False)
view = tlg.render.head_types(sweep)
