"""Parts of interventions number by number: metrics of logits, remarks on both sides of their
limits, other prompts, other planes, other directions, and tables beside attributions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.interventions.bases import basis_of
from tests.tiny import HEADS, VOCAB, tiny, tokens
from tl_geometry.base.results import Provenance
from tl_geometry.circuits import explain_logits
from tl_geometry.corpus.sources import token_rows
from tl_geometry.interventions import HeadKnockouts, beside_knockouts, head_knockouts
from tl_geometry.interventions.causal import NecessitySufficiency, _flags
from tl_geometry.interventions.edge_effects import _controls, _counted, _share, _shrinking
from tl_geometry.interventions.head_edits import derangement
from tl_geometry.interventions.knockouts import control_sets
from tl_geometry.interventions.offsets import _add_diagonal, _offsets
from tl_geometry.interventions.output_metrics import output_metric
from tl_geometry.interventions.planes import random_planes
from tl_geometry.interventions.stream import subspace_of
from tl_geometry.interventions.surrogates import part_of, random_directions
from tl_geometry.models import view
from tl_geometry.weights.bilinear import Factors

PROMPTS = tokens(3, 6, seed=5)
PAIRS = [(5, 9), (7, 3), (11, 20)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# ---- metrics


def test_metrics_of_logits_are_those_of_numpy() -> None:
    """Difference, probability and loss of some prompts, each from its own targets and tokens."""
    seen = view(tiny("bridge", "gpt2"))
    rows, logits = token_rows(seen, PROMPTS), draw(2, 6, VOCAB)
    some, at = slice(1, 3), logits[:, 3:4]
    p = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(-1, keepdims=True)
    difference = output_metric(seen, rows, "difference", PAIRS, 3)
    assert (difference.name, difference.position, difference.own) == ("difference", 3, None)
    wanted = [float(at[b, 0, r] - at[b, 0, w]) for b, (r, w) in enumerate(PAIRS[1:])]
    assert difference.of(at, some).tolist() == pytest.approx(wanted)
    for targets in (PAIRS, [r for r, _ in PAIRS]):
        probability = output_metric(seen, rows, "probability", targets, -3)
        assert (probability.name, probability.position) == ("probability", 3)
        wanted = [float(p[b, 3, r]) for b, (r, _) in enumerate(PAIRS[1:])]
        assert probability.of(at, some).tolist() == pytest.approx(wanted)
    loss = output_metric(seen, rows, "loss", None, -1)
    assert (loss.name, loss.position, loss.ids) == ("loss", None, None)
    wanted = [
        -np.mean([np.log(p[b, i, int(PROMPTS[b + 1, i + 1])]) for i in range(5)]) for b in range(2)
    ]
    assert loss.of(logits, some).tolist() == pytest.approx(wanted)


def test_a_users_metric_has_the_name_of_its_function() -> None:
    """Its name, or "metric" for a callable without one; its numbers in float64, detached."""
    seen = view(tiny("bridge", "gpt2"))
    rows, logits = token_rows(seen, PROMPTS), draw(3, 6, VOCAB).float().requires_grad_()

    def first(logits: Tensor) -> Tensor:
        return logits[:, 0, 0]

    own = output_metric(seen, rows, first, None, -1)
    assert (own.name, own.position, own.ids) == ("first", None, None)
    values = own.of(logits, slice(0, 3))
    assert (values.dtype, values.requires_grad) == (torch.float64, False)
    assert torch.equal(values, logits[:, 0, 0].detach().double())
    unnamed: Any = type("Unnamed", (), {"__call__": lambda self, logits: logits[:, 0, 0]})()
    assert output_metric(seen, rows, unnamed, None, -1).name == "metric"


# ---- remarks


def necessity(prompts: int = 10, **fields: Any) -> NecessitySufficiency:
    """Effects that were written down: clean 1, bias terms only 3, keep 2, remove 4, swap 2."""
    level = torch.tensor([1.0, 3, 2, 4, 2]).double()[:, None]
    losses = level.expand(5, prompts).clone()
    given: dict[str, Any] = {
        "provenance": Provenance(),
        "conditions": ("clean", "bias terms only", "keep", "remove", "swap"),
        "losses": losses,
        "induction_losses": losses,
        "kls": losses,
        "heads": ((0, 0),),
        "term": ("cvec-cvec",),
        "swap_cosine": 0.5,
        "shrunk": 0.5,
    }
    return NecessitySufficiency(**given | fields)


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({}, []),
        ({"swap_cosine": 0.9, "shrunk": 1.0}, []),
        (
            {"swap_cosine": 0.901},
            [
                "the term hardly differs between prompts (cosine 0.90): its swap is no control, "
                "the other rows are"
            ],
        ),
        ({"shrunk": 1.25}, ["shrink turns the sign of scores (share 1.25 above 1)"]),
        ({"term": ("bias-pos",)}, ["no sufficiency: the term is one of the bias terms"]),
        ({"losses": torch.ones(5, 10).double()}, ["no sufficiency: nothing is lost without it"]),
        ({"prompts": 9}, ["fewer than 10 prompts: no intervals of the loss"]),
    ],
)
def test_remarks_on_both_sides_of_their_limits(fields: dict[str, Any], flags: list[str]) -> None:
    """Each remark in its own words, where its limit is passed and not where it is met."""
    assert _flags(necessity(**fields)) == flags


def test_shares_that_survive_are_those_by_hand() -> None:
    """Half of the loss is saved; removing costs 3 nats; a loss that does not rise has no share."""
    found = necessity()
    assert found.sufficiency == {"loss": 0.5, "induction_loss": 0.5}
    assert found.necessity == {"loss": 3.0, "induction_loss": 3.0}
    assert found.of("keep") == {"loss": 2.0, "induction_loss": 2.0, "kl": 2.0}
    assert found.survival("remove", "swap") == -2.0
    assert math.isnan(found.survival("keep", "clean"))
    assert found.controls == ("bias terms only", "swap")


# ---- other prompts, planes and directions


@pytest.mark.parametrize("prompts", [2, 3, 9])
def test_each_prompt_gets_the_one_before_it_in_a_random_order(prompts: int) -> None:
    """From each prompt on, all others come before it comes again; the seed chooses the order."""
    for seed in range(4):
        other, at, seen = derangement(prompts, seed).tolist(), 0, []
        for _ in range(prompts):
            at = other[at]
            seen.append(at)
        assert sorted(seen) == list(range(prompts))
        assert seen[-1] == 0
    orders = {tuple(derangement(9, seed).tolist()) for seed in range(4)}
    assert len(orders) == 4


def test_random_planes_differ_by_seed_layer_and_head() -> None:
    """Each of the three changes what is drawn; the same three draw the same; no plane is none."""
    chosen, theta = torch.arange(12) < 3, torch.arange(12.0).flip(0)
    draws = {
        (seed, layer, head): tuple(random_planes(chosen, theta, seed, layer, head).tolist())
        for seed in range(4)
        for layer in range(4)
        for head in range(4)
    }
    assert all(sum(drawn) == 3 and not drawn[-1] for drawn in draws.values())
    for along in (
        [draws[i, 2, 2] for i in range(4)],
        [draws[2, i, 2] for i in range(4)],
        [draws[2, 2, i] for i in range(4)],
    ):
        assert len(set(along)) > 2
    assert draws[1, 2, 3] == tuple(random_planes(chosen, theta, 1, 2, 3).tolist())
    assert len(set(draws.values())) > 45
    none = torch.zeros(12, dtype=torch.bool)
    assert not bool(random_planes(none, theta, 0).any())
    # of two planes the only other one
    assert random_planes(torch.tensor([True, False]), torch.tensor([1.0, 2.0]), 0).tolist() == [
        *(False, True),
    ]


@pytest.mark.parametrize("centered", [False, True])
def test_random_directions_are_orthonormal_and_centred_where_asked(centered: bool) -> None:
    """As many as there are, of another seed others, with sums of zero only where asked."""
    V = torch.linalg.qr(draw(12, 3))[0]
    found = random_directions(V, centered, 1)
    assert torch.allclose(found.mT @ found, torch.eye(3).double(), atol=1e-12)
    sums = found.sum(0).abs()
    assert bool((sums < 1e-12).all()) == centered
    assert torch.equal(found, random_directions(V, centered, 1))
    assert float((found - random_directions(V, centered, 2)).abs().max()) > 0.1


@pytest.mark.parametrize("centered", [False, True])
def test_random_parts_keep_to_the_space_of_centred_factors(centered: bool) -> None:
    """Factors whose columns sum to zero get directions that do; others get any."""
    left, right = draw(2, 12, 4), draw(2, 12, 4, seed=1)
    if centered:
        left, right = left - left.mean(1, keepdim=True), right - right.mean(1, keepdim=True)
    V = torch.linalg.qr(draw(12, 5, seed=2))[0]
    low, _ = part_of(Factors(left, right), V, "random", 3, seed=4)
    assert low.right.shape == (2, 12, 3)
    assert bool((low.right.sum(1).abs() < 1e-12).all()) == centered
    expected = random_directions(V[:, :3], centered, 4)
    assert torch.allclose(low.right[0], expected)


@pytest.mark.parametrize("part", ["none", "diagonal", "low_rank", "whole"])
def test_parts_of_a_matrix_by_loops(part: str) -> None:
    """Zero, the diagonal, the best of two directions, and the matrix itself, as dense matrices."""
    left, right = draw(2, 6, 3), draw(2, 6, 3, seed=1)
    V = torch.linalg.qr(draw(6, 4, seed=2))[0]
    low, diagonal = part_of(Factors(left, right), V, part, 2)
    for head in range(2):
        W = left[head] @ right[head].mT
        P = V[:, :2] @ V[:, :2].mT
        wanted = {"none": 0 * W, "diagonal": W.diag().diag(), "low_rank": P @ W @ P, "whole": W}
        found = low.left[head] @ low.right[head].mT + diagonal[head].diag()
        assert torch.allclose(found, wanted[part], atol=1e-12)


@pytest.mark.parametrize("offset", [-2, 0, 1, 3])
@pytest.mark.parametrize("with_low", [False, True])
def test_a_diagonal_is_added_at_its_offset_alone(offset: int, with_low: bool) -> None:
    """``sum_e delta_e (x_i x_j - low_i low_j)_e`` where query minus key is the offset, by loops."""
    x, low, delta = draw(2, 4, 3), draw(2, 4, 3, seed=1), draw(2, 3, seed=2)
    out, wanted = torch.ones(2, 2, 4, 4).double(), torch.ones(2, 2, 4, 4).double()
    for b in range(2):
        for h in range(2):
            for i in range(4):
                for j in range(4):
                    if i - j == offset:
                        cell = x[b, i] * x[b, j] - (low[b, i] * low[b, j] if with_low else 0)
                        wanted[b, h, i, j] += (delta[h] * cell).sum()
    _add_diagonal(out, x, low if with_low else None, delta, offset)
    assert torch.allclose(out, wanted, atol=1e-12)


@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_offsets_are_those_of_allowed_cells(architecture: str) -> None:
    """Not negative in a decoder; of both signs in an encoder."""
    layers: list[Any] = []
    view(tiny("bridge", architecture)).run_layers(PROMPTS[:1], [0], layers.append)
    assert _offsets(layers[0]) == list(range(-5 if architecture == "bert" else 0, 6))


@pytest.mark.parametrize("subspace", ["pos", "ctx"])
def test_a_subspace_of_default_rank_is_the_first_that_holds_its_share(subspace: str) -> None:
    """99% of the squared norm with it, less without its last direction, by singular values."""
    basis = basis_of("bridge")
    vectors = getattr(basis, subspace)[1].double()
    V = subspace_of(basis, 1, subspace)
    S = torch.linalg.svdvals(vectors).square()
    rank = V.shape[1]
    assert float(S[:rank].sum() / S.sum()) >= 0.99 > float(S[: rank - 1].sum() / S.sum())
    assert torch.allclose(V.mT @ V, torch.eye(rank).double(), atol=1e-9)
    assert torch.equal(subspace_of(basis, 1, subspace, 2), V[:, :2])
    assert float((vectors @ V).square().sum()) == pytest.approx(float(S[:rank].sum()))


# ---- controls


def test_random_sets_are_drawn_from_the_heads_that_no_row_has() -> None:
    """Eight by default for each size, of others only; none where every head is a row."""
    heads = [(layer, head) for layer in (0, 1) for head in range(HEADS)]
    rows = [[heads[0]], [heads[1], heads[2]], [heads[3]]]
    drawn = control_sets(rows, heads, None, 0)
    assert {size: len(sets) for size, sets in drawn.items()} == {1: 8, 2: 8}
    for size, sets in drawn.items():
        assert all(len(set(chosen)) == size and set(chosen) <= set(heads[4:]) for chosen in sets)
    assert {head for chosen in drawn[2] for head in chosen} == set(heads[4:])
    assert control_sets(rows, heads, 3, 0)[2] != control_sets(rows, heads, 3, 1)[2]
    assert control_sets([heads], heads, None, 0) == {}
    assert control_sets(rows, heads, 0, 0) == {}


SHARES = {
    "embed": [0.1, 0.3],
    "constants": [0.9, 0.9],
    "L0H0": [-0.5, -0.3],
    "L0H1": [0.05, 0.15],
    "mlp0": [math.nan, 0.25],
    "L1H0": [0.2, 0.4],
}


def test_controls_of_an_edge_are_the_largest_others() -> None:
    """By absolute mean share without constants and the writer; of a block none of its heads."""
    shares = {name: torch.tensor(values) for name, values in SHARES.items()}
    assert _controls(3, shares, "embed") == ("L0H0", "L1H0", "mlp0")
    assert _controls(0, shares, "embed") == ()
    assert _controls(9, shares, "attn0") == ("L1H0", "mlp0", "embed")
    assert _controls("L0H1", shares, "embed") == ("L0H1",)
    assert _controls(["mlp0", "L0H0"], shares, "embed") == ("mlp0", "L0H0")
    assert _share(shares, "attn0").tolist() == pytest.approx([-0.45, -0.15])
    assert _share(shares, "L0H1").tolist() == pytest.approx([0.05, 0.15])


@pytest.mark.parametrize("side", ["key", "value"])
def test_shrinking_takes_the_share_of_each_head(side: str) -> None:
    """One minus the share of each head, and all of it where the share is NaN."""
    heads = [(0, 2), (0, 1), (1, 0)]
    edits = _shrinking(torch.tensor([0.25, math.nan, 1.5]), heads, side)
    assert [(edit.layer, edit.heads) for edit in edits] == [(0, (1, 2)), (1, (0,))]
    layers: list[Any] = []
    view(tiny("bridge", "gpt2")).run_layers(PROMPTS[:1, :3], [0], layers.append)
    (layer,) = layers
    total, v = torch.ones(1, 2, 3, 3), torch.ones(1, 3, 2, 4)
    factors = [1.0, 1.0] if side == "value" else [1.0, 0.75]
    assert edits[0].scores(layer, total)[0, :, 0, 0].tolist() == factors
    assert (edits[0].values is not None) == (side == "value")
    if edits[0].values is not None:
        assert edits[0].values(layer, v)[0, 0, :, 0].tolist() == [1.0, 0.75]
    else:
        assert edits[1].scores(layer, total[:, :1])[0, 0, 0, 0] == -0.5


def test_tokens_that_count_are_all_by_default_and_never_the_first() -> None:
    """By position for all prompts, or by prompt and position."""
    assert _counted(None, PROMPTS).tolist() == [[True] * 5] * 3
    by_position = torch.arange(6) % 2 == 0
    assert _counted(by_position, PROMPTS).tolist() == [[False, True] * 2 + [False]] * 3
    by_prompt = torch.arange(18).view(3, 6) % 4 == 1
    assert _counted(by_prompt, PROMPTS).tolist() == by_prompt[:, 1:].tolist()


# ---- beside attributions


def test_knockouts_stand_beside_the_heads_that_were_knocked_out() -> None:
    """Effects, direct contributions and disagreement by name; NaN and false elsewhere."""
    model, prompts = tiny("bridge", "gpt2"), tokens(10, 6, seed=4)
    targets = [(5 + i, 40 - i) for i in range(10)]
    options: dict[str, Any] = {"targets": targets, "controls": 0, "progress": False}
    heads = {"both": ["L0H0", "L1H3"], "second": ["L1H2"], "first": ["L0H3"]}
    knockouts = head_knockouts(model, prompts, heads=heads, attributions=True, **options)
    table = explain_logits(model, prompts, targets)
    found = beside_knockouts(table, knockouts)
    added = ("effect", "effect_low", "effect_high", "direct", "disagrees")
    assert tuple(found.columns()) == (*table.columns(), *added)
    assert isinstance(knockouts, HeadKnockouts)
    assert knockouts.direct is not None
    assert knockouts.disagrees is not None
    rows = {str(row[0]): row for row in found.rows()}
    assert [row[:4] for row in found.rows()] == [tuple(row) for row in table.rows()]
    for name, at in (("L1H2", 1), ("L0H3", 2)):
        value, low, high, _ = (x[at] for x in knockouts.effect)
        numbers = [float(x) for x in (value, low, high, knockouts.direct[at].mean())]
        assert list(rows[name][4:8]) == pytest.approx(numbers)
        assert rows[name][8] is bool(knockouts.disagrees[at])
    for name in rows.keys() - {"L1H2", "L0H3"}:
        assert all(math.isnan(float(str(x))) for x in rows[name][4:8])
        assert rows[name][8] is False
    plain = head_knockouts(model, prompts, heads=heads, **options)
    assert tuple(beside_knockouts(table, plain).columns())[-3:] == added[:3]
    assert tlg.interventions.AttributionTable is type(found)
