"""The command line: parse, call one public function, save; nothing else."""

from __future__ import annotations

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
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]


@app.callback()
def root() -> None:
    """Geometry of transformer activations, attention scores and weights, for TransformerLens models."""


@app.command()
def report(
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
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in the folder.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The whole analysis of a model on a corpus, to a folder: report.html, tables, results, run.json."""
    from tl_geometry.report.build import build

    summary = build(
        model, corpus=corpus, contexts=contexts, length=length, out=out, device=device, dtype=dtype, kind=kind, processed=processed,
        bos=bos, seed=seed, resume=resume, progress=not quiet, command=["tl-geometry", *sys.argv[1:]],
    )  # fmt: skip
    say(summary, as_json, f"{out / 'report.html'}: {', '.join(summary['sections'])}")


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
