"""Models whose circuit is known, to see what a measure finds: :func:`tl_geometry.zoo.known`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import check_seed, require

NAMES = ("heads", "retrieval", "circuit", "idle", "induction", "sum")
POSITIONS = ("learned", "rotary")
CHANGED, CHANGED_SUMS = ("all", "last"), ("all", "key")
"""Which tokens of a counterfactual may differ from its prompt: of repeated tokens, and of sums."""
PERIOD = 7
"""Tokens that :meth:`KnownModel.pairs` repeats. The trained circuits saw periods of 8 to 24
(:data:`tl_geometry.zoo.trained.PERIODS`): this one is new to them."""
ATTENDED, SHIFTS, TRIED_PERIODS = 0.5, range(1, 8), (15, 20)
"""A trained head is named "offset" if more than half of its attention is at one offset of 1 to 7
tokens, and "induction" if more than half is at one shift of 1 to 7 tokens after earlier copies of
the current token; offset or shift must be the same with both periods. (A trained circuit need not
use the token before: in the rotary ones a head reads four tokens back, and the induction head finds
the answer three tokens after it.)"""


class TokenPairs(NamedTuple):
    """Prompts, counterfactuals, and the two tokens whose logits are compared."""

    prompts: Int[Tensor, "batch position"]
    counterfactuals: Int[Tensor, "batch position"]
    targets: Int[Tensor, "batch 2"]


@dataclass(frozen=True, eq=False, kw_only=True)
class KnownModel:
    """A model and what is true of it. Token 0 is BOS.

    ``does`` says what each head does ("summand" and "key" attend to what the next sum is of).
    ``labels`` is the group of terms, and ``terms`` the dominant term, that a correct measure finds
    for a head (where it has one). ``offset`` is that of the planted heads that attend at an offset.
    ``directions`` are those of what is planted in the stream, ``reads`` the rows of them that the
    keys of a head read.

    ``edges`` are the edges that carry the difference between the prompts and counterfactuals of
    :meth:`pairs`, by what was ``changed``, as :func:`tl_geometry.edge_scores` names them.
    ``head_pairs`` are (writer, reader, side) of heads that read what another wrote. Both are empty
    where they were not planted. ``changed`` are the counterfactuals that there are.
    """

    model: Any
    vocab: int
    length: int
    does: Mapping[tuple[int, int], str]
    labels: Mapping[tuple[int, int], str]
    terms: Mapping[tuple[int, int], str] = field(default_factory=dict)
    offset: int | None = None
    directions: Float[Tensor, "row d_model"] | None = None
    reads: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    edges: Mapping[str, frozenset[str]] = field(default_factory=dict)
    head_pairs: frozenset[tuple[str, str, str]] = frozenset()
    changed: tuple[str, ...] = CHANGED

    def random_tokens(self, n: int, *, seed: int = 0) -> Int[Tensor, "batch position"]:
        """BOS, then independent tokens, all equally likely, to the model's full length."""
        generator = _checked(n, seed)
        rows = torch.randint(1, self.vocab, (n, self.length - 1), generator=generator)
        return torch.nn.functional.pad(rows, (1, 0))

    def pairs(self, n: int, *, changed: str = "all", seed: int = 0) -> TokenPairs:
        """Prompts are BOS and distinct random tokens, repeated. Counterfactuals repeat other tokens
        (``changed="all"``), or are the same prompts with another of their tokens in the last place
        (``changed="last"``). Targets are the next tokens of prompt and of counterfactual.

        Prompts of ``"sum"`` lack their last sum, which is the target; the counterfactual has
        another key and nothing else (``changed="key"``), or other digits and sums too."""
        checks.choice(changed, self.changed, "changed")
        generator = _checked(n, seed)
        if self.changed == CHANGED_SUMS:
            return _sum_pairs(n, changed, generator)
        rows = torch.stack([torch.randperm(self.vocab - 1, generator=generator) for _ in range(n)])
        first, second = (1 + rows[:, at : at + PERIOD] for at in (0, PERIOD))
        prompts, others = (
            torch.nn.functional.pad(x.repeat(1, (self.length - 1) // PERIOD), (1, 0))
            for x in (first, second)
        )
        if changed == "all":
            return TokenPairs(prompts, others, torch.stack([first[:, 0], second[:, 0]], 1))
        others = prompts.clone()
        # the last token was first[6], which first[0] follows; first[2] is followed by first[3]
        others[:, -1] = first[:, 2]
        return TokenPairs(prompts, others, first[:, [0, 3]])

    def heads(self, does: str) -> list[tuple[int, int]]:
        """The heads that do this."""
        return [head for head, what in self.does.items() if what == does]


def _sum_pairs(n: int, changed: str, generator: torch.Generator) -> TokenPairs:
    """Rows of sums, and others of which all digits and the key, or the key alone, are others."""
    from tl_geometry.zoo import trained

    drawn = torch.randint(trained.DIGITS, (n, 1 + trained.SUMMED), generator=generator)
    # two steps of 1 to 4 never add up to a multiple of ten, so that no target stays the same
    step = torch.randint(1, trained.DIGITS // 2, drawn.shape, generator=generator)
    rows = trained.in_tokens(drawn[:, :1], drawn[:, 1:])
    step[:, 1:] *= changed == "all"
    turned = (drawn + step) % trained.DIGITS
    others = trained.in_tokens(turned[:, :1], turned[:, 1:])
    targets = torch.stack([rows[:, -1], others[:, -1]], 1)
    if changed == "key":
        others[:, 2:] = rows[:, 2:]
    return TokenPairs(rows[:, :-1], others[:, :-1], targets)


def _checked(n: int, seed: int) -> torch.Generator:
    """The generator of ``seed``, for ``n`` rows; both are checked."""
    count = checks.whole(n)
    fits = count is not None and count >= 1
    require(fits, "n", expected="a whole number of rows, at least 1", got=repr(n))
    require(seed is not None, "seed", expected="a whole number", got="None")
    check_seed(seed, "seed")
    return torch.Generator().manual_seed(seed)


def known(name: str, *, seed: int = 0, positions: str = "learned") -> KnownModel:
    """A model whose circuit is known, as a TransformerBridge, and the truth about it.

    Args:
        name: ``"heads"``, one layer of heads planted by hand that attend at one offset, by
            position, by token identity, by a random table of tokens, by the key's token, by both
            offset and identity (of equal energy, or so that covariance and gain disagree), or
            evenly; ``"retrieval"``, heads that match the two attributes of a token, or one;
            ``"circuit"``, an induction circuit of two layers planted by hand among heads that do
            not matter; ``"idle"``, the same among heads that are connected by their weights and
            write nothing; ``"induction"``, a trained one, whose heads are named by where they
            attend; ``"sum"``, one trained layer whose MLP adds a key to digits.
        seed: what is random about it: order and strengths of heads, directions, gains and biases;
            or the seed of the training (0, 1 or 2).
        positions: ``"learned"`` (GPT-2) or ``"rotary"`` (Qwen2; the trained ones are Llama).

    Raises ``GeometryError`` for an unknown name, and for a seed whose training is not stored.

    >>> truth = known("heads", positions="rotary")
    >>> truth.labels[truth.heads("identity")[0]]
    'content'
    """
    from tl_geometry.models import from_hf

    checks.choice(name, NAMES, "name")
    checks.choice(positions, POSITIONS, "positions")
    _checked(1, seed)
    makers = (_heads, _retrieval, _circuit, partial(_circuit, idle=True), _induction, _sum)
    hf, truth = makers[NAMES.index(name)](positions, seed)
    title = f"{name} ({positions}, seed {seed})"
    return KnownModel(model=from_hf(hf, None, name=title), **truth)


def _heads(positions: str, seed: int) -> tuple[Any, dict[str, Any]]:
    from tl_geometry.zoo import planted, planted_heads

    made = planted_heads.planted_heads(positions, seed)
    does = {(0, head): what for head, what in enumerate(made.does)}
    terms = planted_heads.CONTENT_TERMS | planted_heads.TERMS[positions]
    # without BOS and its position, and without the last keys, which no query reads at an offset
    tokens = tuple(range(1, planted.VOCAB))
    rows = {"identity": tokens, "table": tokens}
    if positions == "learned":
        last = planted.VOCAB + planted.LENGTH - made.offset
        rows["offset"] = tuple(range(planted.VOCAB + 1, last))
    return made.model, {
        "vocab": planted.VOCAB,
        "length": planted.LENGTH,
        "does": does,
        "labels": {head: planted_heads.LABELS[what] for head, what in does.items()},
        "terms": {head: terms[what] for head, what in does.items() if what in terms},
        "offset": made.offset,
        "directions": made.directions,
        "reads": {head: rows[what] for head, what in does.items() if what in rows},
    }


def _retrieval(positions: str, seed: int) -> tuple[Any, dict[str, Any]]:
    from tl_geometry.zoo import planted, planted_retrieval

    made = planted_retrieval.planted_retrieval(positions, seed)
    does = {(0, head): what for head, what in enumerate(made.does)}
    matching = [head for head, what in does.items() if what != "even"]
    return made.model, {
        "vocab": planted.VOCAB,
        "length": planted.LENGTH,
        "does": does,
        "labels": dict.fromkeys(does, "uniform") | dict.fromkeys(matching, "content"),
        "terms": dict.fromkeys(matching, "cvec-cvec"),
        "directions": made.directions,
        "reads": {head: planted_retrieval.READS[does[head]] for head in matching},
    }


def _circuit(positions: str, seed: int, *, idle: bool = False) -> tuple[Any, dict[str, Any]]:
    from tl_geometry.zoo import planted, planted_circuit

    made = planted_circuit.planted_circuit(positions, seed, idle=idle)
    # what idle heads do not write the decoy does not find: it attends evenly
    labelled = _LABELS.keys() - ({"decoy"} if idle else set())
    return made.model, {
        "vocab": planted.VOCAB,
        "length": planted.LENGTH,
        "does": made.does,
        "labels": {h: _LABELS[what] for h, what in made.does.items() if what in labelled},
        "edges": made.edges,
        "head_pairs": made.pairs,
    }


_LABELS = {"previous": "position", "second": "position", "itself": "position"}
_LABELS |= {"offset": "position", "induction": "content", "match": "content", "decoy": "content"}
"""The label that a head of a circuit deserves for what it does."""


def _induction(positions: str, seed: int) -> tuple[Any, dict[str, Any]]:
    from tl_geometry.zoo import trained

    task, hf = trained.TASKS["induction"], trained.hugging_face("induction", positions, seed)
    on_offset, on_repeat = [], []
    for period in TRIED_PERIODS:
        generator = torch.Generator().manual_seed(0)
        tokens, _ = trained.repeats(32, generator, (period, period))
        with torch.inference_mode():
            patterns = torch.stack(hf(tokens, output_attentions=True).attentions)
        # queries that have all the offsets, and queries of a second copy or later (BOS is before)
        by_offset, by_copy = (
            _attention_by_offset(patterns[..., first:, :].mean(1))
            for first in (max(SHIFTS), 1 + max(TRIED_PERIODS))
        )
        on_offset.append(torch.stack([by_offset[..., shift] for shift in SHIFTS]))
        # the same token stood one period back, two, ...; what followed it is that much nearer
        copies = [by_copy[..., period - shift :: period].sum(-1) for shift in SHIFTS]
        on_repeat.append(torch.stack(copies))
    # the least over periods, so that neither is an accident of one; then the best shift
    scores = {
        name: torch.stack(attention).amin(0).amax(0)
        for name, attention in (("offset", on_offset), ("induction", on_repeat))
    }
    does = {}
    for layer in range(task.layers):
        for head in range(task.heads):
            best = max(scores, key=lambda name: float(scores[name][layer, head]))
            attends = float(scores[best][layer, head]) > ATTENDED
            does[layer, head] = best if attends else ""
    return hf, {
        "vocab": task.vocab,
        "length": task.length,
        "does": does,
        "labels": {head: _LABELS[what] for head, what in does.items() if what},
    }


def _sum(positions: str, seed: int) -> tuple[Any, dict[str, Any]]:
    from tl_geometry.zoo import trained

    task, hf = trained.TASKS["sum"], trained.hugging_face("sum", positions, seed)
    tokens, _ = trained.sums(64, torch.Generator().manual_seed(0))
    # queries that predict a sum: the last digit, and all sums but the last
    queries = slice(1 + trained.SUMMED, -1)
    with torch.inference_mode():
        (pattern,) = hf(tokens, output_attentions=True).attentions
    attention = pattern[:, :, queries].mean(0)
    summand = attention.diagonal(offset=2, dim1=-2, dim2=-1).mean(-1)
    key = attention[..., 1].mean(-1)
    does = {}
    for head in range(task.heads):
        attends = {"summand": float(summand[head]), "key": float(key[head])}
        best = max(attends, key=lambda name: attends[name])
        does[0, head] = best if attends[best] > ATTENDED else ""
    return hf, {
        "vocab": task.vocab,
        "length": task.length,
        "does": does,
        "labels": {head: "position" for head, what in does.items() if what == "summand"},
        "changed": CHANGED_SUMS,
    }


def _attention_by_offset(
    pattern: Float[Tensor, "layer head query key"],
) -> Float[Tensor, "layer head offset"]:
    """Attention by offset i - j, mean over the queries, which stand at the last of the keys'
    positions."""
    queries, keys = pattern.shape[-2:]
    # zeros before the first key stand for offsets that a query does not have
    padded = torch.nn.functional.pad(pattern, (keys, 0))
    first = keys - queries
    rows = [padded[..., i, first + i + 1 : first + i + 1 + keys].flip(-1) for i in range(queries)]
    return torch.stack(rows).mean(0)
