"""How many layers can be skipped for how much loss? :func:`skip_map` replaces blocks of the live
model by a fitted map between their states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base.errors import choice, require
from tl_geometry.base.results import Result, hash_tokens
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.flow.alignment import AlignedBases, fit_aligned_bases
from tl_geometry.flow.ensemble import SOURCE, shared_rows, split_rows, states_at, too_few
from tl_geometry.flow.replacing import METRICS, Job, Key, Pair, SkipCosts
from tl_geometry.flow.residuals import ALWAYS, VECTOR_MAPS, LayerMap, MapsFrom, flow_map
from tl_geometry.models.batches import batch_of
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.next_token import output_batch, require_output
from tl_geometry.models.reader import as_view

MAP_TYPES = ("flow", "flow-signed", "linear", "ridge", "shift", "identity", "mean")
"""Maps that replace blocks: the published flow, the flow with the best signs, and the baselines of
:func:`tl_geometry.flow.fit_map`."""
SKIPS = (1, 2, 4)
"""Numbers of consecutive blocks that are skipped unless pairs are given."""
PART = 32
"""Test chunks that are measured at a time: bounds the memory of their states and outputs."""
NEAR_CHANCE = 0.75
"""Share of ``ln(d_vocab)``, the loss of a uniform guess, above which a model is flagged: it does
not predict this text, so that skipping blocks may even lower its loss. Trained models are below
half."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SkipMap(Result):
    """The cost of replacing blocks ``a .. b-1`` by a map from state a to state b, on chunks that
    the map was not fitted on.

    ``values["flow", "kl"]`` is ``[state state]`` with row a and column b (NaN unless measured).
    Metrics compare the output after the last token read, averaged over test chunks: ``kl`` =
    KL(own | replaced) in nats (the direction of ``kl_reverse`` in a
    :class:`~tl_geometry.flow.TruncationCurve`, whose ``kl`` is the published KL(truncated | own)),
    ``kl_se`` its standard error over chunks, ``top1`` and ``top5`` the shares of most likely tokens
    that agree, ``loss_increase`` in nats for the true next token. ``loss`` is the model's own loss;
    ``train`` and ``test`` count chunks.
    """

    values: Mapping[Key, Float[Tensor, "state state"]]
    loss: float
    map_types: tuple[str, ...]
    train: int
    test: int

    def table(self, map_type: str, metric: str = "kl") -> Float[Tensor, "state state"]:
        """One metric of one type of map: row a, column b."""
        choice(map_type, self.map_types, "map_type")
        choice(metric, METRICS, "metric")
        return self.values[map_type, metric]

    def pairs(self) -> list[Pair]:
        """Measured pairs of states."""
        measured = torch.stack([torch.isfinite(table) for table in self.values.values()]).any(0)
        return [(int(a), int(b)) for a, b in measured.nonzero()]

    def columns(self) -> tuple[str, ...]:
        return ("map_type", "from_layer", "to_layer", "skipped", *METRICS, "own_loss")

    def rows(self) -> list[tuple[object, ...]]:
        table_rows: list[tuple[object, ...]] = []
        for map_type in self.map_types:
            tables = [self.table(map_type, metric) for metric in METRICS]
            for a, b in self.pairs():
                numbers = [float(t[a, b]) for t in tables]
                table_rows.append((map_type, a, b, b - a, *numbers, self.loss))
        return table_rows


