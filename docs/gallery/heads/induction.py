"""Which term makes an induction head attend
=========================================

In the *pattern*, the strong cells off the left edge show where the head attends; in the same
cells *content* alone is dark red, so the head attends because contents match. Rows are queries,
columns keys, red is positive; the four groups and the constants add up to the model's own score
(here without the mean of each row, which the softmax ignores).
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()  # or your HookedTransformer, or a TransformerBridge
tokens = model.to_tokens("def area(width, height):\n    return width * height\n")
logits, cache = model.run_with_cache(tokens)

windows = tlg.zoo.default_windows(model, 128, n=128)  # or tlg.windows(model, texts, 128)
basis = tlg.decompose(model, windows, progress=False)  # mean, position, context of every state
heads = tlg.sweep_heads(model, windows[:32], basis, progress=False).top("induction", 1).heads
split = tlg.split_scores(model, tokens, basis, heads=heads, cache=cache)  # sums to the scores
view = tlg.render.split(split, centered=True)  # shows itself in a notebook

bos = model.tokenizer.bos_token_id
repeats = tlg.corpus.repeated_random_tokens(16, 3, 24, low=100, high=2000, bos_id=bos)
edit = tlg.interventions.term(model, basis, "content", heads=heads)
found = tlg.effects(model, repeats, {"without content": edit}, control="heads", progress=False)
print(found.sentence("without content"))
