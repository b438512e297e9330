"""What does ``tl-geometry`` do? Each command checks its options, calls one public function and
saves the result. The docstring of a command is its help text.

Options are checked before torch is imported; this is why commands import what they call in their
own bodies."""

from __future__ import annotations

import json
import shlex
import sys
from csv import QUOTE_NONNUMERIC
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from tl_geometry import __version__
from tl_geometry.base.errors import GeometryError, check_seed, choice, require
from tl_geometry.base.html import plain
from tl_geometry.cli import inputs
from tl_geometry.report.folder import PAGE, SECTIONS, check_folder, check_sections

# help without boxes: to load rich takes 0.15 of the 0.4 s of `--help`
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
USAGE: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What typer raises for words that it cannot parse: by version click's, or its own copy."""
NAMES = "A name that TransformerLens knows, a directory, smollm2 or minilm; none: the embedded one."

Model = Annotated[str | None, Argument(help=NAMES)]
Corpus = Annotated[list[Path] | None, Option(help="Text file, repeatable; none: Python's own.")]
Contexts = Annotated[int | None, Option(min=1, help="Windows to use; none: enough, or all.")]
# of a report: its intervals need 32 windows for the sweep, and 32 others for the basis
Windows = Annotated[int | None, Option(min=64, help="Windows to use; none: enough, or all.")]
Length = Annotated[int | None, Option(min=2, help="Tokens of a window.")]
Bos = Annotated[bool | None, Option("--bos/--no-bos", help="Begin with BOS; none: as the model.")]
Device = Annotated[str, Option(help="cpu, cuda, cuda:1; mps for fit alone.")]
Dtype = Annotated[str, Option(help="float32, float64, bfloat16 or float16.")]
Processed = Annotated[bool, Option("--processed", help="Fold and centre weights.")]
Seed = Annotated[int, Option(help="Seed of every random choice.")]
Out = Annotated[Path, Option(help="Where to write.", callback=Path.expanduser)]
Force = Annotated[bool, Option("--force", help="Write where other files are.")]
Quiet = Annotated[bool, Option("--quiet", help="Print results and errors only.")]
Quick = Annotated[bool, Option("--quick", help="Fewer windows, and no trajectories.")]
Sections = Annotated[str | None, Option(help=f"Some of {', '.join(SECTIONS)}.")]
Fresh = Annotated[bool, Option("--fresh", help="Compute tables again that are there.")]
Shard = Annotated[str, Option(help="i/n: the i-th of n parts of the windows.")]
BatchSize = Annotated[int | None, Option(min=1, help="Windows in one forward pass.")]
Full = Annotated[bool, Option("--full", help="Keep groups, context and second moments too.")]
Prompt = Annotated[list[str], Argument(metavar="[MODEL] PROMPT", help="The prompt, last.")]
Answer = Annotated[str, Option(help="Token whose logit is traced, as text.")]
Other = Annotated[str | None, Option(help="Token whose logit is subtracted from it.")]
Against = Annotated[str | None, Option(help="Prompt of the same length: trace the difference.")]
Position = Annotated[int, Option(help="Where the logit is read; -1 is the last.")]
Keep = Annotated[float, Option(help="Share of what is written that the nodes carry.")]
Mlp = Annotated[str, Option(help="frozen (followed back) or leaf (taken as inputs).")]
Basis = Annotated[Path | None, Option(help="File of tl-geometry fit: leaves by its parts.")]


def _version(wanted: bool | None) -> None:
    if wanted:
        typer.echo(f"tl-geometry {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool | None,
        Option("--version", callback=_version, is_eager=True, help="Print the version and stop."),
    ] = None,
) -> None:
    """Geometry of transformer activations, attention scores and weights, for TransformerLens
    models."""


