"""Settings of an experiment at a scale, and the model and the training that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import nn

from tl_geometry.base.errors import choice, fail, require
from tl_geometry.base.files import write_atomically
from tl_geometry.base.printable import printable
from tl_geometry.base.results import Result
from tl_geometry.base.run_files import RECORD, WRITER, read_record, write_record
from tl_geometry.papers.contents import SCALES
from tl_geometry.zoo.trainer import Batch, TrainSettings, train

SMOKE: dict[str, Any] = {
    "scale": "smoke",
    "layers": 2,
    "heads": 2,
    "d_model": 32,
    "warmup": 5,
    "learning_rate": 3e-3,
    "measurements": 1,
    "contexts": 32,
}
"""What the smoke scales of all experiments share."""
PAPER: dict[str, Any] = {"scale": "paper", "batch": 64, "steps": 100_000, "warmup": 1000}
"""What the published settings of all experiments share."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Model, training and measurement of an experiment; ``paper`` scale holds the published
    settings.

    The model is a GPT-2 of Hugging Face without biases (held at zero) unless ``bias``, dropout
    everywhere. ``measure_at`` are the numbers of steps after which geometry is measured,
    ``contexts`` the windows that it is measured on, ``frequencies`` how many cosines count as low.
    """

    scale: str
    layers: int
    heads: int
    d_model: int
    context: int
    batch: int
    steps: int
    warmup: int
    learning_rate: float = 5e-5
    final_learning_rate: float = 5e-6
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 1.0
    dropout: float = 0.1
    bias: bool = False
    measurements: int = 10
    contexts: int = 512
    frequencies: int = 10

    def training(self, seed: int) -> TrainSettings:
        """Settings of the trainer for a run with this seed."""
        names = (
            "steps",
            "learning_rate",
            "final_learning_rate",
            "warmup",
            "weight_decay",
            "betas",
            "clip",
        )
        return TrainSettings(
            **{n: getattr(self, n) for n in names},
            seed=seed,
            checkpoint_every=max(1, self.steps // 20),
        )

    def measure_at(self) -> tuple[int, ...]:
        """Steps done when geometry is measured: 0, then about evenly in the square root of the
        step, so that the start is seen.

        >>> size = {"layers": 1, "heads": 1, "d_model": 8, "context": 8, "batch": 1}
        >>> Setup(scale="x", steps=100, warmup=1, measurements=4, **size).measure_at()
        (0, 6, 25, 56, 100)
        """
        n = max(1, self.measurements)
        return tuple(dict.fromkeys(round(self.steps * (i / n) ** 2) for i in range(n + 1)))

    def model(self, d_vocab: int, seed: int) -> Any:
        """The model (a ``GPT2LMHeadModel``) before training, under ``seed``."""
        from transformers import GPT2Config, GPT2LMHeadModel

        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout)
        config = GPT2Config(
            vocab_size=d_vocab,
            n_positions=self.context,
            n_embd=self.d_model,
            n_layer=self.layers,
            n_head=self.heads,
            activation_function="gelu",
            layer_norm_epsilon=1e-5,
            bos_token_id=0,
            eos_token_id=0,
            **drop,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = GPT2LMHeadModel(config)
        if not self.bias:
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):  # zero from the start; frozen, so that they stay so
                    parameter.requires_grad_(False)
        return model.eval()

    def changed(self: S, changes: Mapping[str, str]) -> S:
        """The setup with some fields changed, given as text: ``{"context": "512"}``; ``2,3`` is a
        pair of numbers."""
        known = {f.name for f in dataclasses.fields(self)} - {"scale"}
        unknown = sorted(set(changes) - known)
        require(
            not unknown,
            "--set",
            expected=f"names among {', '.join(sorted(known))}",
            got=", ".join(unknown),
        )
        return dataclasses.replace(
            self, **{n: _read(n, text, getattr(self, n)) for n, text in changes.items()}
        )


S = TypeVar("S", bound=Setup)


def chosen(scale: str | S, setups: Mapping[str, S]) -> S:
    """The setup of a scale by its name, or one's own as it is."""
    if isinstance(scale, type(setups["paper"])):
        return scale
    return setups[choice(str(scale), SCALES, "scale")]


