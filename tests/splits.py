"""Splits made of random numbers, for figures: any size at once, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tl_geometry.base.results import Provenance
from tl_geometry.scores import ScoreSplit
from tl_geometry.scores.planes import HeadPlanes


def synthetic(
    heads: int = 2,
    tokens: int = 20,
    *,
    parts: Sequence[str] = ("bias", "pos", "cvec"),
    texts: Sequence[str] = (),
    causal: bool = True,
    seed: int = 0,
) -> ScoreSplit:
    """A split of one prompt by random queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(len(parts), 1, tokens, heads, 16, generator=generator) / 2 for _ in "qk")
    stop = torch.arange(1, tokens + 1) if causal else torch.full((tokens,), tokens)
    key_range = torch.stack([torch.zeros_like(stop), stop], -1).expand(heads, -1, -1)
    return ScoreSplit(
        provenance=Provenance(model="synthetic"),
        heads=tuple((i // 12, i % 12) for i in range(heads)),
        parts=tuple(parts),
        q=q,
        k=k,
        bias=None,
        key_range=key_range,
        softcap=torch.full((heads,), torch.inf),
        sinks=torch.full((heads,), -torch.inf),
        head_planes=HeadPlanes(
            torch.zeros(heads, 16, dtype=torch.int64), torch.zeros(heads, 1).double(), tokens
        ),
        checks=((0, "scores", 1e-6, 2e-5),),
        str_tokens=tuple(texts) or tuple(f" t{i}" for i in range(tokens)),
    )
