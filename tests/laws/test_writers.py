"""Laws of who wrote what heads read (SPEC M): shares by writer are those of a decoder written out
in float64 and of the split; nulls and intervals are what they say."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.lib import kinds
from tests.lib.data import marginals
from tests.lib.double import InDouble, exact
from tests.lib.models import HAS_HOOKED, D, tiny, tiny_hooked, tokens
from tests.lib.reference import scores as reference
from tests.lib.reference.moments import jackknife

PROMPTS, MANY = tokens(batch=4, length=14, seed=7), tokens(batch=16, length=12, seed=3)
QUIET: dict[str, Any] = {"progress": False}
far = partial(torch.dist, p=torch.inf)  # the largest difference


def composed(model: Any, prompts: Tensor = PROMPTS, **options: Any) -> Any:
    return tlg.composition(model, prompts, **QUIET, **options)


@pytest.mark.parametrize("grain", ["writers", "blocks"])
@pytest.mark.parametrize("kind", kinds.KINDS)
def test_shares_are_those_of_the_explicit_decoder(kind: str, grain: str) -> None:
    """In float64, by a route that shares nothing with the library; a position left out."""
    with InDouble():
        options: dict[str, Any] = {"heads": ["L1H2", "L0H1"], "drop": 1, "draws": 1}
        table = composed(exact(kind), kinds.PROMPTS, parts=grain, **options)
    decoder, run = kinds.decoder(kind), kinds.run(kind)
    for row, (layer, head) in enumerate(table.heads):
        parts = reference.writers(decoder, run, layer)
        parts = parts if grain == "writers" else reference.by_block(parts)
        of_layer = reference.terms(decoder, run, layer, parts)
        shares = reference.head_shares(decoder, of_layer, layer, head, drop=1)
        for side in (0, 1):
            for ours, expected in zip((table.cs, table.gs), shares.marginal(side), strict=True):
                for name, value in expected.items():
                    if name in table.parts:  # ALiBi is a part of scores alone
                        own = float(ours[row, side, table.parts.index(name)])
                        assert own == pytest.approx(value, rel=1e-8, abs=1e-9), (name, side)


@pytest.mark.parametrize("kind", ["gpt2", "bloom"])
def test_a_sweep_of_writers_is_that_of_their_split(kind: str) -> None:
    model = tiny("bridge", kind)
    basis = tlg.decompose(model, MANY, **QUIET)  # says that the first position is left out
    swept = tlg.sweep_heads(model, PROMPTS, basis, parts="writers", layers=1, **QUIET)
    split = tlg.split_scores(model, PROMPTS, parts="writers", layers=1).shares(drop=1)
    summed = marginals(split)
    assert swept.parts == summed.parts
    for name, found in (("cs", summed), ("gs", summed), ("dropped_mass", split)):
        assert far(getattr(swept, name), getattr(found, name)) < 1e-5
    assert float(swept.dropped_mass.min()) > 1e-2


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("queries", [None, [4, 13]], ids=["all", "chosen"])
def test_the_value_side_is_the_covariance_of_the_output(
    architecture: str, queries: list[int] | None
) -> None:
    model = tiny("bridge", architecture)
    table = composed(model, layers=1, queries=queries)
    values = tlg.split_values(model, PROMPTS, layers=1, parts="writers")
    W_O = values.W_O if architecture == "llama" else values.W_O - values.W_O.mean(-1, keepdim=True)
    z = values.z[:, :, slice(None) if queries is None else queries]
    out = torch.einsum("pbihe,hed->pbihd", z, W_O)[1:]  # without the constants
    total = out.sum(0)
    expected = (out * total).sum((1, 2, 4)) / total.square().sum((0, 1, 3))
    assert far(table.cs[:, 2, 1:], expected.mT) < 1e-4
    assert queries is None or far(table.cs, composed(model, layers=1).cs) > 1e-2


@torch.no_grad()
def test_another_context_is_another_context() -> None:
    """The null from other prompts is what a split of swapped writers would give, and a writer of
    position is its own null."""
    model = tiny("bridge", "gpt2", dtype=torch.float64)
    table = composed(model, heads="L1H1")
    place, head = table.parts.index("pos_embed"), table.parts.index("L0H2")
    assert float(table.cosine[place]) == pytest.approx(1.0)
    assert torch.allclose(table.other_cs[0, :, place], table.cs[0, :, place])
    split = tlg.split_scores(model, PROMPTS, heads="L1H1", parts="writers")
    cache = model.run_with_cache(PROMPTS)[1]
    scale = cache["blocks.1.ln1.hook_scale"].unsqueeze(-1)
    k = (split.k[head] * scale).roll(1, 0) / scale  # the reader's norm stays as it is
    allowed = split.allowed[0]
    term = torch.einsum("bihe,bjhe->bhij", split.q.sum(0), k)[:, 0]
    total = split.total()[:, 0].masked_fill(~allowed, 0)
    centred = (total - total.sum(-1, keepdim=True) / allowed.sum(-1)[:, None]) * allowed
    expected = (term * centred).sum() / centred.square().sum()
    assert float(table.other_cs[0, 1, head]) == pytest.approx(float(expected), rel=1e-9)
    assert float(table.other_cs[0, 1, head]) != pytest.approx(float(table.cs[0, 1, head]))


@torch.no_grad()
def test_the_random_null_is_that_of_random_orthogonal_maps() -> None:
    """Against splits in which a writer is turned."""
    model = tiny("bridge", "llama", dtype=torch.float64)
    table = composed(model, layers=1, draws=4000)
    cache = model.run_with_cache(PROMPTS)[1]
    h, wrote = cache["resid_pre", 1], cache["z", 0][:, :, 1] @ model.blocks[0].attn.W_O[1]
    written = table.parts.index("L0H1")
    for drop in (0, 3):
        own = wrote[:, drop:]
        cosine = float((own * own.roll(1, 0)).sum() / own.square().sum())
        found = composed(model, layers=1, drop=drop, draws=1).cosine[written]
        assert float(found) == pytest.approx(cosine, rel=1e-9)
        assert abs(cosine) < 0.9
    generator, squares = torch.Generator().manual_seed(0), []
    for _ in range(4):
        Q, R = torch.linalg.qr(torch.randn(50, D, D, generator=generator).double())
        Q = Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # uniform only with these signs
        parts = {f"r{i}": wrote @ turn for i, turn in enumerate(Q)}
        parts["rest"] = h - sum(parts.values())
        summed = marginals(tlg.split_scores(model, PROMPTS, layers=1, parts=parts).shares())
        drawn = torch.stack([summed.cs, summed.gs])[..., 1:-1]
        squares.append(drawn.square().mean(-1))
    for found, expected in zip(
        (table.random_cs, table.random_gs), torch.stack(squares).mean(0).sqrt(), strict=True
    ):
        # 200 squares of nearly normal numbers: 5% of the root; ours: 2.4% at most
        assert far(found[:, :2, written] / expected, torch.ones(())) < 0.2
    assert not bool(table.random_cs[..., table.parts.index("constants")].any())  # Llama has none
    few = [composed(model, layers=1, draws=8, seed=seed).random_cs[..., 1:] for seed in (0, 0, 1)]
    assert torch.equal(few[0], few[1])
    assert not torch.equal(few[0], few[2])


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
@torch.no_grad()
def test_weight_only_scores_are_those_of_transformerlens() -> None:
    model = tiny_hooked(attn_only=True, normalization_type=None)
    table = composed(model, layers=1)
    first = table.parts.index("L0H0")
    for side, letter in enumerate("QKV"):
        theirs: Tensor = model.all_composition_scores(letter)[0, :, 1, :]  # writer, reader
        assert torch.allclose(
            table.weights[:, side, first : first + 4].mT.float(), theirs, atol=1e-4
        )


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_intervals_are_a_jackknife_over_groups_of_prompts(architecture: str) -> None:
    """By hand: the table of all prompts but two, for each of eight pairs. Batches of 5 cut through
    the pairs."""
    model = tiny("bridge", architecture)
    options: dict[str, Any] = {"layers": 1, "drop": 1, "draws": 1}
    table = composed(model, MANY, batch_size=5, **options)
    rest = [torch.cat([MANY[:i], MANY[i + 2 :]]) for i in range(0, len(MANY), 2)]
    without = [composed(model, prompts, **options) for prompts in rest]
    for share in ("cs", "gs"):
        whole = getattr(table, share).numpy()
        left_out = [getattr(t, share).numpy() for t in without]
        value, *bounds = jackknife(whole, [(left_out, [2] * 8)])
        for side, bound in zip(("low", "high"), bounds):
            found = getattr(table, f"{share}_{side}").numpy()
            np.testing.assert_allclose(found, bound, atol=1e-4)
        assert float((bounds[1] - value)[:, :2].max()) > 1e-3  # the prompts differ
    pairs = composed(model, MANY[:15], batch_size=5, **options).cosine  # the last has no pair
    assert torch.allclose(table.cosine, pairs, equal_nan=True)
    assert not bool(pairs[1:].isnan().all())
