"""The published protocol without a model's numbers: settings, windows and ids, which options reach
which work, and the cells and verdicts beside the published tables."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.modules import copy_of
from tests.tiny import tiny
from tl_geometry import zoo
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Provenance, Result
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.papers import protocol, published, reproduction, topics
from tl_geometry.papers.protocol import Settings
from tl_geometry.papers.published import verdict

PUBLISHED: dict[str, Any] = {
    "length": 512,
    "contexts": 6400,
    "fresh": 32,
    "states": 13,
    "k": 20,
    "strategy": "i",
    "seed": 1234,
    "train_share": 0.9,
    "topic_windows": 64,
    "topic_length": 128,
    "uint16": False,
    "causal": False,
    "raw_denominator": True,
    "overlap": True,
    "absolute_with_self": True,
    "final_norm": False,
}


def named(name: str) -> ModelView:
    """A view of a tiny decoder with another name."""
    return dataclasses.replace(as_view(tiny("bridge", "gpt2")), name=name)


def test_the_defaults_are_those_of_the_published_code() -> None:
    """Every size and switch of the published run, and none of the switches in the exact one."""
    assert dataclasses.asdict(Settings()) == PUBLISHED
    off = dict.fromkeys(("raw_denominator", "overlap", "absolute_with_self"), False)
    sizes = {"length": 24, "contexts": 7, "fresh": 3, "k": 4, "seed": 5}
    switched = dict.fromkeys(("uint16", "causal", "final_norm"), True)
    exact = Settings(**sizes, **switched).exact()
    assert dataclasses.asdict(exact) == PUBLISHED | off | sizes


def test_the_switches_that_are_on_in_words() -> None:
    """A remark for each switch that is on, and for no other."""
    words = {
        "uint16": "token ids modulo 65,536",
        "causal": "causal mask",
        "raw_denominator": "relative norm over raw states of fresh windows",
        "overlap": "overlapping windows",
        "absolute_with_self": "similarities with self-pairs",
        "final_norm": "last state after the final norm",
    }
    for name, remark in words.items():
        one = dataclasses.replace(Settings().exact(), **{name: True})
        assert one.remarks() == (remark,)


@pytest.mark.parametrize(
    ("name", "family", "changed"),
    [
        ("gpt2", "GPT-2", {}),
        ("openai-community/GPT2/", "GPT-2", {}),
        ("gpt2-medium", None, {}),
        ("bert-base-cased", "BERT", {}),
        ("bigscience/bloom-560m", "BLOOM", {"uint16": True, "final_norm": True}),
        ("/models/llama-2-7b", "Llama-2", {"contexts": 800, "fresh": 8}),
        ("meta-llama/Llama-2-7b-hf", "Llama-2", {"contexts": 800, "fresh": 8}),
    ],
)
def test_the_family_of_a_model_is_the_last_part_of_its_name(
    name: str, family: str | None, changed: dict[str, Any]
) -> None:
    """It decides which published settings a model has."""
    assert protocol.family_of(named(name)) == family
    found = protocol.settings_for(named(name))
    assert dataclasses.asdict(found) == PUBLISHED | changed


@pytest.mark.parametrize(
    ("n_layers", "states"),
    [
        (2, (0, 1, 2)),
        (4, (0, 1, 2, 3, 4)),
        (5, (0, 1, 2, 3, 5)),
        (6, (0, 1, 3, 4, 6)),
        (8, (0, 2, 4, 6, 8)),
    ],
)
def test_five_states_at_even_distances(n_layers: int, states: tuple[int, ...]) -> None:
    """All states where there are no more than five, else i * n_layers / 4 rounded down."""
    assert protocol.chosen_states(n_layers, 5) == states


SMALL = Settings(length=4, contexts=7, fresh=3, train_share=0.5, seed=11)


def rows_from(train: Tensor, n: int, seed: int) -> list[list[int]]:
    """``n`` windows of four tokens at drawn starts, the last possible one left out."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(train) - 4, (n,), generator=generator).tolist()
    return [train[start : start + 4].tolist() for start in starts]


def test_overlapping_windows_are_drawn_from_the_training_share() -> None:
    """Basis and fresh windows have seeds of their own, and the ids of the first share of the
    text."""
    ids = torch.arange(65_500, 65_560)
    for uint16 in (False, True):
        used = dataclasses.replace(SMALL, uint16=uint16)
        train = (ids % 65_536 if uint16 else ids)[:30]
        basis, fresh = protocol.draw(ids, used, "the text")
        assert basis.tokens.tolist() == rows_from(train, 7, 11)
        assert fresh.tokens.tolist() == rows_from(train, 3, 12)
        assert (basis.corpus, fresh.corpus) == ("the text", "the text")
        assert (basis.has_bos, fresh.has_bos) == (False, False)


