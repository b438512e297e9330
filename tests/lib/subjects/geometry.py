"""Rows of ``weights``, ``measures`` and ``sphere``: formulas of Song & Zhong and of Molina."""

from __future__ import annotations

from typing import Any

import torch

import tl_geometry as tlg
from tests.lib.subjects import reference_scores as reference
from tests.lib.subjects.decomposition import BLOCKS, NO_ORDER, STATES
from tests.lib.subjects.row import Answers, Subject, given, labels, torch_seeded
from tests.lib.worlds import QUIET, World
from tl_geometry import measures, papers, sphere, weights
from tl_geometry.measures import positional as shapes

GAUGE = "the directions that processing removes are part of the matrix as it is"


def column(table: Any, *names: str) -> torch.Tensor:
    """A column of a table, or several, one after another."""
    found = [torch.tensor(table.column(name), dtype=torch.float64) for name in names]
    return found[0] if len(names) == 1 else torch.stack(found)


def geometry(g: Any) -> Answers:
    """W_QK or W_OV in the directions of a positional basis: low rank plus diagonal."""
    first = [i for i, (layer, head) in enumerate(g.heads) if head == 0]  # one of each block
    return {
        "heads": labels(g.heads),
        "rank": column(g, "k", "rank")[:, first],
        "diagonal in directions of pos": g.diagonal,
        "entries in directions of pos": g.block,
        "size of entries": column(g, "std"),
        "threshold": column(g, "threshold"),
        "entries above threshold": column(g, "above_threshold"),
        "concentration in the corner": column(g, "concentration"),
        "concentration by chance": column(g, "null", "noise_null", "noise_high"),
        "excess and lift": column(g, "excess", "lift"),
        "p of concentration": column(g, "p"),
        "reliability of pos": column(g, "reliability"),
        "diagonal of low rank plus diagonal": g.delta,
        "size of the low rank part": g.L.double().square().sum((1, 2)),
        "R2 of low rank, diagonal, both": column(g, "r2_low_rank", "r2_diagonal", "r2_joint"),
        "R2 by chance": column(g, "null_r2"),
    }


def readout(r: Any) -> Answers:
    """Singular values, the tokens at both ends of the leading directions, and coverage."""
    found: Answers = {
        "heads": labels(r.heads),
        "singular values": r.values,
        "directions for 90%": (r.coverage <= 0.99).sum(-1) + 1,
        "coverage": r.coverage,
    }
    for side, ends in (("left", r.left), ("right", r.right)):
        found[f"ids at the {side} ends"] = ends.ids.movedim(1, 0)
        found[f"scores at the {side} ends"] = ends.scores.movedim(1, 0)
    return found


def ids_of(cells: list[Any]) -> torch.Tensor:
    """Token ids of cells that hold as many tokens each."""
    return torch.tensor([[int(token) for token in cell.split()] for cell in cells])


