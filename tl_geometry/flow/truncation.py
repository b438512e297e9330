"""How many directions of an ensemble the output needs: states truncated to K directions after every
block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base.errors import choice, require
from tl_geometry.base.results import Result, hash_tokens
from tl_geometry.corpus.sources import TokenSource
from tl_geometry.flow.alignment import AlignedBases
from tl_geometry.flow.ensemble import (
    AFTER_NORM,
    SOURCE,
    Trajectories,
    require_trajectories,
    too_few,
)
from tl_geometry.models.describing import as_view
from tl_geometry.models.model_view import Hook, ModelView
from tl_geometry.models.output_head import distances
from tl_geometry.models.outputs import log_probabilities, output_batch, pilot_runs, require_output

GRID = (2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024)
"""Published numbers of directions; those that the aligned bases do not have are left out, all of
them are added."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TruncationCurve(Result):
    """KL (nats) and top-5 overlap between the truncated and the model's own next-token
    distribution, for each K.

    ``baseline_*`` is the KL between the model's own outputs on consecutive chunks, its scale for
    "unrelated": the published code takes the median, its caption says average. ``needed(share)`` is
    the smallest K with a mean KL of at most that share of the baseline. ``held_out`` says that no
    chunk measured is among those that the directions were fitted on, ``fitted`` how many those
    were: where they are fewer than the dimensions, their span is small for that reason alone, and
    no K is claimed.
    """

    K: tuple[int, ...]
    kl: Float[Tensor, " sample"]
    kl_se: Float[Tensor, " sample"]
    kl_reverse: Float[Tensor, " sample"]
    top1: Float[Tensor, " sample"]
    top5: Float[Tensor, " sample"]
    baseline_mean: float
    baseline_median: float
    where: str
    positions: str
    held_out: bool
    fitted: int
    claimed: bool

    def needed(self, share: float = 0.1, *, baseline: str = "mean") -> int | None:
        """Smallest K from which on the mean KL stays at most ``share`` of the baseline; ``None`` if
        none does, or none is claimed."""
        scale = (
            self.baseline_mean
            if choice(baseline, ("mean", "median"), "baseline") == "mean"
            else self.baseline_median
        )
        if not self.claimed:
            return None
        bad = (self.kl > share * scale).nonzero()[:, 0].tolist()
        first = bad[-1] + 1 if bad else 0
        return self.K[first] if first < len(self.K) else None

    def columns(self) -> tuple[str, ...]:
        names = (
            "K",
            "kl",
            "kl_se",
            "kl_reverse",
            "top1",
            "top5",
            "baseline_mean",
            "baseline_median",
            "where",
            "positions",
        )
        return (*names, "held_out", "fitted", "claimed")

    def rows(self) -> list[tuple[object, ...]]:
        tail = (
            self.baseline_mean,
            self.baseline_median,
            self.where,
            self.positions,
            self.held_out,
            self.fitted,
            self.claimed,
        )
        values = zip(self.kl, self.kl_se, self.kl_reverse, self.top1, self.top5)
        return [(k, *(float(x) for x in v), *tail) for k, v in zip(self.K, values)]


