"""Scores and values of heads as sums over parts of their input, and the shares of the terms
(SPEC C, L, M, N), from the explicit decoder.

Parts are tensors ``[b i d]`` by name that sum to a block's input (with ``normalized`` to its input
after the norm, without gain and bias). Norm scales are those of the whole input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import softmax
from torch import Tensor

from tests.lib.reference.decoder import Decoder, Run

Parts = Mapping[str, Tensor]
Term = tuple[str, str]
BIAS, ALIBI = "bias", "alibi"


def normed(decoder: Decoder, run: Run, layer: int) -> Tensor:
    """``h A / s``: what a normalised basis is fitted on (SPEC L)."""
    norm = decoder.norm if layer == decoder.n_layers else decoder.blocks[layer].norm
    h = run["state", layer]
    return norm.centre(h) / norm.scale(h)


def position_parts(
    h: Tensor, mean: Tensor, pos: Tensor, *, window: tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """``h = mean + pos_t + cvec``, cvec = h - mean - pos_t (SPEC A.1); with a ``window`` cvec is
    ctx, its mean over the window's positions in each context, and resid."""
    pos = pos[: h.shape[1]]
    parts = {"mean": mean.expand_as(h), "pos": pos.expand_as(h), "cvec": h - mean - pos}
    if window is not None:
        cvec = parts.pop("cvec")
        ctx = cvec[:, window[0] : window[1]].mean(1, keepdim=True).expand_as(h)
        parts |= {"ctx": ctx, "resid": cvec - ctx}
    return parts


def writers(decoder: Decoder, run: Run, layer: int) -> dict[str, Tensor]:
    """Who wrote the input of a block (SPEC M): embeddings, heads ``L0H1``, MLPs ``mlp0``, and
    ``constants``: b_O, the MLP's b_out, biases of norms behind a write, and what a head writes
    whichever keys it attends to, ``(beta W_V + b_V) W_O``."""
    written = {name: run[name, 0] for name in ("embed", "pos_embed") if (name, 0) in run}
    written["constants"] = torch.zeros_like(run["embed", 0])
    for l, block in enumerate(decoder.blocks[:layer]):
        value = block.by_head(
            torch.einsum("d,rde->re", block.norm.bias, block.W_V) + block.b_V, dim=0
        )
        constant = torch.einsum("he,hed->d", value, block.W_O) + block.b_O
        heads = torch.einsum("bihe,hed->hbid", run["z", l] - value, block.W_O)
        if (norm := block.after_attention) is not None:
            scale = run["after_attention_scale", l]
            heads, constant = norm.linear(heads, scale), norm.linear(constant, scale) + norm.bias
        b_out = torch.zeros_like(block.b_out) if block.after_mlp else block.b_out
        written["constants"] = written["constants"] + constant + b_out
        written |= {f"L{l}H{h}": head for h, head in enumerate(heads)}
        written[f"mlp{l}"] = run["mlp", l] - b_out
    return written


def by_block(written: Parts) -> dict[str, Tensor]:
    """The same with the heads of a block together, ``attn0``."""
    joined: dict[str, Tensor] = {}
    for name, part in written.items():
        name = f"attn{name[1:].split('H')[0]}" if name.startswith("L") else name
        joined[name] = joined[name] + part if name in joined else part
    return joined


def projected(
    decoder: Decoder, run: Run, layer: int, which: str, parts: Parts, *, normalized: bool = False
) -> dict[str, Tensor]:
    """Queries, keys or values ``[b i h e]`` of parts (SPEC C.2): ``((a A / s) gain) W``, rotated;
    the part ``bias`` is that of ``beta W + b``, with the part ``mean`` where there is one."""
    readers = len(decoder.blocks[layer].weights(which)[0])
    scale = torch.ones(1, dtype=torch.float64) if normalized else run[f"{which}_scale", layer]

    def project(part: Tensor, bias: bool) -> Tensor:
        read = part.unsqueeze(2).expand(-1, -1, readers, -1)
        return decoder.project(layer, which, read, scale, bias)

    zero = torch.zeros_like(run["state", layer])
    sides = {BIAS: project(zero, True)}
    for name, part in parts.items():
        name = BIAS if name == "mean" else name
        sides[name] = project(part, False) + sides.get(name, 0)
    return sides


