import tl_geometry as tlg

model = tlg.zoo.embedded()
text = "\n".join(tlg.zoo.corpus.held_out_documents().texts)
texts = tlg.corpus.pseudo_sentences(model, text, 50, n=384, prepend_bos=True)
paths = tlg.trajectories(model, texts, progress=False)
view = tlg.render.baseline_figure(tlg.flow_report(paths))
