"""Whole calls, of which one thing is wrong: of works, measures, edits, models and flows."""

from __future__ import annotations

from typing import Any

import torch

import tl_geometry as tlg
from tests.tables.refusals.changed_models import made
from tests.tables.refusals.models import of_transformers
from tests.tables.refusals.row import NAN, Scene, calls
from tl_geometry import flow, interventions, measures, models, papers, sphere, weights

UNSUPPORTED = tlg.UnsupportedModelError
QUIET: dict[str, Any] = {"progress": False}
IDS, EYE, TEXT = torch.arange(400), torch.eye(3), "x = y\n" * 90
PAIR, FINAL = {("content", "ctx"): EYE}, ("final_norm",)
edits: Any = interventions  # calls that the annotations forbid
theorem1, factorised, curve = papers.theorem1, papers.factorisation_gap, measures.learning_curve
aligned: Any = flow.fit_aligned_bases


def noise(*shape: int) -> torch.Tensor:
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return rows - rows.mean(0) if len(rows) > 2 else rows


def tables(s: Scene, ids: Any, quirks: Any = (), model: Any = None, **options: Any) -> Any:
    given: dict[str, Any] = {"contexts": 9, "length": 32, "fresh": 4, "states": 2}
    given |= {"topic_length": 8, "topic_windows": 3, "quirks": quirks, **QUIET, **options}
    return papers.song_zhong(model or s.model, ids, **given)


def thoughts(s: Scene, text: str, n: int | None = None) -> Any:
    return papers.sarfati(s.model, text, length=4, n=n, **QUIET)


def split(s: Scene, basis: Any, ids: Any, form: str = "reference") -> Any:
    return papers.published_split(s.model, ids, basis, 1, form=form)


def other(s: Scene, **options: Any) -> Any:
    return tlg.decompose(s.model, s.w.fresh, **QUIET, **options)


def one(s: Scene) -> Any:
    return tlg.decompose(s.model, s.w.corpus[:1], **QUIET)


def bos(s: Scene, prepend: Any) -> Any:
    return tlg.decompose(s.model, s.w.corpus, prepend_bos=prepend, **QUIET)


def against(s: Scene, a: Any, b: Any, rank: int | None = None) -> Any:
    return measures.compare_bases(a, b, rank=rank)


def effects(s: Scene, *heads: Any, prompts: Any = None, **options: Any) -> Any:
    given = {f"{i}": zero(s.model) if h is None else h for i, h in enumerate(heads)}
    return edits.effects(s.model, s.ids if prompts is None else prompts, given, **QUIET, **options)


def zero(model: Any, head: str = "L1H0") -> Any:
    return interventions.heads(model, head, by="zero")


def encoder(edit: Any, metric: Any = lambda logits: logits[:, 0, 5]) -> Any:
    model = made("bert")
    return edits.effects(model, IDS[3:23].view(2, 10), {"a": edit(model)}, metric=metric, **QUIET)


def inside(s: Scene, ids: Any, edit: Any = None, times: int = 1) -> Any:
    """A pass with the hooks of an edit."""
    hooks = [*(edit or edits.term(s.model, s.w.basis, "pos-pos", "L1H0"))] * times
    with torch.no_grad():
        return s.model.run_with_hooks(ids, fwd_hooks=hooks)


def mean(s: Scene) -> Any:
    return edits.term(s.model, s.w.basis, "cvec-cvec", "L1H0", how="mean")


def idle(s: Scene) -> None:
    with edits.term(s.model, s.w.basis, "pos-pos", "L1H0"):
        pass


def scaled(factor: float) -> Any:
    """A pass inside an edit that was made before a weight was scaled."""
    model = made("gpt2")
    edit = zero(model)
    next(iter(model.parameters())).data.mul_(factor)
    with edit, torch.no_grad():
        return model(IDS[3:43].view(4, 10))


def paths(s: Scene, chunks: int, states: int) -> Any:
    return tlg.trajectories(s.model, s.w.pilots[:chunks], states=range(1, states + 1), **QUIET)


