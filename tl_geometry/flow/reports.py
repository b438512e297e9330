"""Do the blocks act on an ensemble of trajectories as rotation, stretch and noise?
:func:`tl_geometry.flow_report` answers in one result: residuals of the flow between all pairs of
states, baselines, noise laws, isotropy, anomalous layers. :func:`compare_ensembles` sets the same
statistics of an ensemble beside those of its nulls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.base.results import Result
from tl_geometry.flow import ensemble_shape, noise
from tl_geometry.flow.alignment import AlignedBases, fit_aligned_bases
from tl_geometry.flow.ensemble import Trajectories, require_trajectories, too_few
from tl_geometry.flow.residuals import ALWAYS, MAPS, Maps, flow_map, held_out_errors, residual_maps

BASELINES = ("linear", "ridge", "scaled", "shift", "identity", "mean")
"""Maps that the flow is compared with."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FlowReport(Result):
    """Residuals of rotation and stretch for every pair of states, in-sample and held out, beside
    the errors of other maps.

    All tables of pairs are ``[state state]`` (row start, column end; NaN unless start < end).
    ``in_sample`` and ``held_out`` have the names of :class:`tl_geometry.flow.residuals.Maps`;
    ``baselines`` map ``"linear"``, ... to held-out relative errors. ``isotropy`` has the fields of
    :class:`tl_geometry.flow.noise.Isotropy`, taken on held-out residuals, without the p-value of
    sphericity: a held-out residual is noise plus the error of the fitted map, which is not
    isotropic, so that around linear maps with exactly isotropic Gaussian noise the test of level 5%
    rejects in 93 to 100% of pairs. ``laws`` holds ``[alpha, lambda, ln alpha, R^2, AIC, pairs]`` of
    each noise law, fitted in-sample as published. ``anomalies`` holds ``[excess, z]`` of each
    target state for three measures, and again with the post-norm last state where it was kept.
    ``outliers`` are rows of the ensemble; ``train`` and ``test`` count trajectories.
    """

    states: tuple[int, ...]
    in_sample: Mapping[str, Float[Tensor, "state state"]]
    held_out: Mapping[str, Float[Tensor, "state state"]]
    baselines: Mapping[str, Float[Tensor, "state state"]]
    isotropy: Mapping[str, Float[Tensor, "state state"]]
    laws: Mapping[str, Float[Tensor, " column"]]
    anomalies: Mapping[str, Float[Tensor, "row state"]]
    outliers: tuple[int, ...]
    train: int
    test: int

    def law(self, name: str = "asymptotic") -> noise.NoiseLaw:
        """A fitted noise law."""
        expected = f"one of {', '.join(self.laws)}"
        require(name in self.laws, "law", expected=expected, got=name, instead="more states")
        *numbers, pairs = self.laws[name].tolist()
        return noise.NoiseLaw(name, *numbers, pairs=int(pairs))

    def columns(self) -> tuple[str, ...]:
        sides = [f"{n}_{side}" for side in ("in", "out") for n in Maps._fields]
        return ("start", "end", *sides, *(f"error_{k}" for k in self.baselines), *self.isotropy)

    def rows(self) -> list[tuple[object, ...]]:
        tables = [
            *self.in_sample.values(),
            *self.held_out.values(),
            *self.baselines.values(),
            *self.isotropy.values(),
        ]
        n = len(self.states)
        pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
        return [
            (self.states[i], self.states[j], *(float(t[i, j]) for t in tables)) for i, j in pairs
        ]


