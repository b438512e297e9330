"""Who wrote what a head reads
===========================

Each bar is an edge from the embedding, a head or an MLP of SmolLM2-135M-Instruct to the induction
head L18H6, which reads what they wrote in its queries, keys or values: its share of the covariance
of the head's scores, with the interval over prompts. A tick shows what the same writer gives when
it is turned at random.
"""

import tl_geometry as tlg

model = tlg.zoo.smollm2()
bos = int(model.to_tokens("", prepend_bos=True)[0, 0])
tokens = tlg.corpus.repeated_random_tokens(20, 2, 12, low=1000, high=40000, bos_id=bos)
edges = tlg.composition(model, tokens, heads=["L18H6"], progress=False)
view = tlg.render.composition_figure(edges)
