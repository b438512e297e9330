"""Reports of small ensembles, without a model: which noise a flow takes from a law, states after
the norm, directions that maps drop, trajectories that stand still."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Provenance
from tl_geometry.flow import ensemble as ensembles
from tl_geometry.flow.alignment import fit_aligned_bases
from tl_geometry.flow.ensemble import AFTER_NORM, Trajectories, require_trajectories
from tl_geometry.flow.ensemble_shape import bundle, entropy_rank
from tl_geometry.flow.noise import NoiseLaw, layer_anomalies
from tl_geometry.flow.reports import flow_report
from tl_geometry.flow.residuals import flow_map, residual_maps

STATES = (1, 2, 3, 5, 6, 8)


def draw(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def ensemble(n: int = 40, d: int = 4, **changes: Any) -> Trajectories:
    """A random walk through six states."""
    X = draw(n, len(STATES), d).cumsum(1)
    fields: dict[str, Any] = {"X": X, "states": STATES, "position": -1} | changes
    return Trajectories(**{"provenance": Provenance(model="walk"), **fields})


@pytest.mark.parametrize(
    ("law", "rate", "taken", "flag"),
    [
        ("asymptotic", 0.25, (0.5, 0.25), ()),
        ("asymptotic", -0.25, (0.0, 0.0), ("noise law has lambda -0.25, not above 0: no noise",)),
        ("asymptotic", 0.0, (0.0, 0.0), ("noise law has lambda 0, not above 0: no noise",)),
        ("increment", 0.25, (0.5, 0.25), ()),
        ("increment", -0.25, (-0.5, -0.25), ()),
        ("increment", 0.0, (0.0, 0.0), ("noise law has lambda 0, not above 0: no noise",)),
    ],
)
def test_a_flow_takes_its_noise_from_a_law_with_the_sign_of_its_rate(
    law: str,
    rate: float,
    taken: tuple[float, float],
    flag: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The increment law falls with |lambda|; another law that does not rise has no noise."""
    asked: list[dict[str, Any]] = []

    def fit(log_variance: Tensor, **options: Any) -> NoiseLaw:
        asked.append(options)
        return NoiseLaw(options["law"], 0.5, rate, math.log(0.5), 1.0, 0.0, 15)

    monkeypatch.setattr(ensembles, "fit_noise_law", fit)
    whole = ensemble()
    model = whole.langevin(noise=law)
    assert (model.alpha, model.rate) == taken
    assert model.provenance.flags == flag
    assert model.provenance.dtype == "float64"
    assert model.times.tolist() == list(STATES)
    assert asked[0]["law"] == law
    assert asked[0]["times"].tolist() == list(STATES)
    assert whole.langevin().alpha == whole.langevin(noise="asymptotic").alpha
    given = whole.langevin(noise=(0.125, 0.5))
    assert (given.alpha, given.rate, given.provenance.flags) == (0.125, 0.5, ())


def test_a_report_measures_the_last_state_before_and_after_the_norm() -> None:
    """Only maps to the last state change; each measure has a row for either."""
    last = draw(40, 4, seed=9)
    whole = ensemble(post_norm=last)
    found, plain = flow_report(whole, seed=2), flow_report(ensemble(), seed=2)
    train, _ = whole.split(0.5, seed=2)
    normed = train.after_norm()
    assert normed.post_norm is not None
    assert torch.equal(normed.X[:, -1], normed.post_norm)
    assert torch.equal(normed.X[:, :-1], train.X[:, :-1])
    assert normed.provenance.flags == (AFTER_NORM,)
    maps = residual_maps(normed.X, partial(flow_map, fit_aligned_bases(normed.X)))
    names = ("log_variance", "mean_over_sd", "relative_error")
    assert list(found.anomalies) == [*names, *(f"{name}_post_norm" for name in names)]
    for name in names:
        torch.testing.assert_close(found.anomalies[name], plain.anomalies[name], equal_nan=True)
        expected = layer_anomalies(getattr(maps, name), times=whole.times)
        torch.testing.assert_close(
            found.anomalies[f"{name}_post_norm"],
            torch.stack([expected.excess, expected.z]),
            equal_nan=True,
        )
    with pytest.raises(
        GeometryError,
        match=r"^post_norm: expected the last state after the norm, got none\. Use "
        r"trajectories\(\.\.\., post_norm=True\)\.$",
    ):
        ensemble().after_norm()


