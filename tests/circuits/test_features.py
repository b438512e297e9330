"""Scores by features: an orthonormal dictionary explains everything, what is dropped goes to the
error exactly, pairs are those of the dense split, and foreign dictionaries are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.models import D, tiny, tokens
from tl_geometry.base.errors import GeometryError, ReconstructionError, UnsupportedModelError
from tl_geometry.base.results import Provenance
from tl_geometry.circuits.dictionaries import dictionary
from tl_geometry.circuits.features import FeatureShares, feature_shares
from tl_geometry.models import view
from tl_geometry.scores.split import split_scores

PROMPTS = tokens(batch=3, length=10, seed=7)
Q = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(0)).double())[0]
OFFSET = torch.randn(D, generator=torch.Generator().manual_seed(1)).double()


def states(model: Any, layer: int = 1) -> Tensor:
    name = f"blocks.{layer}.hook_resid_pre"
    return view(model).activations(PROMPTS, [name])[name]


def orthonormal(model: Any, keep: int = D) -> tuple[Tensor, Tensor, Tensor]:
    """Activations of an orthonormal dictionary, all but the first ``keep`` features off."""
    activations = (states(model).double() - OFFSET) @ Q.mT
    activations[..., keep:] = 0
    return activations, Q, OFFSET


def shares(model: Any, source: Any, **options: Any) -> FeatureShares:
    return feature_shares(model, PROMPTS, dictionary(source, 1, model), heads="L1H2", **options)


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3", "gemma2", "bloom"])
def test_an_orthonormal_dictionary_leaves_no_error(architecture: str) -> None:
    model = tiny("bridge", architecture, dtype=torch.float64)
    found = shares(model, orthonormal(model))
    alibi = architecture == "bloom"
    assert found.unexplained < 1e-12
    assert float(found.cs[..., 1].abs().max()) < 1e-5
    if not alibi:
        assert torch.allclose(found.cs.sum(-1), torch.ones(1, 2).double(), atol=1e-5)
    parts = {f"f{i}": ((states(model) - OFFSET) @ Q[i]).unsqueeze(-1) * Q[i] for i in range(D)}
    parts["b_dec"] = OFFSET.expand(3, 10, D)
    split = split_scores(model, PROMPTS, None, heads="L1H2", parts=parts).shares()
    marginals = split.marginals()
    for name in ("f0", "f7", "b_dec"):
        mine = found.cs[0, :, found.parts.index(name)]
        assert torch.allclose(mine, marginals.cs[0, :, marginals.parts.index(name)], atol=1e-5)
    pair = found.pairs[0, 0].tolist()
    assert tuple(pair) != (0, 0) or len(found.pairs[0]) > 1


def test_dropping_features_moves_their_sum_into_the_error() -> None:
    model = tiny("bridge", "gpt2", dtype=torch.float64)
    full, fewer = shares(model, orthonormal(model)), shares(model, orthonormal(model, 20))
    assert fewer.feature_ids.tolist() == list(range(20))
    lost = full.cs[..., 3 + 20 :].sum(-1)
    assert torch.allclose(fewer.cs[..., 1] - full.cs[..., 1], lost, atol=1e-5)
    assert torch.allclose(fewer.cs[..., 3:], full.cs[..., 3 : 3 + 20], atol=1e-5)
    assert fewer.unexplained > 0.01
    assert next(row[3] for row in fewer.rows()) == "error"


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_pairs_are_those_of_the_dense_split(architecture: str) -> None:
    """With every pair of each cell kept, the sums are the shares of the terms."""
    model = tiny("bridge", architecture, dtype=torch.float64)
    found = shares(model, orthonormal(model, 4), per_cell=16, pairs=16)
    h = states(model)
    parts = {f"f{i}": ((h - OFFSET) @ Q[i]).unsqueeze(-1) * Q[i] for i in range(4)}
    parts["rest"] = h - torch.stack(list(parts.values())).sum(0)
    table = split_scores(model, PROMPTS, None, heads="L1H2", parts=parts).shares()
    values = found.pair_cs[0], found.pair_gs[0]
    for (a, b), cs, gs in zip(found.pairs[0].tolist(), *values, strict=True):
        term = table.terms.index(f"f{a}-f{b}")
        assert float(cs) == pytest.approx(float(table.cs[0, term]), abs=1e-5)
        assert float(gs) == pytest.approx(float(table.gs[0, term]), abs=1e-5)
    sizes = found.pair_gs[0].abs()
    assert bool((sizes[:-1] >= sizes[1:] - 1e-12).all())


def test_heads_of_fewer_pairs_are_filled_up_with_none() -> None:
    model = tiny("bridge", "gpt2", dtype=torch.float64)
    read = dictionary(orthonormal(model, 4), 1, model)
    missing = feature_shares(model, PROMPTS, read, per_cell=1, pairs=16).pairs < 0
    assert bool(missing.any())
    assert torch.equal(missing[..., 0], missing[..., 1])


def test_batches_and_what_is_dropped_change_nothing() -> None:
    model = tiny("bridge", "gpt2", dtype=torch.float64)
    activations, decoder, bias = orthonormal(model, 6)
    whole = shares(model, (activations, decoder, bias), drop=2)
    louder = activations.clone()
    louder[:, :2] *= 50  # the positions that are left out
    for found in (
        *(shares(model, (activations, decoder, bias), drop=2, batch_size=n) for n in (1, 2)),
        shares(model, (louder, decoder, bias), drop=2),
    ):
        assert torch.allclose(found.cs, whole.cs, atol=1e-9)
        assert torch.allclose(found.gs, whole.gs, atol=1e-9)
        assert torch.equal(found.pairs, whole.pairs)
        assert torch.allclose(found.pair_gs, whole.pair_gs, atol=1e-9)
        assert found.unexplained == pytest.approx(whole.unexplained, rel=1e-9)
    h = states(model)[:, 2:]
    error = h - (activations[:, 2:] @ decoder + bias)
    assert whole.unexplained == pytest.approx(float(error.square().sum() / h.square().sum()))
    assert whole.provenance.window == (2, 10)
    assert whole.pairs.shape == (1, 20, 2)  # of 36
    assert not torch.allclose(whole.cs, shares(model, (activations, decoder, bias)).cs, atol=1e-3)


def test_requests_that_leave_nothing_are_refused() -> None:
    model = tiny("bridge", "gpt2")
    source = orthonormal(model, 4)
    assert shares(model, source, drop=8).drop == 8
    for none in ({"pairs": 0}, {"per_cell": 0}):
        assert shares(model, source, **none).pairs.shape == (1, 0, 2)
    for bad, text in (
        ({"drop": 9}, "drop: expected 0 to 8, to leave two positions, got 9"),
        ({"drop": -1}, "drop: expected 0 to 8"),
        ({"per_cell": -1}, "per_cell: expected at least 0"),
        ({"batch_size": 0}, "batch_size: expected at least 1"),
    ):
        with pytest.raises(GeometryError, match=text):
            shares(model, source, **bad)


def test_rows_have_the_error_the_largest_parts_and_the_pairs() -> None:
    gs = torch.tensor([[[0.1, 0.05, -0.3, 0.2, -0.6, 0.0], [-0.2, 0.9, 0.1, 0.3, torch.nan, 0.0]]])
    found = FeatureShares(
        provenance=Provenance(),
        heads=((1, 2),),
        feature_ids=torch.tensor([4, 7, 9]),
        cs=gs + 1,
        gs=gs,
        pairs=torch.tensor([[[4, 9], [7, 7], [-1, -1]]]),
        pair_cs=torch.tensor([[0.5, 0.25, torch.nan]]),
        pair_gs=torch.tensor([[2.0, 1.0, torch.nan]]),
        unexplained=0.1,
        drop=0,
    )
    rows = found.rows(2)
    assert [row[:4] for row in rows] == [
        *((1, 2, "query", part) for part in ("error", "f7", "b_dec")),
        *((1, 2, "key", part) for part in ("error", "f4", "bias")),
        (1, 2, "pair", "f4-f9"),
        (1, 2, "pair", "f7-f7"),
    ]
    numbers = [number for row in rows for number in row[4:]]
    expected = [
        1.05,
        0.05,
        0.4,
        -0.6,
        0.7,
        -0.3,
        1.9,
        0.9,
        1.3,
        0.3,
        0.8,
        -0.2,
        0.5,
        2.0,
        0.25,
        1.0,
    ]
    assert numbers == pytest.approx(expected)
    assert len(found.rows()) == 2 * 6 + 2


class Autoencoder:
    """What an SAELens object looks like."""

    def __init__(self, normalization: str = "none", **settings: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        self.W_dec = torch.randn(48, D, generator=generator)
        self.b_dec = torch.randn(D, generator=generator)
        about = {"hook_name": "blocks.1.hook_resid_pre", "model_from_pretrained_kwargs": {}}
        self.cfg = SimpleNamespace(
            normalize_activations=normalization, metadata=SimpleNamespace(**(about | settings))
        )
        self.how = normalization

    def encode(self, x: Tensor) -> Tensor:
        if self.how == "layer_norm":
            self.mu, self.std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
            x = (x - self.mu) / self.std
        elif self.how == "constant_norm_rescale":
            self.mu, self.std = 0.0, x.norm(dim=-1, keepdim=True) / D**0.5
            x = x / self.std
        else:
            self.mu, self.std = 0.0, 1.0
        return torch.relu((x - self.b_dec) @ self.W_dec.mT - 4)

    def decode(self, activations: Tensor) -> Tensor:
        return (activations @ self.W_dec + self.b_dec) * self.std + self.mu


@pytest.mark.parametrize("normalization", ["none", "constant_norm_rescale", "layer_norm"])
def test_an_autoencoder_is_taken_as_it_is(normalization: str) -> None:
    model = tiny("bridge", "llama")
    source = Autoencoder(normalization)
    found = shares(model, source)
    assert torch.allclose(found.cs.sum(-1), torch.ones(1, 2).double(), atol=1e-3)
    h = states(model)
    error = (h - source.decode(source.encode(h))).square().sum() / h.square().sum()
    assert found.unexplained == pytest.approx(float(error), rel=1e-3)


def test_foreign_dictionaries_are_refused_by_name() -> None:
    model = tiny("bridge", "gpt2")
    with pytest.raises(UnsupportedModelError, match=r"blocks\.0\.hook_mlp_out"):
        dictionary(Autoencoder(hook_name="blocks.0.hook_mlp_out"), 1)
    with pytest.raises(UnsupportedModelError, match="hook_name_out"):
        dictionary(Autoencoder(hook_name_out="blocks.1.hook_mlp_out"), 1)
    with pytest.raises(UnsupportedModelError, match="expected_average_only_in"):
        dictionary(Autoencoder("expected_average_only_in"), 1)
    centred = Autoencoder(model_from_pretrained_kwargs={"center_writing_weights": True})
    with pytest.raises(UnsupportedModelError, match="center_writing_weights"):
        dictionary(centred, 1, model)
    dictionary(centred, 1, tiny("bridge", "gpt2", processed=True))
    with pytest.raises(GeometryError, match="W_dec"):
        dictionary(SimpleNamespace(encode=None), 1)
    with pytest.raises(GeometryError, match="layers"):
        feature_shares(model, PROMPTS, dictionary(orthonormal(model), 1), heads="L0H0")
    liar = Autoencoder()
    liar.how = "layer_norm"
    with pytest.raises(ReconstructionError, match="decode"):
        shares(model, liar)
