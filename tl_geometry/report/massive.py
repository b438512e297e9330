"""Massive tokens: a few tokens whose norm dwarfs the others', and with it every sum of squares; a sentence and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry import _html
from tl_geometry.render import basis as views
from tl_geometry.report import Analysis, Draft
from tl_geometry.results import Result

TOP, ALARM, LISTED = 0.001, 0.25, 12
"""Share of tokens that are looked at, share of the sum of squares from which they are named, and tokens listed for a state."""


@dataclass(frozen=True, eq=False, kw_only=True)
class MassiveTokens(Result):
    """The largest tokens of each state among the sampled contexts: how much of the sum of squares they hold, and which they are.

    ``share [state]`` is held by the largest ``count`` of ``of`` tokens; the lists have a row per state and a column per token, largest
    first: position in the window, token, norm, coordinate with the largest absolute value.
    """

    states: tuple[int, ...]
    count: int
    of: int
    share: Float[Tensor, " state"]
    median: Float[Tensor, " state"]
    norm: Float[Tensor, "state sample"]
    position: Int[Tensor, "state sample"]
    coordinate: Int[Tensor, "state sample"]
    tokens: tuple[tuple[str, ...], ...]

    def columns(self) -> Sequence[str]:
        return ("state", "share", "median_norm", "largest_norm", "position", "coordinate", "token")

    def rows(self) -> Sequence[Sequence[object]]:
        first = zip(self.norm[:, 0].tolist(), self.position[:, 0].tolist(), self.coordinate[:, 0].tolist(), self.tokens, strict=True)
        return [
            (s, float(self.share[i]), float(self.median[i]), norm, at, where, tokens[0])
            for i, (s, (norm, at, where, tokens)) in enumerate(zip(self.states, first, strict=True))
        ]


def norms_of(analysis: Analysis) -> tuple[Float[Tensor, "sample state position"], Int[Tensor, "sample position"]] | None:
    """Norms of the sampled contexts' states inside the window, and their token ids; the one place that knows where they come from."""
    basis = analysis.basis
    if basis.samples is None or basis.sample_tokens is None or len(basis.samples) == 0:
        return None
    inside = slice(*basis.window)
    return torch.linalg.vector_norm(basis.samples[:, :, inside], dim=-1), basis.sample_tokens[:, inside]


def massive_tokens(analysis: Analysis) -> MassiveTokens | None:
    """The table, from the sampled contexts; ``None`` where none were kept."""
    found = norms_of(analysis)
    if found is None or analysis.basis.samples is None:
        return None
    (norms, ids), basis, start = found, analysis.basis, analysis.basis.window[0]
    samples, _, width = norms.shape
    flat = norms.transpose(0, 1).flatten(1).double()
    count, listed = max(1, round(TOP * samples * width)), min(LISTED, samples * width)
    top = flat.topk(max(count, listed), dim=1)
    context, column = top.indices[:, :listed] // width, top.indices[:, :listed] % width
    states = torch.arange(len(basis.states)).unsqueeze(1)
    coordinate = analysis.basis.samples[context, states, column + start].abs().argmax(-1)
    texts = [analysis.view.decode(row) for row in ids[context, column].tolist()]
    return MassiveTokens(
        states=basis.states, count=count, of=samples * width, share=top.values[:, :count].square().sum(1) / flat.square().sum(1),
        median=flat.median(1).values, norm=top.values[:, :listed], position=column + start, coordinate=coordinate,
        tokens=tuple(tuple(_html.token_text(t) for t in row) for row in texts), provenance=basis.provenance,
    )  # fmt: skip


def add(draft: Draft, analysis: Analysis) -> None:
    """The sentence, the picture of the state where the largest tokens hold most, and the table."""
    table, found = massive_tokens(analysis), norms_of(analysis)
    if table is None or found is None:
        draft.leave_out("massive tokens", "no sampled contexts were kept")
        return
    draft.tables["massive_tokens"] = table
    draft.text.append(sentence(table))
    row = int(table.share.argmax())
    marked = list(zip(table.position[row].tolist(), table.norm[row].tolist(), table.tokens[row], strict=True))
    draft.draw(
        views.token_norms(
            found[0][:, row], analysis.basis.window, marked, state=table.states[row], title=title(table, row), provenance=table.provenance
        )
    )


def title(table: MassiveTokens, row: int) -> str:
    """What the picture shows, in a sentence."""
    share, state = float(table.share[row]), table.states[row]
    if share > ALARM:
        return f"{table.count} of {table.of:,} tokens hold {share:.0%} of the sum of squares of state {state}"
    return f"No few tokens dominate: the largest {table.count} of {table.of:,} hold {share:.1%} of state {state}"


def sentence(table: MassiveTokens) -> str:
    """Which states are dominated by a few tokens, by which, and what follows."""
    bad = [i for i in range(len(table.states)) if float(table.share[i]) > ALARM]
    if not bad:
        worst = int(table.share.argmax())
        return f"{title(table, worst)}, more than of any other state."
    worst = max(bad, key=lambda i: float(table.share[i]))
    which = (
        ", ".join(str(table.states[i]) for i in bad)
        if len(bad) <= 6
        else f"{len(bad)} states ({table.states[bad[0]]} to {table.states[bad[-1]]})"
    )
    named: dict[tuple[int, str], None] = {}
    for at, norm, text in zip(table.position[worst].tolist(), table.norm[worst].tolist(), table.tokens[worst], strict=True):
        if norm > 3 * float(table.median[worst]):
            named[at, text if len(text) <= 16 else f"{text[:15]}…"] = None
    places = ", ".join(f"{text!r} at position {at}" for at, text in list(named)[:3])
    several = "states" if len(bad) > 1 and len(bad) <= 6 else "state" if len(bad) == 1 else "of"
    return (
        f"{title(table, worst)} ({places}; norm {float(table.norm[worst, 0]):,.0f} where the median token has {float(table.median[worst]):,.0f}, "
        f"coordinate {int(table.coordinate[worst, 0])}). Shares, spectra and measures of {several} {which} describe these tokens more than the others."
    )
