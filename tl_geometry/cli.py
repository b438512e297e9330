"""The command line: parse, call one public function, save; nothing else."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tl_geometry.errors import GeometryError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Model = Annotated[
    str | None, typer.Argument(help="A name TransformerLens knows, a local Hugging Face directory, or nothing: the embedded model.")
]
Corpus = Annotated[
    list[Path] | None, typer.Option("--corpus", help="Text file, one document each; repeat it. Default: held-out standard library.")
]
Contexts = Annotated[int | None, typer.Option("--contexts", help="Windows to use (default: up to 1024).")]
Length = Annotated[int | None, typer.Option("--length", help="Tokens of a window (default: what the model takes, at most 512).")]
Out = Annotated[Path, typer.Option("--out", help="Folder to write to.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, float64, bfloat16 or float16.")]
Class = Annotated[str, typer.Option("--class", help="bridge (TransformerBridge) or hooked (HookedTransformer, TransformerLens 3.9).")]
Processed = Annotated[bool, typer.Option("--processed", help="Fold and centre the weights as TransformerLens does.")]
Bos = Annotated[bool | None, typer.Option("--bos/--no-bos", help="Begin windows with BOS (default: where the tokenizer has one).")]
Seed = Annotated[int, typer.Option("--seed")]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable output.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint, where there is one.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]


@app.callback()
def root() -> None:
    """Geometry of transformer activations, attention scores and weights, for TransformerLens models."""


def _analysis(name: str, about: str, sections: tuple[str, ...] | None) -> None:
    """Add a command that runs the analysis and writes these sections (``None``: all) with their tables."""

    def command(
        model: Model = None,
        corpus: Corpus = None,
        contexts: Contexts = None,
        length: Length = None,
        out: Out = Path("tl-geometry-report"),
        device: Device = "cpu",
        dtype: Dtype = "float32",
        kind: Class = "bridge",
        processed: Processed = False,
        bos: Bos = None,
        seed: Seed = 0,
        resume: Resume = False,
        as_json: Json = False,
        quiet: Quiet = False,
    ) -> None:
        from tl_geometry.report.build import build

        summary = build(
            model, corpus=corpus, contexts=contexts, length=length, out=out, device=device, dtype=dtype, kind=kind, processed=processed,
            bos=bos, seed=seed, resume=resume, progress=not quiet, command=["tl-geometry", *sys.argv[1:]], sections=sections,
        )  # fmt: skip
        say(summary, as_json, f"{out / 'report.html'}: {', '.join(summary['sections'])}")

    app.command(name, help=about)(command)


_analysis("report", "The whole analysis of a model on a corpus, to a folder: report.html, tables, results, run.json.", None)
_analysis("heads", "Only the heads: what drives each, and head types.", ("overview", "heads"))
_analysis("weights", "Only the weights: W_QK and W_OV in the geometry of the activations.", ("overview", "weights"))
_analysis("trajectories", "Only the trajectories of pilot tokens as a stochastic flow.", ("overview", "flow"))


@app.command()
def fit(
    model: Model = None,
    corpus: Corpus = None,
    contexts: Annotated[int | None, typer.Option("--contexts", help="Windows to use (default: all).")] = None,
    length: Length = None,
    out: Annotated[Path, typer.Option("--out", help="File to write the basis to.")] = Path("basis.safetensors"),
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="Windows of one forward pass.")] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    kind: Class = "bridge",
    processed: Processed = False,
    bos: Bos = None,
    seed: Seed = 0,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The basis of a model on a corpus (texts, or one .npy file of token ids), to a file.

    On many processes, on any number of machines: torchrun --nproc-per-node=8 -m tl_geometry fit MODEL --corpus FILE --device cuda
    """
    from tl_geometry.processes import launched
    from tl_geometry.report.build import load_model, token_source
    from tl_geometry.verbs.decompose import decompose

    checkpoint = out.with_name(f"{out.stem}.checkpoint.safetensors")
    with launched(device) as (group, own, first):
        loaded = load_model(model, kind=kind, processed=processed, dtype=dtype, device=own)
        tokens = token_source(loaded, corpus, contexts=contexts, length=length, bos=bos, seed=seed)
        if first and not resume:
            checkpoint.unlink(missing_ok=True)
        basis = decompose(
            loaded, tokens, batch_size=batch_size, checkpoint=checkpoint, progress=not quiet, seed=seed, group=group
        )  # fmt: skip
        if first:
            basis.save(out)
            checkpoint.unlink(missing_ok=True)
            say({"file": str(out), **dataclasses.asdict(basis.provenance)}, as_json, f"{out}: {basis!r}")


