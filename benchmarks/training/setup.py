"""What are the settings of an experiment at a scale, and how is a model trained with them? The
three experiments share :class:`Setup` and :func:`run_training`."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors.torch import save_file

from benchmarks.training.trainer import Batch, TrainSettings, new_gpt2, train
from tl_geometry.base.errors import choice, fail, require

SCALES = ("smoke", "cpu", "paper")
"""An experiment runs in seconds, in minutes, or with the published settings."""
FILE = Path(__file__).with_name("setups.toml")
"""Settings of the three experiments at every scale."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Model, training and measurement of an experiment. The ``paper`` scale has the published
    settings (Song & Zhong 2023, appendix A.2, and their code); optimiser, dropout and ``bias`` have
    them as defaults.

    The model is a GPT-2 of Hugging Face with dropout on embeddings, attention and residual stream.
    Its biases are held at zero unless ``bias``. Geometry is measured before training and
    ``measurements`` times during it (:meth:`measure_at`), on ``contexts`` windows. ``frequencies``
    is how many cosines count as low.
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
        names = ("steps", "learning_rate", "final_learning_rate", "warmup", "weight_decay", "betas")
        return TrainSettings(
            **{name: getattr(self, name) for name in names},
            clip=self.clip,
            seed=seed,
            # about 20 checkpoints, so that a stopped run loses at most about 5% of its steps
            checkpoint_every=max(1, self.steps // 20),
        )

    def measure_at(self) -> tuple[int, ...]:
        """Steps after which geometry is measured: 0, then evenly in the square root of the step, so
        that more of them fall early.

        >>> size = {"layers": 1, "heads": 1, "d_model": 8, "context": 8, "batch": 1}
        >>> Setup(scale="x", steps=100, warmup=1, measurements=4, **size).measure_at()
        (0, 6, 25, 56, 100)
        """
        n_measurements = max(1, self.measurements)
        shares = [(i / n_measurements) ** 2 for i in range(n_measurements + 1)]
        # in a short run several round to the same step, which is measured once
        return tuple(dict.fromkeys(round(self.steps * share) for share in shares))

    def model(self, d_vocab: int, seed: int) -> Any:
        """The model (a ``GPT2LMHeadModel``) before training, with weights drawn under ``seed``."""
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout)
        model = new_gpt2(
            seed,
            vocab_size=d_vocab,
            n_positions=self.context,
            n_embd=self.d_model,
            n_layer=self.layers,
            n_head=self.heads,
            activation_function="gelu",
            layer_norm_epsilon=1e-5,
            **dropouts,
        )
        if not self.bias:
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):  # zero from the start; frozen, so that they stay so
                    parameter.requires_grad_(False)
        return model

    def changed(self: S, changes: Mapping[str, str]) -> S:
        """The setup with some fields changed. Values are text, as on the command line:
        ``{"context": "512"}``, or ``{"shown": "2,3"}`` for a pair of numbers."""
        names = {f.name for f in dataclasses.fields(self)} - {"scale"}
        unknown, expected = sorted(set(changes) - names), f"names among {', '.join(sorted(names))}"
        require(not unknown, "--set", expected=expected, got=", ".join(unknown))
        values = {name: _parsed(name, text, getattr(self, name)) for name, text in changes.items()}
        return dataclasses.replace(self, **values)


S = TypeVar("S", bound=Setup)


def setups(cls: type[S], experiment: str) -> dict[str, S]:
    """The settings of an experiment by scale, from :data:`FILE`."""
    settings = tomllib.loads(FILE.read_text(encoding="utf-8"))
    by_scale: dict[str, S] = {}
    for scale in SCALES:
        values: dict[str, Any] = settings["all"][scale] | settings[experiment][scale]
        values = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        by_scale[scale] = cls(scale=scale, **values)
    return by_scale


def chosen(scale: str | S, setups: Mapping[str, S]) -> S:
    """The setup of a scale, by its name; a setup is returned as it is."""
    if isinstance(scale, type(setups["paper"])):
        return scale
    return setups[choice(str(scale), SCALES, "scale")]


def _parsed(name: str, text: str, old: Any) -> Any:
    """The text of a setting as a value of the type of ``old``, the value that it replaces."""
    if isinstance(old, bool):
        require(text in ("true", "false"), f"--set {name}", expected="true or false", got=text)
        return text == "true"
    try:
        if isinstance(old, tuple):
            return tuple(type(old[0])(v) for v in text.split(","))
        return type(old)(text)
    except ValueError:
        fail(f"--set {name}", expected=f"a value of type {type(old).__name__}", got=repr(text))


class Training(NamedTuple):
    """A trained model, the loss of every step, and the rows of every measurement, each with its
    number of steps, ``"step"``."""

    model: Any
    losses: list[float]
    records: list[dict[str, Any]]


def run_training(
    setup: Setup,
    d_vocab: int,
    batch_at: Callable[[int], Batch],
    measure: Callable[[int, Any], list[dict[str, Any]]],
    *,
    name: str,
    seed: int,
    out: str | Path | None = None,
    device: str = "cpu",
    progress: bool = True,
) -> Training:
    """Train a new model and measure it during training.

    ``measure(step, model)`` gives the rows after so many steps, numbers and strings only. The
    folder ``name`` of ``out`` holds the trainer's checkpoint and the weights at every measurement
    (``step-000100.safetensors``). A stopped run resumes from the checkpoint, which holds its
    measurements too. A finished run is not trained again.
    """
    model = setup.model(d_vocab, seed).to(device)
    folder = None if out is None else Path(out) / name
    measured_at = setup.measure_at()
    records: list[dict[str, Any]] = []

    def take(done: int) -> None:
        if done in measured_at and not any(r["step"] == done for r in records):
            records.extend({"step": done, **row} for row in measure(done, model))
            if folder is not None:
                weights = {name: weight.detach() for name, weight in model.named_parameters()}
                save_file(weights, folder / f"step-{done:06d}.safetensors")

    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    checkpoint = None if folder is None else folder / "training.safetensors"
    # a run that resumes has the measurements of its first steps in the checkpoint
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
    return Training(model, losses, records)
