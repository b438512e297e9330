"""How does a corpus of any length become a basis? The loop behind ``decompose`` runs the model over
it batch by batch, with progress and checkpoints, in one or several processes, and keeps sums
only."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base.errors import require
from tl_geometry.base.files import as_path
from tl_geometry.base.results import hash_tokens, row_hashes
from tl_geometry.corpus.sources import TokenSource
from tl_geometry.decomposition import checkpoints, process_group
from tl_geometry.decomposition.accumulator import Accumulation, Feed, OnState, Plan
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.decomposition.processes import Processes
from tl_geometry.models.batches import batch_of, device_of
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights

SAVE_SHARE = 0.05
"""Largest share of the time that writing checkpoints may take: batches for which there is no time
are saved with a later one."""


def run_corpus(
    source: TokenSource,
    plan: Plan,
    *,
    batch_size: int | None,
    checkpoint: str | Path | None,
    progress: bool,
    device: torch.device | str | None,
    group: Any = None,
    normalize: bool = False,
) -> PositionContext:
    """Stream a corpus through the model and return its basis; the loop behind
    :func:`tl_geometry.decompose`.

    With a process group every process reads all tokens, runs every n-th batch, and returns the same
    basis.
    """
    view, processes = source.view, Processes(group)
    size = batch_of(batch_size, source.length, view.device)
    # MPS has no float64, so the sums live on the CPU
    sums_on = device_of(device, "cpu" if view.device.type == "mps" else view.device)
    norms, flags = state_norms(view, plan.states) if normalize else ({}, ())
    provenance = view.provenance(corpus=source.corpus, normalized=normalize, flags=flags)
    work = Accumulation(
        plan,
        provenance,
        length=source.length,
        d_model=view.d_model,
        contexts=source.contexts,
        device=sums_on,
        labels=source.labels,
    )
    labels = checkpoints.label_hash(work, source.contexts or 0)
    arguments = [checkpoints.settings(work, 0), labels, size, str(checkpoint)]
    processes.agree(json.dumps(arguments), "arguments of decompose")
    path = None if checkpoint is None else as_path(checkpoint, "checkpoint")
    saver = _Saver(view, work, processes, path)
    bar = tqdm(
        total=source.contexts,
        initial=work.done,
        unit="ctx",
        disable=not progress or processes.rank > 0,
        desc=view.name,
    )
    with bar:
        for number, tokens in enumerate(_remaining(source, work, size, str(checkpoint))):
            if processes.takes(number):
                # pinned memory, so that the transfer to a GPU runs in the background
                ids = tokens.pin_memory() if view.device.type == "cuda" else tokens
                feed = _feeding(view, plan.states, ids, norms)
                work.update(row_hashes(tokens), feed, tokens, view.bos_id)
            else:
                work.skip(tokens, view.bos_id)
            # after batch 0 only the first process has set its shift: the others have skipped it
            if number == 0:
                process_group.share_shift(work, processes)
            bar.update(len(tokens))
            if (number + 1) % processes.size == 0:
                saver.round()
    processes.agree(work.token_hash, "tokens")
    processes.each(view.require_unchanged)
    saver.finish()
    basis = work.finish(source.labels, source.names)
    return dataclasses.replace(
        basis, provenance=basis.provenance.flagged(*source.flags), largest_texts=_texts(view, basis)
    )


def _texts(view: ModelView, basis: PositionContext) -> tuple[tuple[str, ...], ...]:
    """The largest tokens of each state as text."""
    ids = basis.largest.token.clamp(min=0)
    unique = ids.unique().tolist()
    text = dict(zip(unique, view.decode(unique), strict=True))
    # places that are not filled (id -1) get the text of token 0, which is never shown
    return tuple(tuple(text[i] for i in row) for row in ids.tolist())


def state_norms(
    view: ModelView, states: Sequence[int]
) -> tuple[dict[int, NormWeights], tuple[str, ...]]:
    """For each state the norm through which it is read, by row: that of the block's attention, or
    for the last state the final norm; and remarks.

    States without such a norm (models with norms after their blocks, output heads that are not a
    norm and a linear map) are left out, and a remark names them.
    """
    norms: dict[int, NormWeights] = {}
    bare: list[int] = []
    for row, s in enumerate(states):
        norm = view.attention_norm(s) if s < view.n_layers else view.final_norm()
        if norm is None or norm.norm_type is None:
            bare.append(s)
        else:
            norms[row] = norm
    flags: list[str] = []
    read = ", ".join(str(s) for s in bare if s < view.n_layers)
    if read:
        flags.append(f"states {read} as they are: their blocks read them without a norm")
    if view.n_layers in bare:
        flags.append(f"state {view.n_layers} as it is: no norm in front of a linear output head")
    return norms, tuple(flags)


def _feeding(
    view: ModelView, states: Sequence[int], tokens: Tensor, norms: Mapping[int, NormWeights]
) -> Feed:
    """The :data:`Feed` of a batch of tokens: runs the model over some of its contexts, and
    normalises the states that have a norm in ``norms``, without gain and bias, in float32 at
    least."""

    def feed(contexts: slice, on_state: OnState) -> None:
        def normalized(row: int, h: Tensor) -> None:
            if row in norms:
                h = norms[row].normalize(h.float() if h.element_size() < 4 else h)
            on_state(row, h)

        forward_states(view, states, tokens[contexts], normalized)

    return feed


def _remaining(
    source: TokenSource, work: Accumulation, size: int, checkpoint: str
) -> Iterator[Tensor]:
    """Batches that are not in the checkpoint yet. Before them, checks by their hash that the tokens
    in the checkpoint are those of this corpus."""
    done, hash_so_far = work.done, ""
    what, expected = f"checkpoint {checkpoint}", "the tokens it was made from"
    for batch in source.batches(size):
        head, tokens = batch[:done], batch[done:]
        if done:
            hash_so_far, done = hash_tokens(head, hash_so_far), done - len(head)
            agrees, instead = done > 0 or hash_so_far == work.token_hash, "another checkpoint= path"
            require(agrees, what, expected=expected, got="others", instead=instead)
        if len(tokens):
            yield tokens
    require(done == 0, what, expected=expected, got=f"{done} contexts fewer")


def forward_states(
    view: ModelView, states: Sequence[int], tokens: Tensor, on_state: OnState
) -> None:
    """One forward pass that hooks the wanted states only; ``on_state`` receives their rows in
    ``states``."""

    def hook(row: int) -> Callable[[Tensor], None]:
        return lambda h: on_state(row, h)

    with torch.inference_mode():
        view.run_in_rows(tokens, {view.state_hooks[s]: hook(row) for row, s in enumerate(states)})


def _writable(path: Path) -> None:
    """Raise, before anything is computed, where no checkpoint could be written."""
    expected, instead = "a file that can be written", "a path in a folder of your own"
    try:
        folder = next((p for p in path.absolute().parents if p.exists()), path)
        fits, got = not path.is_dir() and folder.is_dir() and os.access(folder, os.W_OK), str(path)
    except (OSError, ValueError) as error:  # a name that no file can have
        fits, got = False, f"a name of {len(path.name)} characters ({type(error).__name__})"
    require(fits, "checkpoint", expected=expected, got=got, instead=instead)


class _Saver:
    """Writes checkpoints of one or several processes: after the first round of batches (one for
    each process), then as often as :data:`SAVE_SHARE` allows.

    The first process writes the sum over all processes. That does not depend on their number, so
    any number of processes may go on from it. The time of the next checkpoint is agreed on as a
    number of rounds (``due``), so that processes need to wait for each other only then.
    """

    def __init__(
        self, view: ModelView, work: Accumulation, processes: Processes, path: Path | None
    ) -> None:
        self.view, self.work, self.processes, self.path = view, work, processes, path
        if path is not None:
            processes.first(lambda: _writable(path))
            processes.first(lambda: checkpoints.resume(work, path) if path.exists() else None)
            process_group.share(work, processes)
        self.saved, self.rounds, self.due, self.clock = work.done, 0, 1, time.monotonic()

    def round(self) -> None:
        """Call after every process has had one more batch; writes a checkpoint if it is due."""
        self.rounds += 1
        if self.path is None or self.rounds < self.due:
            return
        started = time.monotonic()
        process_group.combine(self.work, self.processes)
        self._save(self.path)
        if self.processes.rank > 0:
            process_group.clear(self.work)
        now = time.monotonic()
        # 1e-9: a clock may not have advanced, and this divides below
        seconds_per_round = max(started - self.clock, 1e-9) / self.rounds
        # the number of rounds in which the time of this writing is a share of SAVE_SHARE
        due = torch.tensor([max(1, math.ceil((now - started) / SAVE_SHARE / seconds_per_round))])
        self.processes.share(due)
        self.rounds, self.due, self.clock = 0, int(due), now

    def finish(self) -> None:
        """Add up over the processes, and write what the last checkpoint lacks."""
        process_group.combine(self.work, self.processes)
        if self.path is not None and self.saved != self.work.done:
            self._save(self.path)

    def _save(self, path: Path) -> None:
        # if the weights have changed, a later run would go on from sums of two models
        self.processes.first(self.view.require_unchanged)
        self.processes.first(lambda: checkpoints.save(self.work, path))
        self.saved = self.work.done