@app.command()
def check(
    model: Model = None, kind: Class = "bridge", processed: Processed = False, dtype: Dtype = "float32", device: Device = "cpu"
) -> None:
    """What is supported, verified and refused for a model: the first thing to run."""
    from tl_geometry.report.build import load_model
    from tl_geometry.verbs.check import check_model

    typer.echo(check_model(load_model(model, kind=kind, processed=processed, dtype=dtype, device=device)).text())


@app.command()
def readout(
    model: Model = None,
    layer: Annotated[int, typer.Option("--layer")] = 0,
    head: Annotated[int, typer.Option("--head")] = 0,
    what: Annotated[str, typer.Option("--weights", help="QK or OV.")] = "OV",
    k: Annotated[int, typer.Option("--k", help="Tokens of each direction.")] = 5,
    out: Annotated[Path | None, typer.Option("--out", help="CSV file to write.")] = None,
    kind: Class = "bridge",
    processed: Processed = False,
) -> None:
    """What one head reads and writes, in tokens: singular directions against the vocabulary."""
    from tl_geometry.report.build import load_model
    from tl_geometry.verbs.weights import token_readout

    table = token_readout(
        load_model(model, kind=kind, processed=processed, dtype="float32", device="cpu"), kind=what, heads=[(layer, head)], k=k
    )
    if out is not None:
        table.to_dataframe().to_csv(out, index=False)
    typer.echo(table.text() if out is None else f"{out}: {len(table.rows())} rows")


@app.command()
def reproduce(
    work: Annotated[str, typer.Argument(help="song-zhong or lines-of-thought.")],
    model: Annotated[str | None, typer.Option("--model", help="A name or directory; default: the embedded model.")] = None,
    corpus: Corpus = None,
    row: Annotated[str | None, typer.Option("--row", help='Published row to compare with, such as "GPT-2 OWT".')] = None,
    out: Annotated[Path | None, typer.Option("--out", help="CSV file to write.")] = None,
    quiet: Quiet = False,
) -> None:
    """Published settings and numbers, with ours beside them."""
    from tl_geometry.reproduce import run

    table = run(work, model=model, corpus=corpus, row=row, progress=not quiet)
    if out is not None:
        table.to_dataframe().to_csv(out, index=False)
    typer.echo(table.text())


@app.command()
def experiment(
    name: Annotated[str, typer.Argument(help="randomisation, addition or nanogpt.")],
    scale: Annotated[str, typer.Option("--scale", help="smoke (seconds), cpu (minutes) or paper (the published settings).")] = "cpu",
    out: Out = Path("tl-geometry-experiment"),
    seeds: Annotated[list[int] | None, typer.Option("--seeds", help="A run for each; repeat it. Default: 0.")] = None,
    text: Annotated[list[Path] | None, typer.Option("--text", help="Text file to train on; repeat it. Default: standard library.")] = None,
    change: Annotated[list[str] | None, typer.Option("--set", help="A setting of the scale, such as context=512; repeat it.")] = None,
    device: Device = "cpu",
    quiet: Quiet = False,
) -> None:
    """Train small models on other formats and measure their geometry on the way; a stopped run goes on in its folder."""
    from tl_geometry.experiments import run

    outcome = run(
        name, scale=scale, out=out, seeds=seeds or [0], texts=text, changes=change, device=device, progress=not quiet,
        command=["tl-geometry", *sys.argv[1:]],
    )  # fmt: skip
    typer.echo(f"{outcome.text()}\n{out / 'report.html'}")


def say(summary: dict[str, Any], as_json: bool, line: str) -> None:
    """Print a result: JSON, or one line for a person."""
    typer.echo(json.dumps(summary, default=str) if as_json else line)


def main() -> None:
    """Run the command line; an error of ours is one line on standard error and exit code 2."""
    try:
        app(prog_name="tl-geometry")
    except GeometryError as error:
        typer.echo(f"tl-geometry: {' '.join(str(error).split())} [{shlex.join(sys.argv[1:])}]", err=True)
        raise SystemExit(2) from None
