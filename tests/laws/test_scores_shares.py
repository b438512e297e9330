"""Laws of the shares (SPEC C, N, O.14), whatever queries and keys: covariance and gain row by row,
the Jeffreys divergence, gauges, planes; labels; head types of any pattern."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lib.reference import scores as reference
from tl_geometry import scores
from tl_geometry.base.results import Provenance
from tl_geometry.scores.share_table import ShareTable
from tl_geometry.scores.sums import share_sums

pytestmark = pytest.mark.once

MASKS = ("causal", "full", "sliding", "scattered")
SEEDS = st.integers(0, 1000)


def draw(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    """Float64 numbers with a mean, so that centring has something to do."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return size * (x + torch.randn(shape[-1], generator=generator, dtype=torch.float64))


def mask_of(name: str, length: int) -> Tensor:
    causal = torch.ones(length, length).tril().bool()
    scattered = torch.rand(length, length, generator=torch.Generator().manual_seed(3)) < 0.4
    sliding = causal & ~causal.roll(5, 0).tril(-5)
    found = {"causal": causal, "full": torch.ones_like(causal), "sliding": sliding}
    return found.get(name, scattered)


def dense(q: Tensor, k: Tensor, bias: Tensor | None = None) -> dict[tuple[str, str], Tensor]:
    """Every term as a matrix ``[b h i j]``."""
    names = [f"part{i}" for i in range(len(q))]
    product = lambda a, b: torch.einsum("bihe,bjhe->bhij", a, b)
    found = {
        (a, b): product(q[i], k[j])
        for (i, a), (j, b) in itertools.product(enumerate(names), repeat=2)
    }
    if bias is not None:
        whole = next(iter(found.values()))
        found["alibi", "alibi"] = bias.expand_as(whole)
    return found


def total(terms: dict[tuple[str, str], Tensor], head: int) -> Tensor:
    return torch.stack([x[:, head] for x in terms.values()]).sum(0)


def jeffreys(score: Tensor, mask: Tensor) -> float:
    """``sum KL(p || u) + KL(u || p)`` over rows of ``[b i j]`` with two keys or more."""
    found = 0.0
    for b, i in itertools.product(range(len(score)), range(len(mask))):
        row = score[b, i, mask[i]].numpy()
        if len(row) > 1:
            p, log_p, u = softmax(row), log_softmax(row), 1 / len(row)
            found += (p * (log_p - math.log(u))).sum() + (u * (math.log(u) - log_p)).sum()
    return found


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("with_bias", "cap"), [(False, None), (True, None), (True, 2.0)])
def test_shares_are_those_of_the_terms_as_matrices(
    name: str, with_bias: bool, cap: float | None
) -> None:
    """Row by row in numpy, more rows than one block holds."""
    length, drop = 77, 3
    q, k, mask = draw(3, 2, length, 2, 4), draw(3, 2, length, 2, 4, seed=7), mask_of(name, length)
    bias = draw(2, length, length, seed=9) if with_bias else None
    terms = dense(q, k, bias)
    at = slice(drop, None)
    some = None if bias is None else bias[:, at, at]
    sums = share_sums(q[:, :, at], k[:, :, at], mask[at, at], bias=some, softcap=cap)
    for head in range(2):
        of_head = {pair: x[:, head] for pair, x in terms.items()}
        expected = reference.shares(of_head, mask, drop=drop, cap=cap)
        for ours, theirs in ((sums.cs, expected.cs), (sums.gs, expected.gs)):
            assert ours[head].numpy() == pytest.approx(np.array(list(theirs.values())), abs=1e-10)
        assert float(sums.total[head]) == pytest.approx(expected.total, rel=1e-10)
        assert float(sums.gain_total[head]) == pytest.approx(expected.gain_total, rel=1e-9)
        score = total(terms, head)[:, at, at]
        divergence = jeffreys(score if cap is None else cap * (score / cap).tanh(), mask[at, at])
        # with a soft cap p is that of the capped scores: at least their divergence
        assert expected.gain_total >= divergence * (1 - 1e-10)
        assert (expected.gain_total == pytest.approx(divergence, rel=1e-9)) == (cap is None)


