"""How do batches of states become a basis? :class:`Accumulation` takes in one state of one batch
after another, in one or several processes, and gives the basis of all. Called by ``decompose`` and
``decompose_activations``.

Batches are cut at the borders of groups, so that each belongs to one group. With several processes
each takes every n-th batch; at the end their sums are added up, once.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, distributed

from tl_geometry.base import checks
from tl_geometry.base.errors import require
from tl_geometry.base.results import Provenance
from tl_geometry.corpus.sources import batches
from tl_geometry.decomposition import largest
from tl_geometry.decomposition.groups import group_borders
from tl_geometry.decomposition.moments import Moments
from tl_geometry.decomposition.position_context import PositionContext

KEEP_LIMIT = 2**30
"""Bytes that samples may take; with ``"auto"`` also second moments, and context means, each."""


class Accumulation:
    """Sums in progress over ``contexts`` contexts of ``length`` positions: :meth:`add` for each
    state of each of :meth:`batches`, then :meth:`basis`. ``options`` are settings of ``decompose``:
    groups, keep, seed, second_moments, keep_ctx, batch_size."""

    def __init__(
        self,
        states: tuple[int, ...],
        window: tuple[int, int],
        sizes: tuple[int, int, int],
        *,
        device: torch.device | str,
        labels: Int[Tensor, " context"] | None = None,
        group: Any = None,
        **options: Any,
    ) -> None:
        self.contexts, length, width = sizes
        groups, keep, seed = (options[name] for name in ("groups", "keep", "seed"))
        for name, least in (("groups", 1), ("keep", 0), ("seed", 0)):
            number, got = checks.whole(options[name]), repr(options[name])
            fits = number is not None and number >= least
            require(fits, name, expected=f"a whole number, at least {least}", got=got)
        self.states, self.length, self.labels, self.options = states, length, labels, options
        self.group, self.rank, self.size, self.there = _process(group)
        # MPS has no float64, so the sums live on the CPU
        count, there = len(states), "cpu" if torch.device(device).type == "mps" else device
        self.borders, remarks = group_borders(self.contexts, groups, labels)
        self.flags = list(remarks)
        room = KEEP_LIMIT // (4 * count * length * width)
        if min(keep, self.contexts) > room:
            self.flags.append(f"{room} of {keep} samples kept (1 GiB)")
        order = torch.randperm(self.contexts, generator=torch.Generator().manual_seed(seed))
        self.sampled = order[: min(keep, room)].sort().values
        self.samples = torch.zeros(len(self.sampled), count, length, width)
        self.moments = Moments.zeros(
            (len(self.borders) + 1, count, length, width),
            window=window,
            second=self._decide("second_moments", count * width**2),
            device=there,
        )
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

    def batches(self, device: torch.device) -> Iterator[slice]:
        """The contexts of each batch that this process takes; every state of a batch must have been
        added when the next one is asked for."""
        cut = {"batch_size": self.options["batch_size"], "borders": self.borders}
        for number, at in enumerate(batches(self.contexts, self.length, device=device, **cut)):
            if number % self.size == self.rank:
                yield at
                self.moments.counts[self._group(at)] += at.stop - at.start
                # one look for all states: it waits for a GPU
                bad = [s for s, fine in zip(self.states, self.finite.tolist()) if not fine]
                got = f"NaN or infinite in states {bad}, contexts {at.start} to {at.stop - 1}"
                require(not bad, "activations", expected="finite numbers", got=got)

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

    def basis(
        self, provenance: Provenance, tokens: Int[Tensor, "context position"] | None, **about: Any
    ) -> PositionContext:
        """The basis of all that was taken in, in every process the same, on the CPU; ``about`` are
        further fields of it."""
        for tensor in (*self.moments.tensors().values(), self.samples, self.means):
            self._total(tensor)
        beside = {name: v.new_zeros(self.size, *v.shape) for name, v in self.places.items()}
        for name, values in beside.items():
            values[self.rank] = self.places[name]
            self._total(values)
        parts = [{n: v[i] for n, v in beside.items()} for i in range(self.size)]
        places = {name: values.cpu() for name, values in largest.top(parts).items()}
        filled = int((places["norm"][0] >= 0).sum())
        places = {name: values[:, :filled].clone() for name, values in places.items()}
        if tokens is not None:
            places["token"] = tokens[places["context"], places["position"]]
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

    def _total(self, tensor: Tensor) -> None:
        """Replace a tensor, in place, by its sum over the processes."""
        if self.size > 1 and tensor.numel():
            buffer = tensor.to(self.there)
            distributed.all_reduce(buffer, group=self.group)
            tensor.copy_(buffer)

    def require_same(self, *arguments: object) -> None:
        """Raise in every process unless all of them were called with the same arguments."""
        if self.size > 1:
            key = hashlib.sha256(repr(arguments).encode()).digest()[:32]
            keys = torch.zeros(self.size, 32, dtype=torch.int64)
            keys[self.rank] = torch.frombuffer(bytearray(key), dtype=torch.uint8)
            self._total(keys)
            expected = "the same model, tokens and settings in every process"
            require((keys == keys[0]).all(), "group", expected=expected, got="others in some")


def _process(group: Any) -> tuple[Any, int, int, torch.device]:
    """A ``torch.distributed`` group, the number of this process in it, how many there are, and the
    device of what they exchange; (``None``) this process alone."""
    if group is None:
        return None, 0, 1, torch.device("cpu")
    ready = distributed.is_available() and distributed.is_initialized()
    rank = distributed.get_rank(group) if ready else -1
    expected, got = "an initialised process group that holds this process", repr(group)
    require(rank >= 0, "group", expected=expected, got=got)
    on_gpu = distributed.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return group, rank, distributed.get_world_size(group), device
