"""The one loop over data: batches in, statistics out, with progress, checkpoints and nothing kept but sums."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry._check import describe, fail, require
from tl_geometry.decomposition import PositionContext
from tl_geometry.moments import Moments, Reservoir
from tl_geometry.records import ModelView, TokenWindows
from tl_geometry.results import Provenance, hash_tokens, read_file, write_atomically

CHECKPOINT = "tl_geometry/checkpoint/1"
"""File format identifier of a checkpoint."""
KEEP_LIMIT = 2**30
"""Bytes up to which ``"auto"`` keeps second moments, context means and samples, each."""
SAVE_SHARE = 0.05
"""Share of the time that writing checkpoints may take: a batch that would exceed it is saved with a later one."""

OnState = Callable[[int, Tensor], None]
"""Receives (row of the state, activations [batch column d_model])."""


def as_view(model: Any) -> ModelView:
    """The view of a TransformerLens model (a view is returned as it is). The one lazy call into the adapter."""
    if isinstance(model, ModelView):
        return model
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
        return tokens
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
        if isinstance(tokens, str | Path) and str(tokens).endswith(".npy"):
            require(Path(tokens).is_file(), "tokens", expected="an existing .npy file of ids [context position]", got=str(tokens))
            tokens = np.load(tokens, mmap_mode="r", allow_pickle=False)
        if isinstance(tokens, str) or (isinstance(tokens, list | tuple) and tokens and isinstance(tokens[0], str)):
            tokens = token_rows(view, tokens, prepend_bos=prepend_bos)
        corpus, names = "tokens", ()
        if isinstance(tokens, TokenWindows):
            labels = tokens.labels if labels is None else labels
            corpus, names, tokens = tokens.corpus, tokens.names, tokens.tokens
        if isinstance(tokens, list | tuple) and tokens and not isinstance(tokens[0], Tensor | np.ndarray | dict):
            tokens = _ids(tokens)
        if isinstance(tokens, Tensor | np.ndarray):
            got = f"{type(tokens).__name__} of shape {tuple(tokens.shape)}"
            expected = "integer ids [context position], at least one context"
            require(
                tokens.ndim == 2 and tokens.shape[0] > 0 and tokens.shape[1] > 0,
                "tokens",
                expected=expected,
                got=got,
                instead="tl_geometry.windows",
            )
        if isinstance(tokens, Tensor | np.ndarray) or hasattr(tokens, "column_names"):
            rows: Any = tokens
            contexts, columns = len(rows), _rows(rows, 0, 1).shape[1]
        else:
            batches: Any = tokens
            stream = iter(batches)
            first = next(stream, None)
            require(first is not None, "tokens", expected="at least one batch", got="an empty iterable")
            contexts, columns = None, _ids(first["tokens"] if isinstance(first, dict) else first).shape[-1]
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
            rows = _ids(item["tokens"] if isinstance(item, dict) else item)
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
        require("tokens" in tokens.column_names, "dataset", expected="a column named 'tokens'", got=f"columns {tokens.column_names}")
        return _ids(tokens[start:stop]["tokens"])
    return _ids(tokens[start:stop])


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of one accumulation, as :func:`tl_geometry.decompose` documents them."""

    states: tuple[int, ...]
    window: tuple[int, int] | None = None
    groups: int = 8
    keep: int = 32
    second_moments: bool | str = "auto"
    keep_ctx: bool | str = "auto"
    moments_dtype: torch.dtype = torch.float32
    seed: int = 0