def skip_map(
    model: ModelLike,
    tokens: TokensLike,
    *,
    test: Any = None,
    pairs: Sequence[Pair] | str | None = None,
    map_types: Sequence[str] = MAP_TYPES,
    align: str = "greedy",
    train_share: float = 0.5,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    seed: int = 0,
    progress: bool = True,
) -> SkipMap:
    """Skip blocks: for pairs of states a < b, replace state b by a map of state a and finish the
    forward pass.

    The maps are fitted on some chunks and measured on others (in-sample the best linear map would
    win by construction). ``"flow"`` is rotation and stretch (Sarfati et al. 2025, Eq. 1) with the
    published signs, ``"flow-signed"`` with the signs that fit best; ``"linear"`` and ``"ridge"``
    are the best linear and affine maps; ``"shift"`` adds the mean step; ``"identity"`` deletes the
    blocks; ``"mean"`` is the constant mean of state b, which any map must beat. Ridge and identity
    are always measured beside a flow. The last token of a chunk is only a target; the state is
    replaced at the last token that is read, the one before it. There later blocks attend to the
    true earlier states, which are run once for all maps.

    Args:
        tokens: chunks of at least three tokens. Maps are fitted on a share ``train_share`` of them
            (whole documents where they are labelled), or on all where ``test`` is given.
        test: chunks to measure on. Those that also occur in ``tokens`` are left out, with a flag.
        pairs: ``(a, b)`` with a < b; ``"all"`` for all n_layers (n_layers + 1) / 2; by default
            skips of 1, 2 and 4 blocks.
        align: order and signs of the flow's directions, see
            :func:`tl_geometry.flow.alignment.align_directions`.

    Raises ``GeometryError`` where no test chunk is left that was not fitted on, and for encoders
    and models without a trained head.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=24)
    >>> skips = tlg.skip_map(model, windows, pairs=[(3, 4)], map_types="identity", progress=False)
    >>> skips.columns()[:3]
    ('map_type', 'from_layer', 'to_layer')
    """
    view = as_view(model)
    require_output(view, "skip_map")
    map_types = _names(map_types)
    if any(t.startswith("flow") for t in map_types):
        map_types = (*map_types, *(t for t in ALWAYS if t not in map_types))
    source, train, held_out, flags = _chunks(view, tokens, test, prepend_bos, train_share, seed)
    chosen = _pairs(view, pairs)
    if pairs is None and view.n_layers > 2:
        flags.append(f"skips of {', '.join(map(str, SKIPS))} blocks only")
    default = output_batch(view, source.length, all_positions=False)
    limit = default if batch_size is None else batch_of(batch_size, source.length, view.device)
    states = sorted({s for pair in chosen for s in pair})
    jobs = _jobs(chosen, map_types)
    fits_matrix = not set(map_types) <= set(VECTOR_MAPS)
    passes = len(jobs) * len(held_out)
    with tqdm(total=passes, disable=not progress, desc="skipping", unit="pass") as bar:
        bar.set_postfix_str("fitting")
        # the state of the last token read; the token after it is the target
        parts = [states_at(view, rows[:, :-1], -1, states) for rows in train.split(limit)]
        X = torch.cat(parts)
        maps = _fit(X, states, jobs, align)
        # maps are fitted in float64; float32 halves the memory of the many d_model^2 matrices
        if view.dtype != torch.float64:
            maps = {job: layer_map.single() for job, layer_map in maps.items()}
        flags += too_few(len(X), view.d_model, "maps") if fits_matrix else ()
        bar.set_postfix_str("measuring")
        measure = SkipCosts(view, jobs, chosen, limit, bar)
        for chunks in held_out.split(PART):
            measure.add(chunks, maps)
    values, loss = measure.finish(map_types)
    flags += _near_chance(loss, view.d_vocab)
    provenance = view.provenance(
        corpus=source.corpus,
        token_hash=hash_tokens(held_out),
        window=(0, source.length),
        contexts=len(held_out),
        seed=seed,
        sources=SOURCE,
        flags=tuple(flags),
    )
    return SkipMap(
        values=values,
        loss=loss,
        map_types=map_types,
        train=len(train),
        test=len(held_out),
        provenance=provenance,
    )


def _near_chance(loss: float, d_vocab: int) -> list[str]:
    """The flag of a model whose loss is near that of a uniform guess, where this is so."""
    chance = math.log(d_vocab)
    if loss <= NEAR_CHANCE * chance:
        return []
    return [
        f"the model's own loss, {loss:.2f} nats, is near chance ({chance:.2f}): is BOS missing?"
    ]


def _names(value: Sequence[str]) -> tuple[str, ...]:
    """One type of map or several."""
    names = (value,) if isinstance(value, str) else tuple(value)
    require(len(names) > 0, "map_types", expected=f"some of {', '.join(MAP_TYPES)}", got="none")
    for name in names:
        choice(name, MAP_TYPES, "map_type")
    return tuple(dict.fromkeys(names))  # a repeat would count every chunk twice


