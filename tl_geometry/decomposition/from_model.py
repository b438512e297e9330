"""How much of each residual stream state is position, and how much is context? The public functions
``decompose`` (a model over a corpus) and ``decompose_activations`` (states held in memory)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base import checks
from tl_geometry.base.checks import describe
from tl_geometry.base.errors import fail, require
from tl_geometry.base.results import Provenance, row_hashes
from tl_geometry.corpus.sources import as_tokens, is_cache, label_ids
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.decomposition.accumulate import Accumulation
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.decomposition.variance import spans
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.reader import as_view
from tl_geometry.models.states import states_from_cache


def decompose(
    model: ModelLike,
    tokens: TokensLike | None = None,
    *,
    states: Sequence[int] | int | None = None,
    window: Sequence[SupportsIndex | float] | None = None,
    batch_size: int | None = None,
    normalize: bool = False,
    second_moments: bool | str = "auto",
    keep_ctx: bool | str = "auto",
    groups: int = 8,
    keep: int = 0,
    labels: Any = None,
    progress: bool = True,
    seed: int = 0,
    prepend_bos: bool | None = None,
    group: Any = None,
) -> PositionContext:
    """Positional and context basis of every residual stream state over a corpus: h = mean + pos +
    ctx + resid.

    Song & Zhong 2023, Eq. 2 and 3, streamed: one forward pass per batch, and only sums are kept, so
    that memory does not grow with the corpus (but for the context vectors of ``keep_ctx``). For
    activations held in memory, see :func:`decompose_activations`; for a corpus in shards,
    :meth:`PositionContext.merge`.

    Args:
        model: a TransformerLens model, or a view of one.
        tokens: windows, ids ``[context position]``, an iterable of rows or batches, or texts of
            equal token length. A context that occurs more than once counts once (a flag says so).
        states: which states, 0 (embedding output) to n_layers (before the final norm); ``None`` for
            all.
        window: half-open positions of the statistics; by default ``(1, T)``, because position 0 is
            an attention sink (its sums are kept all the same).
        batch_size: contexts of one forward pass; by default about 4,096 tokens on a CPU, 16,384 on
            a GPU, and never more than a group.
        normalize: take the sums of ``norm(h)`` without gain and bias, which the next block reads
            (the output head for the last state). Then no token weighs more than another. States
            that are read without a norm stay as they are (a flag says which).
        second_moments, keep_ctx: keep ``[state d_model d_model]`` products and
            ``[state context d_model]`` context vectors; ``"auto"`` while each is under 1 GiB (the
            result says when it is not).
        groups: disjoint, contiguous groups of contexts whose sums are kept apart, for split halves,
            learning curves and jackknife errors.
        keep: contexts whose states are kept whole, a seeded uniform sample (fewer where they would
            exceed 1 GiB).
        labels: a document label for each context, numbers or names.
        progress: show a progress bar.
        seed: seed of the sample that ``keep`` asks for.
        prepend_bos: whether texts get the BOS token; ``None`` takes the model's own default.
        group: a ``torch.distributed`` process group (``torch.distributed.group.WORLD``), all of
            whose processes make this same call. Each runs every n-th batch; all return the whole
            basis, equal to that of one process.

    Raises ``GeometryError`` for ragged, padded or foreign tokens, training mode, NaN or infinite
    activations, and windows beyond the positions.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> basis = decompose(model, tlg.zoo.default_windows(model, 16, n=8), progress=False)
    >>> basis.pos.shape, basis.ctx.shape, basis.window
    (torch.Size([5, 15, 128]), torch.Size([5, 8, 128]), (1, 16))
    """
    if isinstance(model, Tensor) or is_cache(model):
        instead, got = "decompose_activations(...)", type(model).__name__
        fail("model", expected="a TransformerLens model", got=got, instead=instead)
    view = as_view(model)
    rows, hashes = _each_once(view, as_tokens(view, tokens, labels=labels, prepend_bos=prepend_bos))
    chosen = checks.indices(states, view.n_layers + 1, "states")
    norms, flags = state_norms(view, chosen) if normalize else ({}, ())
    options: dict[str, Any] = {"groups": groups, "keep": keep, "seed": seed}
    options |= {"second_moments": second_moments, "keep_ctx": keep_ctx, "batch_size": batch_size}
    positions = checks.window(window, rows.length, 1)
    sizes = (len(rows), rows.length, view.d_model)
    options |= {"device": view.device, "labels": rows.labels, "group": group}
    work = Accumulation(chosen, positions, sizes, **options)
    settings = (chosen, positions, normalize, groups, keep, seed, second_moments, batch_size)
    work.require_same(view.fingerprint, rows.token_hash, *settings)
    hidden = not progress or work.rank > 0
    with tqdm(total=len(rows), unit="ctx", disable=hidden, desc=view.name) as bar:
        for at in work.batches(view.device):
            hooks = {
                view.state_hooks[s]: _hook(work, row, at, norms) for row, s in enumerate(chosen)
            }
            with torch.inference_mode():
                view.run(rows.tokens[at], hooks)
            bar.update(work.size * (at.stop - at.start))
    basis = work.basis(
        view.provenance(rows, normalized=normalize, flags=flags),
        rows.tokens,
        label_names=rows.label_names,
        token_hashes=hashes,
    )
    ids = basis.largest["token"].unique().tolist()
    texts = dict(zip(map(str, ids), view.decode(ids)))
    return dataclasses.replace(basis, token_texts=texts)


def _each_once(view: ModelView, rows: TokenWindows) -> tuple[TokenWindows, Tensor]:
    """The contexts without copies of earlier ones, and the hash of each."""
    hashes = row_hashes(rows.tokens)
    values, number = hashes.unique(return_inverse=True)
    copies = len(hashes) - len(values)
    if not copies:
        return rows, hashes
    # the smallest index of each value
    first = torch.full_like(values, len(hashes))
    first = first.scatter_reduce(0, number, torch.arange(len(hashes)), "amin").sort().values
    remark = f"{copies} of {len(hashes)} contexts are copies of others: {len(values)} are counted"
    kept = as_tokens(view, rows[first])
    return dataclasses.replace(kept, remarks=(*kept.remarks, remark)), hashes[first]


def _hook(
    work: Accumulation, row: int, at: slice, norms: dict[int, NormWeights]
) -> Callable[[Tensor], None]:
    """Takes in one state of a batch; one that has a norm in ``norms`` is normed before, without
    gain and bias, in float32 at least."""

    def hook(h: Tensor) -> None:
        if row in norms:
            h = norms[row].normalize(h.float() if h.element_size() < 4 else h)
        work.add(row, at, h)

    return hook


def state_norms(
    view: ModelView, states: Sequence[int]
) -> tuple[dict[int, NormWeights], tuple[str, ...]]:
    """For each state the norm through which it is read, by row: that of the block's attention, or
    for the last state the final norm; and remarks that name the states without one (models with
    norms after their blocks, output heads that are not a norm and a linear map)."""
    read = [view.attention_norm(s) if s < view.n_layers else view.final_norm() for s in states]
    norms = {row: norm for row, norm in enumerate(read) if norm is not None and norm.norm_type}
    bare = [state for row, state in enumerate(states) if row not in norms]
    flag = f"states {spans(bare)} as they are: nothing reads them through a norm"
    return norms, (flag,) if bare else ()


def decompose_activations(
    source: Any,
    *,
    states: Sequence[int] | int | None = None,
    window: Sequence[SupportsIndex | float] | None = None,
    batch_size: int | None = None,
    second_moments: bool | str = "auto",
    keep_ctx: bool | str = "auto",
    groups: int = 8,
    keep: int = 0,
    labels: Any = None,
    seed: int = 0,
) -> PositionContext:
    """The basis of activations held in memory: h = mean + pos + ctx + resid, as
    :func:`decompose` gives it.

    Args:
        source: a tensor ``[context position d_model]`` (one state) or
            ``[state context position d_model]``, or a TransformerLens ``ActivationCache`` with
            every residual stream state (or the plain dictionary of ``return_cache_object=False``).
        states: which of them; ``None`` for all.
        window: half-open positions of the statistics; by default all.
        batch_size: contexts that are summed at a time.

    The other arguments are those of :func:`decompose`. A basis of a tensor does not know its model:
    results that use it with one say so. Raises ``GeometryError`` for anything but activations, NaN,
    windows beyond the positions and labels that do not fit.

    >>> h = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    >>> basis = decompose_activations(h)
    >>> basis.pos.shape, basis.ctx.shape, basis.window
    (torch.Size([1, 5, 4]), torch.Size([1, 6, 4]), (0, 5))
    """
    h, provenance = _activations(source)
    chosen = checks.indices(states, len(h), "states")
    numbers, names = label_ids(labels, h.shape[1])
    options: dict[str, Any] = {"groups": groups, "keep": keep, "seed": seed}
    options |= {"second_moments": second_moments, "keep_ctx": keep_ctx, "batch_size": batch_size}
    positions, sizes = checks.window(window, h.shape[2], 0), (h.shape[1], h.shape[2], h.shape[3])
    work = Accumulation(chosen, positions, sizes, device=h.device, labels=numbers, **options)
    for at in work.batches(h.device):
        for row, state in enumerate(chosen):
            work.add(row, at, h[state, at])
    return work.basis(provenance, None, label_names=names)


def _activations(
    source: Any,
) -> tuple[Float[Tensor, "state context position d_model"], Provenance]:
    """The states of a tensor or cache, and their provenance."""
    corpus = type(source).__name__
    if isinstance(source, Tensor):
        h = source.unsqueeze(0) if checks.is_plain(source) and source.dim() == 3 else source
        fits = h.is_floating_point() and checks.is_plain(h) and h.dim() == 4 and h.numel() > 0
        expected = "floating [context position d_model] or [state context position d_model]"
        instead = "decompose(model, tokens) for token ids"
        require(fits, "activations", expected=expected, got=describe(source), instead=instead)
        corpus = "activations"
    else:
        expected, instead = "a tensor or an ActivationCache", "decompose(model, tokens)"
        fits, got = is_cache(source), describe(source)
        require(fits, "activations", expected=expected, got=got, instead=instead)
        h = states_from_cache(source)
    return h.detach(), Provenance(dtype=str(h.dtype).removeprefix("torch."), corpus=corpus)
