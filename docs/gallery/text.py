import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
prompt = "def area(width, height):\n    return width * height\n"
split = tlg.split_scores(model, prompt, basis, heads="L1H0", prepend_bos=True)
view = tlg.render.circuitsvis.induction(split, head="L1H0")
