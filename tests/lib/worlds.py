"""What do the tables of tests run on? A :class:`World` for each kind of model: a model, its inputs,
and what many subjects start from (basis, split, sweep, graph, ...), made by public names, lazily,
once in a process.

Kinds: four tiny random models of two blocks (``gpt2``; ``llama`` with grouped keys; ``bloom`` with
ALiBi; ``gemma2`` with soft caps, a sliding window and norms behind its blocks), the ``embedded``
model, and ``smollm2``, a real decoder (nightly).

A law changes one thing of a world and compares: :meth:`World.changed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tl_geometry as tlg
from tests.lib.models import HAS_HOOKED, VOCAB, hooked_of, tiny, tokens
from tl_geometry import circuits, zoo

TINY = ("gpt2", "llama", "bloom", "gemma2")
KINDS = (*TINY, "embedded", "smollm2")
DAILY = ("gpt2", "llama")
"""Kinds of the tables that run every time; the others run nightly."""
QUIET: dict[str, Any] = {"progress": False}
EMBEDDED = Path(zoo.__file__).parent / "assets"
"""The folder of the embedded model."""


@dataclass(frozen=True)
class Sizes:
    """How many contexts of how many tokens each kind of input has."""

    ids: tuple[int, int] = (3, 18)
    prompts: tuple[int, int] = (12, 9)
    corpus: tuple[int, int] = (40, 20)
    fresh: tuple[int, int] = (40, 20)
    pilots: tuple[int, int] = (58, 9)


SMALL = Sizes((2, 10), (10, 8), (16, 16), (8, 16), (12, 8))
"""Of SmolLM2, whose pass costs a thousand times that of a tiny model."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """Token ids. Nothing the library does may change them.

    ``ids`` and ``other`` ``[prompt position]`` are prompts and their counterfactuals, ``targets``
    the (answer, other answer) of each; ``prompts``, ``prompts_other`` and ``answers`` the same for
    what needs ten prompts or more. ``corpus [context position]`` is what bases are fitted on,
    ``fresh`` windows that the basis has not seen, ``pilots`` short contexts for trajectories.
    """

    ids: Tensor
    other: Tensor
    prompts: Tensor
    prompts_other: Tensor
    corpus: Tensor
    fresh: Tensor
    pilots: Tensor

    @property
    def targets(self) -> list[tuple[int, int]]:
        return _pairs(self.ids, self.other)

    @property
    def answers(self) -> list[tuple[int, int]]:
        return _pairs(self.prompts, self.prompts_other)

    def tensors(self) -> dict[str, Tensor]:
        return dict(vars(self))


def _pairs(ids: Tensor, other: Tensor) -> list[tuple[int, int]]:
    """Two different tokens of each prompt: its second, and another one of its counterfactual."""
    pairs = []
    for row, alternative in zip(ids.tolist(), other.tolist()):
        pairs.append((row[1], next(token for token in alternative if token != row[1])))
    return pairs


class World:
    """A model, its inputs, and what is made of them."""

    def __init__(self, kind: str, model: Any, inputs: Inputs, loading: str = "bridge") -> None:
        self.kind, self.model, self.inputs, self.loading = kind, model, inputs, loading
        self.ids, self.other, self.targets = inputs.ids, inputs.other, inputs.targets
        self.prompts, self.prompts_other = inputs.prompts, inputs.prompts_other
        self.corpus, self.fresh, self.pilots = inputs.corpus, inputs.fresh, inputs.pilots
        self.answers = inputs.answers

    def changed(self, **inputs: Tensor) -> World:
        """The same model with other inputs; everything made of them is made anew."""
        return World(self.kind, self.model, replace(self.inputs, **inputs), self.loading)

    # ---- facts that decide which subjects apply

    @property
    def rotary(self) -> bool:
        return self.kind in ("llama", "gemma2", "smollm2")

    @property
    def tiny(self) -> bool:
        return self.kind in TINY

    @property
    def text(self) -> str:
        """A text in its tokens: words of the tiny vocabulary, or functions in Python."""
        if self.tiny:
            return " ".join(
                f"w{token}" for token in tokens(1, 300, seed=9)[0].tolist() if token > 3
            )
        return "".join(texts())

    @property
    def heads(self) -> list[str]:
        """Two heads of two blocks."""
        return {"smollm2": ["L4H1", "L12H5"]}.get(self.kind, ["L0H1", "L1H2"])

    @property
    def head(self) -> str:
        return "L12H5" if self.kind == "smollm2" else "L1H0"

    # ---- what subjects start from

    @cached_property
    def basis(self) -> Any:
        return tlg.decompose(self.model, self.corpus, keep=64, **QUIET)

    @cached_property
    def normalized_basis(self) -> Any:
        return tlg.decompose(self.model, self.corpus, normalize=True, keep=64, **QUIET)

    @cached_property
    def split(self) -> Any:
        return tlg.split_scores(self.model, self.ids, self.basis, heads=self.heads)

    @cached_property
    def sweep(self) -> Any:
        return tlg.sweep_heads(self.model, self.corpus, self.basis, **QUIET)

    @cached_property
    def graph(self) -> Any:
        return tlg.trace_logit(self.model, self.ids[:1, :8], self.targets[0][0], keep=0.8)

    @cached_property
    def edges(self) -> Any:
        return circuits.edge_scores(
            self.model, self.ids, counterfactual=self.other, answer=self.targets, method="gradient"
        )

    @cached_property
    def ensemble(self) -> Any:
        return tlg.trajectories(self.model, self.pilots, **QUIET)

    @cached_property
    def all_states(self) -> Any:
        """Trajectories with the embedding's state too where last tokens differ, so that two blocks
        give three states."""
        states = range(0 if self.tiny else 1, self.model.cfg.n_layers + 1)
        return tlg.trajectories(self.model, self.pilots, states=states, **QUIET)

    @cached_property
    def cache(self) -> Any:
        with torch.no_grad():
            return self.model.run_with_cache(self.ids)[1]

    def stream(self) -> Tensor:
        """The model's own stream ``[state batch position d_model]`` on ``ids``."""
        layers = range(self.model.cfg.n_layers)
        names = [f"blocks.{l}.hook_resid_pre" for l in layers]
        names.append(f"blocks.{len(layers) - 1}.hook_resid_post")
        return torch.stack([self.cache[name] for name in names])

    def features(self) -> Any:
        """A small dictionary on the stream that enters block 1: six random directions, each with
        an activation at each position, the same in all prompts."""
        generator = torch.Generator().manual_seed(0)
        width, (prompts, length) = self.model.cfg.d_model, self.ids.shape
        activations = torch.rand(1, length, 6, generator=generator).expand(prompts, -1, -1)
        decoder = torch.randn(6, width, generator=generator)
        bias = torch.randn(width, generator=generator)
        return circuits.dictionary((activations, decoder, bias), 1)


