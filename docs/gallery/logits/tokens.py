"""Which tokens of a prompt make a logit
=====================================

SmolLM2-135M-Instruct prefers " Mary" to " John", and each token has the colour of what its
embedding contributes to that difference along value paths: red for " Mary", blue for " John". With
the constants, the numbers add up to the difference of the two logits.
"""

import tl_geometry as tlg

model = tlg.zoo.smollm2()
prompt = "When Mary and John went to the store, John gave a drink to"
graph = tlg.trace_logit(model, prompt, " Mary", other=" John", prepend_bos=True)
view = tlg.render.token_attribution(graph.tokens())
