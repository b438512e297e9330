"""What belongs to the caller: tensors that are written into after a call, weights that change while
a pass runs, and files."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tl_geometry as tlg
from tl_geometry import GeometryError
from tl_geometry.interventions import edge, surrogate, term
from tl_geometry.interventions import heads as knockout

Tokens = tlg.TokenWindows


@pytest.fixture(scope="module")
def model() -> Any:
    return tlg.zoo.embedded()


@pytest.fixture(scope="module")
def windows(model: Any) -> Tokens:
    return tlg.zoo.default_windows(model, 12, n=10)


@pytest.fixture(scope="module")
def basis(model: Any, windows: Tokens) -> tlg.PositionContext:
    return tlg.decompose(model, windows, progress=False)


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that can be reached from a result, without the model."""
    if id(value) in seen or isinstance(value, nn.Module | type | str | bytes):
        return
    seen.add(id(value))
    inside: list[Any] = []
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, np.ndarray):
        yield torch.as_tensor(value)
    elif isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple | set):
        inside = list(value)
    elif inspect.isfunction(value):
        inside = [cell.cell_contents for cell in value.__closure__ or ()]
    elif type(value).__module__.startswith("tl_geometry"):
        inside = list(getattr(value, "__dict__", {}).values())
    for part in inside:
        yield from _tensors(part, seen)


def _changed_by(made: Callable[[], tuple[Any, list[Any]]]) -> int:
    """Tensors of a result that change when what it was made from is overwritten."""
    result, given = made()
    found = list(_tensors(result, set()))
    assert found
    before = [t.clone() for t in found]
    for value in given:
        value[...] = 1
    return sum(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, found))


def _results(
    model: Any, windows: Tokens, basis: tlg.PositionContext
) -> dict[str, Callable[[], tuple[Any, list[Any]]]]:
    """Calls that take tensors of the caller: result, and the tensors that it was given."""
    ids, prompt = windows.tokens, windows.tokens[:2]
    states = torch.randn(3, 8, 5, 4, generator=torch.Generator().manual_seed(0)).double()

    def call(make: Callable[..., Any], *given: Any) -> Callable[[], tuple[Any, list[Any]]]:
        def run() -> tuple[Any, list[Any]]:
            mine = [v.copy() if isinstance(v, np.ndarray) else v.clone() for v in given]
            return make(*mine), mine

        return run

    def split(rows: Tensor, first: Tensor, rest: Tensor) -> Any:
        return tlg.split_scores(model, rows, heads="L1H0", parts={"a": first, "b": rest})

    h = model.run_with_cache(prompt)[1]["blocks.1.hook_resid_pre"].detach()
    quiet: dict[str, Any] = {"progress": False}
    labels = torch.arange(len(ids)) // 2
    return {
        "windows": call(lambda t, n: Tokens(tokens=t, labels=n, has_bos=True), ids, labels),
        "decompose": call(lambda t, n: tlg.decompose(model, t, labels=n, **quiet), ids, labels),
        "activations": call(
            lambda t, n: tlg.decompose_activations(t, labels=n), states, torch.arange(8)
        ),
        "transform": call(lambda t: tlg.decompose_activations(states).transform(t), states),
        "trajectories": call(
            lambda t, n: tlg.trajectories(model, t, labels=n, **quiet), ids, labels
        ),
        "split of own parts": call(split, prompt, h * 0.25, h * 0.75),
        "split values": call(lambda t: tlg.split_values(model, t, basis, heads="L1H0"), prompt),
        "sweep": call(lambda t: tlg.sweep_heads(model, t, basis, **quiet), ids),
        "composition": call(lambda t: tlg.composition(model, t, **quiet), ids),
        "trace logit": call(lambda t: tlg.trace_logit(model, t, 5, position=3), prompt[:1]),
        "dictionary": call(
            lambda *given: tlg.circuits.dictionary(given, 1),
            torch.ones(2, 3, 4) / 2,
            torch.eye(4) / 2,
            torch.zeros(4),
        ),
    }


NAMES = ["windows", "decompose", "activations", "transform", "trajectories", "split of own parts"]
NAMES += ["split values", "sweep", "composition", "trace logit", "dictionary"]