@pytest.mark.parametrize(
    ("tokens", "contexts", "fresh", "sizes"),
    [(16, 7, 3, (1, 1)), (64, 7, 3, (6, 2)), (64, 4, 1, (4, 1)), (200, 7, 3, (7, 3))],
)
def test_windows_that_do_not_overlap_are_shared_out(
    tokens: int, contexts: int, fresh: int, sizes: tuple[int, int]
) -> None:
    """At most a quarter of them is fresh, and at least one; the basis has the others, at most as
    many as asked for."""
    used = dataclasses.replace(SMALL, overlap=False, contexts=contexts, fresh=fresh)
    drawn = protocol.draw(torch.arange(tokens), used, "the text")
    assert tuple(len(windows.tokens) for windows in drawn) == sizes
    order = torch.randperm(tokens // 8, generator=torch.Generator().manual_seed(11)).tolist()
    first = [i // 4 for windows in (drawn[1], drawn[0]) for i in windows.tokens[:, 0].tolist()]
    n_fresh = sizes[1]
    assert first == order[:n_fresh] + order[n_fresh:][: sizes[0]]


def test_a_text_that_is_too_short_is_refused() -> None:
    """Overlapping windows take one token more than a window; others two windows."""
    protocol.draw(torch.arange(10), SMALL)
    with pytest.raises(GeometryError) as short:
        protocol.draw(torch.arange(9), SMALL)
    message = "text: expected more than 4 tokens, got 4 tokens. Use a shorter length="
    assert str(short.value).startswith(message)
    apart = dataclasses.replace(SMALL, overlap=False)
    protocol.draw(torch.arange(16), apart)
    with pytest.raises(GeometryError) as few:
        protocol.draw(torch.arange(15), apart)
    expected = "corpus: expected at least 2 windows of 4 tokens in 50% of the text"
    assert str(few.value).startswith(f"{expected}, got 1 of 15 tokens. Use more text")


def test_a_corpus_is_text_or_ids() -> None:
    """Texts are joined by newlines and have no BOS; ids are taken as they are, if they are whole
    numbers in one row."""
    corpus_ids, view = copy_of(protocol).corpus_ids, SimpleNamespace(encode=lambda x: [*x.encode()])
    for text in (["ab", "c"], "ab\nc"):
        assert corpus_ids(view, text).tolist() == [97, 98, 10, 99]
    ids = corpus_ids(view, torch.tensor([3, 1], dtype=torch.int32))
    assert (ids.tolist(), ids.dtype) == ([3, 1], torch.int64)
    for wrong in (torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]])):
        with pytest.raises(GeometryError, match=r"corpus: expected text, or integer ids \[pos"):
            corpus_ids(view, wrong)


# --- which options reach which work


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The works with stand-ins that note what they are given, and a text file."""
    seen: list[Any] = []

    def noting(name: str) -> Any:
        def work(*given: Any, **options: Any) -> Result:
            seen.append((name, given, options))
            return Result(provenance=Provenance())

        return work

    for name in ("song_zhong", "sarfati", "molina"):
        monkeypatch.setattr(reproduction, name, noting(name))
    monkeypatch.setattr(reproduction, "loaded", lambda name: f"model {name}")
    monkeypatch.setattr(reproduction, "as_view", lambda model: f"view of {model}")
    monkeypatch.setattr(reproduction, "settings_for", lambda view: Settings(fresh=9))
    documents = SimpleNamespace(texts=("one", "two"))
    monkeypatch.setattr(reproduction, "held_out_documents", lambda: documents)
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_bytes(f"\u00e9{file.stem}".encode("latin-1"))
    return SimpleNamespace(seen=seen, files=files)


@pytest.mark.parametrize("installed", [False, True])
def test_separability_is_asked_for_where_scikit_learn_is_installed(
    works: Any, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other package is looked for."""
    found = {"sklearn": installed or None}
    monkeypatch.setattr(reproduction, "find_spec", found.__getitem__)
    reproduction.reproduce("lines-of-thought", model="m")
    options = {"n": None, "separate": installed, "progress": True}
    assert works.seen.pop() == ("sarfati", ("model m", "one\ntwo"), options)
    asked: dict[str, Any] = {"corpus": works.files, "encoding": "latin-1", "contexts": 4}
    reproduction.reproduce("lines-of-thought", **asked, progress=False)
    options = {"n": 4, "separate": installed, "progress": False}
    assert works.seen.pop() == ("sarfati", ("model None", "\u00e9a\n\u00e9b"), options)


