"""Where do the options of a command come from? Some are shared by several commands and are declared
here. Others are made from the fields of a record (:class:`~tl_geometry.report.inputs.Inputs`,
:class:`~tl_geometry.report.contents.Request`) by :func:`takes`.

A record declares its options once. The name, type and default of a field are those of the option,
and its annotation is the help.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from tl_geometry.report.inputs import Inputs

Out = Annotated[Path, typer.Option(help="Folder to write to.")]
Table = Annotated[Path | None, typer.Option(help="CSV file to write.")]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable output.")]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Keep what a stopped run of the same settings has finished."),
]
Force = Annotated[
    bool, typer.Option("--force", help="Overwrite files that no earlier run of this command wrote.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print results and errors only.")]
EXAMPLES = {
    "report": "tl-geometry report gpt2 --corpus book.txt --budget full --out report",
    "heads": "tl-geometry heads smollm2 --corpus book.txt --planes --out heads",
    "weights": "tl-geometry weights gpt2 --corpus book.txt --out weights",
    "trajectories": "tl-geometry trajectories gpt2 --corpus walden.txt --out paths",
    "fit": "tl-geometry fit gpt2 --corpus tokens.npy --out basis.safetensors",
    "check": "tl-geometry check gpt2",
    "readout": "tl-geometry readout gpt2 --layer 5 --head 1 --weights OV --k 10",
    "trace": "tl-geometry trace smollm2 'Paris is in' --target ' France' --against ' Italy'",
}
"""An example for each command, shown below its help."""
SPELLED = {"bos": "--bos/--no-bos"}
"""Fields whose option has another name."""
LISTS = {"corpus": list[Path] | None, "sections": str | None}
"""Fields that are tuples -> the type of their option: a list from a repeated option, or text with
names separated by commas. :func:`_tuple` makes the tuple."""


@functools.cache  # a third of the time of `tl-geometry --help`, if asked for each option
def _hints(record: type[Inputs]) -> dict[str, Any]:
    return get_type_hints(record, include_extras=True)


def parameter(record: type[Inputs], name: str) -> inspect.Parameter:
    """A field of a record as a parameter of a command.

    >>> parameter(Inputs, "seed").default
    0
    """
    kind, about = get_args(_hints(record)[name])
    default = record.__dataclass_fields__[name].default
    spelled = SPELLED.get(name, f"--{name}")
    shown: Any = typer.Option(spelled, help=about)
    # the only field that is an argument
    if name == "model":
        shown = typer.Argument(help=about)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if name in LISTS else default,
        annotation=Annotated[LISTS.get(name, kind), shown],
    )


def takes(
    record: type[Inputs], *names: str, **fixed: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for a command whose first parameter is a record: the fields of the record (all,
    or those of ``names``) become options, except ``fixed`` ones, which take the value given here.
    Fields that are neither keep their default."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        fields = [f.name for f in dataclasses.fields(record) if not names or f.name in names]
        chosen = [name for name in fields if name not in fixed]
        signature = inspect.signature(command, eval_str=True)
        # all parameters but the record
        others = list(signature.parameters.values())[1:]

        def run(**given: Any) -> None:
            values = {name: given.pop(name) for name in chosen}
            for name in LISTS.keys() & values:
                values[name] = _tuple(values[name], record.__dataclass_fields__[name].default)
            command(record(**values, **fixed), **given)

        run.__doc__ = command.__doc__
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [parameter(record, name) for name in chosen]
        parameters += [p.replace(kind=keyword) for p in others]
        # typer reads the signature to make the options
        vars(run)["__signature__"] = signature.replace(parameters=parameters)
        return run

    return decorate


def _tuple(given: list[Any] | str | None, default: tuple[Any, ...]) -> tuple[Any, ...]:
    """The value of an option of :data:`LISTS`."""
    if isinstance(given, str):
        return tuple(name.strip() for name in given.split(",") if name.strip())
    return tuple(given) if given else default
