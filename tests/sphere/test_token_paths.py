"""Token paths by numpy: coordinates on fitted axes, the table, models without updates of one kind,
closed paths and other limits."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.lib.models import HAS_HOOKED, hf_model, tiny, tiny_hooked, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import hash_tokens
from tl_geometry.models import from_hf
from tl_geometry.sphere import paths, projection
from tl_geometry.weights import vocabulary

pytestmark = pytest.mark.once


def states_of(view: Any, ids: Tensor) -> np.ndarray:
    """States ``[batch position state d_model]``."""
    found = view.activations(ids, view.state_hooks)
    return torch.stack([found[hook].double() for hook in view.state_hooks], 2).numpy()


def on_sphere(view: Any, x: np.ndarray) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True) if view.norm == "LN" else x
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("of_states", [False, True])
def test_coordinates_are_principal_components_of_directions(
    architecture: str, of_states: bool
) -> None:
    model, ids = tiny("bridge", architecture), tokens(3, 6)
    view = tlg.view(model)
    basis = tlg.decompose(model, tokens(12, 6, seed=4), progress=False, keep=5)
    p = paths.token_paths(model, ids, basis if of_states else None)
    rows = vocabulary.embeddings(view).double().numpy()
    if of_states:
        assert basis.sample_states is not None
        assert basis.sample_states.shape == (5, 3, 6, 32)
        rows = basis.sample_states.double().flatten(0, 2).numpy()
    unit = on_sphere(view, rows)
    _, s, axes = np.linalg.svd(unit - unit.mean(0), full_matrices=False)
    signs = np.sign(axes[:3][range(3), np.abs(axes[:3]).argmax(1)])
    expected = (on_sphere(view, states_of(view, ids)) - unit.mean(0)) @ (
        signs[:, None] * axes[:3]
    ).T
    assert np.allclose(p.coordinates, expected, atol=1e-5)
    assert p.shown == pytest.approx((s[:3] ** 2).sum() / (s**2).sum(), rel=1e-5)
    assert p.fitted_on == ("sampled states" if of_states else "token embeddings")


def test_the_table_of_paths_and_what_they_were_made_from() -> None:
    view, ids = tlg.view(tiny("bridge", "gpt2")), tokens(2, 4)
    p = paths.token_paths(view, ids, seed=7)
    update = [f"{name}_{part}" for part in ("attention", "mlp") for name in paths.SPLIT]
    places = ["context", "position", "token", "state", "next_angle", "next_rank", "step"]
    assert p.columns() == [*places, *update, "length", "net", "tortuosity"]
    rows = iter(p.rows())
    for b in range(2):
        for t in range(4):
            for s in range(3):
                row = next(rows)
                assert row[:4] == [b, t, f"<{int(ids[b, t])}>", s]
                split = [getattr(p, name)[u, s % 2, b, t] for u in range(2) for name in paths.SPLIT]
                here = [p.angle[b, t, s], p.rank[b, t, s], p.steps[b, t, s % 2], *split]
                here += [p.length[b, t], p.net[b, t], p.tortuosity[b, t]]
                numbers = [float(x) for x in here]
                if s == 2:
                    numbers[2:9] = [float("nan")] * 7
                assert row[4:] == pytest.approx(numbers, nan_ok=True)
    assert next(rows, None) is None
    assert p.str_tokens == tuple(tuple(f"<{i}>" for i in row) for row in ids.tolist())
    provenance = p.provenance
    assert (provenance.seed, provenance.contexts, provenance.flags) == (7, 2, ())
    assert provenance.token_hash == hash_tokens(ids)
    assert torch.equal(p.tokens, ids)
    assert paths.token_paths(view, ids).provenance.seed == 0


def test_umap_is_fitted_on_directions_with_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Fake:
        def __init__(self, **settings: object) -> None:
            seen.update(settings)

        def fit(self, rows: np.ndarray) -> None:
            seen["rows"] = rows

        def transform(self, points: np.ndarray) -> np.ndarray:
            return points[:, -3:]

    monkeypatch.setitem(sys.modules, "umap", types.SimpleNamespace(UMAP=Fake))
    view, ids = tlg.view(tiny("bridge", "gpt2")), tokens(2, 4)
    p = paths.token_paths(view, ids, method="umap", seed=3)
    assert (seen["random_state"], seen["n_components"], p.method) == (3, 3, "umap")
    assert np.isnan(p.shown)
    assert np.allclose(seen["rows"], on_sphere(view, vocabulary.embeddings(view).double().numpy()))
    assert np.allclose(p.coordinates, on_sphere(view, states_of(view, ids))[..., -3:], atol=1e-6)
    many = torch.arange(10_002.0)[:, None].expand(-1, 4)
    assert projection.umap_coordinates(many, many[:5]).shape == (5, 3)
    assert (seen["rows"][[0, -1], 0].tolist(), seen["random_state"]) == ([0, 9999], 0)


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
def test_a_model_without_mlps_is_moved_by_attention_alone() -> None:
    model, ids = tiny_hooked(attn_only=True, normalization_type="LN"), tokens(2, 5)
    p = paths.token_paths(model, ids)
    assert p.provenance.flags == ()
    h = states_of(tlg.view(model), ids)
    h = h - h.mean(-1, keepdims=True)
    update = np.linalg.norm(np.diff(h, axis=2), axis=-1) ** 2
    both = p.radial[0].square() + p.tangential[0].square()
    assert np.allclose(both.permute(1, 2, 0), update, rtol=1e-4)
    assert not p.radial[1].any()
    assert not p.tangential[1].any()


def test_a_model_of_one_layer_has_paths() -> None:
    model = from_hf(hf_model("gpt2", n_layer=1), None, name="one layer")
    p = paths.token_paths(model, tokens(2, 5))
    assert p.steps.shape == (2, 5, 1)
    assert torch.equal(p.steps.sum(-1), p.net)
    assert p.turn.shape == (2, 1, 2, 5)
    assert p.turn.isfinite().all()


def test_paths_refuse_a_basis_of_other_states() -> None:
    model, ids = tiny("bridge", "gpt2"), tokens(2, 4)
    other = tlg.decompose(tiny("bridge", "opt"), tokens(8, 6), progress=False)
    bare = tlg.decompose(model, tokens(8, 6), progress=False, keep=0)
    unit = tlg.decompose(model, tokens(8, 6), progress=False, normalize=True)
    for basis, text in ((other, "the model it was computed from"), (bare, "sampled states")):
        with pytest.raises(GeometryError, match=f"basis: expected {text}"):
            paths.token_paths(model, ids, basis)
    with pytest.raises(GeometryError, match="token_paths"):
        paths.token_paths(model, ids, unit)


def test_a_closed_path_has_no_tortuosity() -> None:
    out = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.5, 4.0], [1.0, 2.0, 4.0]])  # less than 1 radian
    closed, open_path = projection.path_geometry(out), projection.path_geometry(out[:2])
    assert float(closed.length) == pytest.approx(2 * float(open_path.length))
    assert float(closed.net) == 0
    assert closed.tortuosity.isnan()
    assert float(open_path.tortuosity) == pytest.approx(1)


def test_a_vector_without_direction_is_a_whole_radius_from_the_sphere() -> None:
    """With any eps; the default is that of torch."""
    rows = torch.tensor([[0.3] * 9, [0.0] * 9]).double()
    for eps in (0.0, 0.1):
        g = projection.norm_geometry(rows, eps=eps)
        assert g.degenerate.all()
        assert g.deficit.tolist() == pytest.approx([3, 3])
    x = 0.01 * torch.randn(5, 9, generator=torch.Generator().manual_seed(0)).double()
    expected = torch.nn.functional.layer_norm(x, (9,))
    g = projection.norm_geometry(x)
    assert torch.allclose(g.z, expected, atol=1e-9)
    assert torch.allclose(g.deficit, 3 - g.radius)
