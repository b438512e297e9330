"""Options that several commands share, as annotations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tl_geometry.report.contents import SECTIONS

Model = Annotated[
    str | None,
    typer.Argument(
        help=(
            "A name that TransformerLens knows, a Hugging Face directory, smollm2, minilm; "
            "nothing: the embedded model."
        )
    ),
]
Corpus = Annotated[
    list[Path] | None,
    typer.Option(
        "--corpus",
        help="Text file, one document each; repeat it. Default: held-out standard library.",
    ),
]
Planes = Annotated[
    bool, typer.Option("--planes", help="Write the shares of every rotary plane too.")
]
Encoding = Annotated[str, typer.Option("--encoding", help="Encoding of the text files.")]
Field = Annotated[
    str | None,
    typer.Option(
        "--field", help="Read this field of each line of .jsonl files, a document each, as text."
    ),
]
Pack = Annotated[
    bool,
    typer.Option(
        "--pack", help="Join documents with a blank line, so that short ones fill windows too."
    ),
]
Contexts = Annotated[
    int | None,
    typer.Option(
        "--contexts", help="Windows to use (default: what the budget allows, at most 1024)."
    ),
]
Length = Annotated[
    int | None,
    typer.Option(
        "--length", help="Tokens of a window (default: what model and budget allow, at most 512)."
    ),
]
Out = Annotated[Path, typer.Option("--out", help="Folder to write to.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, float64, bfloat16 or float16.")]
Class = Annotated[
    str,
    typer.Option(
        "--class",
        help="bridge (TransformerBridge) or hooked (HookedTransformer, TransformerLens 3.9).",
    ),
]
Processed = Annotated[
    bool, typer.Option("--processed", help="Fold and centre the weights as TransformerLens does.")
]
Bos = Annotated[
    bool | None,
    typer.Option(
        "--bos/--no-bos", help="Begin windows with BOS (default: where the tokenizer has one)."
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", help="Seed of every random choice: windows, nulls, controls.")
]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable output.")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on with what a stopped run of the same settings has finished."
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Overwrite files that no earlier run of this command wrote."),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", help="No progress and no remarks; results and errors only.")
]
BudgetOption = Annotated[
    str,
    typer.Option(
        "--budget",
        help=(
            "quick, default or full: how much is computed, by the shape of the model and not by "
            "the clock. For SmolLM2-135M default is about 10 minutes on two cores, quick a fifth "
            "of the work, full leaves nothing out."
        ),
    ),
]
Sections = Annotated[
    str | None,
    typer.Option(
        "--sections",
        help=f"Some of {', '.join(SECTIONS)}, separated by commas. Default: all.",
    ),
]
EXAMPLES = {
    "report": "tl-geometry report gpt2 --corpus book.txt --budget full --out report",
    "heads": "tl-geometry heads smollm2 --corpus book.txt --planes --out heads",
    "weights": "tl-geometry weights gpt2 --corpus book.txt --out weights",
    "trajectories": "tl-geometry trajectories gpt2 --corpus walden.txt --out paths",
    "fit": "tl-geometry fit gpt2 --corpus tokens.npy --out basis.safetensors --resume",
    "check": "tl-geometry check gpt2 --class hooked",
    "readout": "tl-geometry readout gpt2 --layer 5 --head 1 --weights OV --k 10",
    "reproduce": "tl-geometry reproduce lines-of-thought --model gpt2 --corpus walden.txt",
    "experiment": "tl-geometry experiment addition --scale smoke --out addition",
}
"""One for each command, shown below its help."""
