"""How do batches of states become a basis, even where memory runs out in the middle of a batch? An
accumulation takes in one batch after another, where needed by parts, and gives the basis of all.
Called by the loop of ``decompose`` (:mod:`tl_geometry.decomposition.stream_pass`) and by
``decompose_activations``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import BudgetError, fail, require
from tl_geometry.base.results import Provenance, hash_tokens, row_hashes
from tl_geometry.base.transfer import on_cpu
from tl_geometry.corpus.token_windows import begins_with_bos
from tl_geometry.decomposition.groups import group_borders
from tl_geometry.decomposition.largest import Largest
from tl_geometry.decomposition.moments import Moments
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.decomposition.reservoir import Reservoir

KEEP_LIMIT = 2**30
"""Bytes that samples may take; with ``"auto"`` also second moments, and context means, each."""
NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
"""Texts of out-of-memory errors without a class of their own (CPU on Linux and Windows, MPS)."""

OnState = Callable[[int, Tensor], None]
"""Receives the row of a state and its activations ``[batch position d_model]``."""
Feed = Callable[[slice, OnState], None]
"""``feed(contexts, on_state)`` computes the states of some contexts of a batch and calls
``on_state`` once for each state."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that an allocation failed, on any device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        text in str(error) for text in NO_MEMORY
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of one accumulation, as :func:`tl_geometry.decompose` documents them."""

    states: tuple[int, ...]
    window: tuple[int, int]
    groups: int = 8
    keep: int = 32
    second_moments: bool | str = "auto"
    keep_ctx: bool | str = "auto"
    moments_dtype: torch.dtype = torch.float32
    seed: int = 0


class Accumulation:
    """Sums in progress: call :meth:`update` for each batch, then :meth:`finish` for the basis;
    :mod:`tl_geometry.decomposition.checkpoints` saves and resumes in between.

    With several processes each one sees every batch and takes it in (:meth:`update`) or leaves it
    to another (:meth:`skip`), so that all agree on groups, order, samples and the hash of the
    tokens; :mod:`tl_geometry.decomposition.process_group` adds up their sums.

    ``contexts`` is the number of contexts to come, ``None`` where it is not known, and ``done`` how
    many have come. ``means`` are the context means of each batch ``[state batch d_model]``,
    ``hashes`` those of its contexts' tokens, ``block`` the contexts per group while their number is
    not known.
    """

    def __init__(
        self,
        plan: Plan,
        provenance: Provenance,
        *,
        length: int,
        d_model: int,
        contexts: int | None,
        device: torch.device | str,
        labels: Int[Tensor, " context"] | None = None,
    ) -> None:
        start, end = plan.window
        for name, least in (("groups", 1), ("keep", 0), ("seed", 0)):
            value = checks.whole(getattr(plan, name))
            in_range = value is not None and value >= least
            require(in_range, name, expected=f"at least {least}", got=repr(getattr(plan, name)))
        self.plan, self.length, self.contexts, self.d_model = plan, length, contexts, d_model
        n_states = len(plan.states)
        flags: list[str] = []
        keep_second = self._decide(
            plan.second_moments, 8 * n_states * d_model**2, "second moments", flags
        )
        self.keep_ctx = self._decide(
            plan.keep_ctx, 8 * n_states * d_model * (contexts or 0), "context vectors", flags
        )
        # samples are float32, four bytes a number; second moments and means are float64
        keep = min(plan.keep, KEEP_LIMIT // max(1, 4 * n_states * length * d_model))
        if keep < plan.keep:
            flags.append(f"{keep} of {plan.keep} samples kept (1 GiB)")
        if start > 0:
            left_out = "position 0" if start == 1 else f"positions 0 to {start - 1}"
            flags.append(f"{left_out} left out of the statistics")
        # if the number of contexts is not known: 2 G blocks of one context each, which make_room
        # joins in pairs when they are full
        borders, remarks = tuple(range(1, 2 * plan.groups)), ()
        if contexts is not None:
            borders, remarks = group_borders(contexts, plan.groups, labels)
        self.block = 1
        self.provenance = provenance.flagged(*flags, *remarks)
        self.moments = Moments.zeros(
            states=n_states,
            length=length,
            d_model=d_model,
            window=(start, end),
            groups=len(borders) + 1,
            second=keep_second,
            product_dtype=plan.moments_dtype,
            device=device,
        )
        self._divide(borders)
        self.reservoir = Reservoir.empty(keep, plan.seed, (n_states, length, d_model))
        self.largest = Largest.empty(n_states, device)
        self.hashes: list[Tensor] = []
        self.labels = labels
        self.means: list[Tensor] = []
        self.token_hash = ""
        self.has_bos: bool | None = None
        self.done = 0
        self.limit: int | None = None  # contexts that fit into memory; None until it runs out
        self._pending: Callable[[], None] | None = None

    @staticmethod
    def _decide(wanted: bool | str, size: int, name: str, flags: list[str]) -> bool:
        if wanted not in (True, False, "auto"):
            fail(name, expected='True, False or "auto"', got=repr(wanted))
        # only "auto" has a limit; with True the caller has decided
        if wanted == "auto" and size > KEEP_LIMIT:
            flags.append(f"{name} not kept (over 1 GiB)")
        return size <= KEEP_LIMIT if wanted == "auto" else bool(wanted)

    def _divide(self, borders: Sequence[int]) -> None:
        """Set the borders of the groups (the first context of every group but the first), on the
        CPU and on the device of the sums: a transfer in every batch would wait for the GPU."""
        self.borders = torch.tensor(borders, dtype=torch.int64)
        self._borders_there = self.borders.to(self.moments.sums.device)

    def make_room(self, size: int) -> None:
        """Make room for ``size`` more contexts where their number is not known: join the 2 G blocks
        in pairs, as often as needed. Where it is known nothing happens."""
        blocks = torch.arange(2 * self.plan.groups)
        while not self.contexts and self.done + size > len(blocks) * self.block:
            self.moments = self.moments.regrouped(blocks // 2, len(blocks))
            self.block *= 2
            self._divide((blocks[1:] * self.block).tolist())

    def update(
        self,
        keys: Int[Tensor, " batch"],
        feed: Feed,
        tokens: Tensor | None,
        bos_id: int | None = None,
    ) -> None:
        """Take in the next contexts, whose hashes are ``keys``; ``feed`` computes their states.

        Nothing here waits for a GPU. What has to be read back (whether all numbers are finite,
        samples, context means) is read after the next batch has been launched (:meth:`settle`).
        """
        size, device = len(keys), self.moments.sums.device
        self.make_room(size)
        contexts = self.done + torch.arange(size, device=device)
        groups = torch.bucketize(contexts, self._borders_there, right=True)
        # the same on the CPU: reading the groups from a GPU would wait for it
        groups_here = torch.bucketize(self.done + torch.arange(size), self.borders, right=True)
        sampled = self.reservoir.enter(self.done, keys, tokens)
        order = range(len(self.plan.states))
        means: list[list[Tensor]] = [[] for _ in order]
        finite: list[list[Tensor]] = [[] for _ in order]
        device_states: list[tuple[int, int, Tensor]] = []  # clones, read in settle()

        start, end = self.moments.window
        ids = None if tokens is None else tokens[:, start:end].to(device, non_blocking=True)

        def take(row: int, h: Tensor, part: slice) -> None:
            for slot, i in sampled:
                if part.start <= i < part.stop:
                    state = h[i - part.start]
                    if state.device.type == "cpu":
                        self.reservoir.states[slot, row] = state
                    else:
                        device_states.append((slot, row, state.clone()))
            mean, is_finite = self.moments.add(
                row,
                h,
                groups[part],
                lambda h, norms: self.largest.add(
                    row, h, norms, contexts[part], start, None if ids is None else ids[part]
                ),
                slice(int(groups_here[part.start]), int(groups_here[part.stop - 1]) + 1),
            )
            means[row].append(mean)
            finite[row].append(is_finite)

        self._run(feed, slice(0, size), take, set())
        self.moments.count(groups_here)
        first, means_index = self.done, len(self.means)
        self._pass(keys, tokens, bos_id)

        def settle() -> None:
            here = [torch.stack([torch.stack(parts).all() for parts in finite])]
            here += [h for _, _, h in device_states]
            if self.keep_ctx:
                here.append(torch.stack([torch.cat(parts) for parts in means]))
            copied = on_cpu(here)  # all at once, because each copy waits for the device
            bad = [self.plan.states[i] for i in order if not copied[0][i]]
            where = f"NaN or infinite in states {bad}, contexts {first} to {first + size - 1}"
            expected = "finite numbers"
            require(not bad, "activations", expected=expected, got=where, instead="float32 weights")
            # not strict: the means, where they are kept, come last
            for (slot, row, _), state in zip(device_states, copied[1:], strict=False):
                self.reservoir.states[slot, row] = state
            if self.keep_ctx:
                self.means[means_index] = copied[-1]

        self.settle()
        self._pending = settle

    def skip(self, tokens: Int[Tensor, "batch position"], bos_id: int | None = None) -> None:
        """Leave the next contexts to another process, but count, sample and hash them: their
        sampled states are zeros here, so that the sum over processes is the states."""
        self.make_room(len(tokens))
        keys = row_hashes(tokens)
        for slot, _ in self.reservoir.enter(self.done, keys, tokens):
            self.reservoir.states[slot] = 0
        self._pass(keys, tokens, bos_id)

    def settle(self) -> None:
        """Read back what is pending from the last batch; raises for numbers that are not finite."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def _pass(self, keys: Tensor, tokens: Tensor | None, bos_id: int | None) -> None:
        """Count the next contexts and hash their tokens, whichever process takes them in. Their
        means are placeholders until :meth:`settle`."""
        size = len(keys)
        if tokens is not None:
            self.token_hash = hash_tokens(tokens, self.token_hash)
            self.hashes.append(keys)
            # None before the first batch; one batch without BOS decides
            self.has_bos = begins_with_bos(tokens, bos_id) and self.has_bos is not False
        self.done += size
        if self.keep_ctx:
            self.means.append(self.nothing(size))
            n_bytes = 8 * self.done * self.d_model * len(self.plan.states)
            if self.plan.keep_ctx == "auto" and n_bytes > KEEP_LIMIT:
                self.keep_ctx, self.means = False, []
                self.provenance = self.provenance.flagged("context vectors not kept (over 1 GiB)")

    def nothing(self, size: int) -> Tensor:
        """Zeros in place of context means, ``[state size d_model]``: one expanded number, which
        takes no memory."""
        return torch.zeros((), dtype=torch.float64).expand(
            len(self.plan.states), size, self.d_model
        )

    def _run(
        self,
        feed: Feed,
        contexts: slice,
        take: Callable[[int, Tensor, slice], None],
        taken: set[int],
    ) -> None:
        """Run contexts in parts that fit into memory. ``taken`` are the states that are already in
        the sums for all of these contexts, from a run in which memory ran out later."""
        low = contexts.start
        while low < contexts.stop:
            part = slice(low, min(low + (self.limit or contexts.stop), contexts.stop))
            # a copy: states that one part has taken in are still missing from the next
            summed = set(taken)
            if not self._fits(feed, part, take, summed):
                size = part.stop - part.start
                expected = f"room for one context of {self.length} positions"
                instead = "shorter windows, second_moments=False, or fewer states="
                got, error = "out of memory", BudgetError
                require(
                    size > 1, "memory", expected=expected, got=got, instead=instead, error=error
                )
                self.limit = size // 2
                self._run(feed, part, take, summed)
            low = part.stop

    def _fits(
        self, feed: Feed, part: slice, take: Callable[[int, Tensor, slice], None], summed: set[int]
    ) -> bool:
        """Run one part and take in the states that are not in ``summed`` yet; each is added to
        ``summed``. False where memory ran out."""

        def on_state(row: int, h: Tensor) -> None:
            if row not in summed:
                take(row, h, part)
                summed.add(row)

        try:
            feed(part, on_state)
        except (RuntimeError, MemoryError) as error:
            # while busy some sums have changed and others not: the part cannot be taken in again
            if self.moments.scratch.busy or not out_of_memory(error):
                raise
            # free the buffers, which have the size of the part that did not fit
            self.moments.scratch.held.clear()
            return False
        return True

    def finish(
        self, labels: Tensor | None, names: tuple[str, ...], *, final: bool = True
    ) -> PositionContext:
        """The basis of everything taken in so far, on the CPU. One that is not ``final`` is for a
        checkpoint and keeps its blocks, which may still grow."""
        self.settle()
        require(self.done > 0, "tokens", expected="at least one context", got="none")
        moments = self.moments.to("cpu")
        moments = self._full_groups(moments) if final and not self.contexts else moments
        self.reservoir.sort()
        reservoir = self.reservoir.filled()
        if not self.token_hash:
            reservoir = dataclasses.replace(reservoir, tokens=None)
        return PositionContext(
            provenance=dataclasses.replace(
                self.provenance,
                contexts=self.done,
                window=moments.window,
                token_hash=self.token_hash or None,
                has_bos=self.has_bos,
                seed=self.plan.seed,
            ),
            states=self.plan.states,
            moments=moments,
            context_means=torch.cat(self.means, dim=1) if self.keep_ctx else None,
            labels=None if labels is None else labels[: self.done],
            names=names,
            reservoir=reservoir if len(reservoir) else None,
            token_hashes=torch.cat(self.hashes) if self.hashes else None,
            largest=self.largest.to("cpu"),
        )

    def _full_groups(self, moments: Moments) -> Moments:
        """The sums without empty blocks. A last block with fewer than half the contexts of the
        others joins the one before, because a jackknife wants groups of about equal size."""
        n_blocks = -(-self.done // self.block)
        last_size = self.done - (n_blocks - 1) * self.block
        groups = n_blocks - 1 if n_blocks > 1 and 2 * last_size < self.block else n_blocks
        return moments.regrouped(torch.arange(len(moments.counts)).clamp(max=groups - 1), groups)
