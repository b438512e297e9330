"""What does ``tl-geometry`` do? Each command here parses its options, checks them, calls one public
function and saves the result. The docstring of a command is its help text.

Arguments are checked before torch is imported, so that a typing error costs no more time than
starting Python. This is why commands import what they call in their own bodies.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tl_geometry import __version__
from tl_geometry.base import run_files
from tl_geometry.base.errors import choice, require
from tl_geometry.base.printable import printable_lines
from tl_geometry.cli import arguments, ending, trace_folder
from tl_geometry.cli.options import EXAMPLES, Force, Json, Out, Quiet, Resume, Table, takes
from tl_geometry.report.contents import Request, report_files
from tl_geometry.report.inputs import Inputs, at_least

if TYPE_CHECKING:
    from tl_geometry.base.results import Result

# help without boxes: to load rich takes 0.15 of the 0.4 s of `--help`
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
MODEL = ("model", "processed")
"""Fields of :class:`~tl_geometry.report.inputs.Inputs` that say how a model is loaded."""


def _version(wanted: bool | None) -> None:
    if wanted:
        typer.echo(f"tl-geometry {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool | None,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and stop."
        ),
    ] = None,
) -> None:
    """Geometry of transformer activations, attention scores and weights, for TransformerLens
    models."""


def add(name: str, about: str | None = None) -> Callable[[Callable[..., None]], Any]:
    """A decorator that adds a command, with its example below its help."""
    return app.command(name, help=about, epilog=f"For example: {EXAMPLES[name]}")


def analyse(
    request: Request,
    out: Out = Path("tl-geometry-report"),
    resume: Resume = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the analysis of a model on a corpus; exit code 1 where a section failed."""
    request.check_corpus()
    arguments.folder(out)
    run_files.check_folder(out, "report", report_files(request.names), force=force)
    ending.goes_on_from(out)
    from tl_geometry.report.build import build

    summary = build(
        request, out, resume=resume, force=force, progress=not quiet, command=command_line()
    )
    say(summary, as_json, f"{out / 'report.html'}: {', '.join(summary['sections'])}")
    if summary["failed"]:
        errors = "; ".join(f"{section}: {error}" for section, error in summary["failed"].items())
        message = f"not everything could be computed ({errors}); the tracebacks are in the report"
        typer.echo(f"tl-geometry: {message}", err=True)
        raise typer.Exit(1)


# the same function serves four commands, so the help of each is given here
WHOLE = "The whole analysis of a model on a corpus, to a folder: report.html, tables, run.json."
add("report", WHOLE)(takes(Request)(analyse))
for command, section, about in (
    ("heads", "heads", "Only the heads: what drives each, and head types."),
    ("weights", "weights", "Only the weights: W_QK and W_OV in the geometry of the activations."),
    ("trajectories", "flow", "Only the trajectories of pilot tokens as a stochastic flow."),
):
    # rotary planes are a part of the section on heads
    fixed = {} if section == "heads" else {"planes": False}
    add(command, about)(takes(Request, sections=("overview", section), **fixed)(analyse))