def flow_report(
    ensemble: Trajectories,
    *,
    map_types: Sequence[str] = BASELINES,
    train_share: float = 0.5,
    seed: int = 0,
) -> FlowReport:
    """Rotation and stretch between all pairs of states of an ensemble, with baselines, noise laws,
    isotropy tests, anomalies.

    Maps are fitted on one part of the trajectories (``train_share`` of them, whole documents where
    labelled) and measured on the other; "in-sample" numbers are those of the fitted part, as
    published. Flags count the directions that the maps had to drop, and say where fewer
    trajectories than dimensions were fitted on. ``map_types`` are the baselines; ridge (its penalty
    chosen on the fitted part) and the identity are always added. Sarfati et al. 2025, sections 3.3
    and 4.

    Raises ``GeometryError`` for fewer than 16 trajectories or two states.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=24)
    >>> tlg.flow_report(tlg.trajectories(model, windows, progress=False)).states
    (1, 2, 3, 4)
    """
    require_trajectories(ensemble, "ensemble")
    expected = "at least two states"
    require(len(ensemble.states) >= 2, "trajectories", expected=expected, got=ensemble.states)
    # isotropy tests need 8 held-out trajectories, half of 16
    expected, got = "at least 16", len(ensemble)
    require(len(ensemble) >= 16, "trajectories", expected=expected, got=got, instead="more chunks")
    map_types = _baselines(map_types)
    train, test = ensemble.split(train_share, seed=seed)
    aligned = train.aligned_bases()
    flow = partial(flow_map, aligned)
    n = len(ensemble.states)
    empty = torch.full((n, n), torch.nan, dtype=torch.float64)
    tests = {name: empty.clone() for name in noise.Isotropy._fields if name != "sphericity_p"}

    def record_isotropy(start: int, end: int, residual: Tensor) -> None:
        values = noise.isotropy_tests(residual)._asdict()
        for name, table in tests.items():
            table[start, end] = values[name]

    in_sample = residual_maps(train.X, flow)
    held_out = residual_maps(test.X, flow, collect=record_isotropy)
    laws = _laws(in_sample.log_variance, ensemble.times)
    anomalies = _anomalies(in_sample, ensemble.times, "")
    if ensemble.post_norm is not None:
        normed = _after_norm(train, in_sample)
        anomalies |= _anomalies(normed, ensemble.times, "_post_norm")
    outliers = ensemble_shape.outliers(ensemble.X)
    flags = [
        *too_few(len(train), train.X.shape[-1], "maps"),
        *_dropped(aligned, ensemble.states),
        *([] if laws else ["too few states for a noise law"]),
    ]
    # row 1 holds the robust z-scores
    if all(bool(torch.isnan(v[1]).all()) for v in anomalies.values()):
        flags.append("too few states to call one anomalous")
    flags += [f"{len(outliers)} norm outliers kept"] if outliers else []
    return FlowReport(
        states=ensemble.states,
        in_sample=in_sample._asdict(),
        held_out=held_out._asdict(),
        baselines=held_out_errors(train.X, test.X, map_types),
        isotropy=tests,
        laws=laws,
        anomalies=anomalies,
        outliers=outliers,
        train=len(train),
        test=len(test),
        provenance=ensemble.provenance.flagged(*flags),
    )


def _baselines(map_types: Sequence[str] | str) -> tuple[str, ...]:
    """The maps asked for, and those that are always added."""
    names = (map_types,) if isinstance(map_types, str) else tuple(map_types)
    unknown = [t for t in names if t not in MAPS]
    require(not unknown, "map_types", expected=f"some of {', '.join(MAPS)}", got=unknown)
    return (*names, *(t for t in ALWAYS if t not in names))


def _laws(log_variance: Tensor, times: Tensor) -> dict[str, Float[Tensor, " column"]]:
    """The fitted noise laws; none where there are fewer than three states."""
    if len(times) < 3:
        return {}
    laws: dict[str, Tensor] = {}
    for law in noise.LAWS:
        _, *numbers = noise.fit_noise_law(log_variance, law=law, times=times)
        laws[law] = torch.tensor(numbers, dtype=torch.float64)
    return laws


def _dropped(aligned: AlignedBases, states: tuple[int, ...]) -> list[str]:
    """A flag that says how many directions the maps from each state drop, because their singular
    values are too small to divide by."""
    counts = [flow_map(aligned, row, row).dropped for row in range(len(states) - 1)]
    text = ", ".join(f"{n} from state {state}" for n, state in zip(counts, states) if n)
    return [f"directions of {aligned.rank} dropped: {text}"] if text else []


