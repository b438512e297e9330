"""What does the output lose where the states of the last token are edited in the live model?
:func:`truncation_kl` projects them on K directions after every block: how many directions does the
output need? :func:`skip_costs` replaces blocks by a fitted map between their states: how many
layers can be skipped for how much loss? Both run the last token in many ways at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base.checks import count, several
from tl_geometry.base.errors import require
from tl_geometry.base.intervals import paired_interval
from tl_geometry.base.tables import Table
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.flow import maps
from tl_geometry.flow.ensemble import SOURCE, Trajectories, require_fitting, shared_rows, too_few
from tl_geometry.flow.pilots import Edit, Pilots, pilots
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.output_head import distances, token_losses
from tl_geometry.models.reader import as_view

GRID = (2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024)
"""Published values of K. Those not below the rank of the aligned bases are left out, and the rank
itself is added."""
SKIPS, STARTS = (1, 2, 4), 6
"""Numbers of consecutive blocks that are skipped unless pairs are given, and from how many evenly
spaced starts each: 18 pairs of states in a model of 30 blocks."""
VARIANTS = 256
"""Maps that are run in one pass: bounds the memory of their outputs (0.1 GiB for 50,000 tokens)."""
NEAR_CHANCE = 0.75
"""Share of ``ln(d_vocab)``, the loss of a uniform guess, above which a model is flagged: it does
not predict this text, so that skipping blocks may even lower its loss. Trained models are below
half."""
Pair = tuple[int, int]
"""States a < b: a map of state a replaces state b."""
Job = tuple[Pair, str]
"""A pair and the type of map."""


def truncation_kl(
    model: ModelLike,
    tokens: TokensLike,
    ensemble: Trajectories,
    *,
    K: Sequence[int] | int | None = None,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> Table:
    """Ablation of all but K directions: replace the state x by its projection ``U_K U_K^T x`` after
    every block and compare the next-token outputs.

    Sarfati et al. 2025, section 3.2. The directions are those of ``ensemble``, trajectories of the
    last token before the final norm. For a held-out curve give the ensemble of other chunks than
    ``tokens`` (``paths.pick(rows)`` of one that is there already): in-sample chunks lie in the span
    of their own directions, so that the KL is 0 at K = rank. The last token alone is projected (the
    paper does not say whether others are), so that what stands before it is run once for all K.

    Args:
        K: numbers of directions, by default the published ones, up to the rank.
        batch_size: chunks whose keys and values are held at a time, by default 16.

    Returns a row per K:

    - ``kl``: KL(truncated | own) in nats, as published, mean over chunks; ``kl_se`` its standard
      error (NaN below 10 chunks); ``kl_reverse``: KL(own | truncated), the direction of
      :func:`tl_geometry.skip_costs`;
    - ``top1``: share of chunks whose most likely token agrees; ``top5``: mean number of tokens
      among the five most likely of both (0 to 5);
    - ``baseline_mean``, ``baseline_median``: KL between the model's own outputs on consecutive
      chunks, the size of the KL between unrelated outputs. The published code takes the median, its
      caption says average. No standard error: neighbouring pairs share a chunk;
    - ``held_out``: no chunk is among those that the directions were fitted on; ``fitted``: how many
      those were; ``claimed``: false where they are fewer than dimensions, because directions of so
      few chunks span few dimensions for that reason alone.

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
    view.require_output("truncation_kl")
    rows = as_tokens(view, tokens, prepend_bos=prepend_bos)
    require(len(rows) >= 2, "tokens", expected="at least two chunks", got=len(rows))
    states, aligned = range(1, view.n_layers + 1), ensemble.aligned_bases
    require_fitting(view, ensemble, states, rows.tokens)
    default_grid = (*(k for k in GRID if k < aligned.rank), aligned.rank)
    given = default_grid if K is None else several(K)
    instead = "more trajectories, for more directions"
    grid = tuple(sorted({count(k, "K", 1, aligned.rank, instead) for k in given}))
    require(grid, "K", expected="numbers of directions", got="none")
    edits = {s: _projection(view, aligned, ensemble.states.index(s), grid) for s in states}
    measured, baseline, previous = [], [], None
    bar = {"total": len(rows), "disable": not progress, "desc": "truncation", "unit": "chunk"}
    with tqdm(**bar) as shown:
        for some in pilots(view, rows.tokens, 1 + len(grid), batch_size):
            log_probs = some(edits, 1 + len(grid))
            own, changed = log_probs[0], log_probs[1:]
            measured.append(torch.stack(list(distances(changed, own))).mT.cpu())
            before = own if previous is None else torch.cat([previous, own])
            baseline.append(distances(before[1:], before[:-1]).kl.cpu())
            previous = own[-1:]
            shown.update(len(own))
    # [column chunk K]
    found, apart, fitted = torch.cat(measured, dim=1), torch.cat(baseline), ensemble.tokens
    shared = fitted is not None and bool(shared_rows(rows.tokens, fitted).any())
    few = too_few(len(ensemble), view.d_model, "directions")
    about = {
        "baseline_mean": float(apart.mean()),
        "baseline_median": float(apart.quantile(0.5)),
        "held_out": fitted is not None and not shared,
        "fitted": len(ensemble),
        "claimed": not few,
    }
    kl, reverse, top1, top5 = found.mean(1)
    error = paired_interval(found[0]).error
    numbers = {"kl": kl, "kl_se": error, "kl_reverse": reverse, "top1": top1, "top5": top5}
    table = {"K": grid, **{name: x.tolist() for name, x in numbers.items()}, **about}
    flags = ["chunks of the directions not known"] if fitted is None else []
    flags += ["directions fitted on the same chunks"] if shared else []
    flags += [f"{flag}: no K is claimed" for flag in few]
    provenance = view.provenance(rows, window=(0, rows.length), sources=SOURCE)
    chance = "baseline_mean is the KL between unrelated outputs, those on consecutive chunks."
    return Table.of(table, provenance.flagged(*ensemble.provenance.flags, *flags), chance=chance)


