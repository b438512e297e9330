"""A logit as a graph back to the tokens
=====================================

Each mark is a head, an MLP or a token that wrote part of the difference between the logits of two
names in SmolLM2. The more it wrote, the larger the mark: red for " Mary", blue for " John". In the
live page, click a head to see what it read and why it looked there, and move the
slider to see more nodes.
"""

import tl_geometry as tlg

model = tlg.zoo.smollm2()
prompt = "When Mary and John went to the store, John gave a drink to"
graph = tlg.trace_logit(model, prompt, " Mary", other=" John", prepend_bos=True)
view = tlg.render.graph_page(graph)
