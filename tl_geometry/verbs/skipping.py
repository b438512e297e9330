"""How many layers can be skipped for how much loss: blocks replaced by a fitted map between their states, in the live model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry._check import choice, require
from tl_geometry.capture import TokenSource, as_view
from tl_geometry.frames import Frames, fit_frames
from tl_geometry.records import Hook, ModelView
from tl_geometry.residuals import LayerMap, fit_map, flow_map
from tl_geometry.results import Result, hash_tokens
from tl_geometry.verbs.ensemble import SOURCE, split_rows
from tl_geometry.verbs.outputs import distances, log_probabilities, output_batch, require_output

KINDS = ("flow", "flow-signed", "linear", "ridge", "shift", "identity", "mean")
"""Maps that take the place of blocks: the published flow, the flow with the best signs, and the yardsticks of ``residuals.fit_map``."""
METRICS = ("kl", "kl_se", "top1", "top5", "loss_increase")
PLACES = ("pilot", "all")
LOST = 0.75
"""Share of the loss of a uniform guess above which a model is flagged as not knowing the text: then skipping may even help."""

Pair = tuple[int, int]


@dataclass(frozen=True, eq=False, kw_only=True)
class SkipMap(Result):
    """What it costs to replace blocks ``a .. b-1`` by a map from state a to state b, on chunks that the map was not fitted on.

    ``values["pilot|flow|kl"]`` is ``[state state]`` with row a and column b (NaN unless measured): places are the pilot position or
    all positions, metrics ``kl`` = KL(own | replaced) in nats, its standard error over chunks, ``top1`` and ``top5`` agreement
    (shares), ``loss_increase`` in nats per token of the true next token. ``loss`` is the model's own loss at the two places.
    """

    values: Mapping[str, Float[Tensor, "state state"]]
    loss: tuple[float, float]
    kinds: tuple[str, ...]
    places: tuple[str, ...]
    train: int
    test: int

    def table(self, kind: str, metric: str = "kl", *, place: str = "pilot") -> Float[Tensor, "state state"]:
        """One map: row a, column b."""
        key = f"{place}|{kind}|{metric}"
        require(key in self.values, "table", expected=f"one of {', '.join(self.values)}", got=key)
        return self.values[key]

    def pairs(self) -> list[Pair]:
        """Measured pairs of states."""
        known = torch.isfinite(next(iter(self.values.values())))
        return [(int(a), int(b)) for a, b in known.nonzero()]

    def skippable(self, budget: float, kind: str, *, metric: str = "loss_increase", place: str = "pilot") -> tuple[int, Pair] | None:
        """The most blocks that one such map replaces while the metric stays within ``budget``, and which; ``None`` if none does."""
        table = self.table(kind, metric, place=place)
        good = [(b - a, (a, b)) for a, b in self.pairs() if float(table[a, b]) <= budget]
        return max(good, key=lambda g: (g[0], -float(table[g[1]]))) if good else None

    def columns(self) -> tuple[str, ...]:
        return ("place", "kind", "from_layer", "to_layer", "skipped", *METRICS)

    def rows(self) -> list[tuple[object, ...]]:
        return [
            (place, kind, a, b, b - a, *(float(self.table(kind, m, place=place)[a, b]) for m in METRICS))
            for place in self.places
            for kind in self.kinds
            for a, b in self.pairs()
        ]


def skip_map(
    model: Any,
    tokens: Any,
    *,
    test: Any = None,
    pairs: Sequence[Pair] | None = None,
    kinds: Sequence[str] = KINDS,
    places: Sequence[str] = PLACES,
    align: str = "greedy",
    train_share: float = 0.5,
    fit_rows: int = 20_000,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    seed: int = 0,
    progress: bool = True,
) -> SkipMap:
    """Skip blocks: for every pair of states a < b, put a map of state a in the place of state b and finish the forward pass.

    The maps are fitted on some chunks and measured on others (in-sample the best linear map wins by construction when there are
    fewer states than d_model^2). ``"flow"`` is rotation and stretch (Sarfati et al. 2025, Eq. 1) with the published signs,
    ``"flow-signed"`` with the signs that fit best; ``"linear"`` and ``"ridge"`` the best linear and affine maps; ``"shift"`` adds the
    mean step; ``"identity"`` deletes the blocks; ``"mean"`` forgets the state: what a map must beat. At place ``"pilot"`` only the
    token before the last is replaced and later blocks attend to the true earlier states; at ``"all"`` every position but the first
    is (the first is an attention sink whose norm would decide every fit).

    Args:
        tokens: chunks; the last column is only a target. Split by document where labelled, else at random, unless ``test`` is given.
        pairs: ``(a, b)`` with a < b, default all: n_layers (n_layers + 1) / 2 pairs, one forward pass each per map and place.
        fit_rows: states that the maps of place ``"all"`` are fitted on, a seeded sample of positions.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=24)
    >>> skips = tlg.skip_map(model, windows, pairs=[(3, 4)], kinds=("identity",), places=("pilot",), progress=False)
    >>> skips.columns()[:4]
    ('place', 'kind', 'from_layer', 'to_layer')
    """
    view = as_view(model)
    require_output(view, "skip_map")
    for chunks in (tokens, test):
        wrong = isinstance(chunks, Result)
        require(not wrong, "tokens", expected="chunks of tokens", got=type(chunks).__name__, instead="the chunks it was made from")
    kinds, places = ((v,) if isinstance(v, str) else tuple(v) for v in (kinds, places))
    for kind in kinds:
        choice(kind, KINDS, "kind")
    for place in places:
        choice(place, PLACES, "place")
    source = TokenSource.of(view, tokens, None, prepend_bos)
    require(source.columns >= 3, "tokens", expected="at least 3 columns (the last is a target)", got=source.columns)
    rows = torch.cat(list(source.batches(1024)))
    if test is None:
        first, second = split_rows(len(rows), source.labels, train_share, seed)
        train_rows, test_rows = rows[first], rows[second]
    else:
        other = TokenSource.of(view, test, None, prepend_bos)
        train_rows, test_rows = rows, torch.cat(list(other.batches(1024)))
    chosen = _pairs(view, pairs)
    limit = batch_size or output_batch(view, source.columns, all_columns="all" in places)
    states = sorted({s for pair in chosen for s in pair})
    maps = {p: _fit(_collect(view, train_rows, states, p, fit_rows, limit, seed), states, chosen, kinds, align) for p in places}
    work = _Measure(view, kinds, chosen, limit)
    for part in tqdm(test_rows.split(max(1, limit // 4)), disable=not progress, desc="skipping", unit="batch"):
        for place in places:
            work.add(part, place, maps[place])
    values, loss = work.finish(places)
    provenance = view.provenance(
        corpus=source.corpus, token_hash=hash_tokens(test_rows), window=(0, source.columns), contexts=len(test_rows), seed=seed,
        sources=SOURCE,
    )  # fmt: skip
    own = min(v for v in loss if not math.isnan(v))
    if own > LOST * math.log(view.d_vocab):
        provenance = provenance.flagged(
            f"the model's own loss, {own:.2f} nats, is near chance ({math.log(view.d_vocab):.2f}): is BOS missing?"
        )
    return SkipMap(
        values=values, loss=loss, kinds=kinds, places=places, train=len(train_rows), test=len(test_rows), provenance=provenance
    )  # fmt: skip


def _pairs(view: ModelView, pairs: Sequence[Pair] | None) -> list[Pair]:
    n = view.n_layers
    chosen = [(a, b) for a in range(n) for b in range(a + 1, n + 1)] if pairs is None else sorted(set(pairs))
    ok = bool(chosen) and all(0 <= a < b <= n for a, b in chosen)
    require(ok, "pairs", expected=f"states 0 <= a < b <= {n}", got=chosen)
    return chosen


def _collect(
    view: ModelView, rows: Tensor, states: Sequence[int], place: str, fit_rows: int, limit: int, seed: int
) -> Float[Tensor, "trajectory state d_model"]:
    """States of the place's positions in the training chunks; the last column is a target and not seen."""
    generator = torch.Generator().manual_seed(seed)
    columns = rows.shape[1] - 1
    share = min(1.0, fit_rows / (len(rows) * (columns - 1)))
    out = []
    for part in rows.split(limit):
        if place == "pilot":
            where = (torch.arange(len(part)), torch.full((len(part),), columns - 1))
        else:
            picked = (torch.rand(len(part), columns - 1, generator=generator) < share).nonzero()
            where = (picked[:, 0], picked[:, 1] + 1)
        found: dict[int, Tensor] = {}
        view.run(part[:, :-1], {view.state_hooks[s]: _take(found, s, where) for s in states})
        out.append(torch.stack([found[s] for s in states], dim=1))
    return torch.cat(out)


