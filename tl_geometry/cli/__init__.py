"""The command line: parse, check, call one public function, save; nothing else.

Arguments are checked before torch is imported, so that a mistyped one costs no more than starting
Python.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Callable, Set
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from tl_geometry import __version__
from tl_geometry.base import run_files
from tl_geometry.base.errors import check_seed, choice, require
from tl_geometry.base.printable import printable_lines
from tl_geometry.cli import arguments, ending
from tl_geometry.cli.options import (
    EXAMPLES,
    Bos,
    BudgetOption,
    Class,
    Contexts,
    Corpus,
    Device,
    Dtype,
    Encoding,
    Field,
    Force,
    Json,
    Length,
    Model,
    Out,
    Pack,
    Planes,
    Processed,
    Quiet,
    Resume,
    Sections,
    Seed,
)
from tl_geometry.corpus.text_files import read_texts
from tl_geometry.papers.contents import EXPERIMENT_FILES, EXPERIMENTS, SCALES, WORKS
from tl_geometry.report.contents import BASIS, BUDGETS, PARTS, SECTIONS, report_files

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


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


def _check_run(
    model: str | None,
    contexts: int | None,
    length: int | None,
    seed: int,
    **loading: str,
) -> None:
    """Checks that the commands which run a model on a corpus share."""
    arguments.model_options(model, **loading)
    arguments.at_least(contexts, 1, "--contexts")
    arguments.at_least(length, 2, "--length")
    check_seed(seed)


def _own_folder(out: Path, sections: tuple[str, ...] | None, force: bool) -> None:
    """Make sure that a report may be written to a folder, and say what a stopped one goes on
    from."""
    arguments.folder(out)
    files = report_files(sections or SECTIONS)
    run_files.check_folder(out, "report", files, force=force)
    ending.goes_on_from(out / run_files.CHECKPOINT, out / BASIS, out / PARTS)


def _report_outcome(summary: dict[str, Any], out: Path, as_json: bool) -> None:
    """Say what was written, and end with exit code 1 where a section failed."""
    say(summary, as_json, f"{out / 'report.html'}: {', '.join(summary['sections'])}")
    if summary["failed"]:
        said = "; ".join(f"{section}: {error}" for section, error in summary["failed"].items())
        where = "the tracebacks are in the report"
        typer.echo(f"tl-geometry: not everything could be computed ({said}); {where}", err=True)
        raise typer.Exit(1)


def _example(name: str) -> str:
    return f"For example: {EXAMPLES[name]}"


def _add(command: Callable[..., None], name: str, about: str, left_out: Set[str]) -> None:
    """Add a command without some of its function's options, which keep their defaults."""
    signature = inspect.signature(command, eval_str=True)
    kept = [p for p in signature.parameters.values() if p.name not in left_out]
    vars(command)["__signature__"] = signature.replace(parameters=kept)
    app.command(name, help=about, epilog=_example(name))(command)


def _analysis(name: str, about: str, chosen: tuple[str, ...] | None) -> None:
    """Add a command that runs the analysis and writes these sections (``None``: those of
    ``--sections``) with their tables."""

    def command(
        model: Model = None,
        corpus: Corpus = None,
        encoding: Encoding = "utf-8",
        field: Field = None,
        pack: Pack = False,
        contexts: Contexts = None,
        length: Length = None,
        out: Out = Path("tl-geometry-report"),
        device: Device = "cpu",
        dtype: Dtype = "float32",
        model_class: Class = "bridge",
        processed: Processed = False,
        bos: Bos = None,
        seed: Seed = 0,
        budget: BudgetOption = "default",
        sections: Sections = None,
        planes: Planes = False,
        resume: Resume = False,
        force: Force = False,
        as_json: Json = False,
        quiet: Quiet = False,
    ) -> None:
        choice(budget, tuple(BUDGETS), "--budget")
        wanted = chosen if chosen is not None else arguments.sections(sections)
        loading = {"model_class": model_class, "dtype": dtype, "device": device}
        _check_run(model, contexts, length, seed, **loading)
        arguments.check_corpus(corpus, encoding, field=field, pack=pack)
        _own_folder(out, wanted, force)
        from tl_geometry.models.names import check_name
        from tl_geometry.report.build import Request, build

        check_name(model, model_class)
        request = Request(
            model=model,
            corpus=tuple(corpus or ()),
            encoding=encoding,
            field=field,
            pack=pack,
            contexts=contexts,
            length=length,
            processed=processed,
            bos=bos,
            seed=seed,
            budget=budget,
            sections=wanted,
            planes=planes,
            **loading,
        )
        words, shown = ["tl-geometry", *sys.argv[1:]], not quiet
        summary = build(request, out, resume=resume, force=force, progress=shown, command=words)
        _report_outcome(summary, out, as_json)

    left_out = {"sections", *(() if "heads" in chosen else ("planes",))} if chosen else set()
    _add(command, name, about, left_out)


