"""Why the model says another name: the graph between two prompts
==============================================================

After "... John gave a drink to" SmolLM2-135M-Instruct says " Mary", after "... Mary gave a drink
to" it says " John". Each mark is a token, a head or an MLP that wrote part of the difference of
the two runs, red towards " Mary". All of it adds up, query and key edges included. In the live
page, click a head to see what it read and why it looked there.
"""

import tl_geometry as tlg

model = tlg.zoo.smollm2()
start = "When Mary and John went to the store,"
prompt, other = f"{start} John gave a drink to", f"{start} Mary gave a drink to"
graph = tlg.trace_logit(model, prompt, " Mary", other=" John", counterfactual=other)
view = tlg.render.graph_page(graph)
