"""Buffers, bases and files that belong to the caller."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import tl_geometry as tlg
from tests.bad_inputs.cases import PATH, Call, Command, World, loader, same_pos
from tl_geometry.render.figure import View
from tl_geometry.render.page import PageView

WRITABLE = "a file that can be written"
LONG = "a" * 300


# --- One door for every basis -----------------------------------------------------------------


def doors() -> Iterator[tuple[str, Any, str]]:
    """Public functions with a parameter that is a basis, by its annotation: name and parameter,
    function, parameter."""
    packages = [tlg.interventions, tlg.measures, tlg.render, tlg.papers, tlg.scores, tlg.circuits]
    found: dict[Any, str] = {}
    for package in (tlg, *packages, tlg.sphere, tlg.weights):
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isfunction(value):
                found[value] = f"{package.__name__}.{name}"
    for function, name in found.items():
        for parameter in inspect.signature(function).parameters.values():
            if "PositionContext" in str(parameter.annotation):
                yield f"{name}:{parameter.name}", function, parameter.name


def knock(world: World, function: Any, parameter: str, value: Any, **options: Any) -> Any:
    """Call a function with ``value`` where a basis is meant, and what fits for the rest."""
    known = {"model": world.model, "view": tlg.view(world.model), "tokens": world.windows[:1]}
    known |= {"heads": "L1H0", "term": "pos-pos", "state": 1, "states": [1], "position": 3}
    known |= {"target": 5, "basis": world.basis, "a": world.basis, "b": world.basis}
    known |= {"topics": world.windows, "part": "pos", "prompt": world.windows[:1]}
    parameters = inspect.signature(function).parameters.values()
    given = {p.name: known[p.name] for p in parameters if p.default is p.empty}
    made = function(**given | options | {parameter: value})
    if hasattr(made, "__enter__"):  # edits look at their arguments when they are entered
        made.__enter__()
    return made


DOORS = [
    Call(
        f"a path where a basis is meant: {name}",
        lambda w, f=function, p=parameter: knock(w, f, p, PATH),
        r"PositionContext\.load\(path\)",
    )
    for name, function, parameter in doors()
]
DOORS += [
    Call(
        f"a path where a basis is meant: sweep_heads of {parts}",
        lambda w, p=parts: knock(w, tlg.sweep_heads, "basis", PATH, parts=p, progress=False),
        r"PositionContext\.load\(path\)",
    )
    for parts in ("writers", "blocks")
]
DOORS += [
    Call(
        "a table where a basis is meant",
        lambda w: tlg.sweep_heads(w.model, w.windows, w.basis.anova()),  # pyright: ignore
        "decompose",
    ),
    Call(
        "a path where the null of an analysis is meant",
        lambda w: w.basis.anova(null=PATH),
        r"PositionContext\.load\(path\)",
    ),
    Call(
        "a path among the bases to merge",
        lambda w: tlg.PositionContext.merge([w.basis, PATH]),
        r"part 1.*PositionContext\.load\(path\)",
    ),
    Call("a path in place of bases to merge", lambda w: tlg.PositionContext.merge(PATH), "merge"),
    Call(
        "one basis to merge, without a list",
        lambda w: tlg.PositionContext.merge(w.basis),  # pyright: ignore
        r"merge\(\[first",
    ),
    Call("nothing to merge", lambda w: tlg.PositionContext.merge(iter(())), "at least one"),
    Call(
        "a generator of bases to merge",
        lambda w: tlg.PositionContext.merge(w.decompose(rows) for rows in w.ids.split(4)),
        check=same_pos,
    ),
]


# --- Rows, arrays and labels ------------------------------------------------------------------


def refilled(rows: torch.Tensor, size: int = 1, array: bool = False) -> Iterator[Any]:
    """Rows, or batches, in one buffer."""
    parts = rows if size == 1 else rows[: len(rows) // size * size].split(size)
    buffer = torch.empty_like(parts[0])
    for part in parts:
        buffer.copy_(part)
        yield buffer.numpy() if array else buffer


def labelled(world: World, labels: Any) -> tlg.PositionContext:
    return world.decompose(world.ids[:6], labels=labels)


def has_labels(names: tuple[str, ...]) -> Any:
    def check(world: World, found: tlg.PositionContext) -> bool:
        labels = found.labels
        return found.names == names and labels is not None and int(labels.max()) < len(names)

    return check


TENSORS = [
    Call("rows in one buffer", lambda w: w.decompose(refilled(w.ids)), check=same_pos),
    Call(
        "rows in one numpy buffer",
        lambda w: w.decompose(refilled(w.ids, array=True)),
        check=same_pos,
    ),
    Call("batches in one buffer", lambda w: w.decompose(refilled(w.ids, 2)), check=same_pos),
    Call(
        "ids in the order of Fortran",
        lambda w: w.decompose(np.asfortranarray(w.ids.numpy())),
        check=same_pos,
    ),
    Call("ids transposed twice", lambda w: w.decompose(w.ids.T.contiguous().T), check=same_pos),
    Call(
        "ids that cannot be written",
        lambda w: w.decompose(
            np.frombuffer(w.ids.numpy().tobytes(), np.int64).reshape(w.ids.shape)
        ),
        check=same_pos,
    ),
    Call(
        "ids in the other byte order",
        lambda w: w.decompose(w.ids.numpy().astype(">i8").astype("<i8")),
        check=same_pos,
    ),
    Call("nested ids", lambda w: w.decompose(torch.nested.nested_tensor(list(w.ids))), "nested"),
    Call(
        "nested ids as a prompt",
        lambda w: w.splits(torch.nested.nested_tensor(list(w.ids[:2]))),
        "nested",
    ),
    Call("sparse ids", lambda w: w.decompose(w.ids.to_sparse()), "sparse"),
    Call("sparse ids as a prompt", lambda w: w.splits(w.ids[:2].to_sparse()), "sparse"),
    Call(
        "windows of sparse ids",
        lambda w: tlg.TokenWindows(tokens=w.ids.to_sparse(), has_bos=True),
        "sparse",
    ),
    Call(
        "windows of lists",
        lambda w: tlg.TokenWindows(tokens=w.ids.tolist(), has_bos=True),  # pyright: ignore
        "as a tensor",
    ),
    Call(
        "windows with labels as a list",
        lambda w: tlg.TokenWindows(tokens=w.ids[:2], labels=[0, 1], has_bos=True),  # pyright: ignore
        "labels.*as a tensor",
    ),
    Call(
        "masked ids",
        lambda w: w.decompose(np.ma.masked_array(w.ids.numpy(), w.ids.numpy() > 50)),
        "mask",
    ),
    Call(
        "sparse activations",
        lambda w: tlg.decompose_activations(torch.randn(4, 3, 2).to_sparse()),
        "sparse",
    ),
    Call(
        "nested activations",
        lambda w: tlg.decompose_activations(torch.nested.nested_tensor([torch.randn(4, 3)] * 2)),
        "nested",
    ),
    Call(
        "label 300,000",
        lambda w: labelled(w, [0, 0, 1, 1, 1, 300_000]),
        check=has_labels(("0", "1", "300000")),
    ),
    Call(
        "label 10^9",
        lambda w: labelled(w, [7, 7, 7, 7, 7, 10**9]),
        check=has_labels(("7", "1000000000")),
    ),
    Call("a label beyond 64 bits", lambda w: labelled(w, [0, 0, 1, 1, 1, 2**70]), "integer label"),
    Call("a negative label", lambda w: labelled(w, [0, 0, 1, 1, 1, -1]), "from -1"),
    Call("sparse labels", lambda w: labelled(w, torch.arange(6).to_sparse()), "sparse"),
    Call(
        "labels beyond their names",
        lambda w: w.decompose(
            tlg.TokenWindows(
                tokens=w.ids[:2], labels=torch.tensor([0, 5]), names=("a", "b"), has_bos=True
            )
        ),
        "0 to 1",
    ),
    Call(
        "a loader of rows in one order",
        lambda w: w.decompose(loader(w, list(w.ids))),
        check=same_pos,
    ),
]


# --- Weights that change under a pass ---------------------------------------------------------


def trained(world: World, call: Any) -> Any:
    """``call(batches)`` where a weight changes between two batches; afterwards it is as before."""
    weight = next(iter(world.model.parameters())).data
    before = weight.clone()

    def batches() -> Iterator[torch.Tensor]:
        yield world.ids[:2]
        weight.mul_(1.5)
        yield from world.ids[2:6].split(2)

    try:
        return call(batches())
    finally:
        weight.copy_(before)


WEIGHTS = [
    Call(
        "weights that change under decompose",
        lambda w: trained(w, w.decompose),
        "changed during the pass",
    ),
    Call(
        "weights that change under trajectories",
        lambda w: trained(w, lambda rows: tlg.trajectories(w.model, rows, progress=False)),
        "changed during the pass",
    ),
    Call(
        "weights that change under a sweep",
        lambda w: trained(w, lambda rows: tlg.sweep_heads(w.model, rows, w.basis, progress=False)),
        "changed during the pass",
    ),
    Call(
        "weights that change under a sweep of writers",
        lambda w: trained(
            w, lambda rows: tlg.sweep_heads(w.model, rows, parts="writers", progress=False)
        ),
        "changed during the pass",
    ),
]


# --- Files ------------------------------------------------------------------------------------


def saved_through_a_link(world: World) -> bool:
    link, target = world.folder / "link.safetensors", world.folder / "target.safetensors"
    if not link.is_symlink():
        link.symlink_to(target)
    world.basis.save(link)
    return link.is_symlink() and tlg.PositionContext.load(target).contexts == len(world.ids)


def equal_files(world: World) -> int:
    paths = [world.basis.save(world.folder / f"equal{i}") for i in range(3)]
    return len({path.read_bytes() for path in paths})


def figure_of(world: World) -> View:
    return tlg.render.head_types(world.table)


def page_of(world: World) -> PageView:
    return tlg.render.split(world.split)


def kept_from_writing(view: View | PageView, path: Path) -> None:
    """Permissions stop nobody who runs tests as root, hence the patch. What was there stays."""
    path.write_text("before")
    try:
        with patch.object(Path, "touch", side_effect=PermissionError(13, "Permission denied")):
            view.save(path)
    finally:
        assert path.read_text() == "before"


FILES = [
    Call("a basis saved through a link", saved_through_a_link, check=lambda w, v: v),
    Call("equal results are equal files", equal_files, check=lambda w, v: v == 1),
    Call("a name of 300 characters", lambda w: w.basis.save(w.folder / LONG), WRITABLE),
    Call(
        "a table with a name of 300 characters",
        lambda w: w.basis.anova().save(w.folder / LONG),
        WRITABLE,
    ),
    Call(
        "a file with a name of 300 characters",
        lambda w: tlg.PositionContext.load(w.folder / LONG),
        "existing",
    ),
    Call(
        "a checkpoint with a name of 300 characters",
        lambda w: w.decompose(w.ids, checkpoint=w.folder / LONG),
        "checkpoint.*300 characters",
    ),
    Call("a checkpoint that is a number", lambda w: w.decompose(w.ids, checkpoint=3), "a path"),
    Call(
        "a checkpoint with a zero byte", lambda w: w.decompose(w.ids, checkpoint="a\0b"), "a path"
    ),
    Call("a basis saved under a number", lambda w: w.basis.save(3), "a path"),  # pyright: ignore
    Call("a basis loaded from a number", lambda w: tlg.PositionContext.load(3), "a path"),  # pyright: ignore
    Call("a basis saved onto a folder", lambda w: w.basis.save(w.folder), WRITABLE),
    *[
        Call(
            f"{name} in a folder that takes no files",
            lambda w, view=view, form=form: kept_from_writing(view(w), w.folder / f"a.{form}"),
            WRITABLE,
        )
        for form in ("html", "png")
        for name, view in (("a page", page_of), ("a figure", figure_of))
    ],
    Call("a figure saved under a number", lambda w: figure_of(w).save(3), "a path"),  # pyright: ignore
    Call("a page saved under a number", lambda w: page_of(w).save(3), "a path"),  # pyright: ignore
    Call(
        "a name of 250 characters",
        lambda w: tlg.PositionContext.load(w.basis.save(w.folder / ("b" * 250))),
        check=same_pos,
    ),
]

CALLS: list[Call] = [*DOORS, *TENSORS, *WEIGHTS, *FILES]
COMMANDS: list[Command] = []