_analysis(
    "report",
    "The whole analysis of a model on a corpus, to a folder: report.html, tables, results, "
    "run.json.",
    None,
)
_analysis("heads", "Only the heads: what drives each, and head types.", ("overview", "heads"))
_analysis(
    "weights",
    "Only the weights: W_QK and W_OV in the geometry of the activations.",
    ("overview", "weights"),
)
_analysis(
    "trajectories",
    "Only the trajectories of pilot tokens as a stochastic flow.",
    ("overview", "flow"),
)


@app.command(epilog=_example("fit"))
def fit(
    model: Model = None,
    corpus: Corpus = None,
    encoding: Encoding = "utf-8",
    field: Field = None,
    pack: Pack = False,
    contexts: Annotated[
        int | None, typer.Option("--contexts", help="Windows to use (default: all).")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            "--length", help="Tokens of a window (default: what the model takes, at most 512)."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="File to write the basis to.")] = Path(
        "basis.safetensors"
    ),
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Windows of one forward pass.")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    model_class: Class = "bridge",
    processed: Processed = False,
    bos: Bos = None,
    seed: Seed = 0,
    resume: Resume = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The basis of a model on a corpus (texts, or one .npy file of token ids), to a file.

    On many processes, on any number of machines: torchrun --nproc-per-node=8 -m tl_geometry fit
    MODEL --corpus FILE --device cuda
    """
    ids = bool(corpus and corpus[0].suffix == ".npy")
    loading = {"model_class": model_class, "dtype": dtype, "device": device}
    _check_run(model, contexts, length, seed, **loading)
    arguments.check_corpus(corpus, encoding, field=field, pack=pack, tokens=True)
    require(
        not ids or (length is None and bos is None),
        "--length, --bos",
        expected="none with a token file",
        got="some",
    )
    arguments.at_least(batch_size, 1, "--batch-size")
    arguments.file(out, suffix=".safetensors")
    run_files.check_file(out, "PositionContext", force=force)
    checkpoint = out.with_name(f"{out.stem}.checkpoint.safetensors")
    run_files.check_checkpoint(checkpoint, resume=resume, force=force)
    ending.goes_on_from(checkpoint)
    from tl_geometry.decomposition.from_model import decompose
    from tl_geometry.decomposition.processes import launched
    from tl_geometry.models.names import check_name
    from tl_geometry.report.build import load_model, token_source

    check_name(model, model_class)
    alone = os.environ.get("RANK", "0") == "0"  # of several processes the first one writes
    busy = run_files.lock(out.with_name(f".{out.name}.lock")) if alone else nullcontext()
    with busy, launched(device) as (group, own, first):
        loaded = load_model(
            model, model_class=model_class, processed=processed, dtype=dtype, device=own
        )
        tokens = token_source(
            loaded,
            corpus,
            encoding=encoding,
            field=field,
            pack=pack,
            contexts=contexts,
            length=length,
            bos=bos,
            seed=seed,
        )
        if first and not resume:  # allowed by --force
            checkpoint.unlink(missing_ok=True)
        basis = decompose(
            loaded,
            tokens,
            batch_size=batch_size,
            checkpoint=checkpoint,
            progress=not quiet,
            seed=seed,
            group=group,
        )
        if first:
            basis.save(out)
            checkpoint.unlink(missing_ok=True)
            summary = {"file": str(out), **dataclasses.asdict(basis.provenance)}
            say(summary, as_json, f"{out}: {basis!r}")


@app.command(epilog=_example("check"))
def check(
    model: Model = None,
    model_class: Class = "bridge",
    processed: Processed = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
) -> None:
    """What is supported, verified and refused for a model: the first thing to run."""
    arguments.model_options(model, model_class=model_class, dtype=dtype, device=device)
    from tl_geometry.models.names import check_name
    from tl_geometry.models.support import check_model
    from tl_geometry.report.build import load_model

    check_name(model, model_class)

    loaded = load_model(
        model, model_class=model_class, processed=processed, dtype=dtype, device=device
    )
    typer.echo(check_model(loaded).text())


@app.command(epilog=_example("readout"))
def readout(
    model: Model = None,
    layer: Annotated[int, typer.Option("--layer", help="Block of the head, counted from 0.")] = 0,
    head: Annotated[
        int, typer.Option("--head", help="The head in that block, counted from 0.")
    ] = 0,
    what: Annotated[str, typer.Option("--weights", help="QK or OV.")] = "OV",
    k: Annotated[int, typer.Option("--k", help="Tokens of each direction.")] = 5,
    out: Annotated[Path | None, typer.Option("--out", help="CSV file to write.")] = None,
    model_class: Class = "bridge",
    processed: Processed = False,
    force: Force = False,
) -> None:
    """What one head reads and writes, in tokens: singular directions against the vocabulary."""
    arguments.model_options(model, model_class=model_class, dtype="float32", device="cpu")
    choice(what, ("QK", "OV"), "--weights")
    arguments.at_least(layer, 0, "--layer")
    arguments.at_least(head, 0, "--head")
    arguments.at_least(k, 1, "--k")
    if out is not None:
        arguments.file(out)
        run_files.check_file(out, force=force)
    from tl_geometry.models.names import check_name
    from tl_geometry.report.build import load_model
    from tl_geometry.report.folder import write_csv
    from tl_geometry.weights.heads import token_readout

    check_name(model, model_class)

    loaded = load_model(
        model, model_class=model_class, processed=processed, dtype="float32", device="cpu"
    )
    table = token_readout(loaded, matrix=what, heads=[(layer, head)], k=k)
    if out is not None:
        write_csv(table, out)
    typer.echo(table.text() if out is None else f"{out}: {len(table.rows())} rows")


@app.command(epilog=_example("reproduce"))
def reproduce(
    work: Annotated[str, typer.Argument(help="song-zhong, lines-of-thought or traveling-words.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="A name, a directory, smollm2 or minilm; default: the embedded model."
        ),
    ] = None,
    corpus: Corpus = None,
    topics: Annotated[
        list[Path] | None,
        typer.Option(
            "--topics",
            help="Document for the similarities of song-zhong's Table 1 (four were used); "
            "repeat it.",
        ),
    ] = None,
    encoding: Encoding = "utf-8",
    row: Annotated[
        str | None,
        typer.Option("--row", help='Published row to compare with, such as "GPT-2 OWT".'),
    ] = None,
    contexts: Annotated[
        int | None,
        typer.Option(
            "--contexts",
            help="Windows or chunks (default: as published, where the text has as many).",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="CSV file to write.")] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Published settings and numbers, with ours beside them."""
    choice(work, WORKS, "work")
    arguments.model_options(model, model_class="bridge", dtype="float32", device="cpu")
    arguments.check_corpus(corpus, encoding)
    read_texts(topics or [], encoding, "--topics")
    told = ", ".join(map(str, topics or ()))
    require(work == "song-zhong" or not told, "--topics", expected=f"none with {work}", got=told)
    arguments.at_least(contexts, 2, "--contexts")
    if out is not None:
        arguments.file(out)
        run_files.check_file(out, force=force)
    from tl_geometry.models.names import check_name
    from tl_geometry.papers.reproduction import reproduce as run
    from tl_geometry.report.folder import write_csv

    check_name(model, "bridge")

    table = run(
        work,
        model=model,
        corpus=corpus,
        topics=topics,
        encoding=encoding,
        row=row,
        contexts=contexts,
        progress=not quiet,
    )
    if out is not None:
        write_csv(table, out)
    typer.echo(table.text())


