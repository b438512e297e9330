"""Where tokens travel on the sphere of the norm
=============================================

Each line is the path of one token of the prompt over the unit sphere, from its embedding (dark)
to its last state (bright), which is labelled with the token. The picture shows only three
principal axes, so distances in it can be smaller than those in the whole space.
"""

import tl_geometry as tlg

model = tlg.zoo.embedded()
prompt = "for name in names:\n    print(name)\n"
paths = tlg.token_paths(model, prompt, prepend_bos=True)
view = tlg.render.sphere_paths(paths)
