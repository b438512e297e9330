"""Rows of ``models``, ``zoo`` and ``corpus``: what is read off a model, which models there are, and
the token windows that everything else runs on."""

from __future__ import annotations

from typing import Any

import torch

import tl_geometry as tlg
from tests.lib.subjects.row import Answers, Subject, rotary
from tests.lib.worlds import EMBEDDED, World
from tl_geometry import corpus, models, zoo

FACTS = {
    "norm before attention": "norm before attention",
    "key and value heads": "key heads",
    "QK-norm": "QK-norm",
    "rotation": "rotation",
    "score scale": "score scale",
    "soft cap": "soft cap of scores",
    "sinks": "sinks",
    "score bias": "score bias",
    "sliding window": "sliding window",
}
"""Property of ``check_model`` -> what it is called here."""
DRAWS = "transformers draws weights before it reads those of a file"
LOADED = "it depends on how the weights are loaded"


def verdicts(report: Any) -> Answers:
    """What is verified and what is refused, and the facts of attention."""
    rows = [(str(what), str(value), str(verdict)) for what, value, verdict in report.cells]
    found: Answers = {
        "refused": [what for what, _, verdict in rows if verdict.startswith("refused")] or "none",
        "verified": [what for what, _, verdict in rows if verdict.startswith("verified")],
    }
    for what, value, _ in rows:
        if what in FACTS:
            found[f"fact: {FACTS[what]}"] = value
    return found


def seen(v: Any) -> Answers:
    """Sizes and facts of a model, its embeddings and its final norm."""
    norm = v.final_norm()
    return {
        "blocks, heads, d_model, d_head, vocabulary": [
            *(v.n_layers, v.n_heads, v.d_model, v.d_head, v.d_vocab)
        ],
        "key heads of blocks": [v.key_heads(layer) for layer in range(v.n_layers)],
        "causal": str(v.causal),
        "position": v.position,
        "W_E": v.embed(),
        "W_U": v.unembed(),
        "b_U": v.unembed_bias(),
        "gain of the final norm": norm.gain,
        "bias of the final norm": norm.bias,
    }