def directions_needed(curve: Table, share: float = 0.1) -> int | None:
    """The smallest K of a :func:`tl_geometry.truncation_kl` from which on the mean KL stays at most
    ``share`` of the mean baseline; ``None`` where there is none, or where no K is ``claimed``.

    >>> from tl_geometry.base.results import Provenance
    >>> names, rest = ("K", "kl", "baseline_mean", "claimed"), (5.0, True)
    >>> cells = ((2, 1.0, *rest), (8, 0.4, *rest), (16, 0.1, *rest))
    >>> directions_needed(Table(names=names, cells=cells, provenance=Provenance()))
    8
    """
    columns: Any = [curve.column(name) for name in ("K", "kl", "baseline_mean", "claimed")]
    rows = reversed(list(zip(*columns, strict=True)))
    enough = itertools.takewhile(lambda row: row[3] and row[1] <= share * row[2], rows)
    return min((row[0] for row in enough), default=None)


def _projection(
    view: ModelView, aligned: maps.AlignedBases, row: int, grid: tuple[int, ...]
) -> Edit:
    """Keeps the first variant, the model's own, of states ``[variant chunk d_model]`` and projects
    the others on K directions each; the first time it makes them of the one."""
    U = maps.top_directions(aligned, row, grid[-1]).to(view.device, view.dtype)
    # one product for all K: directions beyond K are masked
    kept = torch.arange(grid[-1]) < torch.tensor(grid)[:, None, None]
    kept = kept.to(view.device, view.dtype)

    def edit(h: Tensor) -> Tensor:
        variants = h if len(h) == 1 else h[1:]
        return torch.cat([h[:1], (variants @ U * kept) @ U.mT])

    return edit