def _read(name: str, text: str, old: Any) -> Any:
    """A value of the type of ``old``."""
    if isinstance(old, bool):
        require(text in ("true", "false"), f"--set {name}", expected="true or false", got=text)
        return text == "true"
    try:
        if isinstance(old, tuple):
            return tuple(type(old[0])(v) for v in text.split(","))
        return type(old)(text)
    except ValueError:
        fail(f"--set {name}", expected=f"a {type(old).__name__}", got=repr(text))


@dataclass(frozen=True, eq=False, kw_only=True)
class Table(Result):
    """A plain table: column names and rows of numbers and text."""

    names: tuple[str, ...]
    cells: tuple[tuple[Any, ...], ...]

    def columns(self) -> Sequence[str]:
        return self.names

    def rows(self) -> Sequence[Sequence[object]]:
        return self.cells

    def column(self, name: str, **where: object) -> list[Any]:
        """One column, of the rows whose other columns have the given values."""
        require(
            name in self.names, "column", expected=f"one of {', '.join(self.names)}", got=repr(name)
        )
        at = {self.names.index(k): v for k, v in where.items()}
        return [
            row[self.names.index(name)]
            for row in self.cells
            if all(row[i] == v for i, v in at.items())
        ]


def run_training(
    setup: Setup,
    model: nn.Module,
    batch_at: Callable[[int], Batch],
    measure: Callable[[int, Any], list[dict[str, Any]]],
    *,
    seed: int,
    folder: Path | None,
    progress: bool,
) -> tuple[list[float], list[dict[str, Any]]]:
    """Train, measuring on the way: the losses, and the rows of every measurement (each with its
    number of steps, ``"step"``).

    ``measure(step, model)`` gives the rows after so many steps, numbers and strings only.
    In ``folder`` lie the trainer's checkpoint, from which a run that was stopped goes on (its
    measurements with it), and the weights at every measurement, ``step-000100.safetensors``. A
    finished run is not trained again.
    """
    wanted = setup.measure_at()
    records: list[dict[str, Any]] = []

    def take(done: int) -> None:
        if done in wanted and not any(r["step"] == done for r in records):
            records.extend({"step": done, **row} for row in measure(done, model))
            if folder is not None:
                write_atomically(
                    folder / f"step-{done:06d}.safetensors", dict(model.named_parameters()), {}
                )

    if folder is not None:
        _claim(folder, setup)
    checkpoint = None if folder is None else folder / "training.safetensors"
    if checkpoint is None or not checkpoint.exists():
        take(0)
    losses = train(
        model,
        batch_at,
        setup.training(seed),
        checkpoint=checkpoint,
        records=records,
        progress=progress,
        on_step=lambda step, _: take(step + 1),
    )
    return losses, records


def _claim(folder: Path, setup: Setup) -> None:
    """Make the folder of a training run, or go on in one that an earlier run has made: its record
    says so. Files of the same names that are not ours are refused."""
    names = (RECORD, "training.safetensors", "step-*.safetensors")
    ours = not folder.exists() or bool(read_record(folder, force=True))
    taken = [] if ours else [path.name for name in names for path in sorted(folder.glob(name))]
    taken = taken if ours or folder.is_dir() else ["a file in its place"]
    require(
        not taken,
        "--out",
        expected="a folder of each training run without files of these names",
        got=f"{printable(str(folder))} with {', '.join(taken[:8])}{' ...' * (len(taken) > 8)}",
        instead="another --out",
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder, {"written_by": WRITER, "setup": dataclasses.asdict(setup)})


def load_weights(model: nn.Module, path: Path) -> None:
    """Weights of a measured step, as :func:`run_training` writes them, into a model of the same
    setup."""
    model.load_state_dict(load_file(path), strict=False)  # the output head is tied to the embedding
