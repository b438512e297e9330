"""Which term makes an induction head attend
=========================================

In the *pattern*, the bright cells off the left edge show where the head attends; in the same
cells *content* alone is dark red, so the head attends because contents match. Rows are queries,
columns keys, red is positive, and the four terms add up to the model's own score (here without
the mean of each row, which the softmax ignores).
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()  # the one line to change
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)  # mean, position, context of every state
top = tlg.sweep_heads(model, windows[:32], basis, progress=False).top("induction", 3)
columns = ["layer", "head", "induction", "dominant_group", "group_share", "group_gain"]
print(top.to_dataframe()[columns].round(2).to_string(index=False))
prompt = "def area(width, height):\n    return width * height\n"
split = tlg.split_scores(model, prompt, basis, heads=top.heads[:1], prepend_bos=True)
print(f"terms miss the model's scores by {split.reconstruction.worst:.1f} of what rounding allows")
view = tlg.render.split(split, centered=True)
