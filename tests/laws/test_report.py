"""The report: what it finds is what the functions find, beside a null; what destroys a finding
takes it away; tables of the same model and corpus are read; what cannot be computed is a card."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import tl_geometry as tlg
from tl_geometry.report import build
from tl_geometry.report.analysis import Analysis
from tl_geometry.report.findings import Ask, Finding
from tl_geometry.report.folder import SECTIONS as KEYS
from tl_geometry.report.items import GROUPS, SECTIONS, words

HOSTILE = "<img src=x onerror=window.planted=1>\u202e.txt"
Made = tuple[Path, list[str], dict[str, Any]]
"""The folder of a report of the embedded model, what was said, and the record."""
ASK = Ask(
    value="x", nulls=("n",), shown="{x}", yes="{x} of {row}.", no="No evidence.", beside="{n}"
)


@pytest.fixture(scope="session")
def model() -> Any:
    return tlg.zoo.embedded()


@pytest.fixture(scope="session")
def windows() -> tlg.TokenWindows:
    """Windows of a corpus with a hostile name."""
    rows = tlg.zoo.default_windows(tlg.zoo.embedded(), 48, n=160)
    return dataclasses.replace(rows, corpus=HOSTILE)


@pytest.fixture(scope="session")
def made(model: Any, windows: tlg.TokenWindows, tmp_path_factory: pytest.TempPathFactory) -> Made:
    out, said = tmp_path_factory.mktemp("report") / "made", list[str]()
    record = build(model, windows, out, say=said.append, command=["tl-geometry", "report"])
    return out, said, record


def page_of(out: Path) -> str:
    return (out / "report.html").read_text(encoding="utf-8")


def findings(out: Path) -> list[str]:
    """The sentences of the findings, with what stands beside them, in the order of the page."""
    found = re.findall(r'<div class="find.*?</div></div>', page_of(out), re.DOTALL)
    return [unescape(re.sub("<[^>]+>", " ", text)) for text in found]


@pytest.mark.slow
def test_every_section_is_made_and_every_question_answered(made: Made) -> None:
    out, said, record = made
    assert record["failed"] == {}
    assert record["finished"]
    assert 'class="absent' not in page_of(out)
    assert [re.fullmatch(r".*: about \d+ s", line) is not None for line in said] == [True] * 5
    assert tuple(section.key for section in SECTIONS) == KEYS
    items = [item for section in SECTIONS for item in section.items]
    assert {item.key for item in items} == set(words()) - {"names"}
    assert len(findings(out)) == sum(len(item.asks) for item in items)
    names = set(re.findall("<th[^>]*>([^<(]*[^<( ])", page_of(out)))
    assert not {f"{n} {end}" for n in names for end in ("low", "high", "se")} & names, "bounds"
    for item in items:
        table = pd.read_csv(out / f"{item.key}.csv")
        assert set(item.words["columns"]) <= set(table.columns), item.key
        answers = [ask.answer(table, item.key) for ask in item.asks]
        assert None not in answers, item.key
        for ask in item.asks:
            fields = {**table.iloc[0], "low": 0.0, "high": 1.0, "among": 1, "more": "more"}
            assert ask.yes.format(**fields) != ask.no.format(**fields)


@pytest.mark.slow
def test_the_head_that_does_most_is_the_one_whose_removal_costs_most_by_hand(
    made: Made, model: Any, windows: tlg.TokenWindows
) -> None:
    """Each z replaced by its mean over the prompts, in the model's own hooks."""
    ids, costs = windows.tokens[-32:][:12], {}
    clean = model(ids, return_type="loss")
    for layer in range(4):
        for head in range(4):

            def mean(z: torch.Tensor, hook: Any, head: int = head) -> torch.Tensor:
                z = z.clone()
                z[:, :, head] = z[:, :, head].mean(0, keepdim=True)
                return z

            hooks = [(f"blocks.{layer}.attn.hook_z", mean)]
            with torch.no_grad():
                loss = model.run_with_hooks(ids, return_type="loss", fwd_hooks=hooks)
            costs[f"L{layer}H{head}"] = float((loss - clean).detach())
    table = pd.read_csv(made[0] / "removal.csv").set_index("edit")["change"]
    assert table.to_dict() == pytest.approx(costs, abs=1e-3)
    assert max(costs, key=lambda name: costs[name]) in findings(made[0])[0]