def weights_of(v: Any) -> Answers:
    """Weights of the heads of block 1, grouped keys repeated."""
    w = v.weights(1)
    return {name: getattr(w, name) for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_V", "b_O")}


def output(w: World) -> Answers:
    """Logits as the output head makes them of the last state, and its directions."""
    head = tlg.view(w.model).output_head()
    assert head is not None
    return {
        "log probabilities": head.logits(w.stream()[-1]).double().log_softmax(-1),
        "directions of tokens": head.directions([5, 9, 11]),
        "soft cap of logits": head.softcap or 0.0,
    }


def _planes(w: World) -> Any:
    view, layer = tlg.view(w.model), 1 if w.kind != "smollm2" else 4
    with torch.no_grad():
        cache = w.model.run_with_cache(w.ids)[1]
    return view.layer(layer, cache).planes()


def _untrained(w: World, **options: Any) -> Answers:
    """The untrained control, and that the model is itself again after it. Shuffled weights depend
    on the order of parameters, which differs between versions of TransformerLens; their sizes do
    not."""
    before = w.model(w.ids, return_type="logits").detach().clone()
    with models.reinitialized(w.model, **options):
        inside = w.model(w.ids, return_type="logits").detach().clone()
        sums = [float(p.detach().double().square().sum()) for p in w.model.parameters()]
    after = w.model(w.ids, return_type="logits").detach()
    found: Answers = {
        "squares of the control's weights": sum(sums),
        "it says other things": str(not torch.equal(before, inside)),
        "the model is itself again": str(torch.equal(before, after)),
    }
    if options.get("how") != "shuffle":
        found["log probabilities of the control"] = inside.double().log_softmax(-1)
    return found


MODELS = (
    Subject(
        name="check_model",
        call=lambda w: tlg.check_model(w.model),
        answers=verdicts,
        real=("plain",),
    ),
    Subject(
        name="view",
        call=lambda w: tlg.view(w.model),
        answers=seen,
        gauge=dict.fromkeys(("W_E", "W_U", "b_U", "gain *", "bias *"), LOADED),
        without={
            **dict.fromkeys(("empty:b_U", "empty:bias *"), "this kind of model has no such bias"),
            "classes:W_E": "HookedTransformer has Gemma's factor of embeddings in W_E",
        },
        real=("plain",),
    ),
    Subject(
        name="view, weights of heads",
        covers=("view",),
        call=lambda w: tlg.view(w.model),
        answers=weights_of,
        gauge={"*": LOADED},
        without={"empty:b_*": "this kind of model has no such bias"},
    ),
    Subject(
        name="output head",
        covers=("view",),
        call=output,
        order={"log probabilities": 0},
        later={"log probabilities": 1},
        half=("log probabilities",),
        gauge={"directions *": LOADED},
        without={"empty:soft cap *": "0 stands for none"},
    ),
    Subject(
        name="rotary planes",
        covers=("view",),
        call=_planes,
        answers=lambda p: {
            "angle per token": p.theta,
            "wavelength": p.wavelength,
            "plane": p.plane,
        },
        only={"*": rotary},
        real=("plain",),
    ),
    Subject(
        name="untrained control",
        covers=("reinitialized",),
        call=_untrained,
        variants={"init": {"seed": 2}, "shuffle": {"how": "shuffle"}, "block 1": {"blocks": [1]}},
        order={"log *": 0},
        seeds=("log *", "squares *"),
        without={
            "seeds:shuffle/squares *": "shuffled weights have the same squares",
            "classes": "each class holds its parameters in other shapes and another order",
        },
        gauge={"*": LOADED},
    ),
    Subject(
        name="embedded model",
        covers=("zoo.embedded", "load"),
        call=lambda w, folder=None, **o: (models.load(folder) if folder else zoo.embedded(**o))(
            w.ids, return_type="logits"
        ),
        answers=lambda logits: {"log probabilities": logits.double().log_softmax(-1)},
        variants={"trained": {}, "untrained": {"trained": False}, "loaded": {"folder": EMBEDDED}},
        only={"*": lambda w: w.kind == "embedded"},
        order={"*": 0},
        later={"*": 1},
        without={"disturbs:torch's generator": DRAWS},
    ),
    Subject(
        name="MiniLM",
        covers=("zoo.minilm",),
        call=lambda w: zoo.minilm(),
        answers=lambda model: {
            "states of a sentence": tlg.decompose_activations(
                model.run_with_cache(torch.arange(2000, 2016).view(2, 8))[1]
            ).mean
        },
        only={"*": lambda w: w.kind == "smollm2"},
        real=("plain",),
        without={"disturbs:torch's generator": DRAWS},
    ),
    Subject(
        name="SmolLM2",
        covers=("zoo.smollm2",),
        call=lambda w: w.model(w.ids, return_type="logits"),
        answers=lambda logits: {"log probabilities": logits.detach().double().log_softmax(-1)},
        only={"*": lambda w: w.kind == "smollm2"},
        order={"*": 0},
        later={"*": 1},
        real=("plain",),
    ),
)


def windows(t: Any) -> Answers:
    """Token windows."""
    found: Answers = {"ids": t.tokens, "has BOS": str(t.has_bos)}
    if t.labels is not None and t.labels.any():  # several documents
        found |= {"documents": t.labels}
    return found | {f"position of {name}": at for name, at in t.positions.items()}


def _of_text(w: World, *, texts: Any = None, length: int = 12, **options: Any) -> Any:
    options = {"prepend_bos": True} | options
    return tlg.windows(w.model, texts or w.text, length, **options)


def _several(w: World) -> list[str]:
    words = w.text.split(" ")
    third = len(words) // 3
    return [" ".join(words[i : i + third]) for i in range(0, 3 * third, third)]


def _templates(w: World) -> Any:
    template = "w5 {a} w6 {b} w7 {a}" if w.tiny else "def {a}({b}): return {a}"
    words = ("w9", "w10", "w11", "w12") if w.tiny else ("get", "x", "set", "y")
    texts = [template.format(a=words[0], b=words[1]), template.format(a=words[2], b=words[3])]
    places = {"a": "w5 {a}", "b": "w6 {b}"} if w.tiny else {"a": "def {a}", "b": "({b}"}
    positions: Any = {
        name: [piece.format(a=words[i], b=words[i + 1]) for i in (0, 2)]
        for name, piece in places.items()
    }
    positions |= {"a2": -1, "end": -1}
    return corpus.prompts(w.model, texts, positions=positions, prepend_bos=True).as_windows()


def _known(w: World) -> Any:
    """The windows of ``ids`` as the library's own class."""
    return tlg.TokenWindows(tokens=w.corpus, has_bos=False)


RANDOM: dict[str, Any] = {"period": 5, "copies": 3, "batch": 2, "low": 3, "high": 50}
CORPUS = (
    Subject(
        name="windows",
        covers=("windows", "TokenWindows"),
        call=_of_text,
        answers=windows,
        variants={
            "one text": {},
            "several texts": {"texts": _several},
            "without BOS": {"prepend_bos": False},
            "some of them": {"n": 4, "seed": 1},
            "longer": {"length": 30},
        },
        seeds=(),
        real=("one text",),
    ),
    Subject(
        name="spliced windows",
        covers=("corpus.splice",),
        call=lambda w, **o: corpus.splice(_known(w), **o),
        answers=windows,
        seeds=("ids",),
        without={"order:*": "pieces are drawn by their place"},
    ),
    Subject(
        name="gibberish",
        covers=("corpus.gibberish",),
        call=lambda w, **o: corpus.gibberish(w.model, 4, 9, **o),
        answers=windows,
        variants={"uniform": {}},
        seeds=("ids",),
        without={"order:*": "tokens are drawn by their place"},
    ),
    Subject(
        name="pseudo_sentences",
        covers=("corpus.pseudo_sentences",),
        call=lambda w, **o: corpus.pseudo_sentences(w.model, w.text, 10, **o),
        answers=windows,
        variants={"plain": {}, "first five": {"n": 5}},
    ),
    Subject(
        name="repeated_random_tokens",
        covers=("corpus.repeated_random_tokens",),
        call=lambda w, **o: corpus.repeated_random_tokens(**RANDOM | o),
        answers=lambda ids: {"ids": ids},
        variants={"plain": {}, "with BOS": {"bos_id": 0}},
        only={"*": lambda w: w.kind == "gpt2"},
        seeds=("ids",),
    ),
    Subject(
        name="prompts with named positions", covers=("prompts",), call=_templates, answers=windows
    ),
)
SUBJECTS = (*MODELS, *CORPUS)
