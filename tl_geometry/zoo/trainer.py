"""The one trainer: AdamW, warm-up and cosine, gradient clipping, checkpoints that resume exactly.

A batch is a pure function of the step (``batch_at(step)``), and every step seeds its own generator, so that an interrupted
run that resumes from a checkpoint gives the same weights as one that was never interrupted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm

IGNORE = -100
"""Target id that takes no part in the loss."""

Batch = tuple[Int[Tensor, "batch position"], Int[Tensor, "batch position"]]


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Hyperparameters of :func:`train`; decay applies to matrices only (two or more axes)."""

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
        """Learning rate of ``step``: linear warm-up, then half a cosine down to the final rate."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.final_learning_rate + 0.5 * (self.learning_rate - self.final_learning_rate) * (1 + math.cos(math.pi * done))


def sequence_loss(logits: Float[Tensor, "batch position vocab"], targets: Int[Tensor, "batch position"]) -> Float[Tensor, ""]:
    """Mean over sequences of the mean cross-entropy (nats) over each sequence's targets that are not :data:`IGNORE`."""
    token = F.cross_entropy(logits.transpose(1, 2).float(), targets, ignore_index=IGNORE, reduction="none")
    kept = (targets != IGNORE).sum(1).clamp(min=1)
    return (token.sum(1) / kept).mean()


def _optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas)


def _save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.AdamW, losses: list[float]) -> None:
    tensors = {f"model.{k}": v.detach().clone() for k, v in model.named_parameters()}
    for i, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{k}": torch.as_tensor(v).clone() for k, v in state.items()}
    tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata={"step": str(step)})
    os.replace(part, path)


def _load(path: Path, model: nn.Module, optimizer: torch.optim.AdamW) -> list[float]:
    tensors = load_file(path)
    losses = tensors.pop("losses").tolist()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return losses


def train(
    model: nn.Module,
    batch_at: Callable[[int], Batch],
    settings: TrainSettings,
    *,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    on_step: Callable[[int, nn.Module], None] | None = None,
) -> list[float]:
    """Train a Hugging Face causal language model in place and return the loss (nats per token) of every step.

    ``batch_at(step)`` returns inputs and targets ``[batch position]`` (targets already shifted, :data:`IGNORE` where there
    is none). With ``checkpoint`` the state is written there every ``settings.checkpoint_every`` steps, and a run that finds
    the file continues from it. ``on_step(step, model)`` is called after each step, in evaluation mode.
    """
    device = next(model.parameters()).device
    optimizer = _optimizer(model, settings)
    path = None if checkpoint is None else Path(checkpoint)
    losses = _load(path, model, optimizer) if path is not None and path.exists() else []
    bar = tqdm(range(len(losses), settings.steps), initial=len(losses), total=settings.steps, disable=not progress, unit="step")
    for step in bar:
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step)
        tokens, targets = (x.to(device) for x in batch_at(step))
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
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
        if path is not None and (len(losses) % settings.checkpoint_every == 0 or len(losses) == settings.steps):
            _save(path, step, model, optimizer, losses)
    model.eval()
    return losses
