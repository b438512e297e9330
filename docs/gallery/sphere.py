import tl_geometry as tlg

model = tlg.zoo.embedded()
prompt = "for name in names:\n    print(name)\n"
paths = tlg.token_paths(model, prompt, prepend_bos=True)
view = tlg.render.sphere_paths(paths)
