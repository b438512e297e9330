"""Does a measure find the circuit of a model whose circuit is known? :func:`known` gives such
models and the truth about them; tests and the page of known circuits call it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from benchmarks.known_models import trained
from benchmarks.known_models.planted import LENGTH, VOCAB
from benchmarks.known_models.planted_circuit import planted_circuit
from benchmarks.known_models.planted_heads import planted_heads
from benchmarks.known_models.planted_retrieval import planted_retrieval
from tl_geometry.base import checks
from tl_geometry.base.errors import check_seed, require

NAMES = ("heads", "retrieval", "circuit", "idle", "induction", "sum")
POSITIONS = ("learned", "rotary")
CHANGED, CHANGED_SUMS = ("all", "last"), ("all", "key")
"""Which tokens of a counterfactual may differ from its prompt: for repeated tokens, for sums."""
PERIOD = 7
"""Tokens that :meth:`KnownModel.pairs` repeats. Prompt and counterfactual need 14 distinct tokens
together, and the planted models have 15 beside BOS. The trained circuits saw periods of 8 to 24
(:data:`benchmarks.known_models.trained.PERIODS`), so this one is new to them."""
ATTENDED, SHIFTS, TRIED_PERIODS = 0.5, range(1, 8), (15, 20)
"""How a trained head is named, on rows of each of two periods:

- "offset" if more than half of its attention is at one offset of 1 to 7 tokens;
- "induction" if more than half is at one shift of 1 to 7 tokens after earlier copies of the current
  token.

The offset or shift must be the same with both periods. Both periods exceed 14, so that no offset of
1 to 7 is such a shift too. A trained circuit need not use offset 1: in the rotary ones a head reads
four tokens back, and the induction head attends four tokens after the earlier copy."""


class TokenPairs(NamedTuple):
    """Prompts, counterfactuals, and the two tokens whose logits are compared."""

    prompts: Int[Tensor, "batch position"]
    counterfactuals: Int[Tensor, "batch position"]
    targets: Int[Tensor, "batch 2"]


@dataclass(frozen=True, eq=False, kw_only=True)
class KnownModel:
    """A model and what is true of it. Token 0 is BOS; ``vocab`` and ``length`` are by default those
    of the planted models.

    - ``does``: what each head does. In a trained sum, "summand" and "key" attend to the digit and
      to the key that the next sum adds.
    - ``labels``, ``terms``: the group of terms and the dominant term that a correct measure finds
      for a head. Heads for which none is known are left out.
    - ``offset``: of the planted heads that attend at an offset.
    - ``directions``: of what is planted in the stream.
    - ``reads``: the rows of ``directions`` that the keys of a head read.
    - ``edges``: the edges that carry the difference between the prompts and counterfactuals of
      :meth:`pairs`, by what was ``changed``, with the names of :func:`tl_geometry.edge_scores`.
    - ``head_pairs``: (writer, reader, side) of heads that read what another head wrote.
    - ``changed``: the kinds of counterfactuals that :meth:`pairs` can make.

    ``edges`` and ``head_pairs`` are empty where the circuit was not planted.
    """

    model: Any
    vocab: int = VOCAB
    length: int = LENGTH
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
        """BOS, then independent uniform tokens, to the model's full length."""
        generator = _checked(n, seed)
        rows = torch.randint(1, self.vocab, (n, self.length - 1), generator=generator)
        return torch.nn.functional.pad(rows, (1, 0))

    def pairs(self, n: int, *, changed: str = "all", seed: int = 0) -> TokenPairs:
        """Prompts and counterfactuals; targets are the next tokens of both.

        Prompts are BOS and distinct random tokens, repeated. Counterfactuals repeat other tokens
        (``changed="all"``), or differ only in the last token, which is replaced by another token of
        the prompt (``changed="last"``).

        Prompts of ``"sum"`` end before their last sum, which is the target. Counterfactuals have
        another key and nothing else (``changed="key"``), or other digits and sums too
        (``changed="all"``)."""
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
        # the last token was first[6], which first[0] follows; now it is first[2], before first[3]
        others[:, -1] = first[:, 2]
        return TokenPairs(prompts, others, first[:, [0, 3]])

    def heads(self, does: str) -> list[tuple[int, int]]:
        """The heads that do this."""
        return [head for head, what in self.does.items() if what == does]


