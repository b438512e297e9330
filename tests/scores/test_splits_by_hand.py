"""Methods of a split by numpy, on random queries and keys without a model: scores under soft caps
and sinks, shares under masks of two layers, strongest cells, budgets, what is shown."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.splits import synthetic
from tl_geometry.base.errors import BudgetError, GeometryError
from tl_geometry.base.results import Provenance
from tl_geometry.base.rows import KeyRanges
from tl_geometry.scores.planes import Band, HeadPlanes, default_bands, describe_planes
from tl_geometry.scores.split import ScoreSplit
from tl_geometry.scores.terms import group_of
from tl_geometry.scores.top_cells import NO_KEY, largest_first, top_cells

LENGTH, BATCH, PARTS = 6, 3, ("bias", "pos", "cvec")
HEADS = ((1, 0), (0, 3), (1, 2))
CAPS, SINKS = (2.0, np.inf, 2.0), (-np.inf, 0.5, 1.5)


def masks() -> Tensor:
    """Causal in layer 1; in layer 0 a window of two keys."""
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return torch.stack([causal, causal & ~causal.tril(-2), causal])


def split_of(*, alibi: bool = False, **changes: Any) -> ScoreSplit:
    """Three heads of two layers, out of order, with soft caps and sinks of their own."""
    g = torch.Generator().manual_seed(7)
    q, k = (torch.randn(3, BATCH, LENGTH, 3, 4, generator=g, dtype=torch.float64) for _ in "qk")
    bias = torch.randn(3, LENGTH, LENGTH, generator=g, dtype=torch.float64)
    fields: dict[str, Any] = {
        "provenance": Provenance(model="drawn", dtype="float64"),
        "heads": HEADS,
        "parts": PARTS,
        "q": q,
        "k": k,
        "bias": bias if alibi else None,
        "mask": masks(),
        "softcap": torch.tensor(CAPS, dtype=torch.float64),
        "sinks": torch.tensor(SINKS, dtype=torch.float64),
        "planes": HeadPlanes(
            torch.tensor([[0, 0, 1, 1]] * 3),
            torch.tensor([[1.0, 0.0]] * 3, dtype=torch.float64),
            LENGTH,
        ),
    }
    return dataclasses.replace(synthetic(heads=3, tokens=LENGTH), **(fields | changes))


def cells_of(split: ScoreSplit, a: int, b: int) -> np.ndarray:
    """One term by part numbers, at every cell."""
    return np.einsum("bihe,bjhe->bhij", split.q[a].numpy(), split.k[b].numpy())


def total_of(split: ScoreSplit) -> np.ndarray:
    """The sum of all terms, at every cell."""
    total = np.sum([cells_of(split, a, b) for a in range(3) for b in range(3)], axis=0)
    return total if split.bias is None else total + split.bias.numpy()


def attention(split: ScoreSplit) -> np.ndarray:
    """Softmax of capped scores beside a sink, by loops over rows."""
    total, allowed = total_of(split), split.allowed.numpy()
    found = np.zeros_like(total)
    for b, h, i in np.ndindex(BATCH, 3, LENGTH):
        seen = allowed[h, i]
        scores = total[b, h, i][seen]
        if np.isfinite(CAPS[h]):
            scores = CAPS[h] * np.tanh(scores / CAPS[h])
        weights = np.exp(scores)
        found[b, h, i][seen] = weights / (weights.sum() + np.exp(SINKS[h]))
    return found


@pytest.mark.parametrize("alibi", [False, True])
def test_scores_and_attention_under_caps_and_sinks_by_loops(alibi: bool) -> None:
    """Each head with its own cap and sink; forbidden keys get minus infinity, and no attention."""
    split = split_of(alibi=alibi)
    total, allowed = total_of(split), split.allowed.numpy()
    assert np.allclose(split.summed(), total)
    assert np.allclose(split.total(), np.where(allowed, total, -np.inf))
    caps = np.array(CAPS)[:, None, None]
    with np.errstate(invalid="ignore"):
        capped = np.where(np.isinf(caps), total, caps * np.tanh(total / caps))
    assert np.allclose(split.model_scores(), np.where(allowed, capped, -np.inf))
    assert np.allclose(split.pattern(), attention(split))
    rows = slice(2, 5)
    assert np.allclose(split.pattern_rows(rows), attention(split)[:, :, rows])
    assert np.allclose(split.model_scores(rows), split.model_scores()[:, :, rows])
    centred = split.centered(split.summed()).numpy()
    assert np.allclose((centred * allowed).sum(-1), 0)
    mean = (total * allowed).sum(-1) / allowed.sum(-1)
    assert np.allclose(centred[..., 0][..., :1], (total - mean[..., None])[..., 0][..., :1])


def test_the_reference_preset_gives_the_first_key_no_attention() -> None:
    """Its scores are the model's own, and a row that sees the first key alone has no attention."""
    scores = torch.randn(BATCH, 3, LENGTH, LENGTH, dtype=torch.float64)
    plain = split_of(
        provenance=Provenance(preset="reference"),
        scores=scores,
        softcap=torch.full((3,), torch.inf, dtype=torch.float64),
        sinks=torch.full((3,), -torch.inf, dtype=torch.float64),
    )
    assert torch.equal(plain.summed(), scores)
    assert torch.equal(plain.total(), torch.where(plain.allowed, scores, -torch.inf))
    pattern = plain.pattern()
    assert not pattern[..., 0].any()
    assert not pattern[:, :, 0].any()
    later = plain.allowed.clone()
    later[..., 0] = False
    expected = torch.where(later, scores, -torch.inf).softmax(-1)
    torch.testing.assert_close(pattern[:, :, 1:], expected[:, :, 1:])
    text = r"shares: expected terms that sum to the scores, got preset='reference'. Use preset="
    with pytest.raises(GeometryError, match=text):
        plain.shares()
    with pytest.raises(GeometryError, match="on_planes: expected preset='exact', got preset='ref"):
        plain.on_planes(0)


