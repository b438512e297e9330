import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
report = tlg.contextual_report(basis)
view = tlg.render.incoherence(report)
