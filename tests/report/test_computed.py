"""What each section computes: its tables and findings are those of the library's own functions with
the windows, the sizes and the seed of the report, and nothing else is written to the terminal."""

from __future__ import annotations

import functools
import io
import re
from contextlib import redirect_stderr
from math import nan
from typing import Any, NamedTuple

import pytest
import torch
from tqdm.auto import tqdm

import tl_geometry as tlg
from tests.tiny import tiny, tokens
from tl_geometry.base.results import Result
from tl_geometry.corpus.nulls import gibberish
from tl_geometry.corpus.texts import splice
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.flow.reports import compare_ensembles
from tl_geometry.interventions import causal
from tl_geometry.interventions.surrogates import surrogate_effect
from tl_geometry.models.untrained import reinitialized
from tl_geometry.render import sweeps
from tl_geometry.render.figure import View
from tl_geometry.render.page import PageView
from tl_geometry.render.rotary import bands_page, head_planes
from tl_geometry.report import findings, heads
from tl_geometry.report.analysis import Analysis, make
from tl_geometry.report.findings import Finding
from tl_geometry.report.origin import Cells, by_error, number, plain
from tl_geometry.report.section import Draft, Section
from tl_geometry.scores.relative import offset_profile
from tl_geometry.sphere.paths import token_paths
from tl_geometry.weights.heads import token_readout, weight_geometry

SEED = 5
"""Not the default of any function."""
Figures = dict[str, tuple[View | PageView, dict[str, str]]]


class Call(NamedTuple):
    """A call of a function of the library."""

    given: tuple[Any, ...]
    options: dict[str, Any]
    result: Any


class Made(NamedTuple):
    """A section, its figures with the texts that the section gives them, its sweep and its edits,
    and what the terminal showed."""

    section: Section
    figures: Figures
    calls: list[Call]
    terminal: str


@functools.cache
def analysis(architecture: str, *, contexts: int = 40, length: int = 16) -> Analysis:
    """An analysis of windows that begin with a BOS if they are shorter than 16 tokens."""
    model = tiny("bridge", architecture)
    ids = tokens(batch=contexts, length=length, seed=2)
    if has_bos := length < 16:
        ids[:, 0] = 0
    windows = TokenWindows(tokens=ids, has_bos=has_bos)
    return Analysis(
        model=model,
        view=tlg.view(model),
        windows=windows,
        basis=tlg.decompose(model, windows, progress=False, groups=8),
        seed=SEED,
        planes=True,
        bar=tqdm(total=1, disable=True),
    )


