"""The geometry of three works: measures, weights, the sphere, trajectories and their flow."""

from __future__ import annotations

from typing import Any

import tl_geometry as tlg
from tests.tables.refusals.calls import UNSUPPORTED, made
from tests.tables.refusals.row import Group, Scene
from tests.tables.refusals.scores import BASES, HEADS

SHORT: dict[str, Any] = {"progress": False}
NO_HEADS = {name: HEADS[name] for name in ("a head beyond the last", "a head by words", "no heads")}
NO_MATRIX = {"no matrix": ({"matrix": "QV"}, "matrix")}
NO_TOKENS = {
    "floats": ({"tokens": lambda s: s.w.pilots.float()}, "tokens"),
    "beyond the vocabulary": ({"tokens": lambda s: s.w.pilots + 5000}, "tokens"),
}


def measured(s: Scene, report: Any = tlg.positional_report, **options: Any) -> Any:
    return report(**{"basis": s.w.basis, "jackknife": False, "nulls": False, **options})


def geometry(s: Scene, **options: Any) -> Any:
    given = {"basis": s.w.basis, "layers": 0, "draws": 1, **options}
    return tlg.weight_geometry(s.model, **given)


def paths(s: Scene, tokens: Any = None, **options: Any) -> Any:
    return tlg.token_paths(s.model, s.ids if tokens is None else tokens, **options)


def trajectories(s: Scene, tokens: Any = None, **options: Any) -> Any:
    return tlg.trajectories(s.model, s.w.pilots if tokens is None else tokens, **SHORT, **options)


def curve(s: Scene, tokens: Any = None, ensemble: Any = None, **options: Any) -> Any:
    tokens = s.w.pilots[:12] if tokens is None else tokens
    given = {"K": (1, 4), **SHORT, **options}
    return tlg.truncation_kl(s.model, tokens, ensemble or s.w.ensemble, **given)


def skips(s: Scene, tokens: Any = None, ensemble: Any = None, **options: Any) -> Any:
    given = {"model": s.model, "pairs": [(1, 2)], "map_types": ("flow",), **SHORT, **options}
    read, chunks = s.w.pilots[20:, :-1], s.w.pilots[:20] if tokens is None else tokens
    fitted = ensemble or tlg.trajectories(s.model, read, states=range(3), **SHORT)
    return tlg.skip_costs(tokens=chunks, ensemble=fitted, **given)


GROUPS = (
    Group(
        name="positional_report",
        call=measured,
        right={
            "plain": {},
            "with errors and nulls": {"jackknife": True, "nulls": True, "draws": 2},
        },
        wrong={name: case for name, case in BASES.items() if "model" not in name},
    ),
    Group(
        name="contextual_report",
        call=lambda s, **o: measured(s, tlg.contextual_report, **o),
        of="labels",
        right={"plain": {}, "labels": lambda s: [i % 3 for i in range(40)]},
        wrong={
            **{name: case for name, case in BASES.items() if "model" not in name},
            "labels that are none": [None] * 40,
            "labels below zero": [-1, 0] * 20,
            "a basis without context": (
                {"basis": lambda s: tlg.decompose(s.model, s.ids, keep_ctx=False, **SHORT)},
                "basis",
            ),
        },
    ),
    Group(
        name="weight_geometry",
        call=geometry,
        right={"QK": {}, "OV": {"matrix": "OV"}},
        wrong={**BASES, **NO_MATRIX, "a layer beyond": ({"layers": 99}, "layers")},
    ),
    Group(
        name="token_readout",
        call=lambda s, **o: tlg.token_readout(s.model, **{"heads": "L1H0", **o}),
        right={"QK": {}, "OV": {"matrix": "OV"}, "a layer": {"heads": None, "layers": 1}},
        wrong={**NO_MATRIX, **NO_HEADS},
    ),
    Group(
        name="token_paths",
        call=paths,
        right={"prompts": {}, "axes of a basis": {"basis": lambda s: s.w.basis}},
        wrong={
            **{name: case for name, case in BASES.items() if name != "a table"},
            "floats": NO_TOKENS["floats"],
            "a normalised basis": ({"basis": lambda s: s.w.normalized_basis}, "basis|token_paths"),
        },
    ),
    Group(
        name="trajectories",
        call=trajectories,
        of="states",
        right={"pilots": {}, "a position": {"position": 3}, "some states": [1, 2, 4]},
        wrong={
            **NO_TOKENS,
            "a state beyond": [99],
            "states that fall": [3, 1],
            "labels of others": ({"labels": [1, 2]}, "labels"),
        },
    ),
    Group(
        name="flow_report",
        call=lambda s, **o: tlg.flow_report(s.w.ensemble, **{"map_types": ("linear",), **o}),
        right={"one map": {}},
        wrong={
            "a map of no name": ({"map_types": ("spline",)}, "map_types"),
            "none to fit on": ({"train_share": 0.0}, "share|split"),
            "all chunks to fit on": ({"train_share": 1.0}, "share|split"),
        },
    ),
    Group(
        name="truncation_kl",
        call=curve,
        right={"two ranks": {}},
        wrong={
            "no directions": ({"K": ()}, "^K$"),
            "directions beyond": ({"K": (1, 9999)}, "^K$"),
            "paths of another model": ({"ensemble": lambda s: s.rotary.ensemble}, "ensemble"),
            "trajectories as tokens": ({"tokens": lambda s: s.w.ensemble}, "tokens"),
        },
    ),
    Group(
        name="skip_costs",
        call=skips,
        of="pairs",
        right={"one pair": {}},
        wrong={
            "a batch of none": ({"batch_size": 0}, "batch_size"),
            "a pair the wrong way": [(3, 1)],
            "a pair beyond": [(1, 99)],
            "a map of no name": ({"map_types": ("spline",)}, "map_type"),
            "two states": [3, 4],
            "chunks that maps were fitted on": ({"tokens": lambda s: s.w.pilots[20:]}, "tokens"),
            "paths of another model": ({"ensemble": lambda s: s.rotary.ensemble}, "ensemble"),
            "an encoder": ({"model": lambda s: made("bert")}, "skip_costs", UNSUPPORTED),
            "no embedding": ({"ensemble": lambda s: s.w.ensemble, "pairs": [(0, 1)]}, "ensemble"),
        },
    ),
)
