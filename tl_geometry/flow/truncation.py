"""How many directions of an ensemble does the output need? :func:`truncation_kl` truncates states
to K directions after every block of the live model and compares the outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base.errors import choice, require
from tl_geometry.base.results import Result, hash_tokens
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike, begins_with_bos
from tl_geometry.flow.alignment import AlignedBases
from tl_geometry.flow.ensemble import (
    AFTER_NORM,
    SOURCE,
    Trajectories,
    require_trajectories,
    too_few,
)
from tl_geometry.models.batches import batch_of
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import Hook, ModelView
from tl_geometry.models.next_token import (
    log_probabilities,
    output_batch,
    pilot_runs,
    require_output,
)
from tl_geometry.models.output_head import distances
from tl_geometry.models.reader import as_view

GRID = (2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024)
"""Published values of K. Those not below the rank of the aligned bases are left out, and the rank
itself is added."""
CURVES = ("K", "kl", "kl_se", "kl_reverse", "top1", "top5")
"""Columns of the table of a :class:`TruncationCurve` that have a value for each K."""
SHARED = ("baseline_mean", "baseline_median", "where", "positions", "held_out", "fitted", "claimed")
"""Columns that have one value for all K."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TruncationCurve(Result):
    """How far the next-token distribution of truncated states is from the model's own, for each K.

    ``kl`` is KL(truncated | own) in nats, as published, ``kl_se`` its standard error over chunks,
    ``kl_reverse`` KL(own | truncated) (the direction of ``kl`` in a
    :class:`~tl_geometry.flow.SkipMap`), ``top1`` the share of chunks whose most likely token
    agrees, ``top5`` the mean number of tokens among the five most likely of both (0 to 5).

    ``baseline_*`` is the KL between the model's own outputs on consecutive chunks: the size of the
    KL between unrelated outputs. The published code takes the median, its caption says average.
    It has no standard error: neighbouring pairs share a chunk, so that they are not independent.
    ``needed(share)`` is the smallest K from which on the mean KL stays at most that share of the
    baseline. ``held_out`` says that no chunk measured is among those that the directions were
    fitted on, ``fitted`` how many those were. Directions fitted on fewer chunks than dimensions
    span few dimensions for that reason alone: then ``claimed`` is false and ``needed`` gives
    ``None``.
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
        """Smallest K from which on the mean KL stays at most ``share`` of the baseline; ``None``
        where there is none, or where no K is ``claimed``."""
        mean = choice(baseline, ("mean", "median"), "baseline") == "mean"
        scale = self.baseline_mean if mean else self.baseline_median
        if not self.claimed:
            return None
        above = (self.kl > share * scale).nonzero()[:, 0].tolist()
        first_row = above[-1] + 1 if above else 0
        return self.K[first_row] if first_row < len(self.K) else None

    def columns(self) -> tuple[str, ...]:
        return (*CURVES, *SHARED)

    def rows(self) -> list[tuple[object, ...]]:
        curves = zip(*(getattr(self, name) for name in CURVES), strict=True)
        shared = [getattr(self, name) for name in SHARED]
        return [(int(k), *(float(x) for x in v), *shared) for k, *v in curves]


def truncation_kl(
    model: ModelLike,
    tokens: TokensLike,
    ensemble: Trajectories,
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

    Sarfati et al. 2025, section 3.2. All K run in one batch; with ``positions="pilot"`` the earlier
    tokens are run once for all K. The directions are those of ``ensemble``, trajectories of the
    last token before the final norm. For a held-out curve give the ensemble of other chunks than
    ``tokens``: in-sample chunks lie in the span of their own directions, so that the KL is 0 at
    K = rank. The curve is ``held_out`` only if the two share no chunk.

    Args:
        where: ``"every"`` block's output, or ``"final"``: the last state only.
        positions: ``"pilot"`` projects the last token only, ``"all"`` every token; the paper does
            not say which it does.
        centered: project about the ensemble's mean in place of the origin.

    Raises ``GeometryError`` when K exceeds the directions there are, for an ensemble of other
    states, tokens or BOS, and for models without a trained causal output.

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
    _check_ensemble(view, ensemble, where)
    aligned = ensemble.aligned_bases(align="none", centered=centered)
    default_grid = (*(k for k in GRID if k < aligned.rank), aligned.rank)
    grid = default_grid if K is None else tuple(sorted(set(K)))
    expected, instead = f"1 to {aligned.rank} directions", "more trajectories"
    require(
        grid[0] >= 1 and grid[-1] <= aligned.rank, "K", expected=expected, got=grid, instead=instead
    )
    source = as_tokens(view, tokens, prepend_bos=prepend_bos)
    ids = source.tokens
    require(len(ids) >= 2, "tokens", expected="at least two chunks", got=len(ids))
    _check_bos(view, ensemble, ids)
    states = [view.n_layers] if where == "final" else range(1, view.n_layers + 1)
    rows = {s: ensemble.row(s) for s in states}
    default = output_batch(view, source.length, all_positions=False)
    limit = default if batch_size is None else batch_of(batch_size, source.length, view.device)
    curves, own_log_probs = _run(view, ids, aligned, grid, rows, positions, limit, progress)
    view.require_unchanged()
    kl, reverse, top1, top5 = curves
    # the baseline: consecutive chunks compared
    baseline_kl = distances(own_log_probs[1:], own_log_probs[:-1]).kl
    fitted_chunks = (
        set() if ensemble.tokens is None else {tuple(t) for t in ensemble.tokens.tolist()}
    )
    held_out = bool(fitted_chunks) and fitted_chunks.isdisjoint(tuple(row) for row in ids.tolist())
    few = too_few(len(ensemble), view.d_model, "directions")
    flags = [f"{flag}: no K is claimed" for flag in few]
    if not held_out:
        same_chunks = "directions fitted on the same chunks"
        flags.insert(0, same_chunks if fitted_chunks else "chunks of the directions not known")
    provenance = replace(
        ensemble.provenance,
        token_hash=hash_tokens(ids),
        corpus=source.corpus,
        contexts=len(ids),
        sources=SOURCE,
    )
    return TruncationCurve(
        K=grid,
        kl=kl.mean(0),
        kl_se=kl.std(0) / len(kl) ** 0.5,
        kl_reverse=reverse.mean(0),
        top1=top1.mean(0),
        top5=top5.mean(0),
        baseline_mean=float(baseline_kl.mean()),
        baseline_median=float(baseline_kl.median()),
        where=where,
        positions=positions,
        held_out=held_out,
        fitted=len(ensemble),
        claimed=not few,
        provenance=provenance.flagged(*flags),
    )


def _check_ensemble(view: ModelView, ensemble: Trajectories, where: str) -> None:
    """Refuse directions of another model, of states after the final norm, of too few states, or of
    another token than the last."""
    require_trajectories(ensemble, "ensemble")
    # an ensemble made from plain tensors has no fingerprint to compare
    same_model = ensemble.provenance.fingerprint in (None, view.fingerprint)
    expected, got = f"trajectories of {view.name}", f"of {ensemble.provenance.model}"
    require(same_model, "ensemble", expected=expected, got=got, instead="trajectories(model, ...)")
    needed = {view.n_layers} if where == "final" else set(range(1, view.n_layers + 1))
    has_states = needed <= set(ensemble.states)
    expected = f"states {min(needed)} to {view.n_layers}"
    instead = 'trajectories(model, tokens) with all states, or where="final" for the last one alone'
    require(has_states, "ensemble", expected=expected, got=ensemble.states, instead=instead)
    before_norm = AFTER_NORM not in ensemble.provenance.flags
    expected = "states before the final norm"
    instead = "the ensemble that .after_norm() was called on"
    require(before_norm, "ensemble", expected=expected, got=AFTER_NORM, instead=instead)
    last_position = -1 if ensemble.tokens is None else ensemble.tokens.shape[1] - 1
    expected, got = "trajectories of the last token", f"of position {ensemble.position}"
    instead = 'trajectories(model, tokens, position="pilot")'
    require(
        ensemble.position in (-1, last_position),
        "ensemble",
        expected=expected,
        got=got,
        instead=instead,
    )


def _check_bos(view: ModelView, ensemble: Trajectories, ids: Tensor) -> None:
    """Refuse chunks with BOS for directions of chunks without, and the other way round."""
    bos_text = {True: "with BOS", False: "without BOS"}
    fitted_with_bos, has_bos = ensemble.provenance.has_bos, begins_with_bos(ids, view.bos_id)
    same_bos, instead = fitted_with_bos in (None, has_bos), "the same prepend_bos for both"
    expected = f"chunks {bos_text[bool(fitted_with_bos)]}, as those of ensemble"
    require(
        same_bos, "tokens", expected=expected, got=f"chunks {bos_text[has_bos]}", instead=instead
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
    """Distances ``[chunk K]`` (KL, its reverse, top 1, top 5) of the truncated outputs, and the
    model's own log-probabilities ``[chunk d_vocab]``."""
    chunk = max(1, limit // len(grid))
    U = {s: aligned.U[r].to(view.device, view.dtype) for s, r in rows.items()}
    center = {s: aligned.center[r].to(view.device, view.dtype) for s, r in rows.items()}
    ranks = torch.arange(aligned.rank, device=view.device)
    distance_batches: list[Tensor] = []
    own_log_probs: list[Tensor] = []
    with tqdm(
        total=len(ids) * len(grid), disable=not progress, desc="truncation", unit="pass"
    ) as bar:
        for tokens in ids.split(chunk):
            clean_log_probs = log_probabilities(view, tokens, {})
            own_log_probs.append(clean_log_probs.cpu())
            runs = (
                pilot_runs(view, tokens, clean_log_probs, limit) if positions == "pilot" else None
            )
            n_grid_points = max(1, limit // len(tokens)) if runs is None else runs.copies
            measured = []
            for start in range(0, len(grid), n_grid_points):
                ks = torch.tensor(grid[start : start + n_grid_points], device=view.device)
                # K as masks over all directions, not as sliced bases: one batch holds several K
                kept_directions = (ranks < ks[:, None]).to(view.dtype)
                kept_directions = repeat(
                    kept_directions, "k rank -> (k chunk) rank", chunk=len(tokens)
                )
                hooks = {
                    view.state_hooks[s]: _project(U[s], center[s], kept_directions, positions)
                    for s in rows
                }
                if runs is None:
                    changed = log_probabilities(view, tokens.repeat(len(ks), 1), hooks)
                else:
                    changed = runs.log_probabilities(len(ks), hooks)
                compared = torch.stack(list(distances(changed, clean_log_probs.repeat(len(ks), 1))))
                pattern = "metric (k chunk) -> metric chunk k"
                measured.append(rearrange(compared, pattern, k=len(ks)).cpu())
                bar.update(len(ks) * len(tokens))
            distance_batches.append(torch.cat(measured, dim=2))
    kl, reverse, top1, top5 = torch.cat(distance_batches, dim=1).unbind(0)
    return (kl, reverse, top1, top5), torch.cat(own_log_probs)


def _project(U: Tensor, center: Tensor, kept_directions: Tensor, positions: str) -> Hook:
    """A hook that projects a state: row i of the batch on the directions where
    ``kept_directions[i]`` is 1."""

    def hook(h: Tensor) -> Tensor:
        selected = h if positions == "all" else h[:, -1:]
        projected = ((selected - center) @ U * kept_directions[:, None]) @ U.mT + center
        return projected if positions == "all" else torch.cat([h[:, :-1], projected], dim=1)

    return hook
