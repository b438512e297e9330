import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
spliced = tlg.decompose(model, tlg.corpus.splice(windows), progress=False)
with tlg.models.reinitialized(model) as control:
    untrained = tlg.decompose(control, windows, progress=False)
view = tlg.render.variance_shares(basis.anova(null=spliced), control=untrained.anova())
