"""How many layers can be skipped for how much loss? :func:`skip_costs` replaces blocks of the live
model by a fitted map between their states."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base.errors import require
from tl_geometry.base.tables import Table
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.flow import ensemble as paths
from tl_geometry.flow.maps import Map, MapsFrom, flow_map, map_names
from tl_geometry.flow.pilots import Pilot, pilots
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.next_token import require_output
from tl_geometry.models.output_head import distances, token_losses
from tl_geometry.models.reader import as_view

MAP_TYPES = ("flow", "flow-signed", "linear", "ridge", "shift", "identity", "mean")
"""Maps that replace blocks: the published flow, the flow with the best signs, and baselines of
:class:`tl_geometry.flow.maps.MapsFrom`."""
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


def skip_costs(
    model: ModelLike,
    tokens: TokensLike,
    ensemble: paths.Trajectories,
    *,
    pairs: Sequence[Pair] | str | None = None,
    map_types: Sequence[str] = ("flow", "ridge", "identity", "mean"),
    align: str = "greedy",
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
) -> Table:
    """Skip blocks: for pairs of states a < b, replace state b by a map of state a and finish the
    forward pass.

    The maps are fitted on ``ensemble`` and measured on other chunks (in-sample the best linear map
    would win by construction). ``"flow"`` is rotation and stretch (Sarfati et al. 2025, Eq. 1) with
    the published signs, ``"flow-signed"`` with the signs that fit best; ``"linear"`` and
    ``"ridge"`` are the best linear and affine maps; ``"shift"`` adds the mean step; ``"identity"``
    deletes the blocks; ``"mean"`` is the constant mean of state b, which any map must beat. Ridge
    and identity are always measured. The last token of a chunk is only a target; the
    state is replaced at the last token that is read, the one before it. There later blocks attend
    to the true earlier states, which are run once for all maps.

    Args:
        tokens: chunks of at least three tokens. Those whose read tokens the ensemble holds too are
            left out, with a flag.
        ensemble: trajectories of the last token read, with the states of ``pairs``:
            ``trajectories(model, others[:, :-1], states=range(n_layers + 1))``.
        pairs: ``(a, b)`` with a < b; ``"all"`` for all n_layers (n_layers + 1) / 2; by default
            skips of 1, 2 and 4 blocks, of each at most 6 with evenly spaced starts.
        align: order and signs of the flow's directions, see
            :func:`tl_geometry.flow.fit_aligned_bases`.
        batch_size: chunks whose keys and values are held at a time, by default 16.

    Returns a row per map type and pair: ``map_type``, ``from_layer`` a, ``to_layer`` b,
    ``skipped`` = b - a, then means over test chunks that compare the output after the last token
    read: ``kl`` = KL(own | replaced) in nats (the direction of ``kl_reverse`` in
    :func:`tl_geometry.truncation_kl`, whose ``kl`` is the published KL(truncated | own)), ``kl_se``
    its standard error over chunks, ``top1`` and ``top5`` the shares of most likely tokens that
    agree, ``loss_increase`` in nats for the true next token; ``own_loss`` is the model's own loss,
    ``train`` and ``test`` count chunks.

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
    require_output(view, "skip_costs")
    types, chosen = map_names(map_types, MAP_TYPES), _pairs(view.n_layers, pairs)
    rows = as_tokens(view, tokens, prepend_bos=prepend_bos)
    expected = "at least 3 tokens (the last is a target)"
    require(rows.length >= 3, "tokens", expected=expected, got=rows.length)
    states = sorted({s for pair in chosen for s in pair})
    paths.require_fitting(view, ensemble, states, rows.tokens)
    same = torch.zeros(len(rows), dtype=torch.bool)
    if ensemble.tokens is not None:
        same = paths.shared_rows(rows.tokens[:, :-1], ensemble.tokens)
    count, flags = int(same.sum()), paths.too_few(len(ensemble), view.d_model, "maps")
    expected, got = "chunks that maps are not fitted on", f"{count} that the ensemble holds too"
    require(count < len(rows), "tokens", expected=expected, got=got, instead="other chunks")
    if count:
        flags += (f"{count} of {len(rows)} test chunks left out: maps are fitted on them",)
        rows = rows[~same]
    maps = _fit(ensemble, [(pair, kind) for kind in types for pair in chosen], align)
    items = list(maps.items())
    parts = [dict(items[i : i + VARIANTS]) for i in range(0, len(items), VARIANTS)]
    found, chunks = [], pilots(view, rows.tokens[:, :-1], batch_size)
    bar = tqdm(rows.tokens[:, -1], disable=not progress, desc="skipping", unit="chunk")
    for pilot, target in zip(chunks, bar, strict=True):
        found.append(torch.cat([_measure(pilot, target, part) for part in parts]))
    costs = torch.stack(found)
    errors, own_loss = costs[..., 0].std(0) / len(rows) ** 0.5, float(costs[:, 0, -1].mean())
    by_job = {job: (costs[:, i].mean(0).tolist(), float(errors[i])) for i, job in enumerate(maps)}
    table = []
    for kind, (a, b) in itertools.product(types, chosen):
        (kl, top1, top5, increase, _), error = by_job[(a, b), kind]
        row: dict[str, Any] = {"map_type": kind, "from_layer": a, "to_layer": b}
        row |= {"skipped": b - a, "kl": kl, "kl_se": error, "top1": top1, "top5": top5}
        row |= {"loss_increase": increase, "own_loss": own_loss}
        table.append({**row, "train": len(ensemble), "test": len(rows)})
    chance = math.log(view.d_vocab)
    if own_loss > NEAR_CHANCE * chance:
        text = f"the model's own loss, {own_loss:.2f} nats, is near chance ({chance:.2f})"
        flags += (f"{text}: is BOS missing?",)
    provenance = view.provenance(rows, window=(0, rows.length), sources=paths.SOURCE)
    null = "The map 'mean' forgets the state: what every other must beat."
    return paths.table_of(table, provenance.flagged(*flags), null)


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
        chosen = sorted(set(pairs))
    valid = bool(chosen) and all(0 <= a < b <= n_layers for a, b in chosen)
    require(valid, "pairs", expected=f"states 0 <= a < b <= {n_layers}", got=chosen)
    return sorted(chosen, key=lambda pair: (pair[1] - pair[0], pair))


