"""What does a report contain? :data:`SECTIONS`, a list of sections of items. An item is a table,
its figures, and what is asked of the table. The words are in ``assets/words.toml``.

An item that cannot be computed becomes a card with the reason
(:mod:`tl_geometry.report.written`)."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import pandas as pd
import torch

from tl_geometry import corpus, flow, interventions, measures, models, render, sphere, weights
from tl_geometry.base.checks import head_name
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.intervals import paired_interval
from tl_geometry.report.analysis import COMPARED, PROMPTS, TESTED, Analysis
from tl_geometry.report.findings import Ask, Shown
from tl_geometry.scores.head_types import SEQUENCES
from tl_geometry.scores.split import split_scores
from tl_geometry.scores.terms import GROUPS

TYPES = ("previous", "induction")
LOOKS = {
    "previous": "the token before",
    "induction": "the token that followed last time",
    "same": "the token itself",
    "duplicate": "the same token last time",
}
"""Types of heads that are searched for, and where heads of any type look on repeated random
tokens."""
DRAWN = 0.5
"""Seconds to draw and write an item."""
TOKENS = 16
"""Most tokens whose paths on the sphere are drawn, and that the example repeats."""


@functools.cache
def words() -> Mapping[str, Any]:
    """Title, text, columns and questions of each item."""
    text = (files("tl_geometry.report") / "assets" / "words.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def frame_of(a: Analysis, result: Any) -> pd.DataFrame:
    """The table of a result."""
    return getattr(result, "to_dataframe", lambda: result)()


def plot(a: Analysis, result: Any) -> Any:
    """The view that belongs to a result."""
    return render.plot(result)


@dataclass(frozen=True)
class Item:
    """A table, its figures, and questions to the table.

    ``compute`` gives the result, ``frame`` its table (``key.csv``), ``figures`` views of it.
    ``price`` is how many passes over a window it costs, and ``more`` the seconds beside them and
    :data:`DRAWN` (on a model of width 128 with 5 states).
    """

    key: str
    compute: Callable[[Analysis], Any]
    frame: Callable[[Analysis, Any], pd.DataFrame] = frame_of
    figures: tuple[Callable[[Analysis, Any], Any], ...] = (plot,)
    price: Callable[[Analysis], float] = lambda a: 0.0
    more: float = 0.4

    @property
    def words(self) -> Mapping[str, Any]:
        """Its title, how to read it (``text``), the columns on the page, and its questions."""
        return {"columns": [], "asks": [], **words()[self.key]}

    @property
    def asks(self) -> list[Ask]:
        """The questions to its table."""
        return [Ask(**ask) for ask in self.words["asks"]]


@dataclass(frozen=True)
class Section:
    """Items under one title. Those of ``slow`` sections are left out by ``--quick``."""

    key: str
    title: str
    items: tuple[Item, ...]
    slow: bool = False


def seconds(a: Analysis, items: Iterable[Item]) -> float:
    """About how long items take, from the measured time of one pass."""
    states = (a.view.n_layers + 1) * a.view.d_model / (5 * 128)
    return sum(a.seconds_per_window * i.price(a) + states * i.more + DRAWN for i in items)


def _named(a: Analysis, result: Any) -> pd.DataFrame:
    """A table of heads with their names first."""
    frame = frame_of(a, result)
    names = [head_name(pair) for pair in zip(frame["layer"], frame["head"], strict=True)]
    frame.insert(0, "name", names)
    return frame


# ---- heads


def _heads(a: Analysis, sweep: Any) -> pd.DataFrame:
    """The sweep, and what its questions need: which heads rank a group first by covariance and by
    gain, and the largest share of another group than content."""
    frame = _named(a, sweep)
    agree = frame["group_by_cs"] == frame["group_by_gs"]
    others = frame[[f"cs_{g}_corrected" for g in GROUPS if g != "content"]]
    return frame.assign(
        samples=min(map(len, sweep.sizes)),
        induction_samples=SEQUENCES,
        previous_samples=SEQUENCES,
        position_first=(agree & (frame["group_by_cs"] == "position")).astype(float),
        content_first=(agree & (frame["group_by_cs"] == "content")).astype(float),
        rival=others.max(axis=1),
    )


def _price_of_heads(a: Analysis) -> int:
    return len(a.fitted) + 3 * a.held_out


def _why(head: Mapping[str, Any]) -> str:
    """What drives a head and where it looks, from its row of the sweep."""
    group, share = head["dominant_group"], Shown(head["group_share"])
    if group in GROUPS:
        said = f"Its scores are driven by {group} ({share:%} of their variance"
        null = Shown(head["cs_position_null"])
        said += f", {null:%} with position destroyed)" if group == "position" else ")"
    else:
        said = f"No group of terms drives its scores clearly ({head['group_by_cs']} {share:%})"
    kind = max(LOOKS, key=lambda name: head[name])
    if head[kind] > 0.3:  # below it the type says little of where the head looks
        said += f", and on repeated random tokens {Shown(head[kind]):%} of its attention is on "
        said += f"{LOOKS[kind]} ({Shown(head[f'{kind}_uniform']):%} if it were uniform)"
    return f"{said}."


def _tested(a: Analysis) -> list[str]:
    """The heads that are removed: all, or the strongest of each type and those that attend least to
    the positions that are left out."""
    heads = a.table("heads")
    if len(heads) <= TESTED:
        return list(heads["name"])
    quarter = TESTED // 4
    chosen = [name for kind in TYPES for name in heads.nlargest(quarter, kind)["name"]]
    chosen += list(heads.nsmallest(TESTED, "dropped_mass")["name"])
    return list(dict.fromkeys(chosen))[:TESTED]


def _removal(a: Analysis) -> Any:
    edits = interventions.each(a.model, _tested(a), by="mean")
    return interventions.effects(a.model, a.prompts, edits, seed=a.seed, progress=False)


def _removed(a: Analysis, effects: Any) -> pd.DataFrame:
    """The loss without each head, beside its mean without each of the others, and why."""
    changes = effects.edited - effects.clean
    others = (changes.sum(0) - changes) / max(len(changes) - 1, 1)
    gap = paired_interval((changes - others).T)
    columns = {"others": others.mean(1), **gap.columns("excess")}
    beside = pd.DataFrame({name: values.tolist() for name, values in columns.items()})
    frame = effects.df.merge(beside.assign(edit=effects.edits), on="edit")
    heads = {row["name"]: row for row in a.table("heads").to_dict("records")}
    why = [_why(heads[name]) for name in frame["edit"]]
    return frame.assign(samples=len(a.prompts), of=len(heads), why=why)


def _strongest(a: Analysis) -> str:
    """The head without which the loss rises most."""
    return str(a.table("removal").nlargest(1, "change")["edit"].iloc[0])


def _terms(a: Analysis) -> Any:
    edits = {g: interventions.term(a.model, a.basis, g, _strongest(a)) for g in GROUPS}
    options: dict[str, Any] = {"control": "shrink", "seed": a.seed, "progress": False}
    return interventions.effects(a.model, a.prompts, edits, **options)


def _without(a: Analysis, effects: Any) -> pd.DataFrame:
    return effects.df.assign(head=_strongest(a), samples=len(a.prompts))


def _example(a: Analysis) -> Any:
    """The split of the strongest previous-token and induction heads on a text written twice."""
    if not a.view.causal:
        raise GeometryError("an encoder has no previous-token or induction heads to show")
    window, start, heads = a.windows.tokens[0], int(bool(a.windows.has_bos)), a.table("heads")
    piece = window[start : start + min(TOKENS, (a.basis.length - start) // 2)]
    chosen = dict.fromkeys(str(heads.nlargest(1, kind)["name"].iloc[0]) for kind in TYPES)
    twice = torch.cat([window[:start], piece, piece])
    return split_scores(a.model, twice, a.basis, heads=[*chosen])


def _split(a: Analysis, split: Any) -> Any:
    return render.split(split, centered=True)


# ---- states


def _variance(a: Analysis) -> Any:
    return a.basis.anova(null=a.spliced)


def _price_of_nulls(a: Analysis) -> int:
    return 2 * min(COMPARED, len(a.fitted))


def _bars(a: Analysis, anova: Any) -> Any:
    return render.variance_shares(anova, control=a.untrained)


def _spirals(a: Analysis, anova: Any) -> Any:
    return render.spirals(a.basis)


def _beside_untrained(a: Analysis, anova: Any) -> pd.DataFrame:
    control = a.untrained.to_dataframe().set_index("state")
    column = "pos_corrected" if "pos_corrected" in control else "pos_debiased"
    null = control.filter(regex=f"^{column}(_low)?$")
    null.columns = [name.replace(column, "pos_untrained") for name in null]
    frame = anova.to_dataframe().assign(samples=anova.blocks)
    return frame.join(null, on="state")


def _report(a: Analysis, report: Any) -> pd.DataFrame:
    """A report on states, with what its intervals rest on."""
    return report.to_dataframe().rename(columns={"blocks": "samples"})


def _curves(a: Analysis, report: Any) -> Any:
    return render.measure_curves(report, ["rank", "relative_norm", "low_frequency"])


def _massive(a: Analysis, tokens: Any) -> pd.DataFrame:
    frame = tokens.to_dataframe()
    # three of each state show whether a few tokens dominate it
    return frame.groupby("state").head(3).assign(ratio=frame["norm"] / frame["rms"])


def _geometry(a: Analysis) -> Any:
    return weights.weight_geometry(a.model, a.basis, "QK", seed=a.seed)


def _map(a: Analysis, geometry: Any) -> Any:
    return render.heads(geometry, "excess", title="W_QK in the positional directions, by head")


# ---- trajectories


def _ensembles(a: Analysis) -> Any:
    """The numbers of the trajectories beside gibberish and random weights."""
    count, length = a.pilots.tokens.shape
    options: dict[str, Any] = {"prepend_bos": bool(a.pilots.has_bos), "seed": a.seed}
    noise = corpus.gibberish(a.model, count, length, **options)
    paths = {"text": a.paths, "gibberish": a.follow(a.model, noise)}
    with models.reinitialized(a.model, seed=a.seed) as control:
        paths["random weights"] = a.follow(control, a.pilots)
    return flow.compare_ensembles(paths)


def _truncation(a: Analysis) -> Any:
    fitted, tried = a.fitted_and_tried
    return flow.truncation_kl(a.model, tried.tokens[:, :-1], fitted, progress=False)


def _truncated(a: Analysis, curve: Any) -> pd.DataFrame:
    """The curve, and which rows keep at most half of the directions: nearly all suffice in any
    case."""
    frame, most, samples = curve.to_dataframe(), a.view.d_model, len(a.fitted_and_tried[1])
    few = ((2 * frame["K"] <= most) & frame["claimed"].astype(bool)).astype(float)
    return frame.assign(few=few, allowed=0.1 * frame["baseline_mean"], samples=samples, of=most)


def _skips(a: Analysis) -> Any:
    fitted, tried = a.fitted_and_tried
    maps = ("ridge", "identity", "mean")
    return flow.skip_costs(a.model, tried, fitted, map_types=maps, progress=False)


def _skipped(a: Analysis, skips: Any) -> pd.DataFrame:
    """Each map beside the one that forgets the state, and which rows skip one block."""
    frame = skips.to_dataframe()
    pair, numbers = ["from_layer", "to_layer"], ["kl", "kl_se"]
    null = frame[frame["map_type"] == "mean"].set_index(pair)[numbers]
    frame = frame.join(null.add_prefix("forgotten_"), on=pair)
    single = (frame["skipped"] == 1) & (frame["map_type"] != "mean")
    # as if the errors were independent: chunks that move both alike would make it smaller
    error = (frame["kl_se"] ** 2 + frame["forgotten_kl_se"] ** 2) ** 0.5
    frame = frame.assign(single=single.astype(float), saved=frame["forgotten_kl"] - frame["kl"])
    return frame.assign(saved_se=error, samples=frame["test"])


# ---- the run


def _overview(a: Analysis) -> pd.DataFrame:
    view, rows, p = a.view, a.windows, a.basis.provenance
    (start, end), names = a.basis.window, rows.label_names
    facts = {
        "model": f"{view.name}, {p.library}{', processed weights' if view.processed else ''}",
        "weights": f"fingerprint {view.fingerprint}, computed in {p.dtype}",
        "corpus": f"{p.corpus}: {len(rows)} windows of {rows.length} tokens ({rows.token_hash})",
        "documents": f"{len(names)}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}",
        "kept from the basis": f"{a.held_out} windows, for the sweep and the removals",
        "first token": "BOS" if p.has_bos else "text (no BOS)",
        "positions": f"{start} to {end - 1} (an attention sink before them is left out)",
        "seed": str(a.seed),
        "remarks": "; ".join([*p.flags, *rows.notes]) or "none",
    }
    return pd.DataFrame({"property": [*facts], "value": [*facts.values()]})


# ---- the list


def _seeded(report: Any, of: str) -> Callable[[Analysis], Any]:
    return lambda a: report(getattr(a, of), seed=a.seed)


SECTIONS = (
    Section(
        "heads",
        "Which head does most, and why",
        (
            Item("heads", lambda a: a.sweep, _heads, price=_price_of_heads, more=0.1),
            Item("removal", _removal, _removed, price=lambda a: TESTED * PROMPTS / 2, more=0.2),
            Item("terms", _terms, _without, price=lambda a: 9 * PROMPTS / 2, more=0.1),
            Item("example", _example, lambda a, s: s.shares().to_dataframe(), (_split,), more=0.1),
        ),
    ),
    Section(
        "states",
        "Position and context",
        (
            Item("variance", _variance, _beside_untrained, (_bars, _spirals), _price_of_nulls),
            Item("massive", lambda a: a.basis.largest_tokens(), _massive, (), more=0.05),
            Item("position", _seeded(measures.positional_report, "basis"), _report, (_curves,)),
            Item("context", _seeded(measures.contextual_report, "basis"), _report, more=0.6),
        ),
    ),
    Section(
        "weights",
        "Weights and the sphere",
        (
            Item("weights_qk", _geometry, _named, (_map,)),
            Item("readout_ov", lambda a: weights.token_readout(a.model, matrix="OV"), _named, ()),
            Item("paths", lambda a: sphere.token_paths(a.model, a.windows.tokens[:1, :TOKENS])),
        ),
    ),
    Section(
        "flow",
        "Trajectories as a flow",
        (
            Item("flow", _seeded(flow.flow_report, "paths"), price=lambda a: a.followed),
            Item("ensembles", _ensembles, figures=(), price=lambda a: 2 * a.followed, more=0.1),
            Item("truncation", _truncation, _truncated),
            Item("skips", _skips, _skipped),
        ),
        slow=True,
    ),
    Section("overview", "What was analysed", (Item("overview", _overview, figures=(), more=0.0),)),
)
"""The sections of a report in reading order."""