@given(seed=SEEDS, cut=st.integers(1, 4), cap=st.sampled_from([None, 3.0]))
def test_sums_add_up_over_contexts(seed: int, cut: int, cap: float | None) -> None:
    q, k = (draw(4, 5, 12, 2, 4, seed=s) for s in (seed, seed + 9))
    mask = mask_of("causal", 12)
    whole = share_sums(q, k, mask, softcap=cap)
    pieces = [
        share_sums(q[:, at], k[:, at], mask, softcap=cap) for at in (slice(cut), slice(cut, None))
    ]
    for name, value in (pieces[0] + pieces[1]).tensors().items():
        assert torch.allclose(value, getattr(whole, name), rtol=1e-9, atol=1e-9), name


@given(seed=SEEDS, planes=st.integers(1, 4))
def test_planes_sum_to_their_terms(seed: int, planes: int) -> None:
    q, k = (draw(2, 2, 9, 2, 8, seed=s) for s in (seed, seed + 9))
    mask = mask_of("causal", 9)
    plane = torch.arange(8) % planes
    sums = share_sums(q, k, mask, plane=plane)
    assert sums.by_plane is not None
    assert sums.by_plane.shape == (2, 2, planes, 4)
    both = torch.stack([sums.numerators, sums.gains])
    assert torch.allclose(sums.by_plane.sum(2), both, rtol=1e-9, atol=1e-9)
    # one plane is the product of its coordinates alone, with the whole score
    alone = dense(q * (plane == 0), k)
    whole = torch.stack(list(dense(q, k).values())).sum(0)
    centred = torch.where(mask, whole - _row_means(whole, mask), 0.0)
    expected = torch.stack([(centred * x).sum((0, 2, 3)) for x in alone.values()], -1)
    assert torch.allclose(sums.by_plane[0, :, 0], expected, rtol=1e-8, atol=1e-8)


def _row_means(x: Tensor, mask: Tensor) -> Tensor:
    inside = torch.where(mask, x, 0.0).sum(-1, keepdim=True)
    return inside / mask.sum(-1, keepdim=True)


def test_a_uniform_head_has_no_shares() -> None:
    """Keys that all tokens share: nothing but rounding is left of the scores."""
    q, k = draw(2, 2, 20, 3, 4).float(), draw(2, 2, 20, 3, 4, seed=5).float()
    k[..., 1, :] = k[:, :, :1, 1]
    sums = share_sums(q, k, mask_of("causal", 20))
    assert sums.uniform.tolist() == [False, True, False]
    assert bool(sums.cs[1].isnan().all() & sums.gs[1].isnan().all())
    assert bool(sums.cs[[0, 2]].isfinite().all())