def _fit(ensemble: paths.Trajectories, jobs: list[Job], align: str) -> dict[Job, Map]:
    """The map of every job, in float64 on the CPU, sorted by the state that it replaces."""
    aligned, starts = ensemble.aligned_bases(align=align), {}
    maps: dict[Job, Map] = {}
    for (a, b), kind in sorted(jobs, key=lambda job: job[0][::-1]):
        i, j = ensemble.row(a), ensemble.row(b)
        if kind.startswith("flow"):
            maps[(a, b), kind] = flow_map(aligned, i, j, signs="U" if kind == "flow" else "V")
        else:
            start = starts[i] = starts.get(i) or MapsFrom(ensemble.X[:, i])
            maps[(a, b), kind] = start.to(ensemble.X[:, j], kind)
    return maps


def _measure(pilot: Pilot, target: Tensor, maps: Mapping[Job, Map]) -> Float[Tensor, "row column"]:
    """KL(own | replaced), whether the most likely tokens agree, the share of five that do, the
    increase of the loss, and the model's own loss, a row for each map on one chunk."""
    clean: dict[int, Tensor] = {}

    def edit(h: Tensor, state: int) -> Tensor:
        clean[state] = h[:1].double().cpu()
        ending = [layer_map(clean[a]) for ((a, b), _), layer_map in maps.items() if b == state]
        return torch.cat([h, *(moved.to(h) for moved in ending)])

    edits = {s: partial(edit, state=s) for s in sorted({s for pair, _ in maps for s in pair})}
    log_probs = pilot(edits, 1 + len(maps))
    own, changed = log_probs[:1], log_probs[1:]
    compared = distances(changed, own.expand_as(changed))
    losses = token_losses(log_probs, target.expand(len(log_probs)))
    # distances() counts the tokens in common
    shares = compared.top5 / min(5, own.shape[-1])
    columns = (compared.kl_reverse, compared.top1, shares, losses[1:] - losses[0])
    return torch.stack((*columns, losses[:1].expand(len(changed))), dim=1).double().cpu()
