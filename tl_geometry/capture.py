"""The one loop over data: batches in, statistics out, with progress, checkpoints and nothing kept but sums."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry._check import describe, require
from tl_geometry.accumulation import Accumulation, OnState, Plan
from tl_geometry.decomposition import PositionContext
from tl_geometry.processes import Processes
from tl_geometry.records import ModelView, TokenWindows
from tl_geometry.results import hash_tokens

SAVE_SHARE = 0.05
"""Share of the time that writing checkpoints may take: a batch that would exceed it is saved with a later one."""


def as_view(model: Any) -> ModelView:
    """The view of a TransformerLens model as it is now (a view of edited weights is made anew). The one lazy call into the adapter."""
    if isinstance(model, ModelView):
        return model if model.refresh is None else model.refresh(model)
    from tl_geometry.adapters import view

    return view(model)


def cached_states(cache: Any) -> Float[Tensor, "state batch position d_model"]:
    """All residual stream states of a TransformerLens ``ActivationCache``."""
    from tl_geometry.adapters import states_from_cache

    return states_from_cache(cache)


def token_rows(view: ModelView, tokens: Any, *, prepend_bos: bool | None = None) -> TokenWindows:
    """Tokens of a prompt set as windows: a string, strings of equal token length, ids ``[position]`` or ``[batch position]``, or windows.

    Strings need ``prepend_bos`` said explicitly; token ids are never edited, so it must be left out for them.
    """
    if isinstance(tokens, TokenWindows):
        texts = tokens.str_tokens or tuple(view.decode(tokens.tokens[0].tolist()))
        return dataclasses.replace(tokens, str_tokens=texts)
    _refuse_mappings(tokens)
    texts = [tokens] if isinstance(tokens, str) else tokens
    if isinstance(texts, list | tuple) and texts and all(isinstance(t, str) for t in texts):
        require(
            prepend_bos is not None,
            "prepend_bos",
            expected="True or False with text",
            got=None,
            instead="prepend_bos=True or prepend_bos=False",
        )
        require(not prepend_bos or view.bos_id is not None, "prepend_bos", expected="a tokenizer with a BOS token", got="none")
        rows = [[*([view.bos_id] if prepend_bos else []), *view.encode(text)] for text in texts]
        lengths = sorted({len(r) for r in rows})
        require(
            len(lengths) == 1, "texts", expected="equal token lengths", got=f"lengths {lengths[:8]}", instead="tl_geometry.windows(...)"
        )
        ids = torch.tensor(rows, dtype=torch.int64)
        return TokenWindows(tokens=ids, has_bos=bool(prepend_bos), str_tokens=tuple(view.decode(rows[0])), corpus="prompt")
    require(prepend_bos is None, "prepend_bos", expected="None with token ids (they are never edited)", got=prepend_bos)
    ids = torch.as_tensor(tokens)
    ids = ids.unsqueeze(0) if ids.dim() == 1 else ids
    require(ids.dim() == 2 and not ids.is_floating_point(), "tokens", expected="integer ids [batch position]", got=describe(ids))
    return TokenWindows(
        tokens=ids.long(),
        has_bos=view.bos_id is not None and bool((ids[:, 0] == view.bos_id).all()),
        str_tokens=tuple(view.decode(ids[0].tolist())),
        corpus="tokens",
    )


@dataclass(eq=False)
class TokenSource:
    """Tokens of a corpus, in memory or not: ``contexts`` is ``None`` for an iterable of unknown length."""

    view: ModelView
    tokens: Any
    columns: int
    contexts: int | None
    corpus: str = "tokens"
    labels: Int[Tensor, " context"] | None = None
    names: tuple[str, ...] = ()

    @staticmethod
    def of(view: ModelView, tokens: Any, labels: Any = None, prepend_bos: bool | None = None) -> TokenSource:
        """The source behind any form of tokens that :func:`tl_geometry.decompose` takes."""
        _refuse_mappings(tokens)
        if isinstance(tokens, str | Path) and str(tokens).endswith(".npy"):
            require(Path(tokens).is_file(), "tokens", expected="an existing .npy file of ids [context position]", got=str(tokens))
            tokens = np.load(tokens, mmap_mode="r", allow_pickle=False)
        if isinstance(tokens, str) or (isinstance(tokens, list | tuple) and tokens and isinstance(tokens[0], str)):
            tokens = token_rows(view, tokens, prepend_bos=prepend_bos)
        corpus, names = "tokens", ()
        if isinstance(tokens, TokenWindows):
            labels = tokens.labels if labels is None else labels
            corpus, names, tokens = tokens.corpus, tokens.names, tokens.tokens
        if isinstance(tokens, list | tuple) and tokens and not isinstance(tokens[0], Tensor | np.ndarray | Mapping):
            tokens = _ids(tokens)
        if isinstance(tokens, Tensor | np.ndarray):
            got = f"{type(tokens).__name__} of shape {tuple(tokens.shape)}"
            expected = "integer ids [context position], at least one context"
            ok = tokens.ndim == 2 and tokens.shape[0] > 0 and tokens.shape[1] > 0
            instead = "tl_geometry.windows, or .reshape(-1, length) of a flat file of ids"
            require(ok, "tokens", expected=expected, got=got, instead=instead)
        if isinstance(tokens, Tensor):
            tokens = tokens.cpu()
        if isinstance(tokens, Tensor | np.ndarray) or (hasattr(tokens, "column_names") and hasattr(tokens, "__len__")):
            rows: Any = tokens
            contexts, columns = len(rows), _rows(rows, 0, 1).shape[1]
        else:
            batches: Any = tokens
            stream = iter(batches)
            first = next(stream, None)
            require(first is not None, "tokens", expected="at least one batch", got="an empty iterable")
            contexts, columns = None, _ids(_of_item(first)).shape[-1]
            tokens = itertools.chain([first], stream)
        given = None if labels is None else torch.as_tensor(labels)
        ok = given is None or (given.dim() == 1 and len(given) == contexts and not given.is_floating_point())
        require(ok, "labels", expected=f"one integer label for each of {contexts} contexts", got=describe(given))
        return TokenSource(view, tokens, columns, contexts, corpus, given, names)

    def batches(self, size: int) -> Iterator[Int[Tensor, "batch position"]]:
        """Batches of at most ``size`` contexts, in order."""
        if self.contexts is not None:
            for start in range(0, self.contexts, size):
                yield self._checked(_rows(self.tokens, start, min(start + size, self.contexts)))
            return
        pending: list[Tensor] = []
        for item in self.tokens:
            rows = _ids(_of_item(item))
            if rows.dim() == 2:
                yield from (self._checked(part) for part in rows.split(size))
                continue
            pending.append(rows)
            if len(pending) == size:
                yield self._checked(_ids(pending))
                pending = []
        if pending:
            yield self._checked(_ids(pending))

    def _checked(self, rows: Tensor) -> Tensor:
        width = rows.shape[-1]
        require(
            width == self.columns,
            "tokens",
            expected=f"{self.columns} columns, as in the first row",
            got=width,
            instead="tl_geometry.windows",
        )
        return rows


def _rows(tokens: Any, start: int, stop: int) -> Int[Tensor, "batch position"]:
    if hasattr(tokens, "column_names"):  # a datasets.Dataset
        return _ids(_of_item(tokens[start:stop]))
    return _ids(tokens[start:stop])


def _refuse_mappings(tokens: Any) -> None:
    """Refuse what iterates over its keys: a cache, or what a tokenizer returns."""
    cached = hasattr(tokens, "cache_dict")
    instead = "decompose(cache), or cache= beside the tokens" if cached else "its input_ids"
    wrong = cached or isinstance(tokens, Mapping)
    require(not wrong, "tokens", expected="ids, windows or texts", got=type(tokens).__name__, instead=instead)


def _of_item(item: Any) -> Any:
    """Ids of one item of a data set."""
    if not isinstance(item, Mapping):
        return item
    name = next((n for n in ("tokens", "input_ids") if n in item), None)
    require(name is not None, "dataset", expected="a column named 'tokens' or 'input_ids'", got=f"columns {list(item)}")
    return item[name]


def _ids(rows: Any) -> Tensor:
    if isinstance(rows, list | tuple):
        lengths = sorted({len(r) if hasattr(r, "__len__") else 0 for r in rows})
        require(
            len(lengths) == 1, "tokens", expected="rows of equal length", got=f"lengths {lengths[:8]}", instead="tl_geometry.windows(...)"
        )
        rows = torch.stack([torch.as_tensor(r) for r in rows]) if lengths != [0] else torch.tensor(rows)
    ids = torch.as_tensor(np.array(rows) if isinstance(rows, np.ndarray) else rows)
    require(not ids.is_floating_point(), "tokens", expected="integer ids", got=describe(ids))
    return ids.long()


def default_batch(columns: int, device: torch.device) -> int:
    """Contexts of one forward pass: about 4,096 tokens on a CPU, 16,384 on a GPU."""
    return max(1, (4096 if device.type == "cpu" else 16384) // columns)


def run_corpus(
    source: TokenSource,
    plan: Plan,
    *,
    batch_size: int | None,
    checkpoint: str | Path | None,
    progress: bool,
    device: torch.device | str | None,
    group: Any = None,
) -> PositionContext:
    """Stream a corpus through the model and return its basis; the loop behind :func:`tl_geometry.decompose`.

    With a process group every process reads all tokens, runs every n-th batch, and returns the same basis.
    """
    view, processes = source.view, Processes(group)
    size = batch_size or default_batch(source.columns, view.device)
    provenance = view.provenance(corpus=source.corpus)
    sums_on = device or ("cpu" if view.device.type == "mps" else view.device)
    work = Accumulation(plan, provenance, columns=source.columns, d_model=view.d_model, contexts=source.contexts, device=sums_on)
    if source.labels is not None:
        work.set_labels(int(source.labels.max()) + 1)
    processes.agree(json.dumps([work.settings(), size, str(checkpoint)]), "arguments of decompose")
    saver = _Saver(work, processes, None if checkpoint is None else Path(checkpoint))
    bar = tqdm(total=source.contexts, initial=work.done, unit="ctx", disable=not progress or processes.rank > 0, desc=view.name)
    with bar:
        for number, (tokens, labels) in enumerate(_remaining(source, work, size, str(checkpoint))):
            if processes.takes(number):
                run = _ahead(tokens, view.device)
                work.update(
                    len(tokens),
                    lambda part, on_state, run=run: _forward(view, plan.states, run[part], on_state),
                    tokens,
                    labels,
                    view.bos_id,
                )
            else:
                work.skip(tokens, view.bos_id)
            if number == 0:
                work.share_pilot(processes)
            bar.update(len(tokens))
            if (number + 1) % processes.size == 0:
                saver.round()
    processes.agree(work.token_hash, "tokens")
    saver.finish()
    return work.finish(source.labels, source.names)


def _remaining(source: TokenSource, work: Accumulation, size: int, checkpoint: str) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Batches (and labels) that are not in the checkpoint yet, after making sure that those before are the ones it was made from."""
    done, seen = work.done, ""
    for batch in source.batches(size):
        head, tokens = batch[:done], batch[done:]
        if done:
            seen, done = hash_tokens(head, seen), done - len(head)
            same = done > 0 or seen == work.token_hash
            other = f"checkpoint {checkpoint}"
            require(same, other, expected="the tokens it was made from", got="others", instead="another checkpoint= path")
        if len(tokens):
            yield tokens, None if source.labels is None else source.labels[work.done : work.done + len(tokens)]