class Accumulation:
    """Sums in progress: :meth:`update` for each batch, :meth:`finish` for the basis, :meth:`save` and :meth:`resume` in between."""

    def __init__(
        self, plan: Plan, provenance: Provenance, *, columns: int, d_model: int, contexts: int | None, device: torch.device | str
    ) -> None:
        start, end = plan.window or (0, columns)
        require(
            0 <= start < end <= columns, "window", expected=f"0 <= start < end <= {columns} (columns of the input)", got=repr(plan.window)
        )
        require(plan.groups >= 1, "groups", expected="at least 1", got=plan.groups)
        self.plan, self.columns, self.contexts = plan, columns, contexts
        n = len(plan.states)
        flags: list[str] = []
        second = self._decide(plan.second_moments, 8 * n * d_model**2, "second moments", flags)
        self.keep_ctx = self._decide(plan.keep_ctx, 8 * n * d_model * (contexts or 0), "context vectors", flags)
        keep = min(plan.keep, KEEP_LIMIT // max(1, 4 * n * columns * d_model))
        if keep < plan.keep:
            flags.append(f"{keep} of {plan.keep} samples kept (1 GiB)")
        if start > 0:
            flags.append(f"{'column 0' if start == 1 else f'columns 0 to {start - 1}'} left out of the statistics")
        self.provenance = provenance.flagged(*flags)
        self.moments = Moments.zeros(
            states=n, columns=columns, d_model=d_model, window=(start, end), groups=plan.groups,
            second=second, product_dtype=plan.moments_dtype, device=device,
        )  # fmt: skip
        self.reservoir = Reservoir(size=keep, seed=plan.seed)
        self.means: list[Tensor] = []
        self.token_hash = ""
        self.has_bos: bool | None = None
        self.done = 0

    @staticmethod
    def _decide(wanted: bool | str, size: int, name: str, flags: list[str]) -> bool:
        if wanted not in (True, False, "auto"):
            fail(name, expected='True, False or "auto"', got=repr(wanted))
        if wanted == "auto" and size > KEEP_LIMIT:
            flags.append(f"{name} not kept (over 1 GiB)")
        return size <= KEEP_LIMIT if wanted == "auto" else bool(wanted)

    def set_labels(self, labels: int) -> None:
        """Keep sums for each of ``labels`` labels as well."""
        sums = self.moments.sums
        self.moments.label_sums = torch.zeros(labels, sums.shape[1], sums.shape[3], dtype=torch.float64, device=sums.device)
        self.moments.label_counts = torch.zeros(labels, dtype=torch.int64)

    def update(
        self,
        size: int,
        feed: Callable[[OnState], None],
        tokens: Tensor | None,
        labels: Int[Tensor, " batch"] | None,
        bos_id: int | None = None,
    ) -> None:
        """Take in ``size`` contexts: ``feed(on_state)`` calls ``on_state(row, h)`` once for each state."""
        group_of = (self.done + torch.arange(size)) % self.plan.groups
        chosen = self.reservoir.choose(self.done, size) if self.reservoir.size else []
        rows = [i for _, i in chosen]
        means: dict[int, Tensor] = {}
        finite: dict[int, Tensor] = {}
        samples: dict[int, Tensor] = {}

        def on_state(row: int, h: Tensor) -> None:
            means[row], finite[row] = self.moments.add(row, h, group_of, labels)
            if rows:
                samples[row] = h[rows].float().cpu()

        feed(on_state)
        order = range(len(self.plan.states))
        bad = [self.plan.states[i] for i in order if not finite[i]]
        where = f"contexts {self.done} to {self.done + size - 1}"
        require(
            not bad, "activations", expected="finite numbers", got=f"NaN or infinite in states {bad}, {where}", instead="float32 weights"
        )
        self.moments.count(group_of, labels)
        if rows:
            self.reservoir.put(self.done, chosen, torch.stack([samples[i] for i in order], dim=1), None if tokens is None else tokens[rows])
        if self.keep_ctx:
            self.means.append(torch.stack([means[i].cpu() for i in order]))
            if self.plan.keep_ctx == "auto" and 8 * sum(m.numel() for m in self.means) > KEEP_LIMIT:
                self.keep_ctx, self.means = False, []
                self.provenance = self.provenance.flagged("context vectors not kept (over 1 GiB)")
        if tokens is not None:
            self.token_hash = hash_tokens(tokens, self.token_hash)
            begins = bos_id is not None and bool((tokens[:, 0] == bos_id).all())
            self.has_bos = begins and self.has_bos is not False
        self.done += size

    def finish(self, labels: Tensor | None, names: tuple[str, ...]) -> PositionContext:
        """The basis of everything taken in so far, on the CPU."""
        require(self.done > 0, "tokens", expected="at least one context", got="none")
        moments = Moments.of(self.moments.window, self.moments.tensors())
        reservoir = self.reservoir if self.reservoir.states is not None else None
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
            reservoir=reservoir,
        )

    def settings(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that resumes it."""
        plan = {f.name: getattr(self.plan, f.name) for f in dataclasses.fields(self.plan)}
        fields = {k: getattr(self.provenance, k) for k in ("model", "fingerprint", "corpus", "dtype")}
        sizes = {"columns": self.columns, "window": self.moments.window, "contexts": self.contexts}
        return json.loads(json.dumps(plan | fields | sizes, default=str))

    def save(self, path: Path) -> None:
        """Write a checkpoint: the file holds the last whole one at every moment."""
        basis = self.finish(None, ())
        run = {"settings": self.settings(), **{k: getattr(self, k) for k in ("done", "token_hash", "has_bos", "keep_ctx")}}
        header = basis.header() | {"schema": CHECKPOINT, "run": run}
        write_atomically(path, basis.tensors(), {k: json.dumps(v) for k, v in header.items()})

    def resume(self, path: Path) -> None:
        """Take up a checkpoint, or raise and leave it as it is."""
        header, tensors = read_file(path, CHECKPOINT)
        run, mine = header["run"], self.settings()
        differing = [k for k in mine if mine[k] != run["settings"].get(k)]
        shown = ", ".join(f"{k}={run['settings'].get(k)!r} (now {mine[k]!r})" for k in differing)
        require(
            not differing,
            f"checkpoint {path}",
            expected="the run that wrote it",
            got=f"another: {shown}",
            instead="another checkpoint= path",
        )
        basis = PositionContext.of(header, tensors)
        device = self.moments.sums.device
        self.moments = dataclasses.replace(Moments.of(basis.window, basis.moments.tensors(), device), product_dtype=self.plan.moments_dtype)
        self.reservoir = basis.reservoir or self.reservoir
        self.keep_ctx = run["keep_ctx"]
        self.means = [] if basis.context_means is None else [basis.context_means]
        self.done, self.token_hash, self.has_bos, self.provenance = run["done"], run["token_hash"], run["has_bos"], basis.provenance


def run_corpus(
    source: TokenSource,
    plan: Plan,
    *,
    batch_size: int | None,
    checkpoint: str | Path | None,
    progress: bool,
    device: torch.device | str | None,
) -> PositionContext:
    """Stream a corpus through the model and return its basis; the loop behind :func:`tl_geometry.decompose`."""
    view = source.view
    path = None if checkpoint is None else Path(checkpoint)
    dtype = str(view.dtype).removeprefix("torch.")
    provenance = Provenance(
        model=view.name,
        fingerprint=view.fingerprint,
        library=f"{view.kind}, {view.library}",
        processed=view.processed,
        corpus=source.corpus,
        dtype=dtype,
    )
    sums_on = device or ("cpu" if view.device.type == "mps" else view.device)
    work = Accumulation(plan, provenance, columns=source.columns, d_model=view.d_model, contexts=source.contexts, device=sums_on)
    if source.labels is not None:
        work.set_labels(int(source.labels.max()) + 1)
    if path is not None and path.exists():
        work.resume(path)
    done, seen, cost, saved = work.done, "", 0.0, -1
    bar = tqdm(total=source.contexts, initial=done, unit="ctx", disable=not progress, desc=view.name)
    clock = time.monotonic()
    with bar:
        for batch in source.batches(batch_size or default_batch(source.columns, view.device)):
            head, tokens = batch[:done], batch[done:]
            if done:
                seen, done = hash_tokens(head, seen), done - len(head)
                same = done > 0 or seen == work.token_hash
                require(
                    same, f"checkpoint {path}", expected="the tokens it was made from", got="others", instead="another checkpoint= path"
                )
            if not len(tokens):
                continue
            labels = None if source.labels is None else source.labels[work.done : work.done + len(tokens)]
            work.update(
                len(tokens),
                lambda on_state, tokens=tokens: _forward(view, plan.states, tokens, on_state),
                tokens,
                labels,
                view.bos_id,
            )
            bar.update(len(tokens))
            if path is not None and (time.monotonic() - clock) * SAVE_SHARE >= cost:
                before = time.monotonic()
                work.save(path)
                clock, saved = time.monotonic(), work.done
                cost = clock - before
    if path is not None and saved != work.done:
        work.save(path)
    return work.finish(source.labels, source.names)


def _forward(view: ModelView, states: Sequence[int], tokens: Tensor, on_state: OnState) -> None:
    def hook(row: int) -> Callable[[Tensor], None]:
        return lambda h: on_state(row, h)

    view.run(tokens, {view.state_hooks[s]: hook(row) for row, s in enumerate(states)})


def run_tensor(
    h: Float[Tensor, "state context position d_model"], plan: Plan, labels: Tensor | None, provenance: Provenance, batch: int
) -> PositionContext:
    """The same statistics of activations that are already in memory."""
    work = Accumulation(plan, provenance, columns=h.shape[2], d_model=h.shape[3], contexts=h.shape[1], device=h.device)
    if labels is not None:
        work.set_labels(int(labels.max()) + 1)
    for start in range(0, h.shape[1], batch):
        part = h[:, start : start + batch]

        def feed(on_state: OnState, part: Tensor = part) -> None:
            for row in range(len(part)):
                on_state(row, part[row])

        work.update(part.shape[1], feed, None, None if labels is None else labels[start : start + batch])
    return work.finish(labels, ())