@pytest.mark.slow
def test_tables_hold_what_their_questions_need(
    made: Made, model: Any, windows: tlg.TokenWindows
) -> None:
    of = lambda key: pd.read_csv(made[0] / f"{key}.csv")
    removal, heads, skips = of("removal"), of("heads").set_index("name"), of("skips")
    others = (removal.change.sum() - removal.change) / (len(removal) - 1)
    assert np.allclose(removal.others, others)
    assert np.allclose(removal.excess, removal.change - others)
    assert set(removal.samples) == set(of("terms").samples) == {12}
    assert set(removal.of) == {len(heads)} == {16}
    assert set(of("terms")["head"]) == {removal.edit[removal.change.idxmax()]}
    shares = heads[[f"cs_{group}_corrected" for group in ("position", "token", "mixed")]]
    assert np.allclose(heads.rival, shares.max(axis=1))
    for group in ("position", "content"):
        agree = (heads.group_by_cs == group) & (heads.group_by_gs == group)
        assert list(heads[f"{group}_first"]) == list(agree.astype(float))
    looks = heads[["previous", "induction", "same", "duplicate"]].max(axis=1)
    for name, why in zip(removal.edit, removal.why, strict=True):
        assert ("repeated random tokens" in why) == (looks[name] > 0.3), why
        assert ("No group" in why) == (heads.dominant_group[name] not in GROUPS), why
    forgotten = skips[skips.map_type == "mean"].set_index(["from_layer", "to_layer"])
    for _, row in skips.iterrows():
        null = forgotten.loc[(row.from_layer, row.to_layer)]
        assert row.saved == pytest.approx(null.kl - row.kl)
        assert row.saved_se == pytest.approx(np.hypot(row.kl_se, null.kl_se))
        single = row.to_layer - row.from_layer == 1 and row.map_type != "mean"
        assert (row.single, row.samples) == (single, row.test)
    curve, massive = of("truncation"), of("massive")
    assert (curve.few == ((curve.K <= 64) & curve.claimed)).all()
    assert np.allclose(curve.allowed, curve.baseline_mean / 10)
    assert np.allclose(massive.ratio, massive.norm / massive.rms)
    assert (massive.groupby("state").norm.count() == 3).all()
    assert list(of("ensembles").ensemble) == ["text", "gibberish", "random weights"]
    plain, variance = dataclasses.replace(windows[:48], labels=None), of("variance")
    with tlg.models.reinitialized(model, seed=0) as control:
        untrained = tlg.decompose(control, plain, progress=False).anova().to_dataframe()
    assert np.allclose(variance.pos_untrained, untrained.pos_corrected, rtol=1e-4)
    assert set(variance.samples) == {8}


def test_a_report_is_unfinished_until_it_is_and_read_where_it_is_the_same(
    model: Any, tmp_path: Path
) -> None:
    rows, seen = tlg.zoo.default_windows(model, 16, n=12), list[Any]()
    record = lambda: json.loads((tmp_path / "report.json").read_text())
    look = lambda line: seen.append((record()["finished"], line))
    make = lambda **o: build(model, rows, tmp_path, sections=["overview"], **o)
    first = make(say=look, command=["a", "b"])
    assert [done for done, _ in seen] == [False]
    assert record() == first
    assert (first["finished"], first["command"], first["seed"]) == (True, ["a", "b"], 0)
    table = tmp_path / "overview.csv"
    facts = lambda: dict(pd.read_csv(table).to_numpy().tolist())
    assert (facts()["seed"], facts()["first token"]) == ("0", "BOS")
    assert facts()["kept from the basis"].startswith("6 windows")
    changed = table.read_text().replace("BOS", "mine")
    for options, kept in (({}, True), ({"fresh": True}, False)):
        table.write_text(changed)
        assert make(**options)["hash"] == first["hash"]
        assert ("mine" in table.read_text()) == kept
    other = make(seed=1, force=True)["hash"]
    assert facts()["seed"] == "1"
    model.add_hook("blocks.0.hook_resid_pre", lambda x, hook: x)
    hooked = make(seed=1, force=True)["hash"]
    model.reset_hooks()
    rows = dataclasses.replace(rows, labels=torch.arange(12))
    assert len({first["hash"], other, hooked, make(seed=1, force=True)["hash"]}) == 4


@pytest.mark.parametrize("key", ["position", "context"])
def test_nulls_are_drawn_by_the_seed(key: str, model: Any, windows: tlg.TokenWindows) -> None:
    item = next(item for section in SECTIONS for item in section.items if item.key == key)
    a, b = (
        item.compute(Analysis(model=model, windows=windows[:16], seed=seed)).df for seed in (0, 1)
    )
    assert not a.equals(b)
    assert a.filter(regex="^[a-z]+$").equals(b.filter(regex="^[a-z]+$"))  # the measures themselves