def _after_norm(train: Trajectories, maps: Maps) -> Maps:
    """``train.after_norm().residuals()``, computed anew only for maps to the last state: alignment
    runs forward, so the others equal those of ``maps``."""
    X = train.after_norm().X
    flow = partial(flow_map, fit_aligned_bases(X))
    maps_to_last = residual_maps(X, flow, first_end=X.shape[1] - 1)
    return Maps(
        *(
            torch.cat([plain[:, :-1], normed[:, -1:]], dim=1)
            for plain, normed in zip(maps, maps_to_last)
        )
    )


def _anomalies(maps: Maps, times: Tensor, suffix: str) -> dict[str, Float[Tensor, "row state"]]:
    """``[excess, z]`` of each target state, by the name of the measure and ``suffix``."""
    by_measure = {}
    for name in ("log_variance", "mean_over_sd", "relative_error"):
        anomalies = noise.layer_anomalies(getattr(maps, name), times=times)
        by_measure[name + suffix] = torch.stack([anomalies.excess, anomalies.z])
    return by_measure


@dataclass(frozen=True, eq=False, kw_only=True)
class NullComparison(Result):
    """Bundle and residual statistics of an ensemble and of its nulls, one row per ensemble (see
    :func:`compare_ensembles`)."""

    names: tuple[str, ...]
    statistics: Mapping[str, Float[Tensor, " sample"]]

    table_axes = ("sample",)

    def axis_labels(self, axis: str) -> Mapping[str, Sequence[object]]:
        """The ensemble of each row."""
        return {"ensemble": self.names}

    def table_numbers(self) -> Mapping[str, tuple[Tensor, tuple[str, ...]]]:
        """A column for each statistic."""
        return {name: (value, ("sample",)) for name, value in self.statistics.items()}


def compare_ensembles(ensembles: Mapping[str, Trajectories], *, k: int = 10) -> NullComparison:
    """Straightness, parallelism, neighbour preservation (of ``k`` neighbours), in-sample residual
    statistics and noise laws of several ensembles, such as a model and its nulls.

    The published claims to look for: an untrained model shows no law ``e^{lambda (t + tau)}`` and a
    mean |kurtosis| of 1 to 1.5 where the trained one has 0 to 0.3 (Sarfati et al. 2025).

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> text = tlg.trajectories(model, tlg.zoo.default_windows(model, 16, n=24), progress=False)
    >>> null = tlg.trajectories(model, tlg.corpus.gibberish(model, 24, 16), progress=False)
    >>> tlg.flow.compare_ensembles({"text": text, "gibberish": null}).names
    ('text', 'gibberish')
    """
    require(len(ensembles) >= 1, "ensembles", expected="at least one", got="none")
    table: dict[str, list[float]] = {}
    for ensemble in ensembles.values():
        bundle, maps = ensemble.bundle(k=k), ensemble.residuals()
        # the entropy rank reads singular values alone, which need no alignment
        directions = ensemble.aligned_bases(align="none")
        row = {
            "trajectories": float(len(ensemble)),
            "straightness": float(bundle.straightness.nanmean()),
            "parallel": float(bundle.parallel.nanmean()),
            "neighbours": float(bundle.neighbours.mean()),
            "neighbours_chance": bundle.neighbours_chance,
            "entropy_rank": float(ensemble_shape.entropy_rank(directions.S).mean()),
            "relative_error": float(maps.relative_error.nanmean()),
            "abs_kurtosis": float(maps.abs_kurtosis.nanmean()),
            "mean_over_sd": float(maps.mean_over_sd.nanmean()),
        }
        laws = _laws(maps.log_variance, ensemble.times)
        for law in noise.LAWS:
            # 6: the fields of a NoiseLaw after its name
            _, rate, _, r2, *_ = laws[law].tolist() if law in laws else [math.nan] * 6
            row |= {f"{law}_rate": rate, f"{law}_r2": r2}
        for name, value in row.items():
            table.setdefault(name, []).append(value)
    first_ensemble = next(iter(ensembles.values()))
    fewest = min(ensembles.values(), key=len)
    few = too_few(len(fewest), fewest.X.shape[-1], "directions and maps")
    provenance = first_ensemble.provenance.flagged(*few)
    statistics = {name: torch.tensor(values, dtype=torch.float64) for name, values in table.items()}
    return NullComparison(names=tuple(ensembles), statistics=statistics, provenance=provenance)