@pytest.mark.parametrize(
    ("contexts", "settings"),
    [
        (None, Settings(fresh=9)),
        (20, Settings(contexts=20, fresh=9)),
        (4, Settings(contexts=4, fresh=4)),
    ],
)
def test_song_zhong_is_given_files_row_and_settings(
    works: Any, contexts: int | None, settings: Settings
) -> None:
    """Fewer windows than the usual fresh ones make these fewer too."""
    files: dict[str, Any] = {"corpus": works.files[:1], "topics": works.files}
    options: dict[str, Any] = {"row": "BERT OWT", "progress": False, "contexts": contexts}
    reproduction.reproduce("song-zhong", model="m", **files, encoding="latin-1", **options)
    given = {"topics": ["\u00e9a", "\u00e9b"], "row": "BERT OWT", "settings": settings}
    wanted = ("view of model m", ["\u00e9a"]), given | {"progress": False}
    assert works.seen.pop() == ("song_zhong", *wanted)
    reproduction.reproduce("song-zhong", contexts=contexts)
    given = {"topics": None, "row": None, "settings": settings, "progress": True}
    assert works.seen.pop() == ("song_zhong", ("view of model None", None), given)


def test_options_that_a_work_does_not_take_are_refused(works: Any) -> None:
    """Each is named, with what came, before the model is loaded."""
    file, files = works.files[0], {"encoding": "latin-1"}
    for work, given, message in (
        ("traveling-words", {"corpus": [file]}, "--corpus, --contexts: expected none with trav"),
        ("traveling-words", {"contexts": 3}, "--corpus, --contexts: expected none with traveling"),
        ("traveling-words", {"row": "BERT OWT"}, "--row: expected none with traveling-words, got "),
        ("lines-of-thought", {"row": "BERT OWT"}, "--row: expected none with lines-of-thought, g"),
        ("lines-of-thought", {"topics": [file]}, "--topics: expected none with lines-of-thought"),
        ("song-zhong", {"row": "BERT"}, "--row: expected one of NanoGPT Shakespeare, GPT-2 OWT"),
        ("words", {}, "work: expected one of 'song-zhong', 'lines-of-thought', 'traveling-words'"),
    ):
        options: Any = given | files
        with pytest.raises(GeometryError) as refused:
            reproduction.reproduce(work, **options)
        assert str(refused.value).startswith(message)
    assert works.seen == []
    reproduction.reproduce("traveling-words", model="m")
    assert works.seen == [("molina", ("model m",), {})]


# --- cells and verdicts


@pytest.mark.parametrize(
    ("measure", "published_value", "deviation", "allowed"),
    [
        ("rank", 12.0, 2.0, 1.0),
        ("stable_rank", 1.5, None, 0.1),
        ("relative_norm", 0.5, 0.3, 0.05),
        ("inter", 0.3, 0.07, 0.07),
        ("incoherence", 0.3, None, 0.0),
    ],
)
def test_how_far_a_number_may_lie_from_the_published_one(
    measure: str, published_value: float, deviation: float | None, allowed: float
) -> None:
    """By the measure, else the published deviation over states."""
    found = published.tolerance(measure, published_value, deviation)
    assert found == pytest.approx(allowed)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((1.0, 1.5, 0.5, True), "agrees"),
        ((2.0, 1.5, 0.5, True), "agrees"),
        ((2.25, 1.5, 0.5, True), "differs"),
        ((0.75, 1.5, 0.5, True), "differs"),
        ((1.0, 1.5, 0.5, False), "another model"),
        ((1.0, 1.5, 0.5, False, "why"), "another model"),
        ((1.0, 1.5, 0.5, True, "why"), "doubtful: why"),
        ((1.0, math.nan, 0.5, False, "why"), "no published row"),
    ],
)
def test_a_verdict_at_the_end_of_its_tolerance(given: Any, said: str) -> None:
    """A number at the end of the range agrees; what cannot be compared is said first."""
    assert verdict(*given) == said


