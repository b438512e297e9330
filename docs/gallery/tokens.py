import tl_geometry as tlg

model = tlg.zoo.smollm2()
prompt = "When Mary and John went to the store, John gave a drink to"
graph = tlg.trace_logit(model, prompt, " Mary", against=" John", prepend_bos=True)
view = tlg.render.token_values(graph.tokens(), width=38)
