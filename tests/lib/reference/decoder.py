"""A decoder written out in float64 from the weights of a Hugging Face model: GPT-2, Llama (grouped
keys, rotation), BLOOM (ALiBi), Gemma 2 (soft caps, sliding window, norms behind blocks).

A block adds to the stream, with x = N(h) each time the normed input,

    head h:  N_a(z_h W_O^h + b_O / H),   z_h = pattern_h v_h,   pattern = softmax(cap(S) + mask)
    MLP:     N_b(a(x W_gate + b_gate) * (x W_in + b_in) W_out + b_out)

where N_a, N_b are the norms behind attention and MLP, where there are such; their bias, like b_O,
is shared out evenly among heads (SPEC P.4). S = scale q k^T (+ ALiBi) is before a soft cap.

Everything computed has a name and a layer, ``run["scores", 1]``, and may be replaced by a hook
``hooks={("scores", 1): lambda value, run: ...}``, which sees all that was computed before. Every
reader has an input of its own (queries by head, keys and values by group of heads, MLP, output):

    embed, pos_embed [b i d] at 0; state [b i d] at 0..n_layers
    q_in [b i h d], k_in, v_in [b i g d], mlp_in, output_in [b i 1 d]; q_scale, ... alike
    q, k, v [b i h e] as they enter scores and mixing; scores, pattern [b h i j]; z [b i h e]
    writes [h b i d], gate, linear [b i m], mlp [b i d]; raw_logits, logits [b i v] at 0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Key = tuple[str, int]
Run = dict[Key, Tensor]
Hooks = Mapping[Key, Callable[[Tensor, Run], Tensor]]


@dataclass(frozen=True, eq=False)
class Norm:
    """``(x A / s) gain + bias``, s = sqrt(mean((x A)^2) + eps); A centres (LayerNorm) or not."""

    gain: Tensor
    bias: Tensor
    eps: float
    centred: bool

    def centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def scale(self, x: Tensor) -> Tensor:
        """s, with a last axis of one."""
        return (self.centre(x).square().mean(-1, keepdim=True) + self.eps).sqrt()

    def linear(self, x: Tensor, scale: Tensor | float) -> Tensor:
        """A part of the input, at a given scale and without the bias."""
        return self.centre(x) / scale * self.gain

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x, self.scale(x)) + self.bias


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """Weights of one block: W_Q, W_O by head, W_K, W_V by group of heads that share them."""

    norm: Norm
    W_Q: Tensor
    b_Q: Tensor
    W_K: Tensor
    b_K: Tensor
    W_V: Tensor
    b_V: Tensor
    W_O: Tensor
    b_O: Tensor
    mlp_norm: Norm
    W_gate: Tensor
    b_gate: Tensor
    W_in: Tensor | None
    W_out: Tensor
    b_out: Tensor
    act: Callable[[Tensor], Tensor]
    score_scale: float
    softcap: float | None = None
    window: int | None = None
    after_attention: Norm | None = None
    after_mlp: Norm | None = None

    @property
    def group_size(self) -> int:
        """Heads that share keys and values."""
        return len(self.W_Q) // len(self.W_K)

    def weights(self, which: str) -> tuple[Tensor, Tensor]:
        """Matrix and bias of queries, keys or values ("q", "k", "v"), by reader."""
        name = which.upper()
        return getattr(self, f"W_{name}"), getattr(self, f"b_{name}")

    def by_head(self, x: Tensor, dim: int) -> Tensor:
        """Keys or values of groups, once for every head of the group."""
        return x.repeat_interleave(self.group_size, dim) if x.shape[dim] < len(self.W_Q) else x

    def cap(self, scores: Tensor) -> Tensor:
        """Scores as they enter the softmax."""
        c = self.softcap
        return scores if c is None else c * torch.tanh(scores / c)

    def allowed(self, length: int) -> Tensor:
        """Which keys j a query i may see, ``[i j]``."""
        offset = torch.arange(length)[:, None] - torch.arange(length)
        return (offset >= 0) & (offset < (self.window or length))

    def softmax(self, scores: Tensor) -> Tensor:
        """The pattern of scores (before the cap)."""
        allowed = self.allowed(scores.shape[-1])
        return self.cap(scores).masked_fill(~allowed, -torch.inf).softmax(-1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Decoder:
    """All weights of a model in float64."""

    embed: Tensor
    pos_embed: Tensor | None
    embed_norm: Norm | None
    blocks: tuple[Block, ...]
    norm: Norm
    W_U: Tensor
    logit_cap: float | None = None
    rotary_base: float | None = None
    slopes: Tensor | None = None

    @staticmethod
    def of(hf: Any) -> Decoder:
        """The decoder of a Hugging Face model that no TransformerBridge has instrumented."""
        from tests.lib.reference.weights import decoder_of

        return decoder_of(hf)

    @property
    def n_layers(self) -> int:
        return len(self.blocks)

    @property
    def n_heads(self) -> int:
        return len(self.blocks[0].W_Q)

    def rotate(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotary embedding of ``[... position head d_head]``: coordinates e and e + d_head / 2 are
        one complex number, which position t turns by ``t base^(-2 e / d_head)``."""
        if self.rotary_base is None:
            return x
        half = x.shape[-1] // 2
        t = torch.arange(x.shape[-3]) if positions is None else positions
        theta = self.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = (t.double()[:, None] * theta)[:, None]
        a, b = x[..., :half], x[..., half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def alibi(self, length: int) -> Tensor | None:
        """``-slope_h (i - j)``, ``[h i j]`` (SPEC C.2; Hugging Face's differ by row constants)."""
        if self.slopes is None:
            return None
        offset = torch.arange(length)[:, None] - torch.arange(length)
        return -self.slopes[:, None, None] * offset

    def run(
        self, tokens: Tensor | None, hooks: Hooks | None = None, *, first: Tensor | None = None
    ) -> Run:
        """One pass over tokens, or over a ``first`` state."""
        run: Run = {}

        def put(name: str, layer: int, value: Tensor) -> Tensor:
            hook = (hooks or {}).get((name, layer))
            run[name, layer] = value if hook is None else hook(value, run)
            return run[name, layer]

        x = self._first(tokens, put) if first is None else first
        for l, block in enumerate(self.blocks):
            x = put("state", l, x)
            x = x + self._attention(l, block, x, put).sum(0)
            x = x + self._mlp(l, block, x, put)
        x = put("state", self.n_layers, x)
        read = put("output_in", 0, x.unsqueeze(2))
        scale = put("output_scale", 0, self.norm.scale(read))
        normed = (self.norm.linear(read, scale) + self.norm.bias)[:, :, 0]
        raw, cap = put("raw_logits", 0, normed @ self.W_U), self.logit_cap
        put("logits", 0, raw if cap is None else cap * torch.tanh(raw / cap))
        return run

    def _first(self, tokens: Tensor | None, put: Any) -> Tensor:
        """State 0: token embeddings (behind their norm, where there is one) and positions."""
        assert tokens is not None, "tokens, or a first state"
        embed = self.embed[tokens]
        x = put("embed", 0, embed if self.embed_norm is None else self.embed_norm(embed))
        if self.pos_embed is not None:
            x = x + put("pos_embed", 0, self.pos_embed[: tokens.shape[1]].expand_as(x))
        return x

    def project(self, l: int, which: str, read: Tensor, scale: Tensor, bias: bool = True) -> Tensor:
        """Queries, keys or values ``[... i h e]`` of inputs by reader ``[... i r d]`` at a scale,
        as they enter scores and mixing; without ``bias`` those of a part of the input."""
        block = self.blocks[l]
        W, b = block.weights(which)
        x = block.norm.linear(read, scale)
        x = torch.einsum("...ird,rde->...ire", x + block.norm.bias if bias else x, W)
        x = x + b if bias else x
        return block.by_head(x if which == "v" else self.rotate(x), -2)

    def _attention(self, l: int, block: Block, x: Tensor, put: Any) -> Tensor:
        """What each head writes."""
        sides = {}
        for which in "qkv":
            readers = len(block.weights(which)[0])
            read = put(f"{which}_in", l, x.unsqueeze(2).expand(-1, -1, readers, -1))
            scale = put(f"{which}_scale", l, block.norm.scale(read))
            sides[which] = put(which, l, self.project(l, which, read, scale))
        scores = block.score_scale * torch.einsum("bihe,bjhe->bhij", sides["q"], sides["k"])
        alibi = self.alibi(x.shape[1])
        scores = put("scores", l, scores if alibi is None else scores + alibi)
        p = put("pattern", l, block.softmax(scores))
        z = put("z", l, torch.einsum("bhij,bjhe->bihe", p, sides["v"]))
        writes = torch.einsum("bihe,hed->hbid", z, block.W_O) + block.b_O / self.n_heads
        if (norm := block.after_attention) is not None:
            scale = put("after_attention_scale", l, norm.scale(writes.sum(0)))
            writes = norm.linear(writes, scale) + norm.bias / self.n_heads
        return put("writes", l, writes)

    def _mlp(self, l: int, block: Block, x: Tensor, put: Any) -> Tensor:
        """What the MLP writes."""
        read = put("mlp_in", l, x.unsqueeze(2))
        scale = put("mlp_scale", l, block.mlp_norm.scale(read))
        normed = (block.mlp_norm.linear(read, scale) + block.mlp_norm.bias)[:, :, 0]
        gate = put("gate", l, normed @ block.W_gate + block.b_gate)
        linear = None if block.W_in is None else put("linear", l, normed @ block.W_in)
        hidden = block.act(gate) if linear is None else block.act(gate) * linear
        out = hidden @ block.W_out + block.b_out
        if (norm := block.after_mlp) is not None:
            scale = put("after_mlp_scale", l, norm.scale(out))
            out = norm.linear(out, scale) + norm.bias
        return put("mlp", l, out)
