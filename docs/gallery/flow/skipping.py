"""Can a map stand for several layers?
===================================

Each point is the rise of the loss when a map takes the place of blocks, beginning with the one on
the axis. Each line is a map, each panel a number of skipped blocks. The map *mean* forgets the
state, so every other map must beat it.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
text = "\n".join(tlg.zoo.corpus.held_out_documents().texts)
texts = tlg.corpus.pseudo_sentences(model, text, 50, n=384, prepend_bos=True)
# the last token of a text is what the model should say next
fitted = tlg.trajectories(model, texts.tokens[:336, :-1], states=range(5), progress=False)
skips = tlg.skip_costs(model, texts[336:], fitted, pairs="all", progress=False)
view = tlg.render.skip_figure(skips)