@app.command(epilog=_example("experiment"))
def experiment(
    name: Annotated[str, typer.Argument(help="randomisation, addition or nanogpt.")],
    scale: Annotated[
        str,
        typer.Option(
            "--scale", help="smoke (seconds), cpu (minutes) or paper (the published settings)."
        ),
    ] = "cpu",
    out: Out = Path("tl-geometry-experiment"),
    seeds: Annotated[
        list[int] | None, typer.Option("--seeds", help="A run for each; repeat it. Default: 0.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", help="Text file to train on; repeat it. Default: standard library."),
    ] = None,
    encoding: Encoding = "utf-8",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the scale, such as context=512; repeat it."),
    ] = None,
    device: Device = "cpu",
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Train small models on other formats and measure their geometry on the way; a stopped run goes
    on in its folder."""
    choice(name, EXPERIMENTS, "experiment")
    choice(scale, SCALES, "--scale")
    for seed in seeds or ():
        check_seed(seed, "--seeds")
    arguments.check_device(device)
    read_texts(text or [], encoding, "--text")
    arguments.folder(out)
    run_files.check_folder(out, name, EXPERIMENT_FILES, force=force)
    ending.goes_on_from(out, how="the same command")
    from tl_geometry.papers.experiments import experiment as run

    outcome = run(
        name,
        scale=scale,
        out=out,
        seeds=seeds or [0],
        texts=text,
        encoding=encoding,
        changes=change,
        device=device,
        progress=not quiet,
        force=force,
        command=["tl-geometry", *sys.argv[1:]],
    )
    typer.echo(f"{outcome.text()}\n{out / 'report.html'}")


def say(summary: dict[str, Any], as_json: bool, line: str) -> None:
    """Print a result: JSON, or one line for a person."""
    typer.echo(json.dumps(summary, default=str) if as_json else printable_lines(line))


def main() -> None:
    """Run the command line: see :mod:`tl_geometry.cli.ending`."""
    ending.run(app)
