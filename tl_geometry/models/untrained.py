"""The untrained control: :func:`reinitialized` gives the same model with some or all blocks
untrained, for as long as a ``with`` block lasts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tl_geometry.base import checks
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.parameters import part
from tl_geometry.models.reader import as_view


@contextmanager
def reinitialized(
    model: ModelLike,
    blocks: Sequence[int] | None = None,
    *,
    how: str = "init",
    std: float = 0.02,
    seed: int = 0,
) -> Iterator[ModelView]:
    """The model with untrained ``blocks`` (``None``: all parameters, embeddings too), restored on
    leaving, also on exceptions.

    ``how="init"``: matrices Gaussian with standard deviation ``std`` (GPT-2's initialisation; for
    it alone), biases 0, gains 1; ``how="shuffle"``: the entries of every parameter in random order,
    which keeps the sizes of the trained weights. Yields a view whose name says so and whose
    fingerprint is that of the redrawn weights. Sarfati et al. 2025 reinitialise everything, or
    blocks 13 to 24 of GPT-2-medium.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> with tlg.models.reinitialized(model) as control:
    ...     control.name
    'tl-geometry-embedded, untrained (init)'
    """
    checks.choice(how, ("init", "shuffle"), "how")
    view = as_view(model)
    chosen = None if blocks is None else checks.indices(blocks, view.n_layers, "blocks")
    root = view._model
    parts: list[nn.Module] = [root] if chosen is None else [root.blocks[i] for i in chosen]
    named = {id(p): (name, p) for part in parts for name, p in part.named_parameters()}
    trained = [(name, p, p.detach().clone()) for name, p in named.values()]
    # a bridge's queries, keys and values may be parts of one weight: parts come after the whole
    trained.sort(key=lambda entry: -entry[1].numel() if how == "shuffle" else 0)
    generator = checks.seeded(seed)
    # norms of Gemma store their gain less one
    gain = 0.0 if part(root.cfg, "rmsnorm_uses_offset") else 1.0
    what = "untrained" if chosen is None else f"blocks {', '.join(map(str, chosen))} untrained"
    name, head = f"{view.name}, {what} ({how})", chosen is not None and view.head_trained
    try:
        with torch.no_grad():
            for leaf, value, old in trained:
                value.copy_(_redrawn(leaf, old, how, std, generator, gain))
        yield dataclasses.replace(as_view(root), name=name, head_trained=head)
    finally:
        with torch.no_grad():
            for _, value, old in trained:
                value.copy_(old)


def _redrawn(
    name: str, value: Tensor, how: str, std: float, generator: torch.Generator, gain: float
) -> Tensor:
    """An untrained parameter in place of ``value``; its name and shape tell biases and gains, which
    become ``gain``."""
    if how == "shuffle":
        order = torch.randperm(value.numel(), generator=generator).to(value.device)
        return value.reshape(-1)[order].view_as(value)
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "b" or leaf.endswith("bias") or leaf.startswith("b_"):
        return torch.zeros_like(value)
    # gains of a norm of queries and keys may have a row for each head
    if value.dim() == 1 or "_norm." in name:
        return torch.full_like(value, gain)
    return (torch.randn(value.shape, generator=generator, dtype=torch.float64) * std).to(value)