def _take(into: dict[int, Tensor], state: int, where: tuple[Tensor, Tensor] | None) -> Hook:
    def hook(h: Tensor) -> None:
        into[state] = h.detach() if where is None else h.detach()[where[0].to(h.device), where[1].to(h.device)].float().cpu()

    return hook


def _fit(
    X: Float[Tensor, "trajectory state d_model"], states: list[int], pairs: list[Pair], kinds: tuple[str, ...], align: str
) -> dict[tuple[Pair, str], LayerMap]:
    frames: Frames | None = fit_frames(X, align=align) if any(k.startswith("flow") for k in kinds) else None
    maps: dict[tuple[Pair, str], LayerMap] = {}
    for a, b in pairs:
        i, j = states.index(a), states.index(b)
        for kind in kinds:
            if kind.startswith("flow") and frames is not None:
                maps[(a, b), kind] = flow_map(frames, i, j, signs="U" if kind == "flow" else "V")
            else:
                maps[(a, b), kind] = fit_map(X[:, i], X[:, j], kind)
    return maps


class _Measure:
    """Per-chunk results in progress."""

    def __init__(self, view: ModelView, kinds: tuple[str, ...], pairs: list[Pair], limit: int) -> None:
        self.view, self.kinds, self.pairs, self.limit = view, kinds, pairs, limit
        self.found: dict[tuple[str, str, Pair], list[Tensor]] = {}
        self.loss: dict[str, list[Tensor]] = {}

    def add(self, rows: Tensor, place: str, maps: Mapping[tuple[Pair, str], LayerMap]) -> None:
        """Measure all maps on some test chunks."""
        view, column = self.view, -1 if place == "pilot" else None
        tokens = rows[:, :-1]
        target = rows[:, -1:] if place == "pilot" else rows[:, 2:]
        clean: dict[int, Tensor] = {}
        hooks = {view.state_hooks[s]: _take(clean, s, None) for s in {a for a, _ in self.pairs}}
        own = self._from_second(log_probabilities(view, tokens, hooks, column=column), place)
        own_loss = self._loss(own, target)
        self.loss.setdefault(place, []).append(own_loss.mean(1))
        copies = max(1, self.limit // len(tokens))
        for end in sorted({b for _, b in self.pairs}):
            pairs = [pair for pair in self.pairs if pair[1] == end]
            jobs = [(pair, kind) for pair in pairs for kind in self.kinds if kind != "mean" or pair == pairs[0]]
            for start in range(0, len(jobs), copies):
                group = jobs[start : start + copies]
                moved = torch.cat([self._moved(maps[job], clean[job[0][0]], place) for job in group])
                hooks = {view.state_hooks[end]: _put(moved, place)}
                changed = log_probabilities(view, tokens.repeat(len(group), 1), hooks, column=column)
                for job, part in zip(group, self._from_second(changed, place).split(len(tokens))):
                    self._record(place, job, part, own, self._loss(part, target) - own_loss)

    @staticmethod
    def _moved(found: LayerMap, state: Tensor, place: str) -> Tensor:
        return found(state[:, -1:] if place == "pilot" else state[:, 1:])

    @staticmethod
    def _from_second(values: Tensor, place: str) -> Tensor:
        return values[:, None] if place == "pilot" else values[:, 1:]

    def _loss(self, log_p: Tensor, target: Tensor) -> Tensor:
        return -log_p.gather(-1, target.to(log_p.device)[..., None])[..., 0]

    def _record(self, place: str, job: tuple[Pair, str], changed: Tensor, own: Tensor, increase: Tensor) -> None:
        compared = distances(changed, own)
        k = min(5, own.shape[-1])
        row = torch.stack([compared.kl_reverse, compared.top1, compared.top5 / k, increase.to(compared.kl)]).mean(2)
        alike = [p for p in self.pairs if p[1] == job[0][1]] if job[1] == "mean" else [job[0]]  # the mean is the same from every start
        for pair in alike:
            self.found.setdefault((place, job[1], pair), []).append(row.double().cpu())

    def finish(self, places: tuple[str, ...]) -> tuple[dict[str, Tensor], tuple[float, float]]:
        """The maps, and the model's own loss at the pilot and at all positions."""
        n = self.view.n_layers + 1
        keys = [f"{p}|{k}|{m}" for p in places for k in self.kinds for m in METRICS]
        values = {key: torch.full((n, n), torch.nan, dtype=torch.float64) for key in keys}
        for (place, kind, (a, b)), parts in self.found.items():
            table = torch.cat(parts, dim=1)
            mean, error = table.mean(1), table[0].std() / table.shape[1] ** 0.5
            for metric, value in zip(METRICS, (mean[0], error, mean[1], mean[2], mean[3])):
                values[f"{place}|{kind}|{metric}"][a, b] = value
        loss = [float(torch.cat(self.loss[p]).mean()) if p in self.loss else float("nan") for p in PLACES]
        return values, (loss[0], loss[1])


def _put(moved: Tensor, place: str) -> Hook:
    def hook(h: Tensor) -> Tensor:
        kept = h[:, :-1] if place == "pilot" else h[:, :1]
        return torch.cat([kept, moved.to(h)], dim=1)

    return hook
