"""How much of each residual stream state is position, and how much is context? The public functions
``decompose`` (a model over a corpus) and ``decompose_activations`` (states held in memory), and
:class:`Accumulation`, which takes in one state of one batch after another, in one or several
processes, and gives the basis of all.

Batches are cut at the borders of groups, so that each belongs to one group. With several processes
each takes every n-th batch; at the end their sums are added up, once.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, SupportsIndex, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, distributed

from tl_geometry.base import checks
from tl_geometry.base.errors import fail, require
from tl_geometry.base.results import Provenance, row_hashes
from tl_geometry.corpus.passes import batches, cuts
from tl_geometry.corpus.sources import as_tokens, label_ids
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.decomposition import largest
from tl_geometry.decomposition.groups import group_borders
from tl_geometry.decomposition.moments import Moments
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.decomposition.variance import spans
from tl_geometry.models.batches import batch_of
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.reader import as_view
from tl_geometry.models.states import states_from_cache

T = TypeVar("T")
SOURCE = ("song2023",)
KEEP_LIMIT = 2**30
"""Bytes that second moments, and context means, may take with ``"auto"``."""


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
        keep: contexts whose states are kept whole, a seeded uniform sample.
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
    if isinstance(model, Tensor | Mapping) or hasattr(model, "cache_dict"):
        instead, got = "decompose_activations(...)", type(model).__name__
        fail("model", expected="a TransformerLens model", got=got, instead=instead)
    view = as_view(model)
    rows, hashes = _each_once(view, as_tokens(view, tokens, labels=labels, prepend_bos=prepend_bos))
    chosen = checks.indices(states, view.n_layers + 1, "states")
    norms, flags = state_norms(view, chosen) if normalize else ({}, ())
    options: dict[str, Any] = {"groups": groups, "keep": keep, "seed": seed}
    options |= {"second_moments": second_moments, "keep_ctx": keep_ctx, "batch_size": batch_size}
    positions, sizes = checks.window(window, rows.length, 1), (len(rows), rows.length, view.d_model)
    where: dict[str, Any] = {"device": view.device, "labels": rows.labels, "group": group}
    work = Accumulation(chosen, positions, sizes, **where, **options)
    work.require_same(view.fingerprint, rows.token_hash, chosen, positions, normalize, options)

    def take(row: int, at: slice, h: Tensor) -> None:
        if row in norms:  # normed without gain and bias, in float32 at least
            h = norms[row].normalize(h.float() if h.element_size() < 4 else h)
        work.add(row, at, h)

    for batch in batches(view, rows, work.cut, progress=progress and work.rank == 0):
        at = batch.at
        hooks = {view.state_hooks[s]: partial(take, row, at) for row, s in enumerate(chosen)}
        with torch.inference_mode():
            view.run(batch.tokens, hooks)
        work.close(at)
    source = view.provenance(rows, normalized=normalize, sources=SOURCE, flags=flags)
    about = {"label_names": rows.label_names, "token_hashes": hashes}
    return work.basis(source, rows.tokens, view.decode, **about)


def _each_once(view: ModelView, rows: TokenWindows) -> tuple[TokenWindows, Tensor]:
    """The contexts without copies of earlier ones, and the hash of each."""
    hashes, seen = row_hashes(rows.tokens), dict[int, int]()
    first = [i for i, h in enumerate(hashes.tolist()) if seen.setdefault(h, i) == i]
    copies = len(hashes) - len(first)
    if not copies:
        return rows, hashes
    remark = f"{copies} of {len(hashes)} contexts are copies of others: {len(first)} are counted"
    kept = as_tokens(view, rows[first])
    return dataclasses.replace(kept, remarks=(*kept.remarks, remark)), hashes[first]


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
    for at in work.cut:
        for row, state in enumerate(chosen):
            work.add(row, at, h[state, at])
        work.close(at)
    return work.basis(provenance, label_names=names)


def _activations(
    source: Any,
) -> tuple[Float[Tensor, "state context position d_model"], Provenance]:
    """The states of a tensor or cache, and their provenance."""
    what, got = "activations", checks.describe(source)
    corpus = what if isinstance(source, Tensor) else type(source).__name__
    if isinstance(source, Tensor):
        h = source.unsqueeze(0) if checks.is_plain(source) and source.dim() == 3 else source
        fits = h.is_floating_point() and checks.is_plain(h) and h.dim() == 4 and h.numel() > 0
        expected = "floating [context position d_model] or [state context position d_model]"
        instead = "decompose(model, tokens) for token ids"
        require(fits, what, expected=expected, got=got, instead=instead)
    else:
        items = source.items() if isinstance(source, Mapping) else [(None, None)]
        plain = all(isinstance(name, str) and isinstance(v, Tensor) for name, v in items)
        fits = hasattr(source, "cache_dict") or plain
        expected, instead = "a tensor or an ActivationCache", "decompose(model, tokens)"
        require(fits, what, expected=expected, got=got, instead=instead)
        h = states_from_cache(source)
    dtype = str(h.dtype).removeprefix("torch.")
    return h.detach(), Provenance(dtype=dtype, corpus=corpus, sources=SOURCE)


class Accumulation:
    """Sums in progress over contexts of some positions and width (``sizes``): :meth:`add` for each
    state of each batch of ``cut``, the part of this process, and :meth:`close`; then :meth:`basis`.
    ``options`` are settings of ``decompose``: groups, keep, seed, second_moments, keep_ctx,
    batch_size."""

    def __init__(
        self,
        states: tuple[int, ...],
        window: tuple[int, int],
        sizes: tuple[int, int, int],
        *,
        device: torch.device,
        labels: Int[Tensor, " context"] | None = None,
        group: Any = None,
        **options: Any,
    ) -> None:
        for name, least in (("groups", 1), ("keep", 0)):
            checks.count(options[name], name, least)
        self.states, self.labels, self.options = states, labels, options
        self.group, self.rank, self.size = group, 0, 1
        if group is not None:
            ready = distributed.is_available() and distributed.is_initialized()
            self.rank = distributed.get_rank(group) if ready else -1
            expected, got = "an initialised process group that holds this process", repr(group)
            require(self.rank >= 0, "group", expected=expected, got=got)
            self.size = distributed.get_world_size(group)
        self.contexts, length, width = sizes
        self.borders, remarks = group_borders(self.contexts, options["groups"], labels)
        self.flags, count = list(remarks), len(states)
        batch = batch_of(options["batch_size"], length, device)
        self.cut = cuts(self.contexts, batch, self.borders)[self.rank :: self.size]
        # MPS has no float64, so the sums live on the CPU
        there = "cpu" if device.type == "mps" else device
        order = torch.randperm(self.contexts, generator=checks.seeded(options["seed"]))
        self.sampled = order[: options["keep"]].sort().values
        self.samples = torch.zeros(len(self.sampled), count, length, width, dtype=torch.float32)
        second = self._decide("second_moments", count * width**2)
        shape = (len(self.borders) + 1, count, length, width)
        self.moments = Moments.zeros(shape, window=window, second=second, device=there)
        kept = self.contexts if self._decide("keep_ctx", count * width * self.contexts) else 0
        self.means = torch.zeros(count, kept, width, dtype=torch.float64, device=there)
        self.places = largest.no_places(count, there)
        self.finite = torch.ones(count, dtype=torch.bool, device=there)

    def _decide(self, name: str, numbers: int) -> bool:
        wanted = self.options[name]
        expected = 'True, False or "auto"'
        require(wanted in (True, False, "auto"), name, expected=expected, got=repr(wanted))
        if wanted == "auto" and 8 * numbers > KEEP_LIMIT:
            self.flags.append(f"{name} over 1 GiB: not kept (True keeps them)")
            return False
        return bool(wanted)

    def _group(self, at: slice) -> int:
        return bisect.bisect_right(self.borders, at.start)

    def add(self, row: int, at: slice, h: Float[Tensor, "batch position d_model"]) -> None:
        """Take in one state (``row``) of the contexts ``at``."""
        means, norms = self.moments.add(row, self._group(at), h)
        self.finite[row] &= torch.isfinite(norms).all()
        if self.means.numel():
            self.means[row, at] = means
        largest.take_in(self.places, row, h, norms, self.moments.window, at.start)
        inside = (self.sampled >= at.start) & (self.sampled < at.stop)
        if inside.any():
            chosen = h[(self.sampled[inside] - at.start).to(h.device)]
            self.samples[inside, row] = chosen.float().cpu()

    def close(self, at: slice) -> None:
        """Count a batch of which every state was added, and refuse it if any is not finite."""
        self.moments.counts[self._group(at)] += at.stop - at.start
        # one look for all states: it waits for a GPU
        bad = [s for s, fine in zip(self.states, self.finite.tolist()) if not fine]
        got = f"NaN or infinite in states {bad}, contexts {at.start} to {at.stop - 1}"
        require(not bad, "activations", expected="finite numbers", got=got)

    def basis(
        self,
        provenance: Provenance,
        tokens: Int[Tensor, "context position"] | None = None,
        decode: Callable[[list[int]], list[str]] | None = None,
        **about: Any,
    ) -> PositionContext:
        """The basis of all that was taken in, in every process the same, on the CPU. ``about`` are
        further fields of it; ``decode`` gives texts of ``tokens``."""
        for tensor in (*self.moments.tensors().values(), self.samples, self.means):
            if self.size > 1 and tensor.numel():
                nccl = distributed.get_backend(self.group) == "nccl"
                total = tensor.to("cuda" if nccl else "cpu")
                distributed.all_reduce(total, group=self.group)
                tensor.copy_(total)
        places = largest.top(self._of_each({name: v.cpu() for name, v in self.places.items()}))
        filled = int((places["norm"][0] >= 0).sum())
        places = {name: values[:, :filled].clone() for name, values in places.items()}
        if tokens is not None and decode is not None:
            places["token"] = tokens[places["context"], places["position"]]
            ids = places["token"].unique().tolist()
            about["token_texts"] = dict(zip(map(str, ids), decode(ids)))
        made = {"window": self.moments.window, "contexts": self.contexts}
        flagged = provenance.flagged(*self.flags)
        sampled = len(self.sampled) > 0
        return PositionContext(
            provenance=dataclasses.replace(flagged, seed=self.options["seed"], **made),
            states=self.states,
            moments=self.moments.to("cpu"),
            context_means=self.means.cpu() if self.means.numel() else None,
            labels=self.labels,
            sampled=self.sampled if sampled else None,
            sample_states=self.samples if sampled else None,
            largest=places,
            **about,
        )

    def _of_each(self, value: T) -> list[T]:
        """What each process gives, in all of them."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            distributed.all_gather_object(values, value, group=self.group)
        return values

    def require_same(self, *arguments: object) -> None:
        """Raise in every process unless all of them were called with the same arguments."""
        same = len(set(self._of_each(repr(arguments)))) == 1
        expected = "the same model, tokens and settings in every process"
        require(same, "group", expected=expected, got="others in some")