@pytest.mark.slow
def test_the_page_is_escaped_and_asks_for_nothing(made: Made) -> None:
    html = page_of(made[0])
    assert "<img src=x" not in html
    assert "&lt;img src=x onerror" in html
    assert "\u202e" not in html
    assert "<script" not in re.sub(r'srcdoc="[^"]*"', "", html)
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", html)
    policy = html.partition('content="')[2].partition('"')[0]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2]


@pytest.mark.slow
def test_tables_of_the_same_model_and_corpus_are_read(
    made: Made,
    model: Any,
    windows: tlg.TokenWindows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, said = tmp_path / "again", list[str]()
    shutil.copytree(made[0], out)
    asked: dict[str, Any] = {"sections": ["heads", "weights"], "say": said.append}
    (out / "weights_qk.csv").unlink()  # what a stopped report has not made

    def refuse(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("computed again")

    monkeypatch.setattr(sys.modules["tl_geometry.report.analysis"], "sweep_heads", refuse)
    record = build(model, windows, out, **asked)
    assert record["failed"] == {}
    assert said[0].endswith(": read")
    assert re.search(r"about \d+ s", said[1])
    assert findings(out)[0] == findings(made[0])[0]
    assert (out / "weights_qk.csv").read_bytes() == (made[0] / "weights_qk.csv").read_bytes()
    failed = build(model, windows, out, fresh=True, sections=["heads"])["failed"]
    assert any("computed again" in why for why in failed.values())
    with pytest.raises(tlg.GeometryError, match="another model, corpus or version"):
        build(model, windows[:100], out, sections=["heads"])
    forced = build(model, windows[:100], out, force=True, sections=["heads"])["failed"]
    assert any("computed again" in why for why in forced.values())


def test_a_folder_of_other_things_is_refused_and_forced(model: Any, tmp_path: Path) -> None:
    rows = tlg.zoo.default_windows(model, 16, n=12)
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("overview", "heads"):
        (tmp_path / f"{name}.csv").write_text("mine")
    with pytest.raises(tlg.GeometryError, match="--force"):
        build(model, rows, tmp_path, sections=["overview"])
    assert {path.read_text() for path in tmp_path.iterdir()} == {"mine"}
    build(model, rows, tmp_path, sections=["overview"], force=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "heads.csv").read_text() == "mine"
    assert (tmp_path / "overview.csv").read_text().startswith('"property","value"')
    for text in ("{", "[]", '{"written_by": "me"}', "[" * 100_000):
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(tlg.GeometryError, match="--force"):
            build(model, rows, tmp_path, sections=["overview"])
    with pytest.raises(tlg.GeometryError, match="windows: expected 2 or more"):
        build(model, rows[:1], tmp_path / "new")
    with pytest.raises(tlg.GeometryError, match="some of heads, states"):
        build(model, rows, tmp_path / "new", sections=["bodies"])


def test_what_cannot_be_computed_is_a_card(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few windows are a refusal; an unexpected error has its traceback; the rest stays."""
    rows = tlg.zoo.default_windows(model, 16, n=12)

    def crash(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted <b>crash</b>")

    monkeypatch.setattr(tlg.weights, "weight_geometry", crash)
    record = build(model, rows, tmp_path, sections=["heads", "weights", "overview"])
    html = page_of(tmp_path)
    assert list(record["failed"]) == ["W_QK in the positional directions"]
    assert "planted &lt;b&gt;crash" in html
    assert "<b>crash" not in html
    assert "<summary>Traceback</summary>" in html
    assert re.search(r"What drives each head</b> is missing: .*at least 32 windows", html)
    assert "it needs the table heads.csv" in html
    assert (tmp_path / "readout_ov.csv").exists()
    assert not (tmp_path / "heads.csv").exists()
    assert json.loads((tmp_path / "report.json").read_text())["failed"] == record["failed"]


def tables(shift: float, count: int, seed: int = 0) -> Iterator[pd.DataFrame]:
    """Means of 8 normal samples in each of 16 rows; the first row lies ``shift`` above its null."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        samples = generator.normal(size=(16, 8))
        samples[0] += shift
        error = samples.std(1, ddof=1) / np.sqrt(8)
        columns = {"row": range(16), "x": samples.mean(1), "x_se": error, "n": 0.0, "samples": 8}
        yield pd.DataFrame(columns)


def answered(table: pd.DataFrame, ask: Ask = ASK) -> Finding:
    finding = ask.answer(table)
    assert finding is not None
    return finding


def test_a_table_without_an_effect_gives_no_finding() -> None:
    claims = [answered(table).clear for table in tables(0.0, 300)]
    # 5% of them at most, and two standard errors of 300 tables
    assert np.mean(claims) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 300)
    real = [answered(table) for table in tables(6.0, 50)]
    assert np.mean([found.clear for found in real]) > 0.9


def test_what_a_question_asks_for_decides() -> None:
    table = pd.DataFrame(
        {"row": [0, 1], "x": [0.5, 0.1], "x_se": 0.01, "n": 0.2, "samples": 8, "draws": 8}
    )
    assert answered(table).said == "0.5 of 0."
    below = Ask(**{**vars(ASK), "side": -1})
    assert answered(table, below).said == "0.1 of 1."
    assert answered(table.head(1), below).said == "No evidence."
    both = table.assign(x=[0.3, 0.5])
    assert answered(both).said == "0.5 of 1."
    assert answered(both, Ask(**{**vars(ASK), "least": "row"})).said == "0.3 of 0."
    # a clear row is not hidden by a further one that is noisy
    found = answered(table.assign(x=[0.8, 0.5], x_se=[0.4, 0.01]))
    assert (found.said, found.beside) == ("0.5 of 1.", "0.2; more extreme, but not clear: 1")
    near = table.assign(x=[0.5, 0.2], x_se=0.115)  # 2.6 errors: enough for one row, not for two
    assert answered(near.head(1)).clear
    assert answered(near).beside == "0.2; clear alone, but not as one of 2"
    between = Ask(**{**vars(ASK), "beside": "95% interval {low} to {high}"})
    assert answered(table.head(1), between).beside == "95% interval 0.476 to 0.524"
    assert answered(table.drop(columns="x_se"), between).beside == "no interval"
    # a wide null, too few samples, no interval, a large p and no evidence each take it away
    assert not answered(table.assign(n_sd=0.2)).clear
    assert answered(table.assign(n_sd=0.001)).clear
    assert not answered(table.assign(x_se=0.2)).clear
    assert not answered(table.assign(samples=2, x_se=0.02)).clear
    assert answered(table.assign(samples=8, x_se=0.02)).clear
    assert not answered(table.drop(columns="x_se")).clear
    for column in ("p", "evidence"):
        asked = Ask(**{**vars(ASK), column: "y"})
        assert answered(table.assign(y=[0.01, 0.9] if column == "p" else [0.9, 0.1]), asked).clear
        assert not answered(table.assign(y=[0.9, 0.9] if column == "p" else 0.1), asked).clear
    assert ASK.answer(table.drop(columns="n")) is None
    assert ASK.answer(table.assign(x=np.nan)) is None


@contextmanager
def positions_in_an_order_of_each_window(model: Any) -> Iterator[None]:
    """Each window adds its positional embeddings in a random order, that of its tokens."""
    running: list[torch.Tensor] = []
    noted = model.register_forward_pre_hook(lambda module, args: running.append(args[0]))

    def shuffled(embedded: torch.Tensor, hook: Any) -> torch.Tensor:
        rows = []
        for ids in running[-1]:
            generator = torch.Generator().manual_seed(int(ids.sum()))
            order = 1 + torch.randperm(len(ids) - 1, generator=generator)
            rows.append(torch.cat([torch.tensor([0]), order]))
        places = torch.stack(rows)[..., None].expand(-1, -1, embedded.shape[-1])
        return embedded.expand(len(rows), -1, -1).gather(1, places)

    try:
        with model.hooks(fwd_hooks=[("pos_embed.hook_out", shuffled)]):
            yield
    finally:
        noted.remove()


@pytest.mark.slow
@pytest.mark.nightly
def test_position_drives_no_head_where_windows_do_not_agree_on_it(
    made: Made, model: Any, windows: tlg.TokenWindows, tmp_path: Path
) -> None:
    assert any("Position drives L0H0:" in text for text in findings(made[0]))
    with positions_in_an_order_of_each_window(model):
        build(model, windows, tmp_path, sections=["heads", "weights"])
    said = findings(tmp_path)
    assert any("No evidence that position drives a head" in text for text in said)
    assert any("No evidence that W_QK reads position" in text for text in said)
