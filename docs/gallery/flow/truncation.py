"""How many directions the output needs
====================================

Each point says how far the next-token distribution moves (KL divergence) if only the K leading
directions of the stream are kept after every block, with two standard errors. The dashed line is
the KL divergence between the outputs on consecutive chunks of text.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
text = "\n".join(tlg.zoo.corpus.held_out_documents().texts)
texts = tlg.corpus.pseudo_sentences(model, text, 50, n=384, prepend_bos=True)
directions = tlg.trajectories(model, texts[:192], progress=False)
curve = tlg.truncation_kl(model, texts[192:][:64], directions, progress=False)
view = tlg.render.truncation_figure(curve)
