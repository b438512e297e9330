import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
geometry = tlg.weight_geometry(model, basis)
view = tlg.render.weight_blocks(geometry, ["L0H0", "L1H0"])
