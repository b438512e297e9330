"""How far may recomputed numbers be from a model's own? One rule, :func:`reconstruction_bound`,
judges every comparison; layers, edits, writers, MLPs and splits call it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base.errors import ReconstructionError, fail
from tl_geometry.base.rows import row_center

Check = tuple[int, str, float, float]
"""(layer, what was compared, largest error, largest error allowed)."""
T = TypeVar("T")
TIE = 0.99
"""A later candidate must be better by 1%: equal ones differ by rounding, and the first is the one
that the module itself declares."""

CHECKED_ROWS = 512
"""Query rows of a sampled context that are compared at most: all of a long one would cost more than
the sums that the check stands beside."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ReconstructionReport:
    """How far sums of parts are from what the model computed, each as (largest error, largest error
    allowed).

    ``checks`` has ``q`` and ``k`` (against ``hook_q``, ``hook_k``), ``pattern`` (row-centred
    logarithm of ``hook_pattern``), ``pattern sum`` (its rows sum to one, or to what a sink leaves)
    and ``scores`` (where the hook holds scores). ``scale`` is A, the largest product of absolute
    values on allowed cells; ``sizes`` has the same for queries and keys,
    ``sum_d |x_d W_de| + |constant|``, behind any QK-norm.
    """

    checks: Mapping[str, tuple[float, float]]
    scale: float
    sizes: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, checks: Iterable[Check], scale: float = 0.0) -> ReconstructionReport:
        """The worst check of each kind, over layers."""
        worst: dict[str, tuple[float, float]] = {}
        for _, name, error, bound in checks:
            if name not in worst or error * worst[name][1] > worst[name][0] * bound:
                worst[name] = (error, bound)
        return cls(checks=worst, scale=scale)

    @property
    def adds_up(self) -> bool:
        """Whether every error is within its bound; NaN is not."""
        return all(error <= bound for error, bound in self.checks.values())

    @property
    def nearest(self) -> tuple[str, float, float] | None:
        """Name, error and bound of the check that comes nearest to its bound (or is furthest beyond
        it); ``None`` where nothing was checked."""
        checks = ((name, error, bound) for name, (error, bound) in self.checks.items())
        # 1e-300 in place of a bound of zero: any error beyond it counts as far too large
        return max(checks, key=lambda check: check[1] / max(check[2], 1e-300), default=None)

    @property
    def worst(self) -> float:
        """The largest error as a fraction of its bound."""
        _, error, bound = self.nearest or ("", 0.0, 1.0)
        return error / bound if bound > 0 else float(error > 0)


def reconstruction_bound(roundoff: float, scale: float) -> float:
    """Largest error allowed: 32 u A in float32 and better, 4 u A in half precision.

    ``roundoff`` u is the unit roundoff of the model's arithmetic, ``scale`` A the largest product
    of absolute values on allowed cells, ``scale * sum_e (sum_a |q_a,e|) (sum_b |k_b,e|) + |bias|``:
    rounding of a dot product grows with its absolute sum, not with its value. Absolute tolerances
    do not hold: scores of real models reach thousands. Clean float32 runs were measured at 3 to 9
    ``u A``; planted faults exceed the bound 10 to 100 times. u is never below 2^-24: models in
    float64 compute in float32 in places (RMSNorm, rotary tables, the softmax).

    >>> reconstruction_bound(2**-24, 10.0) == 320 * 2**-24
    True
    """
    return (32 if roundoff <= 2**-24 else 4) * max(roundoff, 2**-24) * scale


