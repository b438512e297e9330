"""Which prompts are compared with which counterfactuals, and what is measured on them? Edge scores
and pruned runs ask here.

A pair has equal numbers of tokens, so that every write of one run has its counterpart in the other;
pairs of several lengths go through the model by length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import fail, require
from tl_geometry.base.results import Provenance, hash_tokens
from tl_geometry.circuits.edge_layout import EdgeLayout
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.models.batches import batch_of
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.next_token import log_probabilities
from tl_geometry.scores.corpus_pass import rows_per_batch
from tl_geometry.scores.values import target_ids

UserMetric = Callable[[Float[Tensor, "batch position d_vocab"]], Float[Tensor, " batch"]]
"""A number for each prompt of a batch, from the batch's logits."""


class PairBatch(NamedTuple):
    """Some pairs of one length; ``rows`` are their numbers among all."""

    rows: Int[Tensor, " batch"]
    clean: Int[Tensor, "batch position"]
    counterfactual: Int[Tensor, "batch position"]


@dataclass(frozen=True, eq=False)
class PromptPairs:
    """Token ids of prompts and counterfactuals, pair by pair."""

    clean: tuple[Int[Tensor, "..."], ...]
    counterfactual: tuple[Int[Tensor, "..."], ...]

    @classmethod
    def of(
        cls,
        view: ModelView,
        prompts: TokensLike,
        counterfactuals: TokensLike,
        prepend_bos: bool | None,
    ) -> PromptPairs:
        """Pairs from texts or token rows; refused where a pair has two lengths."""
        clean, other = (_rows(view, x, prepend_bos) for x in (prompts, counterfactuals))
        what, expected = "counterfactuals", f"one for each of {len(clean)} prompts"
        require(len(clean) == len(other), what, expected=expected, got=len(other))
        for pair, (a, b) in enumerate(zip(clean, other, strict=True)):
            require(
                len(a) == len(b),
                f"prompt pair {pair} ({_text(view, a)} and {_text(view, b)})",
                expected="a prompt and a counterfactual of equal token length",
                got=f"{len(a)} and {len(b)} tokens",
                instead="a counterfactual that changes one token for another",
            )
        return cls(tuple(clean), tuple(other))

    def __len__(self) -> int:
        return len(self.clean)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The different lengths, the shortest first."""
        return tuple(sorted({len(row) for row in self.clean}))

    def batches(self, rows_of: Callable[[int], int]) -> Iterator[list[PairBatch]]:
        """For each length its batches of at most ``rows_of(length)`` pairs."""
        for length in self.lengths:
            rows = torch.tensor([i for i, row in enumerate(self.clean) if len(row) == length])
            yield [
                PairBatch(
                    of_batch,
                    torch.stack([self.clean[i] for i in of_batch.tolist()]),
                    torch.stack([self.counterfactual[i] for i in of_batch.tolist()]),
                )
                for of_batch in rows.split(rows_of(length))
            ]

    def provenance(self, view: ModelView, **fields: Any) -> Provenance:
        """What a result on these pairs was computed from."""
        tokens = ""
        for row in (*self.clean, *self.counterfactual):
            tokens = hash_tokens(row.unsqueeze(0), tokens)
        bos = view.bos_id is not None and all(int(row[0]) == view.bos_id for row in self.clean)
        about: dict[str, Any] = {"corpus": "pairs of prompts", "contexts": len(self)}
        return view.provenance(token_hash=tokens, has_bos=bos, **about, **fields)


def pairs_per_batch(
    view: ModelView, layout: EdgeLayout, batch_size: int | None, memory_budget: int, gradients: bool
) -> Callable[[int], int]:
    """How many pairs of a length fit the budget: several vectors of the stream are held for every
    writer, and with gradients for every reader."""
    # of a writer: what it wrote in both runs, the counterfactual's once more in the tensor of all
    # writers, and the difference
    vectors = 4 * len(layout.writers) + (6 * len(layout.readers) if gradients else 0)

    def rows_of(length: int) -> int:
        number = max(4, view.dtype.itemsize)  # half precision runs in float32
        needed = vectors * length * view.d_model * number
        return rows_per_batch(view, length, needed, memory_budget, batch_size)

    return rows_of


@dataclass(frozen=True, eq=False)
class Metric:
    """What is measured: ``user``, or the difference of two logits at the last position, those of
    ``targets``."""

    user: UserMetric | None
    targets: Int[Tensor, "context 2"] | None

    @classmethod
    def of(cls, view: ModelView, pairs: PromptPairs, metric: Any, targets: Any) -> Metric:
        """The user's metric; or the tokens compared, by default the most likely one after each run
        of a pair."""
        if metric is not None:
            require(
                callable(metric), "metric", expected="a function of logits", got=describe(metric)
            )
            given = targets is not None
            require(not given, "metric, targets", expected="one of them", got="both")
            return cls(metric, None)
        if targets is not None:
            return cls(None, _given_targets(view, targets, len(pairs)))
        likeliest = torch.stack(
            [_likeliest(view, rows) for rows in (pairs.clean, pairs.counterfactual)], dim=1
        )
        for pair, (answer, other) in enumerate(likeliest.tolist()):
            require(
                answer != other,
                f"targets of prompt pair {pair} ({_text(view, pairs.clean[pair])})",
                expected="another most likely token after the counterfactual",
                got=f"{view.decode([answer])[0]!r} after both",
                instead="targets=[(answer, other), ...]",
            )
        return cls(None, likeliest)

    @property
    def positions(self) -> slice:
        """Where logits are needed."""
        return slice(None) if self.user is not None else slice(-1, None)

    def __call__(
        self, logits: Float[Tensor, "batch position d_vocab"], rows: Int[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        """The metric of some pairs (``rows``) from logits at :attr:`positions`."""
        if self.targets is not None:
            chosen = logits[:, -1].gather(1, self.targets[rows].to(logits.device))
            return chosen[:, 0] - chosen[:, 1]
        values = self.user(logits) if self.user is not None else None
        got = tuple(values.shape) if isinstance(values, Tensor) else repr(values)
        expected = f"one number for each of {len(logits)} prompts of a batch"
        require(got == (len(logits),), "metric", expected=expected, got=got)
        assert isinstance(values, Tensor)
        finite = bool(torch.isfinite(values).all())
        require(finite, "metric", expected="finite numbers", got=values.tolist())
        return values


def _rows(view: ModelView, tokens: Any, prepend_bos: bool | None) -> list[Tensor]:
    """Each prompt's ids; those of a list may have different lengths."""
    if isinstance(tokens, list | tuple) and len(tokens) > 0:
        rows = [isinstance(x, str | list | tuple) or getattr(x, "ndim", 0) > 0 for x in tokens]
        if all(rows):  # else they are the ids of one prompt
            return [
                row for x in tokens for row in as_tokens(view, x, prepend_bos=prepend_bos).tokens
            ]
    return list(as_tokens(view, tokens, prepend_bos=prepend_bos).tokens)


