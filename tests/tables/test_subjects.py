"""Every public function has a row in the subject table, and every row keeps the laws
(:mod:`tests.lib.subjects.laws`), each a test over all rows; a row says where one does not apply.

By day a law that calls again runs on one of two kinds, one that looks at an answer on both; the
night asks every law of every kind. What the tables share is computed once, in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.lib.models import HAS_HOOKED, tiny, tokens
from tests.lib.subjects import SUBJECTS, Subject, answered, called, laws
from tests.lib.subjects.guard import Guard
from tests.lib.subjects.row import match
from tests.lib.worlds import TINY, World, world
from tests.sizes import public_names
from tl_geometry import split_scores


def kinds(*daily: str, of: tuple[str, ...] = (*TINY, "embedded")) -> Any:
    """Parametrise by kinds of model, some of them every day. SmolLM2 has its records alone."""
    values = [*daily, *(pytest.param(k, marks=pytest.mark.nightly) for k in of if k not in daily)]
    return pytest.mark.parametrize("kind", values)


def rows(applies: Any = lambda subject: True) -> Any:
    """Parametrise by the rows that a law is about."""
    return pytest.mark.parametrize("name", [n for n, s in SUBJECTS.items() if applies(s)])


def variants(subject: Subject, here: World) -> list[str]:
    return [variant for variant in subject.variants if subject.exists(here, variant)]


def check(law: laws.Law, kind: str, name: str) -> None:
    """A law on every variant of a row."""
    subject, here = SUBJECTS[name], world(kind)
    for variant in variants(subject, here):
        if not subject.excused(law.__name__, f"{variant}/"):
            law(subject, variant, here, answered(kind, name, variant))


def _row(call: Any, **more: Any) -> Subject:
    """A row of no public function."""
    return Subject(**{"name": "row", "call": call, "answers": _states} | more)


def _states(found: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"states": found}


def _two_parts(found: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"states": found, "part one": 0.4 * found, "part two": 0.5 * found}


WITHOUT_ROW: dict[str, str] = {
    **dict.fromkeys(
        ("BudgetError", "GeometryError", "ReconstructionError", "UnsupportedModelError"),
        "errors: the table of refusals",
    ),
    **dict.fromkeys(
        (
            *("circuits", "corpus", "decomposition", "flow", "interventions", "measures"),
            *("models", "papers", "render", "report", "scores", "sphere", "weights", "zoo"),
        ),
        "a package",
    ),
    **dict.fromkeys(("Result", "Table"), "what all results are: their own laws"),
    "Prompts": "what rows are asked about: its own laws",
    "zoo.default_windows": "text of the running Python: a law compares it with windows",
    "plot": "pictures: the table of views",
    "from_hf": "every model of the tests is made by it",
}
"""Names that need no row in the subject table, and why."""


def test_every_public_function_has_a_row() -> None:
    """A row of ``tests/lib/subjects`` that ``covers`` it, or a reason in :data:`WITHOUT_ROW`."""
    covered = {name for subject in SUBJECTS.values() for name in subject.covered}
    have = {name.split(".")[-1] for name in (*covered, *WITHOUT_ROW)}
    assert public_names() ^ have == set()


def test_excuses_name_a_law_and_give_a_reason() -> None:
    for subject in SUBJECTS.values():
        for key, reason in {**subject.without, **subject.gauge}.items():
            assert len(reason.split()) >= 3, f"{subject.name} {key}"
        unknown = {key.partition(":")[0] for key in subject.without} - set(laws.LAWS)
        assert not unknown, f"{subject.name}: {unknown}"


@rows(lambda s: any(s.exists(world(k), v) for k in ("gpt2", "llama") for v in s.variants))
def test_patterns_of_a_row_match_something(name: str) -> None:
    """A pattern that matches nothing would excuse, loosen or check nothing, unnoticed."""
    subject, keys = SUBJECTS[name], []
    for kind in ("gpt2", "llama"):
        for variant in variants(subject, world(kind)):
            answers = answered(kind, name, variant)
            keys += [f"{variant}/{quantity}" for quantity in answers]
    patterns = [*subject.order, *subject.later, *subject.seeds, *subject.half, *subject.adds]
    patterns += [*subject.tolerance, *subject.gauge]
    patterns += [part for parts in subject.adds.values() for part in parts]
    for key in subject.without:
        law, _, pattern = key.partition(":")
        patterns += [pattern] if pattern and law not in ("disturbs", "faults", "seeds") else []
    unused = [p for p in patterns if not any(match({p: True}, key) for key in keys)]
    assert not unused, f"{name}: {unused}"


@rows()
@kinds("gpt2", "llama")
def test_nothing_is_disturbed(kind: str, name: str) -> None:
    for variant in variants(SUBJECTS[name], world(kind)):
        laws.disturbs(SUBJECTS[name], variant, called(kind, name, variant)[2])


@pytest.mark.parametrize("what", ["weight", "hook", "input", "generator", "gradients", "training"])
def test_what_is_disturbed_is_seen(what: str) -> None:
    here = world("gpt2")
    weight, undo = next(here.model.parameters()), lambda: None
    with Guard(here) as guard:
        if what == "weight":
            before = weight.data[0].clone()  # one more and one less would round
            weight.data[0] += 1
            undo = lambda: weight.data[0].copy_(before)
        elif what == "hook":
            undo = here.model.hook_dict["blocks.1.hook_out"].register_forward_hook(print).remove
        elif what == "input":
            here.ids[0, 0] += 1
            undo = lambda: here.ids[0, 0].sub_(1)
        elif what == "generator":
            torch.rand(1)
        elif what == "gradients":
            weight.requires_grad_(not weight.requires_grad)
            undo = lambda: weight.requires_grad_(not weight.requires_grad)
        else:
            here.model.train()
            undo = here.model.eval
    undo()
    assert guard.disturbed


@rows()
def test_no_quantity_is_empty(name: str) -> None:
    subject = SUBJECTS[name]
    for variant in subject.variants:
        there = [k for k in ("gpt2", "llama") if subject.exists(world(k), variant)]
        laws.empty(subject, variant, [answered(k, name, variant) for k in there])


@rows()
@kinds("gpt2")
def test_the_same_call_gives_the_same(kind: str, name: str) -> None:
    check(laws.again, kind, name)


@rows(lambda s: s.seeds)
@kinds("gpt2")
def test_another_seed_changes_what_is_drawn(kind: str, name: str) -> None:
    check(laws.seeds, kind, name)


@rows()
@kinds("llama")
def test_the_order_of_prompts_does_not_matter(kind: str, name: str) -> None:
    check(laws.order, kind, name)


@rows(lambda s: s.batches)
@kinds("llama")
def test_the_size_of_batches_does_not_matter(kind: str, name: str) -> None:
    check(laws.batches, kind, name)


@rows(lambda s: s.later)
@kinds("llama")
def test_later_tokens_do_not_matter(kind: str, name: str) -> None:
    check(laws.later, kind, name)


@rows()
@kinds("gpt2")
def test_loadings_agree(kind: str, name: str) -> None:
    check(laws.loaded, kind, name)


ALIBI = pytest.mark.xfail(
    HAS_HOOKED, strict=True, reason="HookedTransformer shifts the rows of ALiBi after a longer pass"
)


@pytest.mark.parametrize(
    ("kind", "model_class"),
    [
        *(pytest.param(kind, "bridge", id=f"{kind} bridge") for kind in TINY),
        *(pytest.param(k, "hooked", id=f"{k} hooked") for k in TINY if k != "bloom"),
        pytest.param("bloom", "hooked", id="bloom hooked", marks=ALIBI),
    ],
)
def test_a_longer_pass_does_not_matter(kind: str, model_class: str) -> None:
    if model_class == "hooked" and not HAS_HOOKED:
        pytest.skip("TransformerLens 4 has no HookedTransformer")
    model = tiny(model_class, kind)
    split = lambda: split_scores(model, tokens(2, 8), parts="blocks").pattern()
    before = split()
    model(tokens(2, 30))
    assert torch.equal(split(), before)


@pytest.mark.nightly
@rows()
@kinds()
def test_classes_agree(kind: str, name: str) -> None:
    check(laws.classes, kind, name)


@rows()
@kinds("gpt2", of=TINY)
def test_half_precision_is_near_or_refused(kind: str, name: str) -> None:
    check(laws.half, kind, name)


@rows(lambda s: "how" in s.takes)
@kinds("llama")
def test_an_edit_as_a_list_equals_the_edit_inside_with(kind: str, name: str) -> None:
    check(laws.lists, kind, name)


@rows(lambda s: s.adds)
@kinds("gpt2", "llama")
def test_parts_sum_to_the_whole(kind: str, name: str) -> None:
    check(laws.adds, kind, name)


@rows(lambda s: s.faults)
@kinds("llama")
def test_a_planted_fault_is_refused(kind: str, name: str) -> None:
    check(laws.faults, kind, name)


@rows(lambda s: s.reference)
@kinds("gpt2", "llama", of=TINY)
def test_answers_are_those_of_the_reference(kind: str, name: str) -> None:
    check(laws.reference, kind, name)


def _stream(w: World, **_: Any) -> torch.Tensor:
    return w.stream()[1]


def _counted(w: World, calls: list[None] = []) -> torch.Tensor:  # noqa: B006 (it is meant to stay)
    calls.append(None)
    return w.stream()[1] + len(calls)


def _listed(w: World, how: str = "with") -> torch.Tensor:
    return w.stream()[-1] + (how == "list")


BROKEN: dict[str, Subject] = {
    "again": _row(_counted),
    "seeds": _row(_stream, seeds=("states",)),
    "order": _row(lambda w: w.stream()[1]),
    "batches": _row(lambda w, batch_size=2: w.stream()[1] * batch_size, batches=(1,)),
    "later": _row(lambda w: w.stream()[1] - w.stream()[1].mean(1, True), later={"states": 1}),
    "loaded": _row(_stream),
    "classes": _row(lambda w: w.stream()[1] + (type(w.model).__name__[0] == "T")),
    "half": _row(lambda w: w.stream()[1] * w.stream().dtype.itemsize, half=("states",)),
    "lists": _row(_listed),
    "adds": _row(_stream, adds={"states": ("part *",)}, answers=_two_parts),
    "faults": _row(_stream, faults=("q",)),
    "reference": _row(_stream, reference=lambda w, variant, a: {"states": 1.001 * a["states"]}),
}


@pytest.mark.parametrize("law", BROKEN)
def test_a_broken_row_is_noticed(law: str) -> None:
    if law == "classes" and not HAS_HOOKED:
        pytest.skip("TransformerLens 4 has no HookedTransformer")
    here, subject = world("gpt2"), BROKEN[law]
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(laws, law)(subject, "plain", here, subject.answer(here, "plain"))


def test_every_law_has_a_broken_row() -> None:
    assert set(laws.LAWS) - set(BROKEN) == {"disturbs", "empty"}  # they have tests of their own


def test_an_empty_answer_is_noticed() -> None:
    subject, some = _row(_stream), np.ones(3)
    laws.empty(subject, "plain", [{"a": some}, {"a": 0 * some}])
    for empty in ([{"a": 0 * some}, {"a": 0 * some}], [{"a": some}, {"a": some * np.nan}]):
        with pytest.raises(AssertionError):
            laws.empty(subject, "plain", empty)
