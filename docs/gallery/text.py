import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
prompt = "def area(width, height):\n    return width * height\n"
ids = model.to_tokens(prompt, prepend_bos=True)
following = [
    (i, int(ids[0, i + 1])) for i in range(1, ids.shape[1] - 1)
]  # the text's own next token
found = [tlg.explain_logit(model, ids, i, token, basis) for i, token in following]
view = tlg.render.circuitsvis.induction(found)
