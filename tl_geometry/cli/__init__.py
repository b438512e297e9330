"""What does ``tl-geometry`` do? Each command here parses its options, checks them, calls one public
function and saves the result. The docstring of a command is its help text.

Arguments are checked before torch is imported, so that a typing error costs no more time than
starting Python. This is why commands import what they call in their own bodies.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tl_geometry import __version__
from tl_geometry.base import run_files
from tl_geometry.base.errors import check_seed, choice, fail, require
from tl_geometry.base.printable import printable_lines
from tl_geometry.cli import arguments, ending, trace_folder
from tl_geometry.cli.options import EXAMPLES, Force, Json, Out, Quiet, Resume, Table, takes
from tl_geometry.corpus.text_files import read_texts
from tl_geometry.papers.contents import EXPERIMENT_FILES, EXPERIMENTS, SCALES, WORKS
from tl_geometry.report.contents import Request, report_files
from tl_geometry.zoo.inputs import Inputs, at_least

if TYPE_CHECKING:
    from tl_geometry.base.results import Result

# help without boxes: to load rich takes 0.15 of the 0.4 s of `--help`
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
MODEL = ("model", "model_class", "processed")
"""Fields of :class:`~tl_geometry.zoo.inputs.Inputs` that say how a model is loaded."""


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
    resume: Resume = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The basis of a model on a corpus (texts, or one .npy file of token ids), to a file.

    On many processes, on any number of machines: torchrun --nproc-per-node=8 -m tl_geometry fit
    MODEL --corpus FILE --device cuda
    """
    inputs.check_corpus(ids=True)
    at_least(batch_size, 1, "--batch-size")
    arguments.file(out, suffix=".safetensors")
    run_files.check_file(out, "PositionContext", force=force)
    checkpoint = out.with_name(f"{out.stem}.checkpoint.safetensors")
    run_files.check_checkpoint(checkpoint, resume=resume, force=force)
    ending.goes_on_from(checkpoint)
    from tl_geometry.decomposition.from_model import decompose
    from tl_geometry.decomposition.processes import launched

    # the lock is taken before processes are joined, so the rank is read from the environment
    writes = os.environ.get("RANK", "0") == "0"  # torchrun numbers processes; the first one writes
    writing = run_files.lock(out.with_name(f".{out.name}.lock")) if writes else nullcontext()
    with writing, launched(inputs.device) as (group, device, first):
        model = inputs.load(device=device)
        tokens = inputs.tokens(model)
        # check_checkpoint let a checkpoint pass without --resume only because of --force
        if first and not resume:
            checkpoint.unlink(missing_ok=True)
        basis = decompose(
            model,
            tokens,
            batch_size=batch_size,
            checkpoint=checkpoint,
            progress=not quiet,
            seed=inputs.seed,
            group=group,
        )
        if first:
            basis.save(out)
            checkpoint.unlink(missing_ok=True)
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
    from tl_geometry.weights.heads import token_readout

    table = token_readout(inputs.load(), matrix=matrix, heads=[(layer, head)], k=k)
    save_table(table, out)
    typer.echo(table.text() if out is None else f"{out}: {len(table.rows())} rows")


@add("trace")
@takes(Inputs, "bos", "model_class", "processed", "dtype", "device")
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


@add("reproduce")
@takes(Inputs, "corpus", "encoding")
def reproduce(
    inputs: Inputs,
    work: Annotated[str, typer.Argument(help="song-zhong, lines-of-thought or traveling-words.")],
    model: Annotated[
        str | None,
        typer.Option(help="A name, a directory, smollm2 or minilm; default: the embedded model."),
    ] = None,
    topics: Annotated[
        list[Path] | None,
        typer.Option(
            help="Document for the similarities of song-zhong's Table 1 (four were used); "
            "may be repeated."
        ),
    ] = None,
    row: Annotated[
        str | None, typer.Option(help='Published row to compare with, such as "GPT-2 OWT".')
    ] = None,
    contexts: Annotated[
        int | None,
        typer.Option(help="Windows or chunks (default: as published, where the text has as many)."),
    ] = None,
    out: Table = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Published settings and numbers, with the measured ones beside them."""
    # `model` is an option of this command, because the work is its argument
    choice(work, WORKS, "work")
    inputs = dataclasses.replace(inputs, model=model)
    # texts are read here only to refuse unreadable ones before torch is imported
    inputs.check_corpus()
    read_texts(topics or [], inputs.encoding, "--topics")
    if topics and work != "song-zhong":
        fail("--topics", expected=f"none with {work}", got=", ".join(map(str, topics)))
    at_least(contexts, 2, "--contexts")
    check_table(out, force)
    from tl_geometry.papers import reproduction

    table = reproduction.reproduce(
        work,
        model=model,
        corpus=inputs.corpus or None,
        topics=topics,
        encoding=inputs.encoding,
        row=row,
        contexts=contexts,
        progress=not quiet,
    )
    save_table(table, out)
    typer.echo(table.text())


@add("experiment")
@takes(Inputs, "encoding", "device")
def experiment(
    inputs: Inputs,
    name: Annotated[str, typer.Argument(help="randomisation, addition or nanogpt.")],
    scale: Annotated[
        str, typer.Option(help="smoke (seconds), cpu (minutes) or paper (the published settings).")
    ] = "cpu",
    out: Out = Path("tl-geometry-experiment"),
    seeds: Annotated[
        list[int] | None, typer.Option(help="Seed of a run; may be repeated. Default: 0.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text file to train on; may be repeated. Default: standard library."),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A changed setting of the scale, such as context=512; may be repeated."
        ),
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Train small models on other formats and measure their geometry during training; a stopped run
    resumes in its folder."""
    choice(name, EXPERIMENTS, "experiment")
    choice(scale, SCALES, "--scale")
    for seed in seeds or ():
        check_seed(seed, "--seeds")
    # read here only to refuse unreadable files before torch is imported
    read_texts(text or [], inputs.encoding, "--text")
    arguments.folder(out)
    run_files.check_folder(out, name, EXPERIMENT_FILES, force=force)
    ending.goes_on_from(out, "the same command")
    from tl_geometry.papers.experiments import experiment as run

    outcome = run(
        name,
        scale=scale,
        out=out,
        seeds=seeds or [0],
        texts=text,
        encoding=inputs.encoding,
        changes=change,
        device=inputs.device,
        progress=not quiet,
        force=force,
        command=command_line(),
    )
    typer.echo(f"{outcome.text()}\n{out / 'report.html'}")


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