def some_rows(length: int) -> slice:
    """At most :data:`CHECKED_ROWS` evenly spaced query rows, the last, which sees most keys, among
    them.

    >>> some_rows(512), some_rows(2000)
    (slice(0, 512, 1), slice(3, 2000, 4))
    """
    every = -(-length // CHECKED_ROWS)
    return slice((length - 1) % every, length, every)


def nearest(candidates: Iterable[tuple[T, float]], enough: float = 0.0) -> tuple[T, float]:
    """Of (candidate, error), at least one, the candidate of least error, and its error; the search
    ends at an error within ``enough``.

    >>> nearest([("a", 1.0), ("b", 0.995), ("c", 0.5)])
    ('c', 0.5)
    """
    best: tuple[T, float] | None = None
    for candidate, error in candidates:
        if best is None or error < best[1] * TIE:
            best = candidate, math.inf if math.isnan(error) else error
        if best[1] <= enough:
            break
    assert best is not None
    return best


def pattern_error(
    scores: Float[Tensor, "*batch query key"],
    pattern: Float[Tensor, "*batch query key"],
    allowed: Bool[Tensor, "query key"],
    roundoff: float,
) -> Float[Tensor, ""]:
    """Largest difference of row-centred ``scores`` and row-centred logarithm of ``pattern``, the
    check that holds for every model.

    Compared are cells above 1e3 times the smallest normal number of the model's dtype. Infinite
    where the pattern has weight on a key that is not allowed, or none on a key whose score asks for
    it. Nothing here waits for a GPU.

    >>> s = torch.tensor([[0.0, -torch.inf], [1.0, 2.0]])
    >>> bool(pattern_error(s, s.softmax(-1), torch.ones(2, 2).tril().bool(), 2**-24) < 1e-6)
    True
    """
    # float64 counts as float32, in which its softmax may have been computed
    dtype = {2**-11: torch.float16, 2**-8: torch.bfloat16}.get(roundoff, torch.float32)
    smallest = 1e3 * torch.finfo(dtype).smallest_normal
    seen = pattern > smallest
    forbidden = (seen & ~allowed).any()
    log = torch.where(seen, pattern, 1.0).log()
    # a key without weight must be negligible by the recomputed scores too: its log probability
    # follows from the strongest key of its row
    highest = torch.where(seen, scores, -torch.inf).amax(-1, keepdim=True)
    highest_log = torch.where(seen, log, -torch.inf).amax(-1, keepdim=True)
    hidden = allowed & ~seen & torch.isfinite(highest)
    expected = torch.where(hidden, scores - highest + highest_log, -torch.inf)
    # ten times the threshold: a probability that rounds to just below it is no fault
    missing = (expected > math.log(10 * smallest)).any()
    error = (row_center(scores, seen) - row_center(log, seen)).abs().max()
    return torch.where(forbidden | missing, torch.inf, error)


def head_spreads(
    scores: Float[Tensor, "batch head query key"], allowed: Bool[Tensor, "query key"]
) -> Float[Tensor, " head"]:
    """How far scores spread in a row of each head: the largest less the smallest over the allowed
    keys. The median over rows with two keys or more, because one token of enormous norm spreads its
    own row.

    >>> s = torch.tensor([[0.0, 9.0, 9.0], [1.0, 3.0, 9.0], [0.0, 1.0, 5.0]])
    >>> head_spreads(s[None, None], torch.ones(3, 3).tril().bool())
    tensor([2.])
    """
    highest = torch.where(allowed, scores, -torch.inf).amax(-1)
    lowest = torch.where(allowed, scores, torch.inf).amin(-1)
    # NaN in place of a choice of rows: to know their number would mean to wait for a GPU
    ranges = torch.where(allowed.sum(-1) > 1, highest - lowest, torch.nan)
    return (
        rearrange(ranges, "b h q -> h (b q)")
        .nanmedian(dim=1)
        .values.nan_to_num(0, torch.inf, -torch.inf)
    )


def judge_rounding(
    roundoff: float,
    scales: tuple[float, float],
    spreads: Float[Tensor, " head"],
    what: str,
    size: str = "scores of a row spread over",
) -> tuple[str, ...]:
    """A remark where rounding of the parts may exceed 1% of what scores of a row spread over;
    ``ReconstructionError`` where it may exceed all of it, so that no check would see an error.
    ``spreads`` are those of the heads (:func:`head_spreads`), of which the median counts; ``size``
    names them in the message, where they are not of scores.

    Parts that cancel (a mean that holds a token of enormous norm) round as large as they are:
    ``scales`` are A of the queries and keys as they are, and of their parts. Heads without any
    spread beyond the rounding of the scores themselves are left out. The refusal takes the rounding
    of float32 or better, in which parts are computed: models in half precision are verified in
    float32 besides.

    >>> judge_rounding(2**-24, (20.0, 2.0**18), torch.tensor([10.0]), "layer 1")
    ('layer 1: rounding may reach 0.5, scores of a row spread over 10',)
    """
    own, parts = scales
    single = min(roundoff, 2**-24)
    spreads = spreads[spreads > reconstruction_bound(single, own)]
    if not len(spreads):
        return ()
    spread = float(spreads.median())
    bound, single_bound = (reconstruction_bound(u, parts) for u in (roundoff, single))
    if single_bound > spread:
        expected = f"rounding below what {size} ({spread:.2g})"
        got = f"parts so large that it may reach {single_bound:.2g}"
        instead = "model.double(), or decompose(..., normalize=True)"
        fail(what, expected=expected, got=got, instead=instead, error=ReconstructionError)
    if bound > 0.01 * spread:
        return (f"{what}: rounding may reach {bound:.2g}, {size} {spread:.2g}",)
    return ()


def require_reconstruction(checks: Sequence[Check], what: str) -> None:
    """Raise ``ReconstructionError`` that names every comparison above its bound (NaN is above)."""
    bad = [
        f"{name} off by {error:.2g} (at most {bound:.2g})"
        for _, name, error, bound in checks
        if not error <= bound
    ]
    if bad:
        expected = "parts that add up to the model's own numbers"
        got, instead = ", ".join(bad), "check_model(model)"
        fail(what, expected=expected, got=got, instead=instead, error=ReconstructionError)
