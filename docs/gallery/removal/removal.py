"""Does a head need the term that explains it?
===========================================

Each bar is the rise of the embedded model's loss on repeated random tokens when the scores of
L1H0 are edited in the running model: *remove* takes the term of content with content (cvec-cvec)
out, *keep* leaves only this term and the constants. The head needs the term because *remove*
costs more than *shrink* (all scores made smaller by as much) and more than the removal of any
other term; *swap* puts the same term of another prompt in its place.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
windows = tlg.zoo.default_windows(model, 128, n=128)
basis = tlg.decompose(model, windows, progress=False)
prompts, head, term = windows[:16], "L1H0", "cvec-cvec"
effect = tlg.interventions.necessity_sufficiency(model, prompts, basis, head, term, progress=False)
view = tlg.render.effect_bars(effect, "induction_loss")