def skip_costs(
    model: ModelLike,
    tokens: TokensLike,
    ensemble: Trajectories,
    *,
    pairs: Sequence[Pair] | str | None = None,
    map_types: Sequence[str] = ("flow", "ridge", "identity", "mean"),
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> Table:
    """Ablation of blocks: for pairs of states a < b, replace state b by a map of state a and finish
    the forward pass.

    The maps are fitted on ``ensemble`` and measured on other chunks (in-sample the best linear map
    would win by construction). ``"flow"`` is rotation and stretch (Sarfati et al. 2025, Eq. 1);
    ``"linear"`` and ``"ridge"`` are the best linear and affine maps; ``"shift"`` adds the mean
    step; ``"scaled"`` is the best multiple; ``"identity"`` deletes the blocks; ``"mean"`` is the
    constant mean of state b, which any map must beat. Ridge and identity are always measured. The
    last token of a chunk is only a target; the state is replaced at the last token that is read,
    the one before it. There later blocks attend to the true earlier states, which are run once for
    all maps.

    Args:
        tokens: chunks of at least three tokens. Those whose read tokens the ensemble holds too are
            left out, with a flag.
        ensemble: trajectories of the last token read, with the states of ``pairs``:
            ``trajectories(model, others[:, :-1], states=range(n_layers + 1))``.
        pairs: ``(a, b)`` with a < b; ``"all"`` for all n_layers (n_layers + 1) / 2; by default
            skips of 1, 2 and 4 blocks, of each at most 6 with evenly spaced starts.
        batch_size: chunks whose keys and values are held at a time, by default 16.

    Returns a row per map type and pair: ``map_type``, ``from_layer`` a, ``to_layer`` b, ``skipped``
    = b - a, then means over test chunks that compare the output after the last token read: ``kl`` =
    KL(own | replaced) in nats (the direction of ``kl_reverse`` in
    :func:`tl_geometry.truncation_kl`, whose ``kl`` is the published KL(truncated | own)), ``kl_se``
    its standard error over chunks (NaN below 10), ``top1`` and ``top5`` the shares of most likely
    tokens that agree, ``loss_increase`` in nats for the true next token; ``own_loss`` is the
    model's own loss, ``train`` and ``test`` count chunks.

    Raises ``GeometryError`` where no test chunk is left that was not fitted on, and for encoders
    and models without a trained head.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tokens = tlg.zoo.default_windows(model, 16, n=24).tokens
    >>> paths = tlg.trajectories(model, tokens[:16, :-1], states=range(5), progress=False)
    >>> costs = tlg.skip_costs(model, tokens[16:], paths, pairs=[(3, 4)], progress=False)
    >>> costs.column("map_type")
    ['flow', 'ridge', 'identity', 'mean']
    """
    view = as_view(model)
    view.require_output("skip_costs")
    types, chosen = maps.map_names(map_types, ("flow", *maps.MAPS)), _pairs(view.n_layers, pairs)
    rows = as_tokens(view, tokens, prepend_bos=prepend_bos)
    expected = "at least 3 tokens (the last is a target)"
    require(rows.length >= 3, "tokens", expected=expected, got=rows.length)
    states = sorted({s for pair in chosen for s in pair})
    require_fitting(view, ensemble, states, rows.tokens)
    same = torch.zeros(len(rows), dtype=torch.bool)
    if ensemble.tokens is not None:
        same = shared_rows(rows.tokens[:, :-1], ensemble.tokens)
    held, flags = int(same.sum()), too_few(len(ensemble), view.d_model, "maps")
    expected, got = "chunks that maps are not fitted on", f"{held} that the ensemble holds too"
    require(held < len(rows), "tokens", expected=expected, got=got, instead="other chunks")
    if held:
        flags += (f"{held} of {len(rows)} test chunks left out: maps are fitted on them",)
        rows = rows[~same]
    jobs = [(pair, kind) for kind in types for pair in chosen]
    fitted = _fit(ensemble, jobs)
    items, found = list(fitted.items()), []
    parts = [dict(items[i : i + VARIANTS]) for i in range(0, len(items), VARIANTS)]
    bar = {"total": len(rows), "disable": not progress, "desc": "skipping", "unit": "chunk"}
    read, targets, done = rows.tokens[:, :-1], rows.tokens[:, -1], 0
    with tqdm(**bar) as shown:
        for some in pilots(view, read, 1 + max(map(len, parts)), batch_size):
            of_some = targets[done : done + len(some.tokens)]
            found.append(torch.cat([_measure(some, of_some, part) for part in parts], dim=1))
            done += len(some.tokens)
            shown.update(len(some.tokens))
    place = {job: i for i, job in enumerate(fitted)}
    costs = torch.cat(found)[:, [place[job] for job in jobs]]
    kl, top1, top5, increase, own = costs.mean(0).T.tolist()
    error = paired_interval(costs[..., 0]).error.tolist()
    kinds, starts, ends = zip(*((kind, a, b) for (a, b), kind in jobs), strict=True)
    table: dict[str, Any] = {"map_type": kinds, "from_layer": starts, "to_layer": ends}
    table["skipped"] = [b - a for (a, b), _ in jobs]
    table |= {"kl": kl, "kl_se": error, "top1": top1, "top5": top5, "loss_increase": increase}
    table |= {"own_loss": own, "train": len(ensemble), "test": len(rows)}
    own_loss, chance = own[0], math.log(view.d_vocab)
    if own_loss > NEAR_CHANCE * chance:
        text = f"the model's own loss, {own_loss:.2f} nats, is near chance ({chance:.2f})"
        flags += (f"{text}: is BOS missing?",)
    provenance = view.provenance(rows, window=(0, rows.length), sources=SOURCE)
    null = "The map 'mean' forgets the state: what every other must beat."
    return Table.of(table, provenance.flagged(*flags), chance=null)


def _pairs(n_layers: int, pairs: Sequence[Pair] | str | None) -> list[Pair]:
    """Pairs of states, the shortest skips first."""
    if isinstance(pairs, str):
        require(pairs == "all", "pairs", expected='"all", or states (a, b)', got=repr(pairs))
        chosen = list(itertools.combinations(range(n_layers + 1), 2))
    elif pairs is None:
        chosen = []
        for skip in (n for n in SKIPS if n <= n_layers):
            starts = torch.linspace(0, n_layers - skip, min(STARTS, n_layers - skip + 1)).round()
            chosen += [(int(a), int(a) + skip) for a in starts]
    else:
        chosen = sorted({several(pair) for pair in several(pairs)})
    valid = bool(chosen) and all(len(p) == 2 and 0 <= p[0] < p[1] <= n_layers for p in chosen)
    require(valid, "pairs", expected=f"states 0 <= a < b <= {n_layers}", got=chosen)
    return sorted(chosen, key=lambda pair: (pair[1] - pair[0], pair))


def _fit(ensemble: Trajectories, jobs: list[Job]) -> dict[Job, maps.Map]:
    """The map of every job, in float64 on the CPU, sorted by the state that it replaces."""
    fitted: dict[Job, maps.Map] = {}
    X = vars(ensemble)["X"].unbind(1)  # no copy
    maps_from = cache(lambda i: maps.MapsFrom(X[i]))  # types of map share what depends on the start
    for (a, b), kind in sorted(jobs, key=lambda job: job[0][::-1]):
        i, j = (ensemble.states.index(state) for state in (a, b))
        if kind == "flow":
            fitted[(a, b), kind] = maps.flow_map(ensemble.aligned_bases, i, j)
        else:
            fitted[(a, b), kind] = maps_from(i).to(X[j], kind)
    return fitted


def _measure(
    some: Pilots, targets: Tensor, part: Mapping[Job, maps.Map]
) -> Float[Tensor, "chunk row column"]:
    """KL(own | replaced), whether the most likely tokens agree, the share of five that do, the
    increase of the loss, and the model's own loss, a row for each map on each chunk."""
    clean: dict[int, Tensor] = {}

    def edit(h: Tensor, state: int) -> Tensor:
        clean[state] = h[0].double().cpu()
        ending = [layer_map(clean[a]) for ((a, b), _), layer_map in part.items() if b == state]
        return torch.cat([h, *(moved.to(h).unsqueeze(0) for moved in ending)])

    edits = {s: partial(edit, state=s) for s in sorted({s for pair, _ in part for s in pair})}
    log_probs = some(edits, 1 + len(part))
    own, changed = log_probs[0], log_probs[1:]
    compared = distances(changed, own)
    losses = token_losses(log_probs, targets.expand(log_probs.shape[:2]))
    # distances() counts the tokens in common
    shares, gaps = compared.top5 / min(5, own.shape[-1]), losses[1:] - losses[0]
    columns = (compared.kl_reverse, compared.top1, shares, gaps, losses[0].expand_as(gaps))
    return torch.stack(columns, dim=-1).transpose(0, 1).double().cpu()
