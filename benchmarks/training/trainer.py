"""How is a small model trained so that a stopped run resumes exactly? AdamW, warm-up and cosine,
gradient clipping, checkpoints. The embedded model, the trained circuits of
:mod:`benchmarks.known_models` and the three training formats are trained with :func:`train`.

A batch is a pure function of the step (``batch_at(step)``), and every step seeds its own generator.
So a stopped run that resumes from a checkpoint ends with the same weights as one that was never
stopped.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from tl_geometry.base.errors import require
from tl_geometry.base.files import read_file, write_atomically

IGNORE = -100
"""Target id that takes no part in the loss; the value that torch's cross-entropy ignores."""

Batch = tuple[Int[Tensor, "batch position"], Int[Tensor, "batch position"]]
"""Inputs and targets."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Hyperparameters of :func:`train`. Weight decay applies only to parameters with two or more
    axes."""

    steps: int
    learning_rate: float
    final_learning_rate: float
    warmup: int
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 1.0
    seed: int = 0
    checkpoint_every: int = 500

    def rate(self, step: int) -> float:
        """Learning rate of ``step``: a linear warm-up, then half a cosine down to the final
        rate."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        half = 0.5 * (self.learning_rate - self.final_learning_rate)
        return self.final_learning_rate + half * (1 + math.cos(math.pi * done))


def new_gpt2(seed: int, **settings: Any) -> Any:
    """A ``GPT2LMHeadModel`` before training, in evaluation mode, with weights drawn under ``seed``.
    Token 0 is BOS and EOS.

    >>> new_gpt2(0, vocab_size=5, n_positions=4, n_embd=8, n_layer=1, n_head=2).config.n_embd
    8
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(GPT2Config(**settings, bos_token_id=0, eos_token_id=0)).eval()


def sequence_loss(
    logits: Float[Tensor, "batch position vocab"], targets: Int[Tensor, "batch position"]
) -> Float[Tensor, ""]:
    """Cross-entropy in nats: the mean over each sequence's targets that are not :data:`IGNORE`,
    then the mean over sequences.

    So each sequence counts alike, as in the published code for additions, however many targets it
    has.

    >>> targets = torch.tensor([[0, 1, IGNORE]])
    >>> round(float(sequence_loss(torch.zeros(1, 3, 4), targets).exp()), 4)
    4.0
    """
    scores = logits.transpose(1, 2).float()
    losses = F.cross_entropy(scores, targets, ignore_index=IGNORE, reduction="none")
    # at least 1, so that a sequence without targets gives 0 and not NaN
    counts = (targets != IGNORE).sum(1).clamp(min=1)
    return (losses.sum(1) / counts).mean()


def _optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas)


SCHEMA = "tl_geometry/training/1"


def _save(
    path: Path,
    settings: TrainSettings,
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    losses: list[float],
    records: list[Any],
) -> None:
    tensors: dict[str, Tensor] = {f"model.{k}": v for k, v in model.named_parameters()}
    for i, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{k}": torch.as_tensor(v) for k, v in state.items()}
    tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
    header = {"schema": SCHEMA, "settings": dataclasses.asdict(settings), "records": records}
    write_atomically(path, tensors, header)


def _load(
    path: Path, settings: TrainSettings, model: nn.Module, optimizer: torch.optim.AdamW
) -> tuple[list[float], list[Any]]:
    """Put the state of a checkpoint into model and optimizer; return its losses and records. A
    checkpoint of other settings or another model is refused."""
    header, tensors = read_file(path, SCHEMA)
    # through JSON, as the header went: tuples are lists there
    current = json.loads(json.dumps(dataclasses.asdict(settings)))
    differs = [k for k in current if header["settings"].get(k) != current[k]]
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    shapes = {k: v.shape for k, v in model.named_parameters()}
    fits = not differs and {k: v.shape for k, v in weights.items()} == shapes
    expected = "a checkpoint of this run"
    got = f"other {', '.join(differs) or 'parameters of another model'}"
    require(fits, str(path), expected=expected, got=got, instead="another folder, or delete it")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    return tensors["losses"].tolist(), header["records"]


def train(
    model: nn.Module,
    batch_at: Callable[[int], Batch],
    settings: TrainSettings,
    *,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    on_step: Callable[[int, nn.Module], None] | None = None,
    records: list[Any] | None = None,
) -> list[float]:
    """Train a Hugging Face causal language model in place, on its device, and return the loss (nats
    per token) of every step.

    ``batch_at(step)`` returns inputs and targets ``[batch position]``. Targets are already shifted,
    and :data:`IGNORE` marks places without a target.

    With ``checkpoint`` the state is written there every ``settings.checkpoint_every`` steps. A run
    that finds the file continues from it; a file of other settings or another model is refused.

    ``on_step(step, model)`` is called after each step, in evaluation mode. What it appends to
    ``records`` (JSON values) is stored in the checkpoint and restored when a run resumes.

    >>> ids = torch.arange(16).view(2, 8)
    >>> short = TrainSettings(steps=3, learning_rate=1e-2, final_learning_rate=1e-3, warmup=1)
    >>> model = new_gpt2(0, vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    >>> losses = train(model, lambda step: (ids[:, :-1], ids[:, 1:]), short, progress=False)
    >>> losses[-1] < losses[0]
    True
    """
    device = next(model.parameters()).device
    optimizer = _optimizer(model, settings)
    path = None if checkpoint is None else Path(checkpoint)
    records = [] if records is None else records
    losses: list[float] = []
    if path is not None and path.exists():
        losses, records[:] = _load(path, settings, model, optimizer)
    steps, done = range(len(losses), settings.steps), len(losses)
    bar = tqdm(steps, initial=done, total=settings.steps, disable=not progress, unit="step")
    for step in bar:
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step)
        tokens, targets = (x.to(device) for x in batch_at(step))
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            # for dropout; the factor is larger than the steps of any run: runs share no seed
            torch.manual_seed(settings.seed * 1_000_003 + step)
            loss = sequence_loss(model(tokens).logits, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
        model.eval()
        if on_step is not None:
            on_step(step, model)
        due = len(losses) % settings.checkpoint_every == 0 or len(losses) == settings.steps
        if path is not None and due:
            _save(path, settings, model, optimizer, losses, records)
    model.eval()
    return losses