def _ahead(tokens: Tensor, device: torch.device) -> Tensor:
    """Tokens for a device: in pinned memory for a GPU, so that their transfer waits for nothing."""
    return tokens.pin_memory() if device.type == "cuda" else tokens


def _forward(view: ModelView, states: Sequence[int], tokens: Tensor, on_state: OnState) -> None:
    def hook(row: int) -> Callable[[Tensor], None]:
        return lambda h: on_state(row, h)

    with torch.inference_mode():
        view.run(tokens, {view.state_hooks[s]: hook(row) for row, s in enumerate(states)})


class _Saver:
    """Checkpoints of one or several processes: after the first round of batches, then as often as :data:`SAVE_SHARE` allows.

    A checkpoint is the sum over all processes, in the first one's file; it is the same whatever their number, so that any number
    may go on from it. The next one is agreed on in rounds, so that processes meet only there.
    """

    def __init__(self, work: Accumulation, processes: Processes, path: Path | None) -> None:
        self.work, self.processes, self.path = work, processes, path
        if path is not None:
            processes.first(lambda: work.resume(path) if path.exists() else None)
            work.share(processes)
        self.saved, self.rounds, self.due, self.clock = work.done, 0, 1, time.monotonic()

    def round(self) -> None:
        """One more batch has gone through every process."""
        self.rounds += 1
        if self.path is None or self.rounds < self.due:
            return
        before = time.monotonic()
        self.work.combine(self.processes)
        self._save(self.path)
        if self.processes.rank > 0:
            self.work.clear()
        now = time.monotonic()
        due = torch.tensor([max(1, math.ceil((now - before) / SAVE_SHARE * self.rounds / max(before - self.clock, 1e-9)))])
        self.processes.share(due)
        self.rounds, self.due, self.clock = 0, int(due), now

    def finish(self) -> None:
        """All processes hold the whole, and the checkpoint too."""
        self.work.combine(self.processes)
        if self.path is not None and self.saved != self.work.done:
            self._save(self.path)

    def _save(self, path: Path) -> None:
        self.processes.first(lambda: self.work.save(path))
        self.saved = self.work.done
