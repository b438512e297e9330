"""How much of each state is position, and how much is context
===========================================================

The three lines of a panel are the shares of position, context and residual (both together) in the
variance of the residual stream, from the embedding (state 0) to the last state; they add up to
one. The dashed line is the context that chance gives (windows spliced from random places), and
the right panel is the untrained control.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
spliced = tlg.decompose(model, tlg.corpus.splice(windows), progress=False)
with tlg.models.reinitialized(model) as control:
    untrained = tlg.decompose(control, windows, progress=False)
view = tlg.render.variance_shares(basis.anova(null=spliced), control=untrained.anova())