def law(ensemble: Any, **options: Any) -> Any:
    return flow.fit_noise_law(ensemble.residuals(), **options)


GROUPS = (
    calls(
        "numbers of works",
        right={
            "just enough ids": lambda s: tables(s, IDS[:72]),
            "just enough with overlap": lambda s: tables(s, IDS[:37], ("overlap",)),
            "topics": lambda s: tables(s, IDS, topics=[IDS[:10], IDS[50:80]]),
            "long topics": lambda s: tables(s, IDS, topics=[IDS[:35], IDS[50:90]], topic_length=32),
            "a split": lambda s: split(s, s.w.basis, s.ids),
            "all cosines": lambda s: theorem1(noise(9, 4), 9, 2),
            "cosines of zeros": lambda s: theorem1(torch.zeros(9, 4), 3, 1),
            "unit rows": lambda s: factorised(EYE, EYE, {}),
        },
        wrong={
            "too few ids": (lambda s: tables(s, IDS[:71]), "^corpus$"),
            "too few with overlap": (lambda s: tables(s, IDS[:36], ("overlap",)), "^corpus$"),
            "floats": (lambda s: tables(s, noise(400)), "^corpus$"),
            "ids of two axes": (lambda s: tables(s, IDS.view(2, 200)), "^corpus$"),
            "a row of no table": (lambda s: tables(s, IDS, row="GPT-9 OWT"), "^row$"),
            "a quirk of no name": (lambda s: tables(s, IDS, ("uint8",)), "^quirks$"),
            "a size of no name": (lambda s: tables(s, IDS, width=3), "^sizes$"),
            "an encoder": (lambda s: tables(s, IDS, FINAL, made("bert")), "final", UNSUPPORTED),
            "short topics": (lambda s: tables(s, IDS, topics=[IDS[:7]]), "^topics$"),
            "two windows of three": (lambda s: tables(s, IDS, topics=[IDS[:9]]), "^topics$"),
            "longer topics": (lambda s: tables(s, IDS, topics=[IDS], topic_length=33), "^topic_l"),
            "31 chunks": (lambda s: thoughts(s, "x = y\n" * 31), "text"),
            "31 of more chunks": (lambda s: thoughts(s, TEXT, 31), "text"),
            "a split of another model": (lambda s: split(s, s.rotary.basis, s.ids), "basis"),
            "a normalised split": (lambda s: split(s, s.w.normalized_basis, s.ids), "split"),
            "a long prompt": (lambda s: split(s, s.w.basis, s.ids.repeat(1, 2)), "basis"),
            "a split of no form": (lambda s: split(s, s.w.basis, s.ids, "exact"), "^form$"),
            "rows with a mean": (lambda s: theorem1(noise(9, 4) + 1e-3, 3, 2), "^pos$"),
            "no cosine": (lambda s: theorem1(noise(9, 4), 0, 2), "^k$"),
            "no differences": (lambda s: theorem1(noise(9, 4), 3, 0), "^m$"),
            "other rows": (lambda s: factorised(EYE, EYE[:2], {}), "^rows$"),
            "longer rows": (lambda s: factorised(1.001 * EYE, EYE, {}), "^rows$"),
            "other parts": (lambda s: factorised(EYE, EYE, PAIR), "coefficients"),
        },
    ),
    calls(
        "measures and bases",
        right={
            "fewer states": lambda s: against(s, s.w.basis, other(s, states=[2, 1])),
            "all directions": lambda s: against(s, s.w.basis, other(s), 18),
            "a curve of context": lambda s: curve(s.w.basis, "context"),
            "as they are": lambda s: measures.smoothness(noise(6, 3), 0),
            "eight values": lambda s: measures.screenot(noise(8).abs(), (9, 8), k=3),
            "a norm": lambda s: sphere.norm_geometry(noise(3, 4), norm_type="RMS"),
            "biases": lambda s: weights.bias_readout(s.model, heads="L1H0"),
            "nouns": lambda s: weights.noun_probe(s.model, [" name", " value"], layers=0),
            "no BOS to be added": lambda s: bos(s, False),
            "a file": lambda s: s.w.basis.save(s.folder / "b.safetensors"),
            "some positions": lambda s: s.w.basis.transform(s.w.stream(), range(18)),
        },
        wrong={
            "windows": (lambda s: against(s, s.w.basis, other(s, window=(2, 20))), "^b$"),
            "one normalised": (lambda s: against(s, s.w.basis, s.w.normalized_basis), "^b$"),
            "states": (lambda s: against(s, other(s, states=[0]), other(s, states=[1])), "states"),
            "more directions": (lambda s: against(s, s.w.basis, other(s), 19), "^rank$"),
            "a curve of both": (lambda s: curve(s.w.basis, "both"), "^of$"),
            "position in one context": (lambda s: curve(one(s)), "report"),
            "one context": (lambda s: curve(one(s), "context"), "report"),
            "differences below 0": (lambda s: measures.smoothness(noise(6, 3), -1), "^m$"),
            "seven values": (lambda s: measures.screenot(noise(7).abs(), (9, 8), k=2), "singular"),
            "a bound of 0": (lambda s: measures.screenot(noise(8).abs(), (9, 8), k=0), "^k$"),
            "NaN": (lambda s: measures.screenot(NAN * noise(8), (9, 8), k=2), "singular"),
            "a path": (lambda s: sphere.path_geometry(EYE, "BN"), "norm_type"),
            "no norm": (lambda s: sphere.norm_geometry(noise(3, 4), norm_type="BN"), "norm_type"),
            "less than no eps": (lambda s: sphere.norm_geometry(noise(3, 4), eps=-1.0), "^eps$"),
            "half of the values": (lambda s: measures.screenot(noise(9).abs(), (9, 9), k=4), "^k$"),
            "weights, one context": (lambda s: tlg.weight_geometry(s.model, one(s)), "geometry"),
            "biases of no heads": (lambda s: weights.bias_readout(s.model, heads=[]), "head"),
            "no nouns": (lambda s: weights.noun_probe(s.model, []), "nouns"),
            "a noun of no token": (lambda s: weights.noun_probe(s.model, ["qzxqzxqz"]), "nouns"),
            "QK-norm": (lambda s: weights.bias_readout(made("qwen3")), "readout", UNSUPPORTED),
            "norms behind": (lambda s: weights.bias_readout(made("gemma2")), ".", UNSUPPORTED),
            "moments in words": (lambda s: other(s, second_moments="yes"), "second_moments"),
            "contexts in words": (lambda s: other(s, keep_ctx="yes"), "keep_ctx"),
            "no process group": (lambda s: other(s, group="world"), "^group$"),
            "BOS to be added": (lambda s: bos(s, True), "prepend_bos"),
            "into a folder": (lambda s: s.w.basis.save(s.folder), "."),
            "fewer positions": (lambda s: s.w.basis.transform(s.w.stream(), [1, 2]), "positions"),
        },
    ),
    calls(
        "edits and models",
        right={
            "effects": lambda s: effects(s, None, None, control="heads", draws=2),
            "of an encoder": lambda s: encoder(zero),
            "hooks once": lambda s: inside(s, s.ids),
            "a mean over three": lambda s: inside(s, s.ids, mean(s)),
            "weights as they were": lambda s: scaled(1.0),
            "of transformers": lambda s: models.from_hf(of_transformers(s)),
        },
        wrong={
            "a share of no edges": (lambda s: s.w.edges.edges(0.0), "fraction"),
            "no edits": (lambda s: effects(s), "^edits$"),
            "a name alone": (lambda s: effects(s, "L1H0"), "^edits$"),
            "of another model": (lambda s: effects(s, zero(s.rotary.model)), "^edits$"),
            "of two models": (lambda s: zero(s.model) + zero(s.rotary.model), "^edits$"),
            "a seed": (lambda s: effects(s, None, seed=-1), "^seed$"),
            "one answer": (lambda s: effects(s, None, metric="difference", answer=5), "answer"),
            "the loss of one token": (lambda s: effects(s, None, prompts=s.ids[:, :1]), "prompts"),
            "a change of no edit": (lambda s: effects(s, None).change("x"), "^edit$"),
            "no control": (lambda s: effects(s, None).excess("0", "heads"), "^control$"),
            "no p of a control": (lambda s: effects(s, None).p("0", "heads"), "^control$"),
            "a position of the loss": (lambda s: effects(s, None, position=3), "position"),
            "a loss of BERT": (lambda s: encoder(zero, "loss"), "effects", UNSUPPORTED),
            "a term by number": (lambda s: edits.term(s.model, s.w.basis, 7), "^term$"),
            "a term of a number": (lambda s: edits.term(s.model, s.w.basis, [7]), "^term$"),
            "erased": (lambda s: edits.term(s.model, s.w.basis, "content", how="x"), "^how$"),
            "a term of one": (lambda s: edits.term(s.model, one(s), "content"), "interventions"),
            "a mean plane": (lambda s: edits.planes(s.rotary.model, [0], how="mean"), "^how$"),
            "a draw": (lambda s: edits.planes(s.rotary.model, [0], draw=-1), "^draw$"),
            "hooks twice": (lambda s: inside(s, s.ids, times=2), "inside an edit"),
            "a mean over one": (lambda s: inside(s, s.ids[:1], mean(s)), "prompts|tokens"),
            "no pass": (idle, "edit"),
            "a model that has changed": (lambda s: scaled(1.5), "edit"),
            "floats": (lambda s: tlg.view(s.model).logits(s.ids.float()), "tokens"),
            "ids for a cache": (lambda s: tlg.view(s.model).layer(0, s.ids), "^cache$"),
            "text without a tokenizer": (lambda s: tlg.windows(made("gpt2"), "a b c", 2), "."),
            "redrawn": (lambda s: models.reinitialized(s.model, how="x").__enter__(), "^how$"),
            "no file": (lambda s: models.load("basis.safetensors"), "^path$"),
        },
    ),
    calls(
        "flows",
        right={
            "a report of sixteen": lambda s: tlg.flow_report(paths(s, 16, 2)),
            "a bundle": lambda s: flow.compare_ensembles({"a": paths(s, 4, 2)}),
            "by hungarian": lambda s: aligned(s.w.ensemble.X, align="hungarian"),
            "a law": lambda s: law(s.w.all_states),
            "after the norm": lambda s: paths(s, 4, 4).after_norm(s.model),
        },
        wrong={
            "a report of fifteen": (lambda s: tlg.flow_report(paths(s, 15, 2)), "trajectories"),
            "a report of tokens": (lambda s: tlg.flow_report(s.ids), "trajectories"),
            "of one state": (lambda s: tlg.flow_report(paths(s, 16, 1)), "trajectories"),
            "of two": (lambda s: flow.compare_ensembles({"a": paths(s, 2, 2)}), "trajectories"),
            "none": (lambda s: flow.compare_ensembles({}), "ensembles"),
            "a pick of none": (lambda s: s.w.ensemble.pick([]), "^rows$"),
            "an alignment of no name": (lambda s: aligned(s.w.ensemble.X, align="x"), "align"),
            "two axes": (lambda s: aligned(noise(4, 5)), "trajectories"),
            "NaN": (lambda s: aligned(NAN * noise(9, 3, 4)), "trajectories|state"),
            "a law of no name": (lambda s: law(s.w.all_states, law="cubic"), "law"),
            "a law of no column": (lambda s: law(s.w.all_states, of="x"), "column"),
            "a law of one pair": (lambda s: law(paths(s, 9, 2)), "pairs"),
            "no last state": (lambda s: paths(s, 4, 3).after_norm(s.model), "after_norm"),
            "another model": (lambda s: s.rotary.ensemble.after_norm(s.model), "after_norm"),
        },
    ),
)