@pytest.mark.parametrize("name", NAMES)
def test_results_do_not_change_with_what_they_were_made_from(
    name: str, model: Any, windows: Tokens, basis: tlg.PositionContext
) -> None:
    assert _changed_by(_results(model, windows, basis)[name]) == 0


def test_the_law_sees_a_result_that_holds_on_to_an_argument(windows: Tokens) -> None:
    first, second = windows.tokens.clone(), windows.tokens.clone()
    held = dataclasses.make_dataclass("Held", ["value"], namespace={"__module__": "tl_geometry"})
    assert _changed_by(lambda: (held(first), [first])) == 1
    assert _changed_by(lambda: ([lambda: second], [second])) == 1


Edits = Callable[[Any, Tensor, Tensor, list[Any], tlg.PositionContext], Any]
EDITS: dict[str, Edits] = {
    "term": lambda m, t, o, heads, b: term(m, b, "cvec-cvec", heads),
    "heads": lambda m, t, o, heads, b: knockout(m, heads, reference=o),
    "surrogate": lambda m, t, o, heads, b: surrogate(m, b, heads, part="none"),
    "edge": lambda m, t, o, heads, b: edge(m, t, "embed", heads),
    "swapped edge": lambda m, t, o, heads, b: edge(
        m, t, "embed", heads, how="swap", counterfactual=o
    ),
}
"""Edits of heads, made from tokens, other tokens and a list of heads."""


@torch.no_grad()
@pytest.mark.parametrize("name", list(EDITS))
def test_an_edit_is_of_what_was_given_when_it_was_made(
    name: str, model: Any, windows: Tokens, basis: tlg.PositionContext
) -> None:
    def edited(overwrite: bool) -> Tensor:
        first, other, heads = windows.tokens[:2].clone(), windows.tokens[2:4].clone(), ["L1H0"]
        edit = EDITS[name](model, first, other, heads, basis)
        if overwrite:
            first.zero_()
            other.zero_()
            heads.append("L1H1")
        with edit:
            return model(windows.tokens[:2])

    assert torch.equal(edited(overwrite=True), edited(overwrite=False))
    assert not torch.equal(edited(overwrite=False), model(windows.tokens[:2]))


def test_a_file_that_is_written_over_leaves_what_was_read(
    basis: tlg.PositionContext, tmp_path: Path
) -> None:
    path = basis.save(tmp_path / "basis.safetensors", full=True)
    loaded = tlg.PositionContext.load(path)
    with path.open("r+b") as handle:  # in place, as copying tools write
        handle.write(b"\0" * path.stat().st_size)
    names = [field.name for field in dataclasses.fields(basis)]
    before, after = ([*_tensors([vars(x)[n] for n in names], set())] for x in (basis, loaded))
    assert len(before) == len(after) > 3
    assert all(map(torch.equal, before, after))


def _while_training(model: Any, rows: Tensor) -> Iterator[Tensor]:
    """Batches, in the middle of which a weight changes."""
    for i, part in enumerate(rows.split(3)):
        if i == 2:
            with torch.no_grad():
                next(iter(model.parameters())).mul_(1.5)
        yield part


STREAMED: dict[str, Callable[[Any, Any, tlg.PositionContext], Any]] = {
    "decompose": lambda m, t, b: tlg.decompose(m, t, progress=False),
    "trajectories": lambda m, t, b: tlg.trajectories(m, t, progress=False),
    "sweep": lambda m, t, b: tlg.sweep_heads(m, t, b, progress=False),
    "writers": lambda m, t, b: tlg.sweep_heads(m, t, parts="writers", progress=False),
    "composition": lambda m, t, b: tlg.composition(m, t, progress=False),
}


@pytest.mark.parametrize("name", list(STREAMED))
def test_weights_that_change_during_a_pass_are_refused(
    name: str, windows: Tokens, basis: tlg.PositionContext
) -> None:
    own, call = tlg.zoo.embedded(), STREAMED[name]
    call(own, iter(windows.tokens.split(3)), basis)
    with pytest.raises(GeometryError, match="changed during the pass"):
        call(own, _while_training(own, windows.tokens), basis)
