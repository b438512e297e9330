"""How well a linear map predicts one layer's step
===============================================

Each line is the error of one map from a state to the next, relative to the size of the state, on
texts that the map was not fitted to. A map is of use where its line lies below *identity*, which
leaves the state as it is.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
text = "\n".join(tlg.zoo.corpus.held_out_documents().texts)
texts = tlg.corpus.pseudo_sentences(model, text, 50, n=384, prepend_bos=True)
paths = tlg.trajectories(model, texts, progress=False)
view = tlg.render.baseline_figure(tlg.flow_report(paths))