def truncation_kl(
    model: Any,
    tokens: Any,
    basis: Trajectories,
    *,
    K: tuple[int, ...] | None = None,
    where: str = "every",
    positions: str = "pilot",
    centered: bool = False,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> TruncationCurve:
    """Replace the state x by its projection ``U_K U_K^T x`` on K directions after every block and
    compare the next-token outputs.

    Sarfati et al. 2025, section 3.2. All K run in one batch; at the pilot alone the earlier tokens
    are run once for all of them. ``basis`` holds the directions, of the last token's states before
    the final norm: give the ensemble of other chunks than ``tokens`` for a held-out curve
    (in-sample chunks lie in the span of their own directions, so that the KL is 0 from K = rank
    on). The curve is ``held_out`` only if the two share no chunk.

    Args:
        where: ``"every"`` block's output, or ``"final"``: the last state only.
        positions: ``"pilot"`` (last token only; earlier ones are untouched by causality) or
            ``"all"``; the paper does not say.
        centered: project about the ensemble's mean in place of the origin.

    Raises ``GeometryError`` when K exceeds the directions there are, for a basis of other states,
    tokens or BOS, and for models without a trained causal output.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=24)
    >>> others = tlg.trajectories(model, windows[:16], progress=False)
    >>> tlg.truncation_kl(model, windows[16:], others, K=(1, 8), progress=False).held_out
    True
    """
    view = as_view(model)
    require_output(view, "truncation_kl")
    choice(where, ("every", "final"), "where")
    choice(positions, ("pilot", "all"), "positions")
    _check_basis(view, basis, where)
    aligned = basis.aligned_bases(align="none", centered=centered)
    grid = (
        tuple(sorted(set(K)))
        if K is not None
        else (*(k for k in GRID if k < aligned.rank), aligned.rank)
    )
    require(
        grid[0] >= 1 and grid[-1] <= aligned.rank,
        "K",
        expected=f"1 to {aligned.rank} directions",
        got=grid,
        instead="more trajectories",
    )
    source = TokenSource.of(view, tokens, None, prepend_bos)
    ids = torch.cat(list(source.batches(1024)))
    require(len(ids) >= 2, "tokens", expected="at least two chunks", got=len(ids))
    _check_bos(view, basis, ids)
    rows = {
        s: basis.row(s)
        for s in ([view.n_layers] if where == "final" else range(1, view.n_layers + 1))
    }
    limit = batch_size or output_batch(view, source.columns, all_columns=False)
    (kl, reverse, top1, top5), own = _run(
        view, ids, aligned, grid, rows, positions, limit, progress
    )
    chunks = distances(own[1:], own[:-1]).kl
    fitted = set() if basis.tokens is None else {tuple(row) for row in basis.tokens.tolist()}
    held_out = basis.tokens is not None and fitted.isdisjoint(tuple(row) for row in ids.tolist())
    error = kl.std(0) / len(kl) ** 0.5
    provenance = replace(
        basis.provenance,
        token_hash=hash_tokens(ids),
        corpus=source.corpus,
        contexts=len(ids),
        sources=SOURCE,
    )
    if not held_out:
        provenance = provenance.flagged(
            "directions fitted on the same chunks"
            if fitted
            else "chunks of the directions not known"
        )
    few = too_few(len(basis), view.d_model, "directions")
    provenance = provenance.flagged(*(f"{flag}: no K is claimed" for flag in few))
    return TruncationCurve(
        K=grid,
        kl=kl.mean(0),
        kl_se=error,
        kl_reverse=reverse.mean(0),
        top1=top1.mean(0),
        top5=top5.mean(0),
        baseline_mean=float(chunks.mean()),
        baseline_median=float(chunks.median()),
        where=where,
        positions=positions,
        held_out=held_out,
        fitted=len(basis),
        claimed=not few,
        provenance=provenance,
    )


def _check_basis(view: ModelView, basis: Trajectories, where: str) -> None:
    """Refuse directions of another model, of states after the final norm, of too few states, or of
    another token than the last."""
    require_trajectories(basis, "basis")
    same = basis.provenance.fingerprint in (None, view.fingerprint)
    require(
        same,
        "basis",
        expected=f"trajectories of {view.name}",
        got=f"of {basis.provenance.model}",
        instead="trajectories(model, ...)",
    )
    needed = {view.n_layers} if where == "final" else set(range(1, view.n_layers + 1))
    require(
        needed <= set(basis.states),
        "basis",
        expected=f"states {min(needed)} to {view.n_layers}",
        got=basis.states,
        instead='trajectories(model, tokens) with the default states, or where="final" for the last one alone',
    )
    require(
        AFTER_NORM not in basis.provenance.flags,
        "basis",
        expected="states before the final norm, where they are projected",
        got=AFTER_NORM,
        instead="the ensemble that .after_norm() was called on",
    )
    last = -1 if basis.tokens is None else basis.tokens.shape[1] - 1
    require(
        basis.column in (-1, last),
        "basis",
        expected="trajectories of the last token",
        got=f"of column {basis.column}",
        instead='trajectories(model, tokens, position="pilot")',
    )


def _check_bos(view: ModelView, basis: Trajectories, ids: Tensor) -> None:
    said = {True: "with BOS", False: "without BOS"}
    known, found = (
        basis.provenance.has_bos,
        view.bos_id is not None and bool((ids[:, 0] == view.bos_id).all()),
    )
    require(
        known is None or known == found,
        "tokens",
        expected=f"chunks {said[bool(known)]}, as those of basis",
        got=f"chunks {said[found]}",
        instead="the same prepend_bos for both",
    )


def _run(
    view: ModelView,
    ids: Tensor,
    aligned: AlignedBases,
    grid: tuple[int, ...],
    rows: dict[int, int],
    positions: str,
    limit: int,
    progress: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    chunk = max(1, limit // len(grid))
    U = {s: aligned.U[r].to(view.device, view.dtype) for s, r in rows.items()}
    centre = {s: aligned.centre[r].to(view.device, view.dtype) for s, r in rows.items()}
    ranks = torch.arange(aligned.rank, device=view.device)
    parts: list[Tensor] = []
    own: list[Tensor] = []
    with tqdm(
        total=len(ids) * len(grid), disable=not progress, desc="truncation", unit="pass"
    ) as bar:
        for tokens in ids.split(chunk):
            plain = log_probabilities(view, tokens, {})
            own.append(plain.cpu())
            runs = pilot_runs(view, tokens, plain, limit) if positions == "pilot" else None
            at_once = max(1, limit // len(tokens)) if runs is None else runs.copies
            columns = []
            for start in range(0, len(grid), at_once):
                ks = torch.tensor(grid[start : start + at_once], device=view.device)
                keep = (ranks < ks[:, None]).to(view.dtype).repeat_interleave(len(tokens), 0)
                hooks = {
                    view.state_hooks[s]: _project(U[s], centre[s], keep, positions) for s in rows
                }
                if runs is None:
                    changed = log_probabilities(view, tokens.repeat(len(ks), 1), hooks)
                else:
                    changed = runs.log_probabilities(len(ks), hooks)
                compared = distances(changed, plain.repeat(len(ks), 1))
                columns.append(
                    torch.stack([v.view(len(ks), len(tokens)).T.cpu() for v in compared])
                )
                bar.update(len(ks) * len(tokens))
            parts.append(torch.cat(columns, dim=2))
    kl, reverse, top1, top5 = torch.cat(parts, dim=1).unbind(0)
    return (kl, reverse, top1, top5), torch.cat(own)


def _project(U: Tensor, centre: Tensor, keep: Tensor, positions: str) -> Hook:
    def hook(h: Tensor) -> Tensor:
        x = h if positions == "all" else h[:, -1:]
        kept = ((x - centre) @ U * keep[:, None]) @ U.mT + centre
        return kept if positions == "all" else torch.cat([h[:, :-1], kept], dim=1)

    return hook