def cells(row: str | None, view: ModelView, measured: dict[str, Tensor]) -> list[Any]:
    """The cells of three states, without NaN, which equals nothing."""
    found = published._cells(measured, (0, 2, 5), row, view)
    return [tuple(None if isinstance(x, float) and x != x else x for x in cell) for cell in found]


MEASURED = {
    "rank": torch.tensor([9.0, 12.0, 15.0]).double(),
    "stable_rank": torch.tensor([1.0, 2.0, 3.0]).double(),
    "relative_norm": torch.tensor([0.5, 0.5, 0.5]).double(),
    "inter": torch.tensor([0.25, 0.25, 0.25]).double(),
}


def test_cells_beside_a_published_row() -> None:
    """Table 1 has mean and population deviation over states; Tables 3 to 5 have every state."""
    view = named("meta-llama/Llama-2-7b-hf")
    data, row = published.published_tables(), "Llama-2 GitHub"
    summary = data["notebook_similarity"].get(row, {}) | published.printed_rows()[row]
    found = {cell[:2]: cell[2:] for cell in cells(row, view, MEASURED)}
    order = [(f"table {n}", f"state {s}") for n in (3, 4, 5) for s in (0, 2, 5)]
    names = [x for m in ("rank", "relative_norm", "inter") for x in (m, f"{m} sd")]
    assert list(found) == [("table 1", name) for name in names] + order
    mean, deviation = summary["rank"]
    near = "agrees" if abs(12.0 - mean) <= 1 else "differs"
    assert found["table 1", "rank"] == (12.0, mean, 1.0, near)
    sd = found["table 1", "rank sd"]
    assert sd[0] == pytest.approx(6**0.5)
    assert sd[1:] == (deviation, None, "doubtful: Table 3 has a deviation of 1.07")
    assert found["table 1", "relative_norm sd"][3] == "not judged"
    norm = found["table 1", "relative_norm"]
    assert norm[2] == pytest.approx(0.1 * summary["relative_norm"][0])
    for number, table in ((3, "rank"), (4, "stable_rank"), (5, "relative_norm")):
        name = f"table_{number}_{table}"
        printed = data[name][row][:3]
        for state, value, theirs in zip((0, 2, 5), MEASURED[table].tolist(), printed, strict=True):
            allowed = {3: 1.0, 4: 0.1, 5: 0.1 * theirs}[number]
            cell = found[f"table {number}", f"state {state}"]
            assert cell[:2] == (value, theirs)
            assert cell[2] == pytest.approx(allowed)
            assert cell[3] == ("agrees" if abs(value - theirs) <= allowed else "differs")


def test_cells_of_no_row_of_another_model_and_in_doubt() -> None:
    """The verdict says why a cell is not compared."""
    view = named("bert-base-cased")
    alone = cells(None, view, MEASURED)
    assert {cell[5] for cell in alone} == {"no published row"}
    assert {cell[3] for cell in alone} == {None}
    other = {cell[:2]: cell[5] for cell in cells("BLOOM OWT", view, MEASURED)}
    assert other["table 1", "rank"] == other["table 3", "state 2"] == "another model"
    own = {cell[:2]: cell[5] for cell in cells("BERT OWT", view, MEASURED)}
    assert own["table 1", "rank"] == "doubtful: Table 3 averages to 12.46(2.76)"
    twin = {cell[:2]: cell[5] for cell in cells("BERT Wiki", view, MEASURED)}
    why = "doubtful: the published notebook has other values"
    assert twin["table 1", "inter"] == why


def test_published_cells_that_are_in_doubt() -> None:
    """Each with its reason, and no others."""
    same, notebook = (
        "all windows of a document were the same text",
        "the published notebook has other values",
    )
    wanted = {
        ("BERT OWT", "rank"): "Table 3 averages to 12.46(2.76)",
        ("BERT Wiki", "rank"): "Table 3 averages to 12.54(2.71)",
        ("Llama-2 Wiki", "relative_norm"): (
            "Table 5 averages to 0.073(0.023); Table 1 repeats the OWT value"
        ),
        ("Llama-2 GitHub", "rank sd"): "Table 3 has a deviation of 1.07",
    }
    wanted |= {(f"Llama-2 {text}", "intra"): same for text in ("OWT", "Wiki", "GitHub")}
    for row in ("BERT Wiki", "BLOOM OWT", "BLOOM Wiki"):
        wanted |= {(row, measure): notebook for measure in ("inter", "intra")}
    assert wanted == published.DOUBTS


# --- the run


