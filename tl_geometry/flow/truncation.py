"""How many directions of an ensemble does the output need? :func:`truncation_kl` truncates states
to K directions after every block of the live model and compares the outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base.errors import choice, require
from tl_geometry.base.tables import Table
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.flow import ensemble as paths
from tl_geometry.flow.bases import AlignedBases, top_directions
from tl_geometry.flow.pilots import Edit, Pilot, pilots
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.next_token import require_output
from tl_geometry.models.output_head import distances
from tl_geometry.models.reader import as_view

GRID = (2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024)
"""Published values of K. Those not below the rank of the aligned bases are left out, and the rank
itself is added."""


def truncation_kl(
    model: ModelLike,
    tokens: TokensLike,
    ensemble: paths.Trajectories,
    *,
    K: tuple[int, ...] | None = None,
    where: str = "every",
    positions: str = "pilot",
    centered: bool = False,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> Table:
    """Replace the state x by its projection ``U_K U_K^T x`` on K directions after every block and
    compare the next-token outputs.

    Sarfati et al. 2025, section 3.2. The directions are those of ``ensemble``, trajectories of the
    last token before the final norm. For a held-out curve give the ensemble of other chunks than
    ``tokens`` (``paths.pick(rows)`` of one that is there already): in-sample chunks lie in the span
    of their own directions, so that the KL is 0 at K = rank. With ``positions="pilot"`` the tokens
    before the last are run once for all K.

    Args:
        where: ``"every"`` block's output, or ``"final"``: the last state only.
        positions: ``"pilot"`` projects the last token only, ``"all"`` every token; the paper does
            not say which it does.
        centered: project about the ensemble's mean in place of the origin.
        batch_size: chunks whose keys and values are held at a time, by default 16.

    Returns a row per K:

    - ``kl``: KL(truncated | own) in nats, as published, mean over chunks; ``kl_se`` its standard
      error; ``kl_reverse``: KL(own | truncated), the direction of :func:`tl_geometry.skip_costs`;
    - ``top1``: share of chunks whose most likely token agrees; ``top5``: mean number of tokens
      among the five most likely of both (0 to 5);
    - ``baseline_mean``, ``baseline_median``: KL between the model's own outputs on consecutive
      chunks, the size of the KL between unrelated outputs. The published code takes the median, its
      caption says average. No standard error: neighbouring pairs share a chunk;
    - ``where``, ``positions``; ``held_out``: no chunk is among those that the directions were
      fitted on; ``fitted``: how many those were; ``claimed``: false where they are fewer than
      dimensions, because directions of so few chunks span few dimensions for that reason alone.

    Raises ``GeometryError`` when K exceeds the directions there are, for an ensemble of other
    states, tokens or BOS, and for models without a trained causal output.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=24)
    >>> others = tlg.trajectories(model, windows[:16], progress=False)
    >>> curve = tlg.truncation_kl(model, windows[16:], others, K=(1, 8), progress=False)
    >>> curve.column("held_out")
    [True, True]
    """
    view = as_view(model)
    require_output(view, "truncation_kl")
    choice(where, ("every", "final"), "where")
    choice(positions, ("pilot", "all"), "positions")
    rows = as_tokens(view, tokens, prepend_bos=prepend_bos)
    require(len(rows) >= 2, "tokens", expected="at least two chunks", got=len(rows))
    states = [view.n_layers] if where == "final" else range(1, view.n_layers + 1)
    paths.require_fitting(view, ensemble, states, rows.tokens)
    aligned = ensemble.aligned_bases(centered=centered)
    default_grid = (*(k for k in GRID if k < aligned.rank), aligned.rank)
    grid = default_grid if K is None else tuple(sorted(set(K)))
    fits = bool(grid) and grid[0] >= 1 and grid[-1] <= aligned.rank
    expected, instead = f"1 to {aligned.rank} directions", "more trajectories"
    require(fits, "K", expected=expected, got=grid, instead=instead)
    edits = {s: _projection(view, aligned, ensemble.row(s), grid) for s in states}
    at = -1 if positions == "pilot" else slice(None)
    whole = (Pilot(view, chunk) for chunk in rows.tokens.split(1))
    runs = pilots(view, rows.tokens, batch_size) if positions == "pilot" else whole
    measured, baseline, previous = [], [], None
    bar = {"total": len(rows), "disable": not progress, "desc": "truncation", "unit": "chunk"}
    for pilot in tqdm(runs, **bar):
        log_probs = pilot(edits, 1 + len(grid), at)
        own, changed = log_probs[:1], log_probs[1:]
        measured.append(torch.stack(list(distances(changed, own.expand_as(changed)))).cpu())
        baseline += [] if previous is None else [distances(own, previous).kl.cpu()]
        previous = own
    found, apart = torch.stack(measured, dim=1), torch.cat(baseline)
    fitted = ensemble.tokens
    shared = fitted is not None and bool(paths.shared_rows(rows.tokens, fitted).any())
    few = paths.too_few(len(ensemble), view.d_model, "directions")
    about: dict[str, Any] = {"baseline_mean": float(apart.mean())}
    about |= {"baseline_median": float(apart.median()), "where": where, "positions": positions}
    about |= {"held_out": fitted is not None and not shared, "fitted": len(ensemble)}
    about["claimed"] = not few
    means, errors, table = found.mean(1).mT.tolist(), found[0].std(0) / len(rows) ** 0.5, []
    for k, (kl, reverse, top1, top5), error in zip(grid, means, errors.tolist(), strict=True):
        row = {"K": k, "kl": kl, "kl_se": error, "kl_reverse": reverse, "top1": top1, "top5": top5}
        table.append(row | about)
    flags = ["chunks of the directions not known"] if fitted is None else []
    flags += ["directions fitted on the same chunks"] if shared else []
    flags += [f"{flag}: no K is claimed" for flag in few]
    provenance = view.provenance(rows, window=(0, rows.length), sources=paths.SOURCE)
    chance = "baseline_mean is the KL between unrelated outputs, those on consecutive chunks."
    return paths.table_of(table, provenance.flagged(*ensemble.provenance.flags, *flags), chance)


def directions_needed(curve: Table, share: float = 0.1, *, baseline: str = "mean") -> int | None:
    """The smallest K of a :func:`tl_geometry.truncation_kl` from which on the mean KL stays at most
    ``share`` of the baseline (``"mean"`` or ``"median"``); ``None`` where there is none, or where
    no K is ``claimed``.

    >>> from tl_geometry.base.results import Provenance
    >>> names, rest = ("K", "kl", "baseline_mean", "claimed"), (5.0, True)
    >>> cells = ((2, 1.0, *rest), (8, 0.4, *rest), (16, 0.1, *rest))
    >>> directions_needed(Table(names=names, cells=cells, provenance=Provenance()))
    8
    """
    choice(baseline, ("mean", "median"), "baseline")
    columns: Any = [curve.column(name) for name in ("K", "kl", f"baseline_{baseline}", "claimed")]
    needed = None
    for k, kl, scale, claimed in reversed(list(zip(*columns, strict=True))):
        if not claimed or kl > share * scale:
            break
        needed = k
    return needed


def _projection(view: ModelView, aligned: AlignedBases, row: int, grid: tuple[int, ...]) -> Edit:
    """Keeps the first row, the model's own, of states ``[row (position) d_model]`` and projects
    the others on K directions each, about the centre of one state row; the first time it makes them
    of the one row."""
    U = top_directions(aligned, row, grid[-1]).to(view.device, view.dtype)
    center = aligned.center[row].to(view.device, view.dtype)
    # one product for all K: directions beyond K are masked
    kept = (torch.arange(grid[-1]) < torch.tensor(grid)[:, None]).to(view.device, view.dtype)

    def edit(h: Tensor) -> Tensor:
        mask = kept if h.dim() == 2 else kept[:, None]
        variants = h if len(h) == 1 else h[1:]
        return torch.cat([h[:1], ((variants - center) @ U * mask) @ U.mT + center])

    return edit