def terms(
    decoder: Decoder, run: Run, layer: int, parts: Parts, *, normalized: bool = False
) -> dict[Term, Tensor]:
    """``S_ab[i, j] = scale <q_a[i], k_b[j]>``, ``[b h i j]`` by (query part, key part); they sum to
    the scores before a soft cap, with ALiBi as ``("alibi", "alibi")``."""
    q, k = (projected(decoder, run, layer, w, parts, normalized=normalized) for w in "qk")
    scale = decoder.blocks[layer].score_scale
    found = {(a, b): scale * torch.einsum("bihe,bjhe->bhij", q[a], k[b]) for a in q for b in k}
    alibi = decoder.alibi(run["state", layer].shape[1])
    return found if alibi is None else found | {(ALIBI, ALIBI): alibi.expand_as(found[BIAS, BIAS])}


def group_of(term: Term) -> str:
    """SPEC, Version 2: position (neither part of the context), content (cvec, cvec), token (bias
    with cvec), mixed (pos with cvec)."""
    content = [part in ("cvec", "ctx", "resid") for part in term]
    if not any(content):
        return "position"
    return "content" if all(content) else "token" if BIAS in term else "mixed"


def split_values(
    decoder: Decoder, run: Run, layer: int, parts: Parts, *, normalized: bool = False
) -> dict[str, Tensor]:
    """Mixed values ``z_a[i] = sum_j p_ij v_a[j]``, ``[b i h e]`` by part (SPEC M), which sum to
    z."""
    values = projected(decoder, run, layer, "v", parts, normalized=normalized)
    p = run["pattern", layer]
    return {name: torch.einsum("bhij,bjhe->bihe", p, v) for name, v in values.items()}


class Shares(NamedTuple):
    """By term: ``cs = sum X~ S~ / sum S~^2`` over rows centred on their allowed keys (SPEC C.4),
    and ``gs = sum (p - u) X / sum (p - u) S`` (SPEC N)."""

    cs: dict[Term, float]
    gs: dict[Term, float]
    total: float
    gain_total: float

    def marginal(self, side: int) -> tuple[dict[str, float], dict[str, float]]:
        """cs and gs of each part as query (0) or as key (1), summed over the other (SPEC M)."""
        sums: list[dict[str, float]] = []
        for share in (self.cs, self.gs):
            sums.append({})
            for term, value in share.items():
                sums[-1][term[side]] = sums[-1].get(term[side], 0.0) + value
        return sums[0], sums[1]


def shares(
    terms: Mapping[Term, Tensor], allowed: Tensor, *, drop: int = 0, cap: float | None = None
) -> Shares:
    """Shares of the terms ``[b i j]`` of one head, row after row. The first ``drop`` queries and
    keys are left out, and rows with one key. With a soft cap p is that of the capped scores."""
    names, mask = list(terms), allowed.numpy()
    matrices = np.stack([terms[name].numpy() for name in names])
    covariance, gain = np.zeros(len(names)), np.zeros(len(names))
    for b in range(matrices.shape[1]):
        for i in range(drop, matrices.shape[2]):
            keys = [j for j in range(drop, matrices.shape[3]) if mask[i, j]]
            if len(keys) < 2:
                continue
            rows = matrices[:, b, i, keys]
            score = rows.sum(0)
            p = softmax(score if cap is None else cap * np.tanh(score / cap))
            gain += rows @ (p - 1 / len(keys))
            rows = rows - rows.mean(1, keepdims=True)
            covariance += rows @ rows.sum(0)
    total, gain_total = covariance.sum(), gain.sum()
    cs, gs = (dict(zip(names, x.tolist())) for x in (covariance / total, gain / gain_total))
    return Shares(cs, gs, float(total), float(gain_total))


def head_shares(
    decoder: Decoder, of_layer: Mapping[Term, Tensor], layer: int, head: int, *, drop: int = 0
) -> Shares:
    """:func:`shares` of one head, of the terms of its layer."""
    block = decoder.blocks[layer]
    of_head = {name: value[:, head] for name, value in of_layer.items()}
    length = next(iter(of_head.values())).shape[-1]
    return shares(of_head, block.allowed(length), drop=drop, cap=block.softcap)


def dropped_mass(pattern: Tensor, drop: int) -> Tensor:
    """Attention of the other queries to the first ``drop`` keys, ``[h]`` (SPEC N)."""
    return pattern[:, :, drop:, :drop].sum(-1).mean((0, 2))


def plane_terms(decoder: Decoder, layer: int, q: Tensor, k: Tensor) -> Tensor:
    """``X^(m)[i, j] = scale sum_{e in plane m} q[i, e] k[j, e]`` of rotated queries and keys,
    ``[m b h i j]`` (SPEC L); plane m holds coordinates m and m + d_head / 2."""
    half, planes = q.shape[-1] // 2, []
    for m in range(half):
        pair = [m, m + half]
        planes.append(torch.einsum("bihe,bjhe->bhij", q[..., pair], k[..., pair]))
    return decoder.blocks[layer].score_scale * torch.stack(planes)