@pytest.mark.parametrize("drop", [0, 2])
@pytest.mark.parametrize("alibi", [False, True])
def test_shares_by_loops_under_the_mask_and_cap_of_each_layer(drop: int, alibi: bool) -> None:
    """Covariance, gain and energy shares, and the attention to dropped keys, of heads that are not
    in the order of their layers; sinks take part in the latter alone."""
    split = split_of(alibi=alibi)
    table = split.shares(drop)
    terms = [cells_of(split, a, b) for a in range(3) for b in range(3)]
    terms += [np.broadcast_to(split.bias.numpy(), terms[0].shape)] if split.bias is not None else []
    total, allowed = total_of(split), split.allowed.numpy()
    assert table.terms[-1] == ("alibi-alibi" if alibi else "cvec-cvec")
    assert (table.heads, table.drop) == (HEADS, drop)
    numbers = np.zeros((3, 3, len(terms)))
    whole, gain, cells = np.zeros(3), np.zeros(3), np.zeros(3)
    for b, h, i in np.ndindex(BATCH, 3, LENGTH):
        seen = allowed[h, i] & (np.arange(LENGTH) >= drop)
        if i < drop or not seen.any():
            continue
        row = total[b, h, i][seen]
        capped = CAPS[h] * np.tanh(row / CAPS[h]) if np.isfinite(CAPS[h]) else row
        p = np.exp(capped) / np.exp(capped).sum()
        moved = p - 1 / len(row)
        whole[h] += ((row - row.mean()) ** 2).sum()
        gain[h] += (moved * row).sum()
        cells[h] += len(row) if len(row) > 1 else 0
        for t, term in enumerate(terms):
            x = term[b, h, i][seen]
            numbers[0, h, t] += ((x - x.mean()) * (row - row.mean())).sum()
            numbers[1, h, t] += (moved * x).sum()
            numbers[2, h, t] += ((x - x.mean()) ** 2).sum()
    assert np.allclose(table.cs, numbers[0] / whole[:, None])
    assert np.allclose(table.gs, numbers[1] / gain[:, None])
    assert np.allclose(table.es, numbers[2] / numbers[2].sum(-1, keepdims=True))
    assert np.allclose(table.sums.cells, cells)
    for i, group in enumerate(("position", "content", "mixed")):
        of_group = [t for t, name in enumerate(table.terms) if group_of(name) == group]
        for found, kind in ((table.group_cs, 0), (table.group_gs, 1), (table.group_es, 2)):
            denominators = (whole, gain, numbers[2].sum(-1))
            share = numbers[kind][:, of_group].sum(-1) / denominators[kind]
            assert np.allclose(found[:, i], share)
    if drop:
        assert table.dropped_mass is not None
        paid = attention(split)[:, :, drop:, :drop].sum(-1)
        assert np.allclose(table.dropped_mass, paid.mean((0, 2)))
    else:
        assert table.dropped_mass is None
        assert not table.marginals().dropped_mass.any()


def test_shares_leave_out_what_comes_before_the_window_unless_told_otherwise() -> None:
    """The default is the start of the window in the provenance."""
    split = split_of(provenance=Provenance(window=(2, LENGTH)))
    assert split.shares().drop == 2
    assert torch.equal(split.shares().cs, split.shares(2).cs)
    assert split.shares(0).drop == 0
    assert split_of().shares().drop == 0


