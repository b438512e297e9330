"""Frozen records that rooms hand to each other: windows of tokens, a view of a model, and a view of one of its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry._check import describe, fail, require, whole
from tl_geometry._html import plain
from tl_geometry.results import Provenance, hash_tokens

Hook = Callable[[Tensor], Tensor | None]
"""Called with an activation; a tensor returned takes its place, ``None`` leaves it."""


Selection = int | slice | Sequence[int] | Sequence[bool] | Int[Tensor, "batch"] | Bool[Tensor, "context"] | Any
"""Contexts: one, a slice, or several (a list, a tensor, an array), as numbers or as a mask."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class TokenWindows:
    """Windows of one length: ``tokens [context position]``, a document label per context (or ``None``), whether column 0 is BOS.

    ``names[labels[c]]`` is the document that context ``c`` was cut from; ``str_tokens`` are the readable tokens of the first window;
    ``notes`` say what was done to the text.
    """

    tokens: Int[Tensor, "context position"]
    has_bos: bool
    labels: Int[Tensor, "context"] | None = None
    names: tuple[str, ...] = ()
    corpus: str = ""
    str_tokens: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ok = self.tokens.dim() == 2 and not self.tokens.is_floating_point() and self.tokens.dtype != torch.bool and self.tokens.numel() > 0
        require(ok, "TokenWindows", expected="integer tokens [context position], at least one", got=describe(self.tokens))
        if self.labels is not None:
            ok = self.labels.shape == self.tokens.shape[:1]
            require(ok, "labels", expected=f"one label for each of {len(self.tokens)} contexts", got=describe(self.labels))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, contexts: Selection) -> TokenWindows:
        """Some of the contexts, in the given order: those of a slice, a list, a tensor or a mask; one of them for a number.

        >>> rows = TokenWindows(tokens=torch.arange(6).view(3, 2), has_bos=False)
        >>> [rows[i].tokens.tolist() for i in (1, torch.tensor([2]), [True, False, False])]
        [[[2, 3]], [[4, 5]], [[0, 1]]]
        """
        chosen = self._rows(contexts)
        labels, tokens = None if self.labels is None else self.labels[chosen], self.tokens[chosen]
        texts = self.str_tokens if len(tokens) > 0 and torch.equal(tokens[0], self.tokens[0]) else ()
        return dataclasses.replace(self, tokens=tokens, labels=labels, str_tokens=texts)

    def _rows(self, contexts: Any) -> Int[Tensor, "batch"]:
        every = torch.arange(len(self))
        if isinstance(contexts, slice):
            return every[contexts]
        if whole(contexts) is not None and not getattr(contexts, "shape", ()):  # a tensor of one number is a tensor
            return every[contexts].unsqueeze(0)  # IndexError beyond the last ends a loop
        try:
            index = torch.as_tensor(contexts if isinstance(contexts, Tensor) else list(contexts)).cpu()
            mask = index.dtype == torch.bool
            if index.dim() == 1 and not index.is_floating_point() and len(index) == (len(self) if mask else max(1, len(index))):
                return every[index if mask else index.long()]
        except (TypeError, ValueError, IndexError, RuntimeError):
            pass
        size = len(self)
        return fail("contexts", expected=f"a slice, numbers from 0 to {size - 1}, or a mask of {size}", got=describe(contexts))

    @property
    def token_hash(self) -> str:
        """Hash of the tokens in their order."""
        return hash_tokens(self.tokens)

    @property
    def flags(self) -> tuple[str, ...]:
        """What a result made from these windows should say: notes, and how many of them begin with BOS twice."""
        twice = int((self.tokens[:, 0] == self.tokens[:, 1]).sum()) if self.has_bos and self.tokens.shape[1] > 1 else 0
        return (*self.notes, *([double_bos(twice, len(self))] if twice else []))

    def __repr__(self) -> str:
        contexts, length = self.tokens.shape
        known = [f"{contexts} contexts of {length} tokens", "with BOS" if self.has_bos else "no BOS"]
        known += [f"corpus {self.corpus[:60]!r}"] if self.corpus else []
        known += [f"{len(self.names)} documents"] if self.names else []
        known += [repr("".join(self.str_tokens)[:60])] if self.str_tokens else [str(self.tokens[0, :8].tolist())]
        return f"TokenWindows({plain('; '.join([*known, *self.flags]))})"


def double_bos(contexts: int, of: int) -> str:
    """Flag of windows that begin with BOS twice."""
    return f"{contexts} of {of} contexts begin with BOS twice"