def _given_targets(view: ModelView, targets: Any, pairs: int) -> Int[Tensor, "context 2"]:
    """Two tokens for each pair of prompts; two tokens alone are those of all."""
    given = targets.tolist() if isinstance(targets, Tensor) else targets
    expected = f"(answer, other) for each of {pairs} prompts, or for all of them"
    if not isinstance(given, Iterable) or isinstance(given, str):
        fail("targets", expected=expected, got=describe(targets))
    given = list(given)
    if len(given) == 2 and all(isinstance(token, str | int) for token in given):
        given = [given] * pairs
    fits = len(given) == pairs and all(isinstance(pair, list | tuple) for pair in given)
    require(fits, "targets", expected=expected, got=describe(targets))
    ids = [target_ids(view, pair) for pair in given]
    for pair, tokens in enumerate(ids):
        two = len(tokens) == 2 and tokens[0] != tokens[1]
        what, expected = f"targets of prompt pair {pair}", "two different tokens"
        require(two, what, expected=expected, got=repr(given[pair]))
    return torch.tensor(ids)


def _likeliest(view: ModelView, rows: tuple[Tensor, ...]) -> Int[Tensor, " context"]:
    """The most likely token after each prompt."""
    tokens = torch.empty(len(rows), dtype=torch.int64)
    pairs = PromptPairs(rows, rows)  # each with itself, for batches of one length
    for batches in pairs.batches(lambda length: batch_of(None, length, view.device)):
        for batch in batches:
            tokens[batch.rows] = log_probabilities(view, batch.clean, {}).argmax(-1).cpu()
    return tokens


def _text(view: ModelView, ids: Tensor) -> str:
    """The end of a prompt, to name it in a message."""
    return repr("".join(view.decode(ids[-6:].tolist())))