def test_shares_of_writers_have_no_energies() -> None:
    """Where constants are a part, pairs are too many."""
    split = split_of(parts=("bias", "constants", "embed"))
    table = split.shares()
    assert table.es.isnan().all()
    assert table.cs.isfinite().all()
    assert table.groups == ()


def test_planes_of_a_split_by_numpy() -> None:
    """A choice of planes keeps its coordinates alone, drops ALiBi and says so."""
    split = split_of(alibi=True)
    for choice, name, kept in (
        (0, "0", [0, 1]),
        ("pass", "pass", [2, 3]),
        ("near", "near", [0, 1]),
    ):
        part = split.on_planes(choice)
        expected = np.einsum(
            "bihe,bjhe->bhij", split.q[1].numpy()[..., kept], split.k[2].numpy()[..., kept]
        )
        assert np.allclose(part["pos-cvec"], expected)
        assert part.bias is None
        assert part.provenance.flags == (f"rotary planes {name} alone",)
    by_plane = split.shares(0).planes()
    whole = split.shares(0)
    torch.testing.assert_close(by_plane.cs.sum(1), whole.cs[:, :9])
    assert by_plane.terms == whole.terms[:9]


# --- Terms ----------------------------------------------------------------------------------------


def test_terms_are_listed_in_order_and_found_by_pair_or_name() -> None:
    """ALiBi is the last, a copy, and the same for every prompt."""
    split = split_of(alibi=True)
    pairs = [(a, b) for a in PARTS for b in PARTS] + [("alibi", "alibi")]
    assert list(split.terms) == pairs
    assert len(split.terms) == 10
    assert "pos-cvec" in split.terms
    assert "alibi-alibi" not in split_of().terms
    assert np.allclose(split["pos-cvec"], cells_of(split, 1, 2))
    assert np.allclose(split.terms.rows("cvec-pos", slice(1, 3)), cells_of(split, 2, 1)[:, :, 1:3])
    assert split.bias is not None
    alibi, before = split["alibi-alibi"], split.bias.clone()
    assert torch.equal(alibi, split.bias.expand(BATCH, -1, -1, -1))
    alibi.zero_()
    assert torch.equal(split.bias, before)
    text = (
        r"terms: expected one of 'bias-bias', 'bias-pos', .*, or a pair \(\"query part\", "
        r"\"key part\"\), got 'pos-ctx'. Use list\(split.terms\)."
    )
    with pytest.raises(GeometryError, match=text):
        split["pos-ctx"]


def test_budgets_are_for_one_term_as_a_matrix_to_the_byte() -> None:
    """``batch heads length^2`` numbers of eight bytes; rows of them are never refused."""
    size = BATCH * 3 * LENGTH**2 * 8
    enough, little = (split_of(memory_budget=size - less) for less in (0, 1))
    asks: list[Any] = [
        lambda split: split.total(),
        lambda split: split.pattern(),
        lambda split: split.model_scores(),
        lambda split: split.sum_of_terms(),
        lambda split: split["pos-pos"],
    ]
    names = ("total", "pattern", "model_scores", "sum_of_terms", "terms")
    for name, ask in zip(names, asks, strict=True):
        ask(enough)
        text = (
            rf"^{name}: expected at most memory_budget={size - 1:,} bytes, got {size:,} bytes for "
            r"one term\. Use top_cells, shares, or fewer heads=\.$"
        )
        with pytest.raises(BudgetError, match=text):
            ask(little)
    rows = little.model_scores(slice(0, 2))
    assert torch.equal(rows, enough.model_scores()[:, :, :2])
    assert little.shares().cs.shape == (3, 9)


@pytest.mark.parametrize(("count", "end"), [(8, "L0H7"), (9, "L0H7 and 1 more")])
def test_a_split_names_its_first_eight_heads_and_its_checks(count: int, end: str) -> None:
    """In one line: what it was made from, heads, parts, errors and their bounds."""
    split = synthetic(heads=count, tokens=4, parts=("a", "b"))
    listed = ", ".join(f"L0H{h}" for h in range(7))
    expected = f"heads {listed}, {end}; parts a, b; scores off by 1e-06 of 2e-05 allowed)"
    assert repr(split).startswith("ScoreSplit(synthetic, ")
    assert repr(split).endswith(expected)


# --- Strongest cells ------------------------------------------------------------------------------