def _tiny_inputs(sizes: Sizes = Sizes()) -> Inputs:
    pilots = tokens(*sizes.pilots, seed=3)
    # all different, so that the embeddings of last tokens span all dimensions
    pilots[:, -1] = torch.arange(VOCAB - len(pilots), VOCAB)
    return Inputs(
        ids=tokens(*sizes.ids, seed=5),
        other=tokens(*sizes.ids, seed=6),
        prompts=tokens(*sizes.prompts, seed=7),
        prompts_other=tokens(*sizes.prompts, seed=8),
        corpus=tokens(*sizes.corpus, seed=2),
        fresh=tokens(*sizes.fresh, seed=12),
        pilots=pilots,
    )


VERBS = ("read", "write", "open", "close", "parse", "count", "join", "split", "find", "sort")
NOUNS = ("file", "line", "token", "name", "path", "value", "table", "index", "key", "word")


def texts(n: int = 40) -> list[str]:
    """Small functions in Python, no two alike: the embedded model was trained on such text. Their
    names recur, so that there is something to copy."""
    lines = []
    for i in range(n):
        verb, noun = VERBS[i % 10], NOUNS[(3 * i + i // 10) % 10]
        other = NOUNS[(7 * i + 1) % 10]
        lines.append(
            f"def {verb}_{noun}({noun}, {other}={i}):\n"
            f"    if {noun} is None:\n        raise ValueError({other})\n"
            f"    for item in {noun}:\n        {other} = {verb}({noun}, item)\n"
            f"    return {other}\n\n"
        )
    return lines


def _text_inputs(model: Any, sizes: Sizes) -> Inputs:
    """Windows of one text, each from another place of it, after a BOS token."""
    ids = model.to_tokens("".join(texts()), prepend_bos=False)[0]
    bos = model.tokenizer.bos_token_id

    def windows(shape: Sequence[int], place: int) -> Tensor:
        """Windows that begin 37 tokens apart, from a place on."""
        starts = [(place + 37 * i) % (len(ids) - shape[1]) for i in range(shape[0])]
        rows = torch.stack([ids[start : start + shape[1] - 1] for start in starts])
        return torch.cat([torch.full((shape[0], 1), bos), rows], 1)

    return Inputs(
        ids=windows(sizes.ids, 5),
        other=windows(sizes.ids, 611),
        prompts=windows(sizes.prompts, 17),
        prompts_other=windows(sizes.prompts, 402),
        corpus=windows(sizes.corpus, 0),
        fresh=windows(sizes.fresh, 23),
        pilots=windows(sizes.pilots, 11),
    )


def loadings(kind: str) -> tuple[str, ...]:
    """The ways in which the installed TransformerLens holds a kind: class, and whether its weights
    are processed."""
    # after a longer pass, HookedTransformer shifts the rows of ALiBi's scores, which are then
    # refused (tests.tables.test_subjects has a test that expects it)
    classes = ("bridge", "hooked") if HAS_HOOKED and kind != "bloom" else ("bridge",)
    return tuple(c + p for c in classes for p in ("", " processed"))


@cache
def world(kind: str, loading: str = "bridge", dtype: torch.dtype = torch.float32) -> World:
    """The world of a kind, its model loaded in one way; made once in a process."""
    if kind not in KINDS:
        raise ValueError(f"expected one of {KINDS}, got {kind!r}")
    model_class, _, word = loading.partition(" ")
    way = {"model_class": model_class, "processed": word == "processed"}
    if kind in TINY:
        model = tiny(model_class, kind, way["processed"], dtype, text=True)
        assert model.cfg.d_vocab == VOCAB
        return _warm(World(kind, model, _tiny_inputs(), loading))
    if dtype != torch.float32:
        raise ValueError(f"{kind} is loaded in float32 only")
    make = zoo.embedded if kind == "embedded" else zoo.smollm2
    model, sizes = make(processed=way["processed"]), Sizes() if kind == "embedded" else SMALL
    if (
        model_class == "hooked"
    ):  # of the embedded model alone: the other has its records in one class
        from transformers import AutoModelForCausalLM

        hf = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=dtype).eval()
        model = hooked_of(hf, way["processed"], model.tokenizer, name=tlg.view(model).name)
    return _warm(World(kind, model, _text_inputs(model, sizes), loading))


def _warm(made: World) -> World:
    """Run the model once: transformers puts hooks of its own on a model in its first pass."""
    with torch.no_grad():
        made.model.run_with_cache(made.ids)
    return made
