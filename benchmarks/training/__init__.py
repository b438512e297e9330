"""How does the format of training text shape the geometry of position? Small transformers are
trained on other formats and measured during training (Song & Zhong 2023, section 5).

One command each:

    python -m benchmarks.training randomisation|addition|nanogpt [--scale smoke|cpu|paper]

``randomisation`` trains on text that is partly random, ``addition`` on sums, ``nanogpt`` on
characters. Scale ``smoke`` takes seconds and means nothing, ``cpu`` minutes, ``paper`` has the
published settings. ``python -m benchmarks.training.embedded`` trains the model that the library
ships."""
