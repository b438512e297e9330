import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
effect = tlg.interventions.surrogate_effect(model, windows[:16], basis)
view = tlg.render.surrogate_bars(effect)