@functools.cache
def made(of: Analysis, name: str) -> Made:
    """A section without the time that drawing takes."""
    figures: Figures = {}
    calls: list[Call] = []

    def draw(self: Draft, figure: View | PageView, key: str = "", **said: str) -> None:
        figures[key or figure.title] = figure, said

    def watched(function: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            calls.append(Call(given, options, function(*given, **options)))
            return calls[-1].result

        return call

    terminal = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(terminal):
        patch.setattr(Draft, "draw", draw)
        for module, function in ((heads, "sweep_heads"), (causal, "dominant_only")):
            patch.setattr(module, function, watched(getattr(module, function)))
        section = make(of, name)
    return Made(section, figures, calls, terminal.getvalue())


def basis_tables(of: Analysis) -> tuple[dict[str, Result], list[Finding | None]]:
    spliced = splice(of.windows, seed=SEED)
    null = tlg.decompose(of.model, spliced, seed=SEED, progress=False)
    table = of.basis.anova(null=null)
    found = [findings.position_share(table), findings.context_share(table)]
    return {"anova": table, "massive_tokens": of.basis.largest_tokens()}, found


def heads_tables(of: Analysis) -> tuple[dict[str, Result], list[Finding | None]]:
    """From the sweep and the edits that the section made, whose options are tested below."""
    (sweep, effect) = (call.result for call in made(of, "heads").calls)
    bands = sweep.planes().by_band()
    tables = {"heads": sweep, "dominant_only": effect, "planes": sweep.planes(), "bands": bands}
    tables["head_bands"] = bands.by_head()
    found = [findings.driver(sweep, groups=8, rotary=True)]
    found += [findings.head_type(sweep, name) for name in ("induction", "previous")]
    return tables, [*found, findings.dominance(effect)]


def measures_tables(of: Analysis) -> tuple[dict[str, Result], list[Finding | None]]:
    position = tlg.positional_report(of.basis, seed=SEED)
    context = tlg.contextual_report(of.basis, seed=SEED)
    found = [findings.smooth(position), findings.incoherence(context)]
    return {"positional": position, "contextual": context}, found


def weights_tables(of: Analysis) -> tuple[dict[str, Result], list[Finding | None]]:
    qk, ov = (weight_geometry(of.model, of.basis, name, seed=SEED) for name in ("QK", "OV"))
    tables = {
        "weights_qk": qk,
        "weights_ov": ov,
        "readout_ov": token_readout(of.model, matrix="OV"),
        "paths": token_paths(of.model, of.windows.tokens[:1]),
        "surrogates": surrogate_effect(of.model, of.pick(16).tokens, of.basis, seed=SEED),
    }
    return tables, [findings.lift(qk)]


def flow_tables(of: Analysis) -> tuple[dict[str, Result], list[Finding | None]]:
    model, windows = of.model, of.windows
    followed = functools.partial(tlg.trajectories, progress=False)
    text = followed(model, windows, post_norm=True)
    noise = gibberish(model, len(windows), windows.tokens.shape[1], prepend_bos=False, seed=SEED)
    ensembles = {"text": text, "gibberish": followed(model, noise)}
    with reinitialized(model, seed=SEED) as untrained:
        ensembles["untrained"] = followed(untrained, windows)
    fitted = followed(model, windows[slice(0, 20)])
    curve = tlg.truncation_kl(model, windows[slice(20, 40)], fitted, progress=False)
    maps = ("flow", "ridge", "identity", "mean")
    skips = tlg.skip_map(model, windows, pairs="all", map_types=maps, seed=SEED, progress=False)
    tables = {
        "flow": tlg.flow_report(text, seed=SEED),
        "flow_nulls": compare_ensembles(ensembles),
        "truncation": curve,
        "skipped_layers": skips,
    }
    return tables, [findings.truncated(curve), findings.skipped(skips)]


WANTED = {
    ("basis", "gpt2"): basis_tables,
    ("heads", "llama"): heads_tables,
    ("measures", "gpt2"): measures_tables,
    ("weights", "llama"): weights_tables,
    ("flow", "gpt2"): flow_tables,
}


@pytest.mark.parametrize(("name", "architecture"), WANTED)
def test_tables_and_findings_are_those_of_the_library(name: str, architecture: str) -> None:
    of = analysis(architecture)
    section, _, _, terminal = made(of, name)
    tables, found = WANTED[name, architecture](of)
    assert set(section.tables) == set(tables)
    for key, table in tables.items():
        assert section.tables[key].columns() == table.columns()
        assert repr(section.tables[key].rows()) == repr(table.rows()), key
    assert list(section.findings) == [finding for finding in found if finding is not None]
    assert terminal == ""


def test_heads_are_swept_and_edited_with_the_options_of_the_report() -> None:
    of = analysis("llama")
    sweep, edit = made(of, "heads").calls
    options = {"progress": False, "seed": SEED}
    assert sweep.options == {"detail": ("intervals", "nulls", "planes"), **options}
    assert edit.options == {"table": sweep.result, "draws": 9, **options}
    for call, count in ((sweep, 40), (edit, 16)):
        model, windows, basis = call.given
        assert model is of.model
        assert basis is of.basis
        assert windows.tokens.equal(of.pick(count).tokens)


def cells(table: Result, column: str) -> list[Any]:
    """A column of a table."""
    return [row[list(table.columns()).index(column)] for row in table.rows()]


def test_sentences_on_heads_by_their_table() -> None:
    """Shares of position where it is destroyed, the strongest heads, and their bands."""
    section, figures, _, _ = made(analysis("llama"), "heads")
    table, bands = (section.tables[name] for name in ("heads", "head_bands"))
    null = plain(figures["shares"][1]["null"])
    largest = number(max(cells(table, "cs_position_null")))
    assert null == f"With position destroyed, the share of position is at most {largest}."
    pairs = zip(cells(table, "layer"), cells(table, "head"), strict=True)
    names = [f"L{layer}H{head}" for layer, head in pairs]
    said = [text.split()[0] for text in section.text if re.match(r"L\dH\d ", text)]
    for kind, first in (("previous", 0), ("induction", 3)):
        scores = dict(zip(names, cells(table, kind), strict=True))
        assert said[first : first + 3] == sorted(names, key=lambda n: -scores[n])[:3]
    assert len(said) == 6
    leading = cells(bands, "dominant")
    counts = [f"{b} planes lead in {leading.count(b)}" for b in ("near", "middle", "far", "pass")]
    counts.append(f"no band leads clearly by covariance and by gain in {leading.count('unclear')}")
    shown = ", ".join(text for text in counts if not text.endswith(" in 0"))
    assert f"Of {len(names)} heads, {shown}. Near planes" in " ".join(section.text)
    for kind, name in (("previous-token", said[0]), ("induction", said[3])):
        row = names.index(name)
        shares = {b: by_error(cells(bands, f"cs_{b}")[row], nan) for b in ("near", "middle", "far")}
        listed = ", ".join(f"{b} {share}" for b, share in shares.items())
        assert f"The strongest {kind} head, {name}: {listed}." in section.text


def test_sentences_on_measures_by_their_tables() -> None:
    """Of the state in the middle."""
    section = made(analysis("gpt2"), "measures").section
    said = " ".join(section.text).replace(",", "")
    for name, columns in (
        ("positional", ("rank", "stable_rank")),
        ("contextual", ("incoherence_avg", "incoherence_avg_random", "incoherence_avg_exchanged")),
    ):
        table = section.tables[name]
        state = cells(table, "state")[len(table.rows()) // 2]
        sentence = re.search(rf"(At|of) state {state} (.*?)\. The ", said)
        assert sentence is not None
        cell = Cells(name, table)
        shown = [plain(cell(len(table.rows()) // 2, column)) for column in columns]
        assert [number in sentence[2].split() for number in shown] == [True] * len(shown), name
        said = said[sentence.end() :]


def strongest(table: Any) -> list[tuple[int, int]]:
    """The strongest previous-token head and the strongest induction head."""
    pairs = list(zip(cells(table, "layer"), cells(table, "head"), strict=True))
    scores = [cells(table, name) for name in ("previous", "induction")]
    return [pairs[values.index(max(values))] for values in scores]


def drawn(figure: Any) -> list[Any]:
    """The texts, lines and images of a figure."""
    axes = figure.figure.axes
    lines = [line.get_xydata().tolist() for axis in axes for line in axis.lines]
    images = [image.get_array().tolist() for axis in axes for image in axis.images]
    return [figure.title, figure.caption, [axis.get_title() for axis in axes], lines, images]


def test_figures_of_heads_are_drawn_from_its_tables() -> None:
    of = analysis("llama")
    _, figures, calls, _ = made(of, "heads")
    keys = ("shares", "gain", "types", "heads", "planes", "bands", "example", "dominance")
    assert tuple(figures) == keys
    table = calls[0].result
    for key, share in (("shares", "cs"), ("gain", "gs")):
        assert drawn(figures[key][0]) == drawn(sweeps.head_shares(table, share=share))
    chosen = strongest(table)
    scores = tlg.split_scores(of.model, of.pick(16), of.basis, heads=chosen)
    planes, profile = table.planes(), offset_profile(scores)
    assert drawn(figures["planes"][0]) == drawn(head_planes(planes, profile, heads=chosen))
    bands, example = figures["bands"][0], figures["example"][0]
    assert isinstance(bands, PageView)
    assert isinstance(example, PageView)
    assert bands.page == bands_page(planes, profile).page
    assert "Row-centred scores by query" in example.caption
    assert all(f"L{layer}H{head}" in example.title for layer, head in chosen)


@pytest.mark.parametrize(("length", "period"), [(16, 8), (9, 4), (8, None)])
def test_the_example_is_a_piece_of_the_first_window_twice(length: int, period: int | None) -> None:
    """Windows of fewer than 16 tokens have a BOS, which is not repeated."""
    of, table = analysis("llama", length=length), made(analysis("llama"), "heads").calls[0].result
    split = heads.repeated(of, table)
    if period is None:
        assert split is None
        return
    ids = of.windows.tokens[0].tolist()
    first = 1 if length < 16 else 0
    prompt = [*ids[:first], *ids[first : first + period], *ids[first : first + period]]
    wanted = tlg.split_scores(of.model, torch.tensor(prompt), of.basis, heads=strongest(table))
    assert split is not None
    assert split.heads == wanted.heads
    assert split.q.equal(wanted.q)
    assert split.k.equal(wanted.k)