def biases(w: World) -> Answers:
    """Which tokens the biases of queries, keys and values favour."""
    b = weights.bias_readout(w.model)
    heads = [f"L{layer}H{head}" for layer, head in zip(b.column("layer"), b.column("head"))]
    return {
        "heads": heads[::3],
        "length of biases": column(b, "length").view(-1, 3),
        "ids that a bias favours": ids_of(b.column("top_ids")).view(len(heads) // 3, 3, -1),
        "ids that a bias disfavours": ids_of(b.column("bottom_ids")).view(len(heads) // 3, 3, -1),
    }


def distances(d: Any) -> Answers:
    """How far W_E, the untied W_U and their averages are from each other."""
    return {
        "matrices": d.column("matrix"),
        "L2 distance, mean and sd": column(d, "l2_mean", "l2_sd"),
        "cosine, mean and sd": column(d, "cosine_distance_mean", "cosine_distance_sd"),
        "mean norm": d.column("mean_norm")[0],
        "share of tokens nearest to themselves": d.column("identity")[0],
    }


def nouns(w: World, **options: Any) -> Answers:
    """What heads attend to and write, at a noun alone."""
    p = weights.noun_probe(w.model, _nouns(w), **options)
    blocks, heads = list(dict.fromkeys(p.column("layer"))), len(set(p.column("head")))
    found = list(dict.fromkeys(p.column("noun")))
    grid = len(blocks), len(found), heads  # the last row of a noun is that of all heads
    norms = column(p, "norm").view(grid)
    values = ids_of(p.column("value_ids")).view(*grid, -1)
    keys = ids_of([cell for cell in p.column("key_ids") if cell]).view(*grid[:2], heads - 1, -1)
    return {
        "nouns": found,
        "blocks": torch.tensor(blocks),
        "ids of keys": keys.movedim(2, 1),
        "ids of values": values[:, :, :-1].movedim(2, 1),
        "ids of the sum over heads": values[:, :, -1],
        "norm of values": norms[:, :, :-1].movedim(2, 1),
        "norm of the sum over heads": norms[:, :, -1],
    }


def _nouns(w: World) -> list[str]:
    return ["w7", "w19", "w44"] if w.tiny else ["file", "list"]


def _query_key(w: World, **options: Any) -> Any:
    heads = None if w.kind != "smollm2" else w.heads
    return tlg.token_readout(w.model, **given(options, matrix="QK", heads=heads, features=3))


WEIGHTS = (
    Subject(
        name="weight_geometry",
        call=lambda w, **o: tlg.weight_geometry(w.model, w.basis, **given(o, draws=9, layers=[1])),
        answers=geometry,
        variants={"QK": {}, "OV": {"matrix": "OV"}, "of rank 3": {"rank": 3}},
        gauge={"*": STATES},
        seeds=("concentration by chance", "excess and lift", "p of *"),
        without={
            "order:*": NO_ORDER,
            "seeds:*/p of *": "p is the least that so many draws allow",
            "empty:of rank 3/entries *": "no entry of a random matrix stands out",
        },
        real=("QK",),
    ),
    Subject(
        name="token_readout",
        call=_query_key,
        reference=reference.readout,
        answers=readout,
        variants={"QK": {}, "OV": {"matrix": "OV"}},
        real=("QK", "OV"),
    ),
    Subject(
        name="bias_readout",
        call=biases,
        only={"*": lambda w: w.kind in ("gpt2", "bloom", "embedded")},
        gauge={"*": GAUGE},
    ),
    Subject(
        name="embedding_distance_table",
        call=lambda w: weights.embedding_distance_table(w.model),
        answers=distances,
        gauge={"*": GAUGE},
    ),
    Subject(
        name="noun_probe",
        call=nouns,
        variants={"plain": {}, "without biases": {"biases": False}},
        only={"*": lambda w: w.kind != "gemma2"},  # a norm follows its attention
        gauge={"*": GAUGE},
    ),
)
NULLS = ("shuffled", "noise", "isotropic", "random", "flipped", "exchanged")


def by_state(r: Any, curve: Any = None) -> Answers:
    """Measures by state with errors, nulls, and the curve over numbers of contexts."""
    ends = ("_se", *(f"_{null}{end}" for null in NULLS for end in ("", "_sd")))
    other = ("state", "blocks", "draws")
    measures = [n for n in r.names if n not in other and not any(n.endswith(e) for e in ends)]
    found: Answers = {}
    for name in measures:
        found[f"measure.{name}"] = column(r, name)
        if f"{name}_se" in r.names:
            found[f"error of measure.{name}"] = column(r, f"{name}_se")
        for null in NULLS:
            if f"{name}_{null}" in r.names:
                values, sd = column(r, f"{name}_{null}"), f"{name}_{null}_sd"
                spread = column(r, sd) if sd in r.names else torch.full_like(values, torch.nan)
                found[f"{name} by chance ({null})"] = torch.stack([values, spread])
    if curve is not None:
        contexts = list(dict.fromkeys(curve.column("contexts")))
        found["contexts of the curve"] = torch.tensor(contexts)
        for name in curve.names[2:]:
            found[f"curve of.{name}"] = column(curve, name).view(len(contexts), -1)
    return found


def positional(w: World, **options: Any) -> Answers:
    """Measures of the positional basis."""
    report = tlg.positional_report(w.basis, **given(options, draws=4))
    curve, kept = None, {k: v for k, v in options.items() if k in ("k", "frequencies")}
    if options.get("jackknife", True):
        curve = measures.learning_curve(w.basis, **kept)
    shown = options.get("frequencies", 10)
    spectrum = shapes.fourier(shapes.normalized_gram(w.basis.pos))[:, :shown, :shown]
    return by_state(report, curve) | {"cosine coefficients of the Gram matrix": spectrum}


def contextual(w: World, **options: Any) -> Answers:
    """Measures of the context basis."""
    report = tlg.contextual_report(w.basis, **given(options, draws=4, rank=5))
    labels = options.get("labels")
    return by_state(report, measures.learning_curve(w.basis, "context", labels=labels, rank=5))


def comparison(c: Any) -> Answers:
    """How far two positional bases agree, beside halves of one."""
    return {
        "directions": column(c, "rank"),
        "angle, mean and largest": column(c, "angle_mean", "angle_max"),
        "overlap": column(c, "overlap"),
        "overlap by chance": column(c, "overlap_random"),
        "overlap of halves": column(c, "overlap_floor"),
        "Procrustes similarity": column(c, "procrustes", "procrustes_floor"),
        "relative difference": column(c, "difference", "difference_floor"),
        "cosine of means": column(c, "mean_cosine"),
    }


def bound(b: Any) -> Answers:
    """Both sides of Theorem 1."""
    return {
        "left side": b.lhs,
        "bound, tight": b.bound_tight,
        "bound, safe": b.bound_safe,
        "bound in the operator norm": b.bound_operator,
        "bound, as printed": b.bound_paper,
        "left side, as printed": b.lhs_paper,
        "largest difference of the Gram matrix": b.delta_max,
        "cosines": b.F,
        "size of B": (b.B @ b.B.mT).trace(),
    }


def _spectrum() -> torch.Tensor:
    """Singular values of a signal of rank 3 in noise."""
    g = torch_seeded(13)
    signal = torch.randn(60, 3, generator=g, dtype=torch.float64) * torch.tensor([9.0, 6.0, 4.0])
    noise = torch.randn(60, 24, generator=g, dtype=torch.float64) / 4
    return torch.linalg.svdvals(signal @ torch.randn(3, 24, generator=g).double() + noise)


def _screenot(_: World, **options: Any) -> Any:
    return measures.screenot(_spectrum(), (60, 24), **options)


def _curves(w: World) -> torch.Tensor:
    return w.basis.pos.double()


def _documents(w: World) -> list[int]:
    """Four documents, told by what they contain, so that they move with their contexts."""
    return [row[1] % 4 for row in w.corpus.tolist()]


MEASURES = (
    Subject(
        name="positional_report",
        covers=("positional_report", "measures.learning_curve"),
        call=positional,
        reference=reference.positional,
        variants={"plain": {}, "bound of 5": {"k": 5, "frequencies": 6, "jackknife": False}},
        seeds=("* by chance *",),
        gauge={"*": STATES},
        without={
            **{
                f"order:{n}": BLOCKS for n in ("error *", "* by chance *", "curve *", "*split_half")
            },
            "empty:*by chance*": "the rank of noise is 0, and so is what it explains",
        },
        real=("plain",),
    ),
    Subject(
        name="contextual_report",
        call=contextual,
        reference=reference.contextual,
        variants={"plain": {}, "documents": {"labels": _documents}},
        tolerance={"*compactness*": (1e-4, "the inverse of a covariance of few contexts")},
        seeds=("* by chance (flipped)", "* by chance (exchanged)", "* by chance (shuffled)"),
        gauge={"*": STATES},
        without={
            f"order:{n}": BLOCKS for n in ("error *", "* by chance *", "curve *", "*split_half")
        },
    ),
    Subject(
        name="compare_bases",
        call=lambda w: measures.compare_bases(w.basis, tlg.decompose(w.model, w.fresh, **QUIET)),
        answers=comparison,
        gauge={"*": STATES},
        without={
            "order:*": BLOCKS,
            "empty:overlap of halves": "it is NaN where position is not reliable",
        },
    ),
    Subject(
        name="screenot",
        call=_screenot,
        answers=lambda r: {"rank": r.rank, "threshold": r.threshold, "bound": r.k},
        variants={"plain": {"k": 5}},
        only={"*": lambda w: w.kind == "gpt2"},
    ),
    Subject(
        name="usable_k",
        covers=("screenot",),
        call=lambda w: [shapes.usable_k(k, side) for k, side in ((20, 19), (20, 100), (3, 8))],
        answers=lambda found: {"bounds": found},
        only={"*": lambda w: w.kind == "gpt2"},
    ),
    Subject(
        name="theorem1",
        covers=("papers.theorem1",),
        call=lambda w, **o: papers.theorem1(_curves(w)[1] - _curves(w)[1].mean(0), **o),
        answers=bound,
        variants={"k 3, m 1": {"k": 3, "m": 1}, "k 4, m 2": {"k": 4, "m": 2}},
        gauge={"*": STATES},
    ),
    Subject(
        name="smoothness",
        call=lambda w: [measures.smoothness(_curves(w), m) for m in (1, 2)],
        reference=reference.smoothness,
        answers=lambda found: {"by first differences": found[0], "by second ones": found[1]},
        gauge={"*": STATES},
    ),
    Subject(
        name="dct_vectors",
        covers=("papers.theorem1",),
        call=lambda w: papers.theorem1(torch.eye(9).double() - 1 / 9, 4, 1).F,
        answers=lambda vectors: {"first cosines": vectors},
        only={"*": lambda w: w.kind == "gpt2"},
    ),
)


def paths(p: Any) -> Answers:
    """Paths of tokens over the sphere of the final norm."""
    found: Answers = {
        "angle to the token's own embedding": p.angle,
        "rank of the token": p.rank,
        "coordinates": p.coordinates,
        "share of variance in coordinates": p.shown,
    }
    found |= {name: getattr(p, name) for name in ("steps", "length", "net", "tortuosity")}
    # records have update, layer, batch, position
    return found | {n: getattr(p, n).permute(3, 2, 0, 1) for n in ("radial", "tangential", "turn")}


def norm(n: Any) -> Answers:
    """Where a norm puts its inputs."""
    found: Answers = {"point on the sphere": n.z, "point on the ellipsoid": n.y}
    found |= {"radius": n.radius, "deficit": n.deficit, "without a direction": n.degenerate}
    return found


def _inputs_of_norm() -> dict[str, Any]:
    g = torch_seeded(17)
    x = 2 * torch.randn(5, 12, generator=g)
    x[3] = 4.0  # no direction is left once it is centred
    return {
        "x": x,
        "gain": 1 + 0.3 * torch.randn(12, generator=g),
        "bias": 0.3 * torch.randn(12, generator=g),
        "eps": 1e-3,
    }


BY_TOKEN = {
    **dict.fromkeys(("angle *", "rank *", "coordinates", "steps", "length", "net"), 0),
    "tortuosity": 0,
    **dict.fromkeys(("radial", "tangential", "turn"), 2),
}
SPHERE = (
    Subject(
        name="token_paths",
        call=lambda w: sphere.token_paths(w.model, w.ids, w.basis),
        reference=reference.token_paths,
        answers=paths,
        order=BY_TOKEN,
        later={"coordinates": 1, "steps": 1, "length": 1, "radial": 3, "turn": 3},
    ),
    Subject(
        name="norm_geometry",
        call=lambda w, **o: sphere.norm_geometry(**_inputs_of_norm() | o),
        answers=norm,
        variants={"LN": {}, "RMS": {"norm_type": "RMS"}},
        only={"*": lambda w: w.kind == "gpt2"},
        without={"empty:RMS/without *": "RMS needs no centring, and leaves each a direction"},
    ),
    Subject(
        name="path_geometry",
        call=lambda w: sphere.path_geometry(w.stream().movedim(0, 2)),
        answers=lambda p: {n: getattr(p, n) for n in ("steps", "length", "net", "tortuosity")},
        order={"*": 0},
        later={"*": 1},
    ),
)
SUBJECTS = (*WEIGHTS, *MEASURES, *SPHERE)