@runtime_checkable
class Run(Protocol):
    """Run the model once over ``tokens`` in evaluation mode without gradients.

    ``hooks`` maps TransformerLens hook names (HookedTransformer spelling) to functions of the activation. With ``logits``
    the logits are returned, otherwise ``None`` and they are never computed where the class allows it; ``stop_at`` stops
    before that block (only where nothing later is hooked). Hooks are removed afterwards, also on exceptions; a hook that
    did not fire is an error.
    """

    def __call__(
        self, tokens: Int[Tensor, "batch position"], hooks: Mapping[str, Hook], *, logits: bool = False, stop_at: int | None = None
    ) -> Tensor | None: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadWeights:
    """Weights of one attention layer in TransformerLens order, grouped keys expanded to ``n_heads``; absent biases are zeros."""

    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "head d_model d_head"]
    W_V: Float[Tensor, "head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]
    b_Q: Float[Tensor, "head d_head"]
    b_K: Float[Tensor, "head d_head"]
    b_V: Float[Tensor, "head d_head"]
    b_O: Float[Tensor, " d_model"]


@dataclass(frozen=True, eq=False, kw_only=True)
class NormWeights:
    """The norm in front of a projection: ``x = ((h A) / s) * gain + bias``, A centring over d_model for ``"LN"``, identity for ``"RMS"``.

    ``kind`` ``None`` is no norm (``x = h``); ``s = sqrt(mean((hA)^2) + eps)``.
    """

    kind: str | None
    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"]
    eps: float

    def centre(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``h A``: deviations from the mean over d_model for ``"LN"``, ``h`` itself otherwise."""
        return h - h.mean(-1, keepdim=True) if self.kind == "LN" else h

    def scale(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        """``s = sqrt(mean((h A)^2) + eps)`` of each token; one where there is no norm."""
        return torch.ones_like(h[..., 0]) if self.kind is None else (self.centre(h).square().mean(-1) + self.eps).sqrt()

    def normalize(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``h A / s``: the norm without gain and bias."""
        return self.centre(h) / self.scale(h).unsqueeze(-1)

    def apply(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``(h A / s) * gain + bias``: the whole norm (``h`` itself where there is none)."""
        return h if self.kind is None else self.normalize(h) * self.gain.to(h) + self.bias.to(h)


@dataclass(frozen=True, eq=False, kw_only=True)
class ClosingReport:
    """How far sums of parts are from what the model computed, each as (largest error, largest error allowed).

    ``checks`` has ``q`` and ``k`` (against ``hook_q``, ``hook_k``), ``pattern`` (row-centred logarithm of ``hook_pattern``),
    ``pattern sum`` (its rows sum to one, or to what a sink leaves) and ``scores`` (where the hook holds scores). ``scale`` is A, the
    largest product of absolute values on allowed cells; ``sizes`` has the same for queries and keys, ``sum_d |x_d W_de| + |constant|``.
    """

    checks: Mapping[str, tuple[float, float]]
    scale: float
    sizes: Mapping[str, float] = field(default_factory=dict)

    @property
    def closes(self) -> bool:
        """Whether every error is within its bound (NaN is not)."""
        return all(error <= bound for error, bound in self.checks.values())

    @property
    def worst(self) -> float:
        """The largest error as a fraction of its bound."""
        return max((error / bound if bound > 0 else float(error > 0) for error, bound in self.checks.values()), default=0.0)


LinearMap = Callable[[Tensor], Tensor]
"""A linear map of additive parts of the stream, ``[*part position d_model] -> [*part position head d_head]``."""


class AddedPosition(NamedTuple):
    """A positional embedding that is added after the norm to what queries and keys are made of, and what they become by it."""

    embedding: Float[Tensor, "position d_model"]
    q: Float[Tensor, "position head d_head"]
    k: Float[Tensor, "position head d_head"]


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerView:
    """One attention layer of one forward pass, with every scale frozen, so that scores are bilinear in parts of the stream.

    For any additive split ``h = sum_a p_a`` of the layer's input (all tensors have the full position axis, column = index)::

        q_a = q_map(p_a) * q_scale[..., None]            [batch position head d_head]   (k_a likewise)
        q   = sum_a q_a + q_constant
        score[b, h, i, j] = scale * <q[b, i, h], k[b, j, h]> + bias[h, i, j]      before any soft cap, where allowed
        pattern = softmax over allowed keys (and one more logit, ``sinks[h]``, where there are sinks) of
                  score, or of softcap * tanh(score / softcap)

    ``q_map`` holds what does not depend on the tokens: centring, gain, W_Q, the linear part of QK-norm, the rotation by the
    column; ``q_scale`` the frozen scales (one over norm scale, and over the QK-norm's); ``q_constant`` the bias of norm and
    projection, scaled and rotated alike. ``added`` is the positional embedding of models that add it to the inputs of queries
    and keys only (Shortformer), and its share of the constants: position, though not in the stream. Grouped keys are expanded
    to all heads. ``bias`` is ALiBi, analytic or measured
    (``bias_source``), else ``None``. ``allowed`` is the mask (causal, sliding window, bidirectional). ``pattern`` and
    ``scores`` are the model's own (``scores`` is ``None`` where the hook holds the pattern; it is masked and after the soft
    cap). Tensors have ``dtype`` float32, or float64 for float64 models, on the layer's device. ``v`` and ``z`` are the
    model's values (expanded) and its mixed values ``[batch position head d_head]``, ``v_map`` and ``v_constant`` the
    values of a part (``v_scale`` is one over the norm scale). ``rotary`` says whether the maps rotate. ``closing`` is the report of the
    checks that were made.
    """

    layer: int
    h: Float[Tensor, "batch position d_model"]
    norm: NormWeights
    norm_scale: Float[Tensor, "batch position"]
    scale: float
    softcap: float | None
    sinks: Float[Tensor, " head"] | None
    bias: Float[Tensor, "head query key"] | None
    bias_source: str
    allowed: Bool[Tensor, "query key"]
    q_map: LinearMap
    k_map: LinearMap
    v_map: LinearMap
    q_scale: Float[Tensor, "batch position head"]
    k_scale: Float[Tensor, "batch position head"]
    v_scale: Float[Tensor, "batch position head"]
    q_constant: Float[Tensor, "batch position head d_head"]
    k_constant: Float[Tensor, "batch position head d_head"]
    v_constant: Float[Tensor, "batch position head d_head"]
    q: Float[Tensor, "batch position head d_head"]
    k: Float[Tensor, "batch position head d_head"]
    pattern: Float[Tensor, "batch head query key"] | None
    scores: Float[Tensor, "batch head query key"] | None
    v: Float[Tensor, "batch position head d_head"] | None
    z: Float[Tensor, "batch position head d_head"] | None
    roundoff: float
    closing: ClosingReport
    rotary: bool = False
    added: AddedPosition | None = None

    def without_norm(self, scale: Float[Tensor, "batch position head"]) -> Float[Tensor, "batch position head"]:
        """A frozen scale without that of the norm: exactly one, or the QK-norm's."""
        same = torch.equal(scale, self.v_scale)
        return torch.ones_like(scale) if same else scale * self.norm_scale.unsqueeze(-1)

    def normalized(self) -> LayerView:
        """The same layer as a function of ``norm(h)`` (no gain, no bias), which is its ``h``: no norm scale is frozen any more.

        ``q = q_map(x) * q_scale + q_constant`` for ``x = (h A) / s``, with ``q_scale`` that of the QK-norm where there is one, else one.
        """
        return replace(
            self,
            h=self.norm.normalize(self.h),
            norm_scale=torch.ones_like(self.norm_scale),
            q_scale=self.without_norm(self.q_scale),
            k_scale=self.without_norm(self.k_scale),
            v_scale=torch.ones_like(self.v_scale),
        )

    def __repr__(self) -> str:
        batch, length, heads, d_head = self.q.shape
        size = f"{batch} contexts of {length} positions, {heads} heads of {d_head}, norm {self.norm.kind}, scale {self.scale:.4g}"
        return f"LayerView(layer {self.layer}, {size}, worst check {self.closing.worst:.2g} of what is allowed)"

    def project_q(self, parts: Float[Tensor, "*part batch position d_model"]) -> Float[Tensor, "*part batch position head d_head"]:
        """Queries of additive parts (without the constant)."""
        return self.q_map(parts) * self.q_scale.unsqueeze(-1)

    def project_k(self, parts: Float[Tensor, "*part batch position d_model"]) -> Float[Tensor, "*part batch position head d_head"]:
        """Keys of additive parts (without the constant)."""
        return self.k_map(parts) * self.k_scale.unsqueeze(-1)

    def project_v(self, parts: Float[Tensor, "*part batch position d_model"]) -> Float[Tensor, "*part batch position head d_head"]:
        """Values of additive parts (without the constant)."""
        return self.v_map(parts) * self.v_scale.unsqueeze(-1)


LayerHook = Callable[[LayerView], None]
"""Receives the view of a layer as soon as the forward pass has finished that layer."""


@runtime_checkable
class RunLayers(Protocol):
    """Run the model once over ``tokens`` and call ``on_layer`` for each of ``layers`` in order, holding one layer at a time.

    With ``verify`` each layer's scores, patterns, queries and keys are recomputed and compared, and a layer that does not close
    raises ``ClosingError``; without it queries and keys are the model's own, from its hooks, and nothing is recomputed.
    """

    def __call__(
        self, tokens: Int[Tensor, "batch position"], layers: Sequence[int], on_layer: LayerHook, *, verify: bool = True
    ) -> None: ...


@runtime_checkable
class BuildLayer(Protocol):
    """View of a layer from a mapping that holds its ``layer_hooks``; without ``verify`` pattern, scores and z may be missing."""

    def __call__(self, layer: int, cache: Mapping[str, Tensor], *, verify: bool = True) -> LayerView: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelView:
    """What the package knows about a model, read from the model object and verified against its own activations.

    ``state_hooks[s]`` is the hook that holds state ``s``; ``head_trained`` is false where the output head was newly
    initialised, so that no output-based measure is given. ``layer(l, cache)`` builds the verified view of attention layer
    ``l`` from a mapping that holds ``layer_hooks(l)`` (a TransformerLens ``ActivationCache`` will do); ``run_layers`` streams
    them through one forward pass; ``layer_facts(l)`` says in words how a layer makes its scores. ``final_norm`` is the norm before the
    unembedding ``unembed [d_model d_vocab]``, ``None`` where there is none or the output is not a linear readout of the last state.
    ``hooked()`` names the hook points at which somebody else's hook acts now. ``pad_id`` is the tokenizer's padding token where it
    is no other special token too, so that it means padding and nothing else. ``refresh(view)`` is the view as the model is now (the
    same one, if its weights and settings are the same), which every public function takes in place of the one that it was given.
    """

    model: Any
    name: str
    kind: str
    library: str
    processed: bool
    fingerprint: str
    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    d_vocab: int
    n_ctx: int
    causal: bool
    position: str
    norm: str | None
    dtype: torch.dtype
    device: torch.device
    head_trained: bool
    bos_id: int | None
    state_hooks: tuple[str, ...]
    run: Run
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], list[str]]
    weights: Callable[[int], HeadWeights]
    attention_norm: Callable[[int], NormWeights]
    layer: BuildLayer
    layer_hooks: Callable[[int], tuple[str, ...]]
    run_layers: RunLayers
    layer_facts: Callable[[int], Mapping[str, object]]
    final_norm: Callable[[], NormWeights | None]
    unembed: Callable[[], Float[Tensor, "d_model d_vocab"]]
    hooked: Callable[[], tuple[str, ...]]
    refresh: Callable[[ModelView], ModelView] | None = None
    notes: tuple[str, ...] = ()
    pad_id: int | None = None

    def __repr__(self) -> str:
        size = f"{self.n_layers} layers, {self.n_heads} heads, d_model {self.d_model}, {str(self.dtype).removeprefix('torch.')}"
        return f"ModelView({self.name} ({self.fingerprint}), {self.kind}, {self.library}, {size}, on {self.device})"

    @property
    def states(self) -> range:
        """All residual stream states, 0 (embedding output) to n_layers (before the final norm)."""
        return range(self.n_layers + 1)

    def provenance(self, rows: TokenWindows | None = None, **fields: Any) -> Provenance:
        """Provenance of a result of this model (on ``rows``), with the hooks that act on it now; ``fields`` are the rest."""
        about = {
            "model": self.name,
            "fingerprint": self.fingerprint,
            "library": f"{self.kind}, {self.library}",
            "processed": self.processed,
        }
        about |= {"library": f"{self.kind}, {self.library}", "dtype": str(self.dtype).removeprefix("torch."), "hooks": self.hooked()}
        if rows is not None:
            about |= {"corpus": rows.corpus, "token_hash": rows.token_hash, "has_bos": rows.has_bos, "contexts": len(rows)}
            fields = {**fields, "flags": tuple(dict.fromkeys([*rows.flags, *fields.get("flags", ())]))}
        return Provenance(**(about | fields))


Mask = Bool[Tensor, "*batch query key"]