@pytest.mark.parametrize("term", [None, "pos-cvec", ("cvec", "bias"), "alibi-alibi"])
@pytest.mark.parametrize("k", [1, 3, LENGTH])
@pytest.mark.parametrize("ranges", [False, True])
def test_strongest_cells_by_sorting(term: Any, k: int, ranges: bool) -> None:
    """By absolute value for a term and by value for the total; rows that see fewer keys end in
    none."""
    mask: Any = KeyRanges.of(masks()) if ranges else masks()
    split = split_of(alibi=True, mask=mask)
    numbers = {"pos-cvec": (1, 2), ("cvec", "bias"): (2, 0)}
    if term == "alibi-alibi":
        assert split.bias is not None
        cells = np.broadcast_to(split.bias.numpy(), (BATCH, 3, LENGTH, LENGTH))
    else:
        cells = total_of(split) if term is None else cells_of(split, *numbers[term])
    found, allowed = split.top_cells(k, term), masks().numpy()
    assert found.term == ("" if term is None else term if isinstance(term, str) else "cvec-bias")
    for b, h, i in np.ndindex(BATCH, 3, LENGTH):
        seen = np.flatnonzero(allowed[h, i])
        size = cells[b, h, i] if term is None else np.abs(cells[b, h, i])
        best = sorted(seen, key=lambda j, size=size: -size[j])[:k]
        missing = k - len(best)
        assert found.keys[b, h, i].tolist() == [*best, *[NO_KEY] * missing]
        values = [*cells[b, h, i][best], *[np.nan] * missing]
        assert found.values[b, h, i].tolist() == pytest.approx(values, nan_ok=True)
    rows = BATCH * sum(min(k, int(n)) for n in allowed.sum(-1).flatten())
    assert len(found.rows()) == rows
    assert NO_KEY == -1


def test_more_cells_than_keys_are_refused() -> None:
    """From one key to all of a prompt."""
    for k in (0, LENGTH + 1):
        text = f"^k: expected 1 to {LENGTH}, the keys of a prompt, got {k}"
        with pytest.raises(GeometryError, match=text):
            top_cells(split_of(), k, None)


def test_the_largest_come_first_and_equal_ones_in_their_order() -> None:
    """Ties within what is taken, and ties with what is left."""
    x = torch.tensor([[1.0, 3, 2, 3, 2, 3], [5, 4, 3, 2, 1, 0], [0, 0, 0, 0, 0, 0]])
    assert largest_first(x, 2).tolist() == [[1, 3], [0, 1], [0, 1]]
    assert largest_first(x, 4).tolist() == [[1, 3, 5, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert largest_first(x, 6).tolist() == [[1, 3, 5, 2, 4, 0], [*range(6)], [*range(6)]]


# --- Planes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "middle", "bands"),
    [
        (5, (16, 16), ["near", "near", "far", "far", "pass", ""]),
        (16, (16, 16), ["near", "near", "far", "far", "pass", ""]),
        (40, (16, 40), ["near", "near", "middle", "far", "pass", ""]),
    ],
)
def test_bands_hold_their_longest_wavelength(
    length: int, middle: tuple[int, int], bands: list[str]
) -> None:
    """16 tokens are near, the length of the prompt is middle; the sign of a frequency is none of
    the wavelength."""
    waves = torch.tensor([[2.0, -16.0, 40.0, 40.5, torch.inf, torch.nan]], dtype=torch.float64)
    planes = HeadPlanes(torch.tensor([[0, 1, 2, 3, 4, 4]]), 2 * torch.pi / waves, length)
    assert planes.bands() == (tuple(bands),)
    assert default_bands(length) == {
        "near": (0, 16),
        "middle": middle,
        "far": (middle[1], float("inf")),
    }
    assert planes.wavelength[0, :4].tolist() == pytest.approx([2, 16, 40, 40.5])
    assert planes.chosen(5).tolist() == [[False] * 6]
    assert planes.chosen([0, "pass"]).tolist() == [[True, False, False, False, True, False]]
    assert planes.chosen(Band(2, 40)).tolist() == [[False, True, True, False, False, False]]
    inside = planes.coordinates(planes.chosen("pass"))
    assert inside.tolist() == [[False] * 4 + [True] * 2]


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (-1, "planes: expected planes 0 to 1, a Band of wavelengths, or near, middle, far, pass"),
        (2, "planes: expected planes 0 to 1, a Band of wavelengths, .* got 2"),
        (Band(4, 4), r"planes: expected over < up_to, both at least 0, got \(4, 4\)"),
        (Band(-1, 4), r"planes: expected over < up_to, both at least 0, got \(-1, 4\)"),
        ("close", "planes: expected one of 'near', 'middle', 'far', 'pass', got 'close'"),
    ],
)
def test_planes_that_are_none_are_refused(choice: Any, says: str) -> None:
    """Numbers, bands and names, each with what would be right."""
    with pytest.raises(GeometryError, match=says):
        split_of().planes.chosen(choice)


def test_choices_of_planes_are_named() -> None:
    """As captions and flags show them."""
    assert describe_planes("near") == "near"
    assert describe_planes(3) == "3"
    assert describe_planes([Band(2, 16.5), "pass"]) == "wavelengths over 2 up to 16.5, pass"