@pytest.fixture
def run() -> Any:
    """The module with a stand-in for the measures; ``run.asked`` holds what they were given."""
    module: Any = copy_of(published)
    module.asked = []
    view = SimpleNamespace(
        n_ctx=100,
        n_layers=4,
        attending_left=lambda: nullcontext(module.asked.append("attending left")),
        with_final_norm=lambda: "after the final norm",
    )
    module.view = view
    module.as_view = lambda model: view
    module.loaded = lambda model: model
    module.settings_for = lambda view: Settings(seed=3)

    def measure(*given: Any) -> Any:
        module.asked.append(given)
        return {}, Provenance(flags=("earlier",))

    module._measure = measure
    module._cells = lambda measured, states, row, view: [(f"{states}", row, 0.0, 0.0, 0.0, "")]
    return module


def test_a_run_with_the_settings_of_the_model(run: Any) -> None:
    """Windows are as long as the model takes, and the flags say what differs."""
    found = run.song_zhong("model", "text", topics=["a"], row="BERT OWT", progress=False)
    used = Settings(seed=3, length=100, topic_length=100)
    options = {"batch_size": None, "progress": False}
    assert run.asked == [(run.view, "text", ["a"], used, options)]
    assert found.provenance.flags == (
        "earlier",
        *Settings().remarks(),
        "published row BERT OWT",
        "windows of 100 tokens, not 512",
        "windows of topics of 100 tokens, not 128",
    )
    assert (found.provenance.preset, found.row) == ("reference", "BERT OWT")
    assert found.settings == dataclasses.asdict(used)
    assert found.cells[0][:2] == ("(0, 1, 2, 3, 4)", "BERT OWT")


def test_a_run_with_settings_of_the_user(run: Any) -> None:
    """A causal mask and the final norm where they are asked for, and no flag of lengths that fit;
    the batch size and the bar are passed on."""
    used = dataclasses.replace(
        Settings().exact(), length=100, topic_length=100, causal=True, final_norm=True, states=3
    )
    found = run.song_zhong("model", "text", settings=used, batch_size=7)
    options = {"batch_size": 7, "progress": True}
    assert run.asked == [
        "attending left",
        ("after the final norm", "text", None, used, options),
    ]
    remarks = ("causal mask", "last state after the final norm")
    assert found.provenance.flags == ("earlier", *remarks)
    assert found.cells[0][0] == "(0, 2, 4)"


def test_without_a_corpus_the_longest_modules_are_the_topics(run: Any) -> None:
    """The four longest, the longest first, unless topics are given."""
    texts = ("aa", "a", "aaaa", "aaa", "aaaaa")
    documents = SimpleNamespace(texts=texts)
    run.zoo = SimpleNamespace(corpus=SimpleNamespace(held_out_documents=lambda: documents))
    run.song_zhong("model")
    run.song_zhong("model", topics=["own"])
    run.song_zhong("model", "text")
    given = [call[1:3] for call in run.asked]
    assert given == [
        (list(texts), ["aaaaa", "aaaa", "aaa", "aa"]),
        (list(texts), ["own"]),
        ("text", None),
    ]


def test_models_by_name_by_directory_and_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """``None`` is the embedded model."""
    monkeypatch.setattr(zoo, "embedded", lambda: "the embedded one")
    monkeypatch.setattr(zoo, "by_name", lambda name: ("by name", name))
    model = tiny("bridge", "gpt2")
    assert published.loaded(None) == "the embedded one"
    assert published.loaded("gpt2") == ("by name", "gpt2")
    assert published.loaded(Path("a")) == ("by name", Path("a"))
    assert published.loaded(model) is model


def test_windows_of_topics_carry_their_document() -> None:
    """Windows at even starts, in the order of the documents, each labelled with its number."""
    documents = [torch.arange(10), torch.arange(100, 105)]
    found = topics.topic_windows(documents, windows=2, length=4)
    assert found.tokens[:, 0].tolist() == [0, 6, 100, 101]
    assert found.labels is not None
    assert found.labels.tolist() == [0, 0, 1, 1]
    assert (found.names, found.corpus, found.has_bos) == (("0", "1"), "topics", False)
    assert topics.topic_windows([torch.arange(128)]).tokens.shape == (64, 128)
    with pytest.raises(GeometryError, match="documents: expected at least one document, got none"):
        topics.topic_windows([])
    with pytest.raises(GeometryError) as short:
        topics.topic_windows(documents, length=6)
    message = "documents: expected at least 6 tokens each, got 5 in one. Use longer documents"
    assert str(short.value).startswith(message)