def test_a_report_counts_the_directions_that_its_maps_drop() -> None:
    """From each state but the last; the last state's own do not count."""
    X = ensemble().X.clone()
    X[:, 1, 2:] = 0
    X[:, 3, 3] = 0
    X[:, -1, 2:] = 0
    flags = flow_report(ensemble(X=X)).provenance.flags
    assert "directions of 4 dropped: 2 from state 2, 1 from state 5" in flags
    assert not any("dropped" in flag for flag in flow_report(ensemble()).provenance.flags)


@pytest.mark.parametrize(
    ("asked", "measured"),
    [
        ("linear", ("linear", "ridge", "identity")),
        (("mean", "identity"), ("mean", "identity", "ridge")),
        ((), ("ridge", "identity")),
    ],
)
def test_ridge_and_the_identity_are_always_measured_beside_what_was_asked_for(
    asked: Any, measured: tuple[str, ...]
) -> None:
    """Once each; the parts are as large as asked for."""
    found = flow_report(ensemble(), map_types=asked, train_share=0.6)
    assert tuple(found.baselines) == measured
    assert (found.train, found.test) == (24, 16)
    columns = found.columns()
    assert [c for c in columns if c.startswith("error_")] == [f"error_{name}" for name in measured]
    assert columns[:3] == ("start", "end", "mean_over_sd_in")
    assert "sphericity_p" not in columns
    assert len(found.rows()) == 15
    text = r"^map_types: expected some of .*, got \['straight'\]"
    with pytest.raises(GeometryError, match=text):
        flow_report(ensemble(), map_types=("linear", "straight"))


def test_what_is_no_ensemble_is_refused_by_its_name() -> None:
    """Tensors among them."""
    text = (
        r"^ensemble: expected Trajectories, got Tensor\. Use "
        r"tl_geometry\.trajectories\(model, tokens\)\.$"
    )
    with pytest.raises(GeometryError, match=text):
        require_trajectories(draw(3), "ensemble")
    require_trajectories(ensemble(), "ensemble")


# ---- bundles


def test_trajectories_that_stand_still_are_left_out_of_the_cosines() -> None:
    """One that never moves has no straightness; a step that none takes has no cosine."""
    X = draw(5, 4, 3)
    X[0] = X[0, :1]  # stands still
    X[:, 2] = X[:, 1]  # all of them stand still in the second step
    found = bundle(X, k=2)
    steps = np.diff(X.numpy(), axis=1)
    lengths = np.linalg.norm(steps, axis=-1)
    assert found.degenerate == int((lengths == 0).sum()) == 5 + 1 + 1
    assert math.isnan(float(found.straightness[0]))
    net = np.linalg.norm(X[:, -1].numpy() - X[:, 0].numpy(), axis=-1)
    straight = net[1:] / lengths[1:].sum(1)
    assert found.straightness[1:].tolist() == pytest.approx(straight.tolist())
    assert math.isnan(float(found.parallel[1]))
    for s in (0, 2):
        unit = steps[1:, s] / lengths[1:, s, None]
        cosines = (unit @ unit.T)[~np.eye(4, dtype=bool)]
        assert float(found.parallel[s]) == pytest.approx(cosines.mean())
    assert float(found.neighbours[1]) == 1
    one = X[:3].clone()
    one[:2] = one[:2, :1]
    assert bundle(one).parallel.isnan().all(), "one alone has none to be parallel to"


def test_the_entropy_rank_by_numpy() -> None:
    """``exp`` of the entropy of the shares of energy; zeros add nothing."""
    S = torch.tensor([[3.0, 1.0, 0.0], [2.0, 2.0, 2.0]])
    p = np.array([0.9, 0.1])
    expected = [math.exp(-(p * np.log(p)).sum()), 3]
    assert entropy_rank(S).tolist() == pytest.approx(expected)


def test_picked_trajectories_keep_what_belongs_to_them() -> None:
    """Tokens, labels and normed states in the given order, and their number."""
    whole = ensemble(
        tokens=torch.arange(80).view(40, 2),
        labels=torch.arange(40) // 4,
        post_norm=draw(40, 4, seed=1),
    )
    some = whole.pick(torch.tensor([7, 2]))
    assert (len(some), some.provenance.contexts) == (2, 2)
    for name in ("X", "tokens", "labels", "post_norm"):
        assert torch.equal(getattr(some, name), getattr(whole, name)[[7, 2]])
    assert replace(whole, labels=None).pick(torch.tensor([1])).labels is None
    assert whole.row(5) == 3
    with pytest.raises(GeometryError, match=r"^state: expected one of \(1, 2, 3, 5, 6, 8\), got 4"):
        whole.row(4)