def _sum_pairs(n: int, changed: str, generator: torch.Generator) -> TokenPairs:
    """Rows of sums, and counterfactuals with another key alone (``changed="key"``), or with another
    key and other digits (``"all"``)."""
    drawn = torch.randint(trained.DIGITS, (n, 1 + trained.SUMMED), generator=generator)
    # steps of 1 to 4 for key and digit add up to 2 to 8, never to 10, so that every sum changes
    step = torch.randint(1, trained.DIGITS // 2, drawn.shape, generator=generator)
    rows = trained.in_tokens(drawn[:, :1], drawn[:, 1:])
    step[:, 1:] *= changed == "all"
    turned = (drawn + step) % trained.DIGITS
    others = trained.in_tokens(turned[:, :1], turned[:, 1:])
    targets = torch.stack([rows[:, -1], others[:, -1]], 1)
    if changed == "key":
        # digits and earlier sums as in the prompt; only the target follows the other key
        others[:, 2:] = rows[:, 2:]
    return TokenPairs(rows[:, :-1], others[:, :-1], targets)


def _checked(n: int, seed: int) -> torch.Generator:
    """Check the number of rows and the seed; return the generator of the seed."""
    count = checks.whole(n)
    fits = count is not None and count >= 1
    require(fits, "n", expected="a whole number of rows, at least 1", got=repr(n))
    require(seed is not None, "seed", expected="a whole number", got="None")
    check_seed(seed, "seed")
    return torch.Generator().manual_seed(seed)


def known(name: str, *, seed: int = 0, positions: str = "learned") -> KnownModel:
    """A model whose circuit is known, as a TransformerBridge, and the truth about it.

    Planted by hand:

    - ``"heads"``: one layer of heads that attend at one offset, by position, by token identity, by
      a random table of tokens, by the key's token, or evenly. Two heads attend by position and
      identity at once: in one both have equal energy, in the other covariance and gain disagree.
    - ``"retrieval"``: heads that match both attributes of a token, or one.
    - ``"circuit"``: an induction circuit of two layers among heads that do not matter.
    - ``"idle"``: the same among heads that are connected by their weights but write nothing.

    Trained:

    - ``"induction"``: an induction circuit, whose heads are named by where they attend.
    - ``"sum"``: one layer whose MLP adds a key to digits.

    Args:
        name: one of the models above.
        seed: of all that is random in a planted model (order and strengths of heads, directions,
            gains and biases), or of the training (0, 1 or 2).
        positions: ``"learned"`` (GPT-2) or ``"rotary"`` (Qwen2 if planted, Llama if trained).

    Raises ``GeometryError`` for an unknown name, and for a seed whose training is not stored.

    >>> truth = known("heads", positions="rotary")
    >>> truth.labels[truth.heads("identity")[0]]
    'content'
    """
    from tl_geometry.models import from_hf

    checks.choice(name, NAMES, "name")
    checks.choice(positions, POSITIONS, "positions")
    _checked(1, seed)
    makers = {
        "heads": planted_heads,
        "retrieval": planted_retrieval,
        "circuit": planted_circuit,
        "idle": partial(planted_circuit, idle=True),
        "induction": _induction,
        "sum": _sum,
    }
    hf, truth = makers[name](positions, seed)
    title = f"{name} ({positions}, seed {seed})"
    return KnownModel(model=from_hf(hf, None, name=title), **truth)


def _induction(positions: str, seed: int) -> tuple[Any, dict[str, Any]]:
    task, hf = trained.TASKS["induction"], trained.hugging_face("induction", positions, seed)
    on_offset, on_repeat = [], []
    for period in TRIED_PERIODS:
        generator = torch.Generator().manual_seed(0)
        tokens, _ = trained.repeats(32, generator, (period, period))
        with torch.inference_mode():
            patterns = torch.stack(hf(tokens, output_attentions=True).attentions)
        # mean over queries from position 7 on, which have all the offsets; and over queries of a
        # second copy or later, which begin after BOS and one period (here the longer of the two)
        by_offset, by_copy = (
            _attention_by_offset(patterns[..., first:, :].mean(1))
            for first in (max(SHIFTS), 1 + max(TRIED_PERIODS))
        )
        on_offset.append(torch.stack([by_offset[..., shift] for shift in SHIFTS]))
        # copies of the current token are at offsets of one period, two, ...; `shift` tokens after
        # a copy the offset is less by `shift`
        copies = [by_copy[..., period - shift :: period].sum(-1) for shift in SHIFTS]
        on_repeat.append(torch.stack(copies))
    # the least over periods, because one period alone may show either by accident; then the best
    # offset or shift
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
    labels = {"offset": "position", "induction": "content"}
    return hf, {
        "vocab": task.vocab,
        "length": task.length,
        "does": does,
        "labels": {head: labels[what] for head, what in does.items() if what},
    }


def _sum(positions: str, seed: int) -> tuple[Any, dict[str, Any]]:
    task, hf = trained.TASKS["sum"], trained.hugging_face("sum", positions, seed)
    tokens, _ = trained.sums(64, torch.Generator().manual_seed(0))
    # positions that predict a sum: the last digit, and all sums but the last
    queries = slice(1 + trained.SUMMED, -1)
    with torch.inference_mode():
        (pattern,) = hf(tokens, output_attentions=True).attentions
    attention = pattern[:, :, queries].mean(0)
    # y_i is predicted one position before it and x_i is SUMMED positions before y_i, so query
    # n of the slice attends to key n + 2: BOS and the key token stand before the digits
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
    """Attention by offset i - j, as a mean over queries. The queries are the last positions of the
    keys."""
    queries, keys = pattern.shape[-2:]
    # zeros before the first key fill the offsets that a query does not have; each row is then cut
    # to end at its own position and reversed, so that its index is the offset
    padded = torch.nn.functional.pad(pattern, (keys, 0))
    first = keys - queries
    rows = [padded[..., i, first + i + 1 : first + i + 1 + keys].flip(-1) for i in range(queries)]
    return torch.stack(rows).mean(0)