@app.command(epilog="For example: tl-geometry report gpt2 --corpus book.txt --out report")
def report(
    model: Model = None,
    corpus: Corpus = None,
    contexts: Windows = None,
    length: Length = None,
    bos: Bos = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    processed: Processed = False,
    seed: Seed = 0,
    quick: Quick = False,
    sections: Sections = None,
    fresh: Fresh = False,
    out: Out = Path("tl-geometry-report"),
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """The whole analysis of a model on a corpus, to a folder: report.html and its tables.

    A table that the folder holds, of this model and corpus, is read. Exit code 1 where something
    failed."""
    inputs.check_model(model, device, dtype)
    inputs.check_corpus(corpus)
    check_seed(seed)
    names = None if sections is None else [name.strip() for name in sections.split(",")]
    if names is not None:
        check_sections(names)
    check_folder(out, force=force)
    say = (lambda line: None) if quiet else (lambda line: typer.echo(line, err=True))
    say("Loading the model and the text")
    from tl_geometry.report.analysis import sizes
    from tl_geometry.report.written import build

    view = inputs.load_model(model, device, dtype, processed=processed)
    most, usual = sizes(view, quick=quick)
    cut: dict[str, Any] = {"most": most, "prepend_bos": bos, "seed": seed}
    windows = inputs.windows_of(view, corpus, length or usual, contexts, **cut)
    options: dict[str, Any] = {"quick": quick, "sections": names, "fresh": fresh, "force": force}
    options |= {"seed": seed, "say": say, "command": ["tl-geometry", *sys.argv[1:]]}
    failed = build(view, windows, out, **options)["failed"]
    typer.echo(plain(out / PAGE))
    if failed:
        what = "; ".join(f"{item} ({why})" for item, why in failed.items())
        typer.echo(plain(f"tl-geometry: could not be computed: {what}"), err=True)
        raise typer.Exit(1)


@app.command(epilog="For example: tl-geometry fit gpt2 --corpus book.txt --shard 1/4 --full")
def fit(
    model: Model = None,
    corpus: Corpus = None,
    contexts: Contexts = None,
    length: Length = None,
    bos: Bos = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    processed: Processed = False,
    seed: Seed = 0,
    shard: Shard = "1/1",
    batch_size: BatchSize = None,
    full: Full = False,
    out: Out = Path("basis.safetensors"),
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """The basis of a model on a corpus (mean and position of every state, context with --full), to
    a file.

    Shards are joined in Python: PositionContext.merge([PositionContext.load(path), ...])."""
    inputs.check_model(model, device, dtype)
    check_seed(seed)
    i, n = inputs.shard_of(shard)
    inputs.check_corpus(corpus)
    inputs.check_file(out, force=force)
    from tl_geometry.decomposition.from_model import decompose

    view = inputs.load_model(model, device, dtype, processed=processed)
    size = length or min(inputs.LENGTH, view.n_ctx)
    rows = inputs.windows_of(view, corpus, size, contexts, prepend_bos=bos, seed=seed)
    require(len(rows) >= n, "--shard", expected=f"at most {len(rows)} shards", got=shard)
    rows = rows[(i - 1) * len(rows) // n : i * len(rows) // n]
    basis = decompose(view, rows, batch_size=batch_size, seed=seed, progress=not quiet)
    basis.save(out, full=full)
    typer.echo(f"{plain(out)}: {basis!r}")


@app.command(epilog="For example: tl-geometry check gpt2")
def check(
    model: Model = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    processed: Processed = False,
) -> None:
    """What is supported, verified and refused for a model: the first thing to run."""
    inputs.check_model(model, device, dtype)
    from tl_geometry.models import check_model

    typer.echo(check_model(inputs.load_model(model, device, dtype, processed=processed)).text())


@app.command(epilog="For example: tl-geometry trace smollm2 'Paris is in' --answer ' France'")
def trace(
    words: Prompt,
    answer: Answer,
    other: Other = None,
    counterfactual: Against = None,
    position: Position = -1,
    keep: Keep = 0.8,
    mlp: Mlp = "frozen",
    basis: Basis = None,
    bos: Bos = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    processed: Processed = False,
    out: Out = Path("tl-geometry-trace"),
    force: Force = False,
) -> None:
    """One logit back to the tokens, as a graph: which heads and MLPs wrote it, and why heads looked
    where they looked. Writes a page, nodes, edges and tokens as CSV, and JSON for Neuronpedia."""
    fits, expected = len(words) <= 2 and words[-1], "a prompt, or a model and a prompt"
    got = f"{len(words)} texts" if words[-1] else "an empty one"
    require(fits, "PROMPT", expected=expected, got=got, instead="quotes")
    name = words[0] if len(words) == 2 else None
    inputs.check_model(name, device, dtype)
    require(0 < keep <= 1, "--keep", expected="a share above 0, at most 1", got=keep)
    choice(mlp, ("frozen", "leaf"), "--mlp")
    there = basis is None or basis.is_file()
    require(there, "--basis", expected="a file of tl-geometry fit", got=plain(basis))
    check_folder(out, force=force, report=False)
    from tl_geometry import PositionContext, render, trace_logit
    from tl_geometry.base.files import write_bytes

    model = inputs.load_model(name, device, dtype, processed=processed)
    options: dict[str, Any] = {"other": other, "counterfactual": counterfactual, "mlp": mlp}
    options |= {"position": position, "keep": keep, "prepend_bos": bos}
    options["basis"] = None if basis is None else PositionContext.load(basis)
    graph = trace_logit(model, words[-1], answer, **options)
    file = graph.to_json()
    file["metadata"]["slug"] = "graph"  # circuit-tracer's server looks for the file of this name
    tables = {"nodes": graph.nodes, "edges": graph.edges, "tokens": graph.tokens().df}
    quoted = QUOTE_NONNUMERIC  # a carriage return would end the row of a bare text
    texts = {f"{key}.csv": x.to_csv(index=False, quoting=quoted) for key, x in tables.items()}
    texts["graph.json"] = json.dumps(file, allow_nan=False)
    texts["graph-metadata.json"] = json.dumps({"graphs": [file["metadata"]]}, allow_nan=False)
    for key, text in texts.items():
        write_bytes(out / key, text.encode(errors="backslashreplace"))
    page = render.graph_page(graph).save(out / "graph.html")
    found = f"T = {graph.value:.3g}, {len(graph.nodes)} nodes, {len(graph.edges)} edges"
    typer.echo(plain(f"{page}: {found}"))


def main() -> None:
    """Run the command line. An error that the user can correct is one line and exit code 2; a run
    that is stopped from the keyboard exits with 130."""
    try:
        code = app(prog_name="tl-geometry", standalone_mode=False)
    except GeometryError as error:
        raise SystemExit(_line(str(error), 2)) from None
    except USAGE as error:
        raise SystemExit(_line(str(error.format_message()), 2)) from None
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    if code == 130:
        raise SystemExit(_line("stopped (a report goes on from what is finished)", code))
    raise SystemExit(code if isinstance(code, int) else 0)


def _line(text: str, code: int) -> int:
    """Say what went wrong, and with which words, in one line on standard error."""
    line = f"tl-geometry: {' '.join(text.split())} [{shlex.join(sys.argv[1:])}]"
    typer.echo(plain(line), err=True)
    return code
