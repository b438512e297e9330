"""Marks where a head's knockout is not what it writes: they stand at the right heads, with the
numbers of the table, in words and not by colour alone; and every table of attributions takes the
same columns."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.browser import FITS, Browser, payload
from tl_geometry import render
from tl_geometry.base.checks import head_name
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Result
from tl_geometry.circuits.logits import LogitExplanation
from tl_geometry.interventions import AttributionTable, HeadKnockouts, beside_knockouts
from tl_geometry.render.writers import knockout_marks, logit_figure

PAIR = (5, 9)
WORDS = re.compile(r"writes (−?[\d.]+), removing it (costs|adds) ([\d.]+)(?: ± ([\d.]+))?")


@cache
def measured(prompts: int = 12) -> HeadKnockouts:
    model = tlg.zoo.embedded()
    windows = tlg.zoo.default_windows(model, 16, n=prompts)
    options: dict[str, Any] = {"controls": 0, "attributions": True, "progress": False}
    return tlg.interventions.head_knockouts(model, windows, targets=[PAIR] * prompts, **options)


@cache
def explained() -> LogitExplanation:
    model = tlg.zoo.embedded()
    return tlg.explain_logit(model, tlg.zoo.default_windows(model, 16, n=1), -1, PAIR, top=4)


def planted(direct: dict[tuple[int, int], float], effect: dict[tuple[int, int], float]) -> Any:
    """Knockouts with these numbers for some heads, 0 for the others, ± 0.01 in turns."""
    table, around = measured(), torch.tensor([0.01, -0.01] * 6).double()
    rows: list[Tensor] = []
    for values in (direct, effect):
        means = torch.tensor([values.get(of[0], 0.0) for of in table.sets]).double()
        rows.append(means[:, None] + around)
    return dataclasses.replace(table, direct=rows[0], effects=rows[1])


def shown_heads() -> list[tuple[int, int]]:
    return list(dict.fromkeys(pair[:2] for pair in explained().pairs))


def hidden_head() -> tuple[int, int]:
    return next(of[0] for of in measured().sets if of[0] not in shown_heads())


def check_words(data: dict[str, Any], table: HeadKnockouts) -> None:
    """Sentences and marks of a page say what the table does."""
    assert table.direct is not None
    assert table.disagrees is not None
    rows = {table.conditions[i]: i for i in range(len(table.conditions))}
    cards = [[h["name"], h["removed"], h["differs"]] for h in data["queries"][0]["heads"]]
    unseen = [[*entry, True] for entry in data["queries"][0]["unseen"]]
    for name, words, differs in cards + unseen:
        row, match = rows[name], WORDS.fullmatch(words)
        assert match, words
        assert float(match[1].replace("−", "-")) == pytest.approx(
            float(table.direct[row].mean()), abs=0.00501
        )
        effect = float(match[3]) * (1 if match[2] == "adds" else -1)
        assert effect == pytest.approx(float(table.effects[row].mean()), abs=0.00501)
        reach = float(table.effects[row].std()) * 2.200985 / 12**0.5  # t with 11 degrees of freedom
        assert float(match[4]) == pytest.approx(reach, abs=0.00501)
        assert differs == bool(table.disagrees[row])
    assert {name for name, _, differs in cards + unseen if differs} == {
        name for name, row in rows.items() if bool(table.disagrees[row])
    }


def test_marks_and_words_are_those_of_the_table() -> None:
    table = measured()
    data = payload(render.logit_page(explained(), knockouts=table))
    check_words(data, table)
    assert "≠" in data["legend"]
    assert "12 prompts" in data["legend"]
    assert table.direct is not None
    for wrong in (
        dataclasses.replace(table, effects=-table.effects),
        dataclasses.replace(table, direct=table.direct + 1),
        dataclasses.replace(table, direct=-table.effects),  # then none disagrees
    ):
        with pytest.raises(AssertionError):
            check_words(data, wrong)


def test_planted_heads_are_marked_and_listed() -> None:
    first, second, hidden = *shown_heads()[:2], hidden_head()
    table = planted({first: 0.9, second: 1.2}, {first: -0.1, second: -1.2, hidden: -0.7})
    query = payload(render.logit_page(explained(), knockouts=table))["queries"][0]
    differs = {h["name"]: h["differs"] for h in query["heads"]}
    assert (differs[head_name(first)], differs[head_name(second)]) == (True, False)
    assert query["heads"][0]["removed"] == "writes 0.90, removing it costs 0.10 ± 0.01"
    assert query["unseen"] == [[head_name(hidden), "writes 0.00, removing it costs 0.70 ± 0.01"]]
    labels = knockout_marks(explained(), table).disagreeing
    assert set(labels) == {first, hidden}
    figure = render.logit_page(explained(), knockouts=table).image().figure
    ticks = [t.get_text() for t in figure.axes[1].get_yticklabels()]
    assert {t.split()[1] for t in ticks if t.startswith("≠")} == {head_name(first)}
    told = figure.axes[1].get_xlabel().replace("\n", " ")
    assert "≠ marks heads" in told
    assert f"≠ {head_name(hidden)} writes 0.00, removing it costs 0.70 ± 0.01" in told
    plain = render.logit_page(explained())
    assert "≠" not in plain.page.split('id="data">')[1].split("</script>")[0]
    assert "≠" not in plain.image().figure.axes[1].get_xlabel()


def test_the_largest_effects_of_knockouts_are_told_first_and_at_most_four() -> None:
    hidden = [of[0] for of in measured().sets if of[0] not in shown_heads()][:6]
    sizes = (0.5, -0.9, 0.6, -0.7, 0.8, 0.4)
    effects = dict(zip(hidden, sizes, strict=True))
    figure = logit_figure(explained(), knockout_marks(explained(), planted({}, effects)))
    told = re.findall(r"≠ (L\d+H\d+) writes", figure.figure.axes[1].get_xlabel())
    assert told == [head_name(hidden[i]) for i in (1, 4, 3, 2)]


def test_few_prompts_have_no_interval_and_no_mark() -> None:
    few = measured(4)
    data = payload(render.logit_page(explained(), knockouts=few))
    assert not any(h["differs"] for h in data["queries"][0]["heads"])
    assert "±" not in data["queries"][0]["heads"][0]["removed"]
    assert "Below 10 prompts" in data["legend"]


TABLES = {
    "explain_logit": lambda model, prompts: explained(),
    "explain_logits": lambda model, prompts: tlg.circuits.explain_logits(
        model, prompts, [PAIR] * len(prompts)
    ),
    "trace_logit": lambda model, prompts: tlg.trace_logit(model, prompts[:1], 5, against=9),
    "average_graphs": lambda model, prompts: tlg.circuits.average_graphs(
        [tlg.trace_logit(model, prompts[i : i + 1], 5, against=9, keep=0.3) for i in range(2)]
    ),
    "node scores": lambda model, prompts: tlg.edge_scores(
        model, prompts[:4], prompts[4:8], targets=[PAIR] * 4
    ).nodes(),
}


@pytest.mark.parametrize("name", list(TABLES))
def test_every_table_of_heads_takes_the_columns(name: str, tmp_path: Path) -> None:
    model = tlg.zoo.embedded()
    table: Result = TABLES[name](model, tlg.zoo.default_windows(model, 16, n=12))
    knockouts = measured()
    found = beside_knockouts(table, knockouts)
    assert found.columns()[-5:] == ("effect", "effect_low", "effect_high", "direct", "disagrees")
    before, frame = table.to_dataframe(), found.to_dataframe()
    assert frame.iloc[:, :-5].equals(before)
    effects = dict(zip(knockouts.conditions, knockouts.effect.value.tolist(), strict=True))
    writers: list[str] = frame["writer"].tolist()
    heads = [w in effects for w in writers]
    columns = zip(writers, frame["effect"].tolist(), frame["disagrees"].tolist(), strict=True)
    assert 0 < sum(heads) < len(heads)
    for writer, effect, disagrees in columns:
        assert effect == effects[writer] if writer in effects else effect != effect
        assert writer in effects or not disagrees
    again = AttributionTable.load(found.save(tmp_path / "table"))
    assert again.to_dataframe().equals(frame)


def test_what_does_not_belong_together_is_refused() -> None:
    knockouts, found = measured(), explained()
    other = dataclasses.replace(
        knockouts, provenance=dataclasses.replace(knockouts.provenance, fingerprint="f")
    )
    bare = dataclasses.replace(knockouts, direct=None)
    for wrong, text in [
        (other, "with the same weights"),
        (bare, "Use head_knockouts.*attributions=True"),
    ]:
        with pytest.raises(GeometryError, match=text):
            render.logit_page(found, knockouts=wrong)
    for table, wrong, text in [
        (found, other, "with the same weights"),
        (knockouts, knockouts, "a column 'writer'"),
    ]:
        with pytest.raises(GeometryError, match=text):
            beside_knockouts(table, wrong)
    assert "direct" not in beside_knockouts(found, bare).columns()


MARKED = """[...document.querySelectorAll('.card')].filter(c => c.querySelector('.differs')).map(
  c => [c.getAttribute('aria-label'), c.querySelector('.differs').textContent,
        c.querySelector('.differs').title, c.querySelector('.removed').textContent])"""


@pytest.mark.slow
def test_a_mark_is_text_with_its_numbers(browser: Browser) -> None:
    first, second, hidden = *shown_heads()[:2], hidden_head()
    table = planted({first: 0.9, second: 1.2}, {first: -0.1, second: -1.2, hidden: -0.7})
    page_text = render.logit_page(explained(), knockouts=table).page
    with browser.open(page_text, width=400) as page:
        page.wait("document.body.dataset.drawn")
        marked = {name: rest for name, *rest in page.evaluate(MARKED)}
        words = "writes 0.90, removing it costs 0.10 ± 0.01"
        assert marked.pop(head_name(first)) == ["≠", words, f"in general it {words}"]
        (rest,) = marked.values()
        assert rest[2] == f"≠{head_name(hidden)} writes 0.00, removing it costs 0.70 ± 0.01"
        assert "≠ marks heads" in page.evaluate("document.body.innerText")
        assert page.evaluate(FITS)
        page.assert_harmless()
    with browser.open(render.logit_page(explained()).page) as page:
        page.wait("document.body.dataset.drawn")
        assert page.evaluate(MARKED) == []
