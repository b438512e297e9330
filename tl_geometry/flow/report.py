"""Do the blocks act on an ensemble of trajectories as rotation, stretch and noise?
:func:`tl_geometry.flow_report` answers in one table: residuals of the flow between all pairs of
states, baselines, isotropy. :func:`compare_ensembles` sets the same statistics of an ensemble
beside those of its nulls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tl_geometry.base.checks import describe, require_default_device
from tl_geometry.base.errors import require
from tl_geometry.base.tables import Table
from tl_geometry.flow import maps, noise
from tl_geometry.flow.ensemble import Trajectories, bundle, outliers, too_few


def flow_report(
    ensemble: Trajectories,
    *,
    map_types: Sequence[str] = maps.MAPS,
    train_share: float = 0.5,
    seed: int = 0,
) -> Table:
    """Rotation and stretch between all pairs of states of an ensemble, with baselines and isotropy
    tests (Sarfati et al. 2025, sections 3.3 and 4).

    Maps are fitted on one part of the trajectories (``train_share`` of them, whole documents where
    labelled) and measured on the other. ``map_types`` are the baselines; ridge (its penalty chosen
    on the fitted part) and the identity are always added. All pairs of states are measured: 435 of
    30 states and 400 trajectories of 576 coordinates take about 20 s of one processor.

    Returns a row for each pair ``start < end``:

    - ``relative_error_in``, ``log_variance_in``, ...: statistics of the flow's residual on the
      fitted part, as published (:func:`tl_geometry.flow.maps.residual_statistics` and
      :func:`tl_geometry.flow.maps.score_map`); ``..._out`` the same on the other part;
    - ``error_linear``, ``error_ridge``, ...: held-out relative errors of the baselines;
    - ``variance_cv``, ...: :func:`tl_geometry.flow.noise.isotropy_tests` of held-out residuals.
      They have no p-value: a held-out residual is noise plus the error of the fitted map, which is
      not isotropic;
    - ``train`` and ``test``: trajectories fitted and held out.

    Flags count directions that the maps had to drop and outliers of the norm, and say where fewer
    trajectories than dimensions were fitted on. :func:`tl_geometry.flow.fit_noise_law` and
    :func:`tl_geometry.flow.layer_anomalies` read the table.

    Raises ``GeometryError`` for fewer than 16 trajectories or two states.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=24)
    >>> report = tlg.flow_report(tlg.trajectories(model, windows, progress=False))
    >>> report.column("end", start=1)
    [2, 3, 4]
    """
    # isotropy tests need 8 held-out trajectories, half of 16
    states = ensemble.states if isinstance(ensemble, Trajectories) else ()
    fits, got = len(states) >= 2 and len(ensemble) >= 16, describe(getattr(ensemble, "X", ensemble))
    require(fits, "trajectories", expected="Trajectories, 16 of two states or more", got=got)
    map_types = maps.map_names(map_types, maps.MAPS)
    train, test = ensemble.split(train_share, seed=seed)
    inside, outside = (vars(part)["X"].unbind(1) for part in (train, test))  # no copies
    aligned, starts, rows = train.aligned_bases, [maps.MapsFrom(x) for x in inside], []
    for i, j in itertools.combinations(range(len(states)), 2):
        flow, before, true = maps.flow_map(aligned, i, j), outside[i], outside[j].double()
        fitted, _ = maps.measured(flow, inside[i], inside[j])
        held_out, residual = maps.measured(flow, before, true)
        row: dict[str, Any] = {"start": states[i], "end": states[j]}
        row |= {f"{name}_in": value for name, value in fitted.items()}
        row |= {f"{name}_out": value for name, value in held_out.items()}
        for kind in map_types:
            error = true - starts[i].to(inside[j], kind)(before)
            row[f"error_{kind}"] = float(error.norm() / true.norm())
        row |= noise.isotropy_tests(residual)
        rows.append({**row, "train": len(train), "test": len(test)})
    flags = list(too_few(len(train), inside[0].shape[-1], "maps"))
    dropped = (maps.inverse_values(aligned.S[:-1]) == 0).sum(1).tolist()
    text = ", ".join(f"{n} from state {state}" for n, state in zip(dropped, states) if n)
    flags += [f"directions of {aligned.rank} dropped: {text}"] if text else []
    far = outliers(ensemble.X)
    flags += [f"{len(far)} norm outliers kept"] if far else []
    chance = "A relative error of 1 is that of putting zero in the state's place."
    return Table.of(rows, ensemble.provenance.flagged(*flags, seed=seed), chance=chance)


def compare_ensembles(ensembles: Mapping[str, Trajectories], *, k: int = 10) -> Table:
    """Straightness, parallelism, neighbour preservation (of ``k`` neighbours), in-sample residual
    statistics and noise laws of several ensembles, such as a model and its nulls: a row for each.

    The published claims to look for: an untrained model shows no law ``e^{lambda (t + tau)}`` and a
    mean |kurtosis| of 1 to 1.5 where the trained one has 0 to 0.3 (Sarfati et al. 2025).

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> text = tlg.trajectories(model, tlg.zoo.default_windows(model, 16, n=24), progress=False)
    >>> null = tlg.trajectories(model, tlg.corpus.gibberish(model, 24, 16), progress=False)
    >>> tlg.flow.compare_ensembles({"text": text, "gibberish": null}).column("ensemble")
    ['text', 'gibberish']
    """
    require_default_device()
    require(len(ensembles) >= 1, "ensembles", expected="at least one", got="none")
    rows = []
    for name, ensemble in ensembles.items():
        shape, residuals = bundle(ensemble.X, k=k), ensemble.residuals()
        energy = ensemble.aligned_bases.S.square()
        share = energy / energy.sum(-1, keepdim=True)
        row: dict[str, Any] = {
            "ensemble": name,
            "trajectories": len(ensemble),
            **{measure: float(values.nanmean()) for measure, values in shape.items()},
            # directions over which the energy of a state spreads, by its entropy
            "entropy_rank": float((-torch.xlogy(share, share).sum(-1)).exp().mean()),
        }
        for measure in ("relative_error", "abs_kurtosis", "mean_over_sd"):
            values: list[Any] = residuals.column(measure)
            row[measure] = sum(values) / len(values)
        for law in noise.LAWS:
            known = len(ensemble.states) >= 3  # a law takes three pairs
            fit = noise.fit_noise_law(residuals, law=law) if known else None
            rate, r2 = (fit.rate, fit.r2) if fit else (math.nan, math.nan)
            row |= {f"{law}_rate": rate, f"{law}_r2": r2}
        rows.append(row)
    fewest = min(ensembles.values(), key=len)
    few = too_few(len(fewest), fewest.X.shape[-1], "directions and maps")
    provenance = next(iter(ensembles.values())).provenance.flagged(*few)
    chance = "neighbours_chance is the share of neighbours that stay where they are drawn at random"
    return Table.of(rows, provenance, chance=chance)