class Largest(TorchDispatchMode):
    """The largest tensor of floats that is made inside."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_no_term_is_held_as_a_matrix() -> None:
    """What is held grows with the length, not with its square; the twin holds a matrix."""
    found = []
    for length in (500, 1000):
        q, k = torch.randn(2, 1, 1, length, 2, 4)
        mask = torch.ones(length, length).tril().bool()
        with Largest() as seen:
            share_sums(q, k, mask)
        found.append(seen.numbers)
    # a block of 64 rows ends at another key of each length
    assert found[1] < 2.2 * found[0]
    assert found[1] < 0.15 * 2 * 1000**2
    with Largest() as seen:
        torch.einsum("bihe,bjhe->bhij", q[0], k[0])
    assert seen.numbers == 2 * 1000**2


def table_of(
    cs: list[float], gs: list[float], parts: tuple[str, ...] = ("bias", "pos", "cvec"), **more: Any
) -> Any:
    """A table of one head with some shares."""
    shares = {"cs": torch.tensor([cs]).double(), "gs": torch.tensor([gs]).double()}
    one = torch.ones(1).double()
    fields = {"total": one, "gain_total": one, "dropped_mass": 0 * one, **shares, **more}
    return ShareTable(provenance=Provenance(), heads=((0, 0),), parts=parts, **fields)


@pytest.mark.parametrize("parts", [("bias", "pos", "cvec"), ("bias", "pos", "ctx", "resid")])
def test_groups_of_terms(parts: tuple[str, ...]) -> None:
    """Position, content, token (a constant beside content) and mixed (pos beside content)."""
    unit = torch.eye(len(parts) ** 2).tolist()
    for shares, pair in zip(unit, table_of(unit[0], unit[0], parts).pairs):
        table, expected = table_of(shares, shares, parts), reference.group_of(pair)
        assert table.groups == ("position", "content", "token", "mixed")
        assert table.dominant_by("group").labels == (expected,)
        assert table.share("cs")[0].tolist() == [float(g == expected) for g in table.groups]
        assert table.dominant_by("term").labels == ("-".join(pair),)


def test_a_label_needs_the_interval_of_its_lead() -> None:
    """The same shares: with a wide jackknife no label, with a narrow one the label."""
    shares, labels = [0.7, 0.0, 0.0, 0.3], []
    for spread in (0.3, 0.01):
        moved = torch.linspace(-spread, spread, 5).double()[:, None] * torch.tensor([1, 0, 0, -1])
        whole = torch.tensor(shares).double()
        samples = torch.cat([whole[None], whole + moved])[None]
        both = {"cs": samples, "gs": samples}
        more: dict[str, Any] = {"samples": both, "sizes": ((0.2,) * 5,)}
        labels += table_of(shares, shares, ("bias", "pos"), **more).dominant_by("term").labels
    assert labels == ["unclear", "bias-bias"]
    assert table_of(shares, shares, ("bias", "pos")).dominant_by("term").labels == ("bias-bias",)


@pytest.mark.parametrize(
    ("position", "content", "gain_position", "gain_content", "label", "flag"),
    [
        (0.7, 0.2, 0.7, 0.2, "position", ""),
        (0.2, 0.7, 0.1, 0.8, "content", ""),
        # a published induction circuit: covariance and gain disagree
        (0.57, 0.28, 0.40, 0.52, "unclear", "position by cs, content by gs"),
        (0.45, 0.2, 0.7, 0.2, "unclear", ""),  # not half of the covariance
        (0.52, 0.45, 0.7, 0.2, "unclear", ""),  # a lead below 0.1 by covariance
        (0.7, 0.2, 0.45, 0.40, "unclear", ""),  # and by gain
        (-0.4, 1.3, -0.2, 1.1, "content", ""),
        (math.nan, math.nan, math.nan, math.nan, "uniform", ""),
        (0.7, 0.2, math.nan, math.nan, "unclear", ""),
    ],
)
def test_a_label_needs_both_shares(
    position: float,
    content: float,
    gain_position: float,
    gain_content: float,
    label: str,
    flag: str,
) -> None:
    shares = []
    for a, b in ((position, content), (gain_position, gain_content)):
        row = [0.0] * 9
        row[4], row[8], row[2] = a, b, 1 - a - b
        shares.append(row)
    best = table_of(*shares).dominant_by("group")
    assert (best.labels, best.flags) == ((label,), (flag,))
    frame = table_of(*shares).to_dataframe()
    marked = frame[frame.group.notna() & frame.dominant].group.tolist()
    assert marked == ([label] if label in ("position", "content") else [])


@given(seed=SEEDS)
def test_head_types_are_sums_of_attention(seed: int) -> None:
    """By a loop over queries and keys; standard errors by the delta method over rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 5, (12, 9), generator=generator)
    pattern = torch.randn(12, 2, 9, 9, generator=generator).double()
    pattern = pattern.masked_fill(~mask_of("causal", 9), -math.inf).softmax(-1)
    found = scores.head_type_scores(pattern, ids)
    uniform = scores.head_type_scores(
        (mask_of("causal", 9) / torch.arange(1, 10).unsqueeze(1)).expand(12, 1, 9, 9), ids
    )
    rules = {
        "previous": lambda t, i, j: i - j == 1,
        "neighbourhood": lambda t, i, j: 1 <= i - j <= 3,
        "same": lambda t, i, j: t[j] == t[i],
        "duplicate": lambda t, i, j: j < i and t[j] == t[i],
        "induction": lambda t, i, j: 1 <= j <= i and t[j - 1] == t[i],
    }
    for name, rule in rules.items():
        sums, counts = np.zeros((12, 2)), np.zeros(12)
        for b, row in enumerate(ids.tolist()):
            for i in range(9):
                again = name in ("duplicate", "induction")
                if (again and row[i] not in row[:i]) or (
                    name in ("previous", "neighbourhood") and not i
                ):
                    continue
                counts[b] += 1
                keys = [j for j in range(i + 1) if rule(row, i, j)]
                sums[b] += pattern[b, :, i, keys].sum(-1).numpy()
        score = sums.sum(0) / counts.sum()
        assert found.scores[name].numpy() == pytest.approx(score)
        residual = (sums - score * counts[:, None]) / counts.mean()
        error = np.sqrt((residual**2).sum(0) / (12 * 11))
        assert found.errors[name].numpy() == pytest.approx(error)
        assert found.baselines[name] == pytest.approx(float(uniform.scores[name]))
    few = scores.head_type_scores(pattern[:9], ids[:9])
    assert bool(few.errors["previous"].isnan().all()), "no error below ten rows"
