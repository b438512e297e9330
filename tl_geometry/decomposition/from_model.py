"""How much of each residual stream state is position, and how much is context? The public functions
``decompose`` (a model over a corpus) and ``decompose_activations`` (states held in memory). They
check the arguments, have the sums taken and return the basis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import describe
from tl_geometry.base.errors import GeometryError, fail, require
from tl_geometry.base.results import Provenance
from tl_geometry.corpus.sources import TokenSource, is_cache, label_ids, state_indices
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.decomposition.accumulator import Accumulation, Feed, OnState, Plan
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.decomposition.reservoir import activation_keys
from tl_geometry.decomposition.stream_pass import run_corpus
from tl_geometry.models.batches import batch_of, device_of
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.reader import as_view
from tl_geometry.models.states import states_from_cache


def decompose(
    model: ModelLike,
    tokens: TokensLike | None = None,
    *,
    states: Sequence[int | str] | None = None,
    window: Sequence[SupportsIndex | float] | None = None,
    batch_size: int | None = None,
    normalize: bool = False,
    second_moments: bool | str = "auto",
    keep_ctx: bool | str = "auto",
    groups: int = 8,
    keep: int = 32,
    labels: Any = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    device: torch.device | str | None = None,
    seed: int = 0,
    prepend_bos: bool | None = None,
    moments_dtype: torch.dtype = torch.float32,
    group: Any = None,
) -> PositionContext:
    """Positional and context basis of every residual stream state over a corpus: h = mean + pos +
    ctx + resid.

    Song & Zhong 2023, Eq. 2 and 3, streamed: one forward pass per batch, and only sums are kept, so
    that memory does not grow with the corpus (but for the context vectors of ``keep_ctx``). For
    activations held in memory, see :func:`decompose_activations`.

    Args:
        model: a TransformerLens model, or a view of one.
        tokens: ids ``[context position]``, :class:`TokenWindows`, what a tokenizer returns, an
            iterable of rows or batches (a ``DataLoader``), a ``.npy`` file or memory map, a
            ``datasets.Dataset`` (or ``IterableDataset``) with a ``tokens`` column, or strings of
            equal token length (then ``prepend_bos`` is needed). Ids are never edited; padded rows
            are refused.
        states: which states, 0 (embedding output) to n_layers (before the final norm), or hooks
            that hold them (``"blocks.1.hook_resid_pre"``); ``None`` for all.
        window: half-open positions of the statistics; by default ``(1, T)``, because position 0 is
            an attention sink (its sums are kept all the same).
        batch_size: contexts of one forward pass; by default about 4,096 tokens on a CPU, 16,384 on
            a GPU. Halved, as often as needed, when memory runs out: the result is the same.
        normalize: take the sums of ``norm(h)`` without gain and bias, which the next block reads
            (the output head for the last state). Then no token weighs more than another. States
            that are read without a norm stay as they are (a flag says which).
        second_moments, keep_ctx: keep ``[state d_model d_model]`` products and
            ``[state context d_model]`` context vectors; ``"auto"`` while each is under 1 GiB (the
            result says when it is not).
        groups: disjoint, contiguous groups of contexts whose sums are kept apart, for split halves,
            learning curves and jackknife errors (between that many and twice as many for an
            iterable, whose length is not known before its end).
        keep: contexts whose states are kept whole, a seeded uniform sample (fewer where they would
            exceed 1 GiB).
        labels: a document label for each context, numbers or names.
        checkpoint: file that holds the finished batches; a run that finds it goes on from there, if
            its model, hooks, tokens, labels and settings are the same. Writing takes about 5% of
            the time at most, so the file may lack the last batches.
        progress: show a progress bar.
        device: where the sums live, by default the model's device.
        seed: seed of the sample that ``keep`` asks for.
        prepend_bos: whether strings get the BOS token; ``None`` for everything else.
        moments_dtype: dtype of the products in second moments (``torch.float64``: partitions agree
            to 1e-10).
        group: a ``torch.distributed`` process group (``torch.distributed.group.WORLD``), all of
            whose processes make this same call with the same tokens. Each reads all of them and
            runs its share of the batches; all return the whole basis, equal to that of one process.
            The first one writes the checkpoint, from which any number of processes goes on.

    Raises ``GeometryError`` for ragged, padded or foreign tokens, training mode, NaN or infinite
    activations, windows beyond the positions, and checkpoints of another run.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> basis = decompose(model, tlg.zoo.default_windows(model, 16, n=8), progress=False)
    >>> basis.pos.shape, basis.ctx.shape, basis.window
    (torch.Size([5, 15, 128]), torch.Size([5, 8, 128]), (1, 16))
    """
    if isinstance(model, Tensor) or is_cache(model):
        instead = "decompose_activations(...) for activations and caches"
        got = describe(model) if isinstance(model, Tensor) else type(model).__name__
        fail("model", expected="a TransformerLens model", got=got, instead=instead)
    view = as_view(model)
    if tokens is None:
        instead = "decompose(model, windows(model, texts, length, ...))"
        fail("tokens", expected="tokens to run the model on", got=None, instead=instead)
    corpus = TokenSource.of(view, tokens, labels, prepend_bos)
    plan = Plan(
        states=state_indices(states, view.n_layers + 1, view.state_hooks),
        window=checks.window(window, corpus.length, 1),
        groups=groups,
        keep=keep,
        second_moments=second_moments,
        keep_ctx=keep_ctx,
        moments_dtype=moments_dtype,
        seed=seed,
    )
    return run_corpus(
        corpus,
        plan,
        batch_size=batch_size,
        checkpoint=checkpoint,
        progress=progress,
        device=device,
        group=group,
        normalize=normalize,
    )


def decompose_activations(
    source: Any,
    *,
    states: Sequence[int | str] | None = None,
    window: Sequence[SupportsIndex | float] | None = None,
    batch_size: int | None = None,
    second_moments: bool | str = "auto",
    keep_ctx: bool | str = "auto",
    groups: int = 8,
    keep: int = 32,
    labels: Any = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    moments_dtype: torch.dtype = torch.float32,
) -> PositionContext:
    """The basis of activations held in memory: h = mean + pos + ctx + resid, as
    :func:`decompose` gives it.

    Args:
        source: a tensor ``[context position d_model]`` (one state) or
            ``[state context position d_model]``, or a TransformerLens ``ActivationCache`` with
            every residual stream state (or the plain dictionary of ``return_cache_object=False``).
        states: which of them, as numbers or hook names; ``None`` for all.
        window: half-open positions of the statistics; by default all.
        batch_size: contexts that are summed at a time.
        device: where the sums live, by default that of the activations.

    The other arguments are those of :func:`decompose`. A basis of a tensor does not know its model:
    results that use it with one say so. Raises ``GeometryError`` for anything but activations, NaN,
    windows beyond the positions and labels that do not fit.

    >>> h = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    >>> basis = decompose_activations(h)
    >>> basis.pos.shape, basis.ctx.shape, basis.window
    (torch.Size([1, 5, 4]), torch.Size([1, 6, 4]), (0, 5))
    """
    h, provenance = _activations(source)
    chosen = state_indices(states, len(h))
    plan = Plan(
        states=chosen,
        window=checks.window(window, h.shape[2], 0),
        groups=groups,
        keep=keep,
        second_moments=second_moments,
        keep_ctx=keep_ctx,
        moments_dtype=moments_dtype,
        seed=seed,
    )
    numbers, names = label_ids(labels, h.shape[1])
    h = h if states is None else h[list(chosen)]
    work = Accumulation(
        plan,
        provenance,
        length=h.shape[2],
        d_model=h.shape[3],
        contexts=h.shape[1],
        device=device_of(device, h.device),
        labels=numbers,
    )
    for batch in h.split(batch_of(batch_size, h.shape[2], h.device), dim=1):
        work.update(activation_keys(batch[-1]), _feeding(batch), None)
    return work.finish(numbers, names)


def _feeding(h: Float[Tensor, "state batch position d_model"]) -> Feed:
    """The :data:`Feed` of a batch of activations that are in memory."""

    def feed(contexts: slice, on_state: OnState) -> None:
        for row, state in enumerate(h):
            on_state(row, state[contexts])

    return feed


def _activations(source: Any) -> tuple[Tensor, Provenance]:
    """The states ``[state context position d_model]`` of a tensor or cache, and their
    provenance."""
    if isinstance(source, Tensor):
        h = source.unsqueeze(0) if checks.is_plain(source) and source.dim() == 3 else source
        fits = h.is_floating_point() and checks.is_plain(h) and h.dim() == 4 and h.numel() > 0
        shape = "floating [context position d_model] or [state context position d_model]"
        got = describe(source)
        instead = "decompose(model, tokens) for token ids"
        require(fits, "activations", expected=shape, got=got, instead=instead)
        return h.detach(), Provenance(
            corpus="activations", dtype=str(h.dtype).removeprefix("torch.")
        )
    instead = "decompose(model, tokens) to run a model"
    expected, got = "a tensor or an ActivationCache", describe(source)
    require(is_cache(source), "activations", expected=expected, got=got, instead=instead)
    h = states_from_cache(source).detach()
    return h, Provenance(
        corpus="ActivationCache",
        dtype=str(h.dtype).removeprefix("torch."),
        **_origin(getattr(source, "model", None)),
    )


def _origin(model: Any) -> dict[str, Any]:
    """Provenance of the model that a cache refers to; only the class name where the model is not
    supported."""
    if model is None:
        return {}
    try:
        view = as_view(model)
    except GeometryError:
        return {"model": type(model).__name__}
    provenance = view.provenance()
    return {
        name: getattr(provenance, name) for name in ("model", "fingerprint", "library", "processed")
    }