@add("fit")
@takes(Inputs)
def fit(
    inputs: Inputs,
    out: Annotated[Path, typer.Option(help="File to write the basis to.")] = Path(
        "basis.safetensors"
    ),
    batch_size: Annotated[int | None, typer.Option(help="Windows in one forward pass.")] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Keep groups, context vectors and second moments in the file too."
        ),
    ] = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The basis of a model on a corpus (texts, or one .npy file of token ids), to a file.

    Bases of the shards of a corpus are joined in Python: PositionContext.merge.
    """
    inputs.check_corpus(ids=True)
    at_least(batch_size, 1, "--batch-size")
    arguments.file(out, suffix=".safetensors")
    run_files.check_file(out, "PositionContext", force=force)
    from tl_geometry.decomposition.from_model import decompose

    with run_files.lock(out.with_name(f".{out.name}.lock")):
        model = inputs.load()
        options: Any = {"batch_size": batch_size, "seed": inputs.seed, "progress": not quiet}
        basis = decompose(model, inputs.tokens(model), **options)
        basis.save(out, full=full)
        summary = {"file": str(out), **dataclasses.asdict(basis.provenance)}
        say(summary, as_json, f"{out}: {basis!r}")


@add("check")
@takes(Inputs, *MODEL, "dtype", "device")
def check(inputs: Inputs) -> None:
    """What is supported, verified and refused for a model: the first thing to run."""
    from tl_geometry.models.support import check_model

    typer.echo(check_model(inputs.load()).text())


@add("readout")
@takes(Inputs, *MODEL)
def readout(
    inputs: Inputs,
    layer: Annotated[int, typer.Option(help="Layer of the head, counted from 0.")] = 0,
    head: Annotated[int, typer.Option(help="The head in that layer, counted from 0.")] = 0,
    matrix: Annotated[str, typer.Option("--weights", help="QK or OV.")] = "OV",
    k: Annotated[int, typer.Option(help="Tokens shown for each direction.")] = 5,
    out: Table = None,
    force: Force = False,
) -> None:
    """What one head reads and writes, in tokens: singular directions against the vocabulary."""
    choice(matrix, ("QK", "OV"), "--weights")
    at_least(layer, 0, "--layer")
    at_least(head, 0, "--head")
    at_least(k, 1, "--k")
    check_table(out, force)
    from tl_geometry.weights import token_readout

    table = token_readout(inputs.load(), matrix=matrix, heads=[(layer, head)], k=k)
    save_table(table, out)
    typer.echo(table.text() if out is None else f"{out}: {len(table.rows())} rows")


@add("trace")
@takes(Inputs, "bos", "processed", "dtype", "device")
def trace(
    inputs: Inputs,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] PROMPT", help="The prompt, after the model (the embedded one)."
        ),
    ],
    target: Annotated[str, typer.Option(help="Token whose logit is traced, as text.")],
    against: Annotated[
        str | None, typer.Option(help="Token whose logit is subtracted from it.")
    ] = None,
    position: Annotated[int, typer.Option(help="Where the logit is read; -1 is the last.")] = -1,
    keep: Annotated[
        float, typer.Option(help="Share of all that is written that the nodes carry.")
    ] = 0.8,
    mlp: Annotated[
        str, typer.Option(help="frozen (followed back) or leaf (taken as inputs).")
    ] = "frozen",
    basis: Annotated[
        Path | None,
        typer.Option(help="File of tl-geometry fit: leaves by position and content."),
    ] = None,
    out: Out = Path("tl-geometry-trace"),
    force: Force = False,
    as_json: Json = False,
) -> None:
    """One logit back to the tokens, as a graph: which heads and MLPs wrote it, and why heads looked
    where they looked. Writes a page, tables, and the JSON that Neuronpedia reads."""
    # `words` is PROMPT, or MODEL and PROMPT
    expected, got = "a prompt, or a model and a prompt", f"{len(words)} texts"
    require(len(words) <= 2, "PROMPT", expected=expected, got=got, instead="quotation marks")
    require(words[-1], "PROMPT", expected="a text", got="none")
    inputs = dataclasses.replace(inputs, model=words[0] if len(words) == 2 else None)
    require(0 < keep <= 1, "--keep", expected="a share above 0, at most 1", got=keep)
    choice(mlp, ("frozen", "leaf"), "--mlp")
    if basis is not None:
        known = run_files.schema(basis).startswith("tl_geometry/PositionContext/")
        got = printable_lines(str(basis))
        require(known, "--basis", expected="a file of tl-geometry fit", got=got)
    arguments.folder(out)
    run_files.check_folder(out, trace_folder.OWNER, trace_folder.FILES, force=force)
    from tl_geometry.circuits.trace import trace_logit
    from tl_geometry.decomposition.position_context import PositionContext
    from tl_geometry.models.reader import as_view

    with run_files.lock(out / run_files.LOCK):
        model = as_view(inputs.load())
        options: Any = {"against": against, "position": position, "keep": keep, "mlp": mlp}
        graph = trace_logit(
            model,
            words[-1],
            target,
            basis=None if basis is None else PositionContext.load(basis),
            prepend_bos=model.bos_id is not None if inputs.bos is None else inputs.bos,
            **options,
        )
        settings = {"prompt": words[-1], "target": target, **options, "basis": basis}
        record = trace_folder.save_graph(
            graph, out, settings=settings, command=command_line(), force=force
        )
    page = out / trace_folder.PAGE
    found = f"T = {graph.value:.4f}, {record['nodes']} nodes, {record['edges']} edges"
    say({"folder": str(out), **record}, as_json, f"{page}: {found}")


def command_line() -> list[str]:
    """The words of this command, for its record."""
    return ["tl-geometry", *sys.argv[1:]]


def check_table(out: Path | None, force: bool) -> None:
    """Make sure that a table can be written to ``out``, where it is given."""
    if out is not None:
        arguments.file(out)
        run_files.check_file(out, force=force)


def save_table(table: Result, out: Path | None) -> None:
    """Write a table to ``out``, where it is given."""
    if out is not None:
        from tl_geometry.report.folder import write_csv

        write_csv(table, out)


def say(summary: dict[str, Any], as_json: bool, line: str) -> None:
    """Print a result: JSON, or one line for a person."""
    typer.echo(json.dumps(summary, default=str) if as_json else printable_lines(line))


def main() -> None:
    """Run the command line: see :mod:`tl_geometry.cli.ending`."""
    ending.run(app)