def _chunks(
    view: ModelView,
    tokens: TokensLike,
    test: TokensLike | None,
    prepend_bos: bool | None,
    share: float,
    seed: int,
) -> tuple[
    TokenWindows, Int[Tensor, "trajectory position"], Int[Tensor, "sample position"], list[str]
]:
    """Chunks to fit on and others to measure on; flags say which were left out."""
    for chunks in (tokens, test):
        wrong = isinstance(chunks, Result)
        expected, instead = "chunks of tokens", "the chunks it was made from"
        require(not wrong, "tokens", expected=expected, got=type(chunks).__name__, instead=instead)
    source = as_tokens(view, tokens, prepend_bos=prepend_bos)
    expected = "at least 3 tokens (the last is a target)"
    require(source.length >= 3, "tokens", expected=expected, got=source.length)
    rows = source.tokens
    if test is None:
        # chunks are equal if the tokens that are read are: the last one is only a target
        train_rows, test_rows = split_rows(len(rows), source.labels, share, seed, rows[:, :-1])
        return source, rows[train_rows], rows[test_rows], []
    test_source = as_tokens(view, test, prepend_bos=prepend_bos)
    expected = f"chunks of {source.length} tokens, as those that maps are fitted on"
    got = f"chunks of {test_source.length}"
    require(test_source.length == source.length, "test", expected=expected, got=got)
    held_out = test_source.tokens
    shared = shared_rows(held_out[:, :-1], rows[:, :-1])
    n_shared = int(shared.sum())
    expected = "chunks that maps are not fitted on"
    got = f"{n_shared} of {len(held_out)} that also stand in tokens"
    instead = "other chunks, or test=None to split these"
    require(n_shared < len(held_out), "test", expected=expected, got=got, instead=instead)
    flags = (
        [f"{n_shared} of {len(held_out)} test chunks left out: maps are fitted on them"]
        if n_shared
        else []
    )
    return test_source, rows, held_out[~shared], flags  # the provenance is of what is measured


def _pairs(view: ModelView, pairs: Sequence[Pair] | str | None) -> list[Pair]:
    """Pairs of states, the shortest skips first."""
    n_layers = view.n_layers
    all_pairs = [(a, b) for a in range(n_layers) for b in range(a + 1, n_layers + 1)]
    if isinstance(pairs, str):
        require(pairs == "all", "pairs", expected='"all", or states (a, b)', got=repr(pairs))
        chosen = all_pairs
    else:
        default = [(a, b) for a, b in all_pairs if b - a in SKIPS]
        chosen = default if pairs is None else sorted(set(pairs))
    valid = bool(chosen) and all(0 <= a < b <= n_layers for a, b in chosen)
    require(valid, "pairs", expected=f"states 0 <= a < b <= {n_layers}", got=chosen)
    return sorted(chosen, key=lambda pair: (pair[1] - pair[0], pair))


def _jobs(pairs: Sequence[Pair], map_types: Sequence[str]) -> list[Job]:
    """What is run, in order. The constant map does not depend on the start: it is run once for each
    end."""
    seen: set[int] = set()
    jobs: list[Job] = []
    for pair in pairs:
        jobs += [(pair, t) for t in map_types if t != "mean" or pair[1] not in seen]
        seen.add(pair[1])
    return jobs


def _fit(
    X: Float[Tensor, "trajectory state d_model"], states: list[int], jobs: Sequence[Job], align: str
) -> dict[Job, LayerMap]:
    """The map of every job; ``states`` are those of the state axis of ``X``. What depends on the
    start alone is computed once."""
    flows = any(map_type.startswith("flow") for _, map_type in jobs)
    aligned: AlignedBases | None = fit_aligned_bases(X, align=align) if flows else None
    maps: dict[Job, LayerMap] = {}
    for i, state in enumerate(states):
        start = MapsFrom(X[:, i])
        for (a, b), map_type in jobs:
            if a != state:
                continue
            j = states.index(b)
            if map_type.startswith("flow") and aligned is not None:
                layer_map = flow_map(aligned, i, j, signs="U" if map_type == "flow" else "V")
            else:
                layer_map = start.to(X[:, j], map_type)
            maps[(a, b), map_type] = layer_map
    return maps
