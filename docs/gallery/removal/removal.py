"""Does a head need the term that explains it?
===========================================

Each bar is the rise of the embedded model's loss on repeated random tokens when the scores of
L1H0 are edited in the running model: the term of content with content is taken out. The head
needs it because that costs more than *shrink* (all scores made smaller by as much), and more than
the removal of any other term. *Wrong content* puts the same term of another prompt in its place.
"""

import tl_geometry as tlg
from tl_geometry.corpus import repeated_random_tokens

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
repeated = repeated_random_tokens(16, 4, 12, low=100, high=1900, bos_id=tlg.view(model).bos_id)
edit = tlg.interventions.term(model, basis, "content", "L1H0")
wrong = tlg.interventions.term(model, basis, "content", "L1H0", how="swap")
edits = {"without content": edit, "wrong content": wrong}
effect = tlg.effects(model, repeated, edits, control=["shrink", "terms"])
view = tlg.render.effect_bars(effect)
