import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
sweep = tlg.sweep_heads(model, windows[:32], basis, progress=False)
view = tlg.render.head_types(sweep)
