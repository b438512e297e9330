"""Rows of ``flow``: last-token trajectories as a rotation and stretch with noise."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

import tl_geometry as tlg
from tests.lib.data import Provenance
from tests.lib.subjects import reference_runs as reference
from tests.lib.subjects.decomposition import STATES
from tests.lib.subjects.row import Answers, Subject, given, prefixed, torch_seeded
from tests.lib.worlds import QUIET, World
from tl_geometry import Table, flow
from tl_geometry.flow import ensemble, maps

EMPTY = {
    "empty:anomaly.*": "two blocks are too few to tell one apart",
    "empty:isotropy: *": "some of them count what does not happen here",
}
FITTED = (1e-4, "a map fitted to few trajectories enlarges rounding")
FOURTH = (2e-4, "fourth moments of residuals that are small differences")
SPLIT = "which trajectories are fitted follows their order"


def trajectories(t: Any) -> Answers:
    """States of the last token."""
    t, normed = t if isinstance(t, tuple) else (t, None)
    found: Answers = {"trajectories": t.X, "states": t.states, "position": t.position}
    return found if normed is None else found | {"after the final norm": normed.X[:, -1]}


def followed(w: World, after_norm: bool = False, **options: Any) -> Any:
    """Trajectories of the pilots; where it is asked for, beside them those after the norm."""
    found = tlg.trajectories(w.model, w.pilots, **QUIET, **options)
    return (found, found.after_norm(w.model)) if after_norm else found


def aligned(a: Any) -> Answers:
    """Singular directions of each state, in one order and with one sign along the layers."""
    return {"directions": a.U, "singular values": a.S}


def moved(images: Any) -> Answers:
    """A map between two states, by what it does to vectors."""
    return {"images of six vectors and zero": images}


MEASURES = (*("mean_over_sd", "log_variance", "abs_kurtosis", "relative_error", "r2", "cosine"),)
ANOMALIES = ("log_variance", "mean_over_sd", "relative_error")


def report(r: Any) -> Answers:
    """Residuals of the flow between all pairs of states, baselines, laws, isotropy, anomalies."""
    found: Answers = {"trajectories": [r.column("train")[0], r.column("test")[0]]}
    for side, suffix in (("in sample", "in"), ("held out", "out")):
        found |= {f"{side}: {name}": r.column(f"{name}_{suffix}") for name in MEASURES}
    errors = [name for name in r.names if name.startswith("error_")]
    found |= {name.replace("error_", "error of "): r.column(name) for name in errors}
    isotropy = r.names[r.names.index("variance_cv") : r.names.index("degenerate") + 1]
    found |= {f"isotropy: {name}": r.column(name) for name in isotropy}
    laws = [flow.fit_noise_law(r, law=name) for name in ("asymptotic", "increment")]
    found |= prefixed(
        "law", {law.law: [law.alpha, law.rate, law.log_alpha, law.r2] for law in laws}
    )
    odd = flow.layer_anomalies(r)
    each = {m: [odd.column(c, measure=m) for c in ("excess", "z")] for m in ANOMALIES}
    return found | prefixed("anomaly", each)


def truncated(t: Any) -> Answers:
    """What is lost where states are projected on few directions."""
    shared = {name: t.column(name)[0] for name in ("baseline_mean", "baseline_median", "held_out")}
    return {
        "directions": t.column("K"),
        "KL(truncated | own), mean and error": [t.column("kl"), t.column("kl_se")],
        "KL(own | truncated)": t.column("kl_reverse"),
        "share of equal first tokens": t.column("top1"),
        "share of equal first five": t.column("top5"),
        "KL of consecutive chunks, mean and median": [*shared.values()][:2],
        "held out": str(shared["held_out"]),
    }


def skipped(s: Any) -> Answers:
    """What is lost where blocks are replaced by a map."""
    kinds = dict.fromkeys(s.column("map_type"))
    first = next(iter(kinds))
    pairs = [s.column(name, map_type=first) for name in ("from_layer", "to_layer")]
    order = np.lexsort(pairs[::-1])
    found: Answers = {"loss, own": s.column("own_loss")[0], "pairs": np.transpose(pairs)[order]}
    for kind, metric in itertools.product(kinds, ("kl", "kl_se", "top1", "top5", "loss_increase")):
        found[f"{metric} of {kind}"] = np.array(s.column(metric, map_type=kind))[order]
    return found


def law(n: Any) -> Answers:
    """A law of the residual variance."""
    return {
        "alpha": n.alpha,
        "rate": n.rate,
        "log alpha": n.log_alpha,
        "R2": n.r2,
        "AIC": n.aic,
        "variance from 1 to 3": n.variance(torch.tensor([1.0]), torch.tensor([3.0])),
    }


def langevin(m: Any) -> Answers:
    """Exact sampling: mean and covariance of what a linear flow with noise does to a state."""
    x = torch.randn(3, m.U.shape[1], generator=torch_seeded(6), dtype=torch.float64)
    mean = x @ m.transition(1.0, 3.0).mT
    return {
        "mean at 3 from 1": mean,
        "covariance at 3 from 1": m.moments(
            x[0], torch.zeros_like(m.transition(1.0, 1.0)), 1.0, 3.0
        )[1],
        "variance gained by coordinates": m.noise_integral(1.0, 3.0),
    }


def sampled(x: torch.Tensor) -> Answers:
    """Moments of exact samples."""
    return {"mean of samples": x.mean(0), "variance of samples": x.var(0)}


def separated(a: Any) -> Answers:
    """How well a linear classifier tells two ensembles apart."""
    return {
        "accuracy": a.accuracy,
        "accuracy, low and high": [a.low, a.high],
        "accuracy on shuffled labels": a.shuffled,
    }


def compared(c: Any) -> Answers:
    """Statistics of several ensembles side by side."""
    statistics = {name: c.column(name) for name in c.names[1:]}
    return {"ensembles": c.column("ensemble")} | prefixed("statistic", statistics)


def bundle(b: Any) -> Answers:
    """Shape of a bundle of trajectories."""
    return {
        "straightness": b["straightness"],
        "parallel steps": b["parallel"],
        "neighbours kept": b["neighbours"],
        "neighbours kept by chance": b["neighbours_chance"],
    }


def _log_variances() -> Table:
    """Log variances of five states that grow, with a wobble, so that no law is exact."""
    t = torch.arange(1.0, 6).double()
    grown = -0.5 + 0.2 * t + 0.05 * torch.sin(3 * t[:, None] + t)
    pairs = itertools.combinations(range(5), 2)
    cells = tuple((a + 1, b + 1, float(grown[a, b])) for a, b in pairs)
    names = ("start", "end", "log_variance")
    return Table(names=names, cells=cells, provenance=Provenance())


def _fit(w: World, *, map_type: str, start: int = 0, end: int = 2) -> Any:
    X = w.all_states.X.double()
    probes = torch.randn(7, X.shape[-1], generator=torch_seeded(5), dtype=torch.float64)
    probes[-1] = 0
    if map_type == "flow":
        return flow.flow_map(flow.fit_aligned_bases(X), start, end)(probes)
    return maps.MapsFrom(X[:, start]).to(X[:, end], map_type)(probes)


def _linear_flow() -> torch.Tensor:
    """Planted trajectories ``[trajectory state d_model]`` of a rotation with growth."""
    g = torch_seeded(8)
    x = torch.randn(30, 4, generator=g, dtype=torch.float64) * torch.tensor([4.0, 3.0, 2.0, 1.0])
    turn = torch.linalg.matrix_exp(
        torch.tensor([[0, 0.3, 0, 0], [-0.3, 0, 0, 0], [0] * 4, [0] * 4])
    )
    states = [x]
    for _ in range(3):
        states.append(states[-1] @ turn.double().mT * 1.2 + 0.1 * torch.randn(30, 4, generator=g))
    return torch.stack(states, 1)


def _some(w: World) -> torch.Tensor:
    """Half of the pilots, told by what they contain, so that another order has the same ones."""
    return (w.pilots[:, 1] % 2 == 0).nonzero()[:, 0]


def skips(w: World, seed: int = 0, **options: Any) -> Any:
    """Maps of three pairs, fitted on half of the pilots and measured on the others."""
    read = w.pilots[:, :-1]
    train, test = tlg.trajectories(w.model, read, states=range(3), **QUIET).split(seed=seed)
    assert test.tokens is not None
    held_out = w.pilots[ensemble.shared_rows(read, test.tokens)]
    types = ("flow", "linear", "ridge", "shift", "identity", "mean")
    chosen = given(options, pairs=[(0, 1), (1, 2), (0, 2)], map_types=types, **QUIET)
    return tlg.skip_costs(w.model, held_out, train, **chosen)


def _langevin(_: World) -> Any:
    X, about = _linear_flow(), Provenance()
    paths = ensemble.Trajectories(X=X, states=(1, 2, 3, 4), position=-1, provenance=about)
    return flow.LangevinModel.fit(paths, noise=(0.05, 0.2))


def _samples(w: World, **options: Any) -> torch.Tensor:
    x = _linear_flow()[:2, 0]
    found = _langevin(w).simulate(x, [3.0], **given(options, samples=64, seed=3))
    return found.reshape(64, -1)


SUBJECTS = (
    Subject(
        name="trajectories",
        covers=("trajectories",),
        call=followed,
        reference=reference.trajectories,
        answers=trajectories,
        variants={"plain": {}, "position 4": {"position": 4}, "after norm": {"after_norm": True}},
        order={"trajectories": 0, "after *": 0},
        batches=(1, 7),
        half=("trajectories",),
        gauge={"*": STATES},
        real=("plain",),
    ),
    Subject(
        name="fit_aligned_bases",
        call=lambda w, **o: flow.fit_aligned_bases(w.all_states.X, **o),
        reference=reference.aligned,
        answers=aligned,
        variants={"greedy": {}, "hungarian": {"align": "hungarian"}},
        tolerance={"directions": FITTED},
        gauge={"*": STATES},
        real=("greedy",),
    ),
    Subject(
        name="maps between states",
        covers=("flow_map",),
        call=_fit,
        reference=reference.maps,
        answers=moved,
        variants={
            kind: {"map_type": kind}
            for kind in ("flow", "linear", "ridge", "scaled", "shift", "mean")
        },
        only={"linear": lambda w: w.tiny},
        tolerance={"flow/*": FITTED},
        gauge={"*": STATES},
        real=("flow",),
    ),
    Subject(
        name="flow_report",
        covers=("flow_report", "layer_anomalies"),
        call=lambda w, **o: tlg.flow_report(w.all_states, **o),
        answers=report,
        tolerance={"*kurtosis*": FOURTH, "held out: *": FITTED},
        seeds=("in sample: *", "held out: *", "error of *", "isotropy: *", "law.*"),
        gauge={"*": STATES},
        without={"order:*": SPLIT, **EMPTY},
    ),
    Subject(
        name="truncation_kl",
        covers=("truncation_kl", "directions_needed"),
        call=lambda w, **o: tlg.truncation_kl(
            w.model, w.prompts, w.ensemble, **given(o, K=(1, 4, 9), **QUIET)
        ),
        reference=reference.truncation,
        answers=truncated,
        variants={"every block": {}},
        batches=(5,),
        gauge={"*": STATES},
        without={"order:KL of consecutive *": "consecutive chunks are others in another order"},
        real=("every block",),
    ),
    Subject(
        name="skip_costs",
        call=skips,
        answers=skipped,
        seeds=("*",),
        tolerance={"*": FITTED},
        batches=(7,),
        gauge={"*": STATES},
        without={"order:*": SPLIT, "seeds:said": "the row draws the halves, not the call"},
    ),
    Subject(
        name="fit_noise_law",
        call=lambda w, **o: flow.fit_noise_law(_log_variances(), **o),
        answers=law,
        variants={"asymptotic": {}, "increment": {"law": "increment"}},
        only={"*": lambda w: w.kind == "gpt2"},
    ),
    Subject(
        name="LangevinModel",
        call=_langevin,
        answers=langevin,
        only={"*": lambda w: w.kind == "gpt2"},
    ),
    Subject(
        name="LangevinModel, samples",
        covers=("LangevinModel",),
        call=_samples,
        answers=sampled,
        only={"*": lambda w: w.kind == "gpt2"},
        seeds=("*",),
    ),
    Subject(
        name="separability",
        covers=("separability", "papers.sarfati"),
        call=lambda w, **o: flow.separability(w.ensemble.X[:, 0], w.ensemble.X[:, 1], **o),
        answers=separated,
        variants={"plain": {}, "paired": {"paired": True}},
        seeds=("accuracy*",),
        gauge={"*": STATES},
        without={"order:*": SPLIT},
    ),
    Subject(
        name="compare_ensembles",
        call=lambda w: flow.compare_ensembles(
            {"pilots": w.all_states, "some": w.all_states.pick(_some(w))}, k=4
        ),
        answers=compared,
        gauge={"*": STATES},
    ),
    Subject(
        name="bundle of trajectories",
        covers=("trajectories",),
        call=lambda w: ensemble.bundle(w.ensemble.X, k=5),
        answers=bundle,
        order={"straightness": 0},
        gauge={"*": STATES},
    ),
)
