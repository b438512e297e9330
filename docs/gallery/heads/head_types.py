"""Which heads are previous-token or induction heads
=================================================

Each cell is a head. Its number is the attention that it pays, on repeated random tokens, to what
followed earlier copies of the token. Choose another number above the map, such as *previous*; a
click shows all numbers of a head, what uniform attention would pay among them.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
sweep = tlg.sweep_heads(model, windows[:32], basis, progress=False)
view = tlg.render.heads(sweep, "induction")
