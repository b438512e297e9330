"""Does a model need an edge, from a writer to what some heads read, and is that edge enough?
:func:`edge_necessity` compares the loss of each prompt in the clean run with that under edits.

- ``remove``: the writer taken out of some heads' inputs
- ``swap``: what the writer wrote in another prompt, in its place
- ``keep``: all other writers taken out: the edge alone
- ``shrink``: (1 - a) of the heads' scores (or values), with a the writer's covariance share
- controls: other writers taken out in its place

Shrinking takes as much as removing the writer does, but evenly from all writers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head, describe
from tl_geometry.base.errors import require
from tl_geometry.base.intervals import paired_interval
from tl_geometry.circuits.writer_edges import HEAD_SIDES, composition
from tl_geometry.circuits.writer_sweep import sweep_writers
from tl_geometry.corpus.sources import token_rows
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.interventions.edges import clean_run, edge_edits, first_edited
from tl_geometry.interventions.effects import Conditions
from tl_geometry.interventions.head_edits import Heads, by_layer, derangement, require_several
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.live_edits import Edit, edited_scores
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.next_token import output_batch, require_output
from tl_geometry.models.output_head import next_token_losses
from tl_geometry.models.reader import as_view

CLEAN, REMOVE, SWAP, KEEP, SHRINK = "clean", "remove", "swap", "keep", "shrink"
"""Conditions of :func:`edge_necessity` beside the controls, which are named by their writers."""


@dataclass(frozen=True, eq=False, kw_only=True)
class EdgeNecessity(Conditions):
    """Loss (nats) of each condition and prompt. Conditions are ``clean``, ``remove``, ``swap``,
    ``keep``, ``shrink`` (as in :mod:`tl_geometry.interventions.edge_effects`), and one for each
    control, with the name of the writer that was removed.

    A row of the table has the mean ``loss`` over prompts, its ``change`` from clean, and the
    ``excess``: how much more removing the edge costs than this condition. Both have Student's 95%
    interval of the paired differences, the excess also a sign-flip p-value (all NaN below 10
    prompts). ``share`` is the mean covariance share, in the chosen heads on that side, of the
    writer that the condition is about. Inputs of the first ``drop`` positions are not edited, and
    shares leave them out too.
    """

    writer: str
    heads: tuple[tuple[int, int], ...]
    side: str
    share: Float[Tensor, " condition"]
    drop: int

    def of(self, condition: str) -> float:
        """Mean loss of one condition."""
        return float(self.loss[self.row(condition)])

    def column_values(self) -> dict[str, Float[Tensor, " condition"]]:
        differences = {
            "change": self.losses - self.losses[0],
            "excess": self.losses[self.row(REMOVE)] - self.losses,
        }
        columns = {"share": self.share, "loss": self.loss}
        for name, values in differences.items():
            columns |= paired_interval(values.mT).columns(name)
        return columns | {"p": self.p_values(REMOVE)}


def edge_necessity(
    model: ModelLike,
    tokens: TokensLike,
    writer: str,
    heads: Sequence[Head] | Head,
    *,
    side: str = "key",
    counted: Bool[Tensor, "..."] | None = None,
    controls: Sequence[str] | int = 6,
    drop: int | None = None,
    prepend_bos: bool | None = None,
    seed: int = 0,
) -> EdgeNecessity:
    """Do ``heads`` need what ``writer`` wrote, on one side of their inputs? The loss without it,
    beside controls: its output of another prompt, the edge alone, as large a share taken from all
    writers evenly, and the removal of other writers.

    Args:
        tokens: at least 2 prompts (10 for intervals).
        counted: tokens whose loss counts, ``[position]`` or ``[batch position]`` (for repeated
            random tokens those of the second copy); all by default.
        controls: names of other writers, or how many of the heads, MLPs and embeddings with the
            largest absolute share in the chosen heads on that side.
        drop: how many first positions keep their inputs, by default the BOS token alone. Leave out
            attention sinks in this way: else a writer may seem to matter only because it keeps
            attention off them.

    Raises ``UnsupportedModelError`` for encoders and without a trained output head,
    ``GeometryError`` for a writer that does not come before every reader, or that is among its
    own controls.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=4)
    >>> effect = tlg.interventions.edge_necessity(model, windows, "L0H0", "L1H0", controls=1)
    >>> effect.conditions[:5], effect.losses.shape
    (('clean', 'remove', 'swap', 'keep', 'shrink'), torch.Size([6, 4]))
    """
    view = as_view(model)
    require_output(view, "edge_necessity")
    rows = token_rows(view, tokens, prepend_bos=prepend_bos)
    require_several(len(rows), "tokens")
    chosen = checks.heads(heads, view.n_layers, view.n_heads)
    checks.choice(side, HEAD_SIDES, "side")
    layers, start = by_layer(chosen), first_edited(drop, rows)
    shares = _shares(view, rows.tokens, chosen, side, start)
    others = _controls(controls, shares, writer)
    is_counted = _counted(counted, rows.tokens).to(view.device)
    size = output_batch(view, rows.tokens.shape[1], all_positions=True)
    order = derangement(len(rows), seed)
    losses: list[Tensor] = []
    for batch in torch.arange(len(rows)).split(size):
        run = clean_run(view, rows.tokens[batch], [writer, *others], layers)
        swapped = clean_run(view, rows.tokens[order[batch]], [writer], layers)
        edits = {
            CLEAN: [],
            REMOVE: edge_edits(run, writer, chosen, side, drop=start),
            SWAP: edge_edits(run, writer, chosen, side, swapped, drop=start),
            KEEP: edge_edits(run, writer, chosen, side, drop=start, keep=True),
            SHRINK: _shrinking(_share(shares, writer), chosen, side),
            **{name: edge_edits(run, name, chosen, side, drop=start) for name in others},
        }
        by_token = torch.stack([_losses(view, run.tokens, edit) for edit in edits.values()])
        losses.append(by_token.mul(is_counted[batch]).sum(-1) / is_counted[batch].sum(-1))
    # remove, swap, keep and shrink are about the writer; clean is about none
    mean_shares = [_share(shares, name).nanmean() for name in (*[writer] * 4, *others)]
    return EdgeNecessity(
        provenance=view.provenance(rows, seed=seed),
        writer=writer,
        heads=chosen,
        side=side,
        conditions=(CLEAN, REMOVE, SWAP, KEEP, SHRINK, *others),
        losses=torch.cat(losses, 1).cpu(),
        share=torch.stack([torch.tensor(torch.nan).to(mean_shares[0]), *mean_shares]),
        drop=start,
    )


def _counted(
    counted: Bool[Tensor, "..."] | None, tokens: Int[Tensor, "batch position"]
) -> Bool[Tensor, "batch token"]:
    """Which tokens after the first count: nothing predicts the first."""
    mask = torch.ones_like(tokens, dtype=torch.bool) if counted is None else counted
    fits = mask.dtype == torch.bool and mask.shape in (tokens.shape, tokens.shape[1:])
    expected = f"bool {list(tokens.shape)} or {list(tokens.shape[1:])}"
    require(fits, "counted", expected=expected, got=describe(mask))
    mask = mask.expand(tokens.shape)[:, 1:]
    require(bool(mask.any(1).all()), "counted", expected="tokens of every prompt", got="none")
    return mask


def _losses(
    view: ModelView, tokens: Int[Tensor, "batch position"], edits: Sequence[Edit]
) -> Float[Tensor, "batch token"]:
    """Loss of every token after the first under some edits."""
    with edited_scores(view, edits):
        return next_token_losses(view.logits(tokens), tokens).double()


def _shrinking(share: Float[Tensor, " head"], heads: Heads, side: str) -> list[Edit]:
    """``(1 - a)`` of each head's scores or values, a its share (0 where it is NaN)."""
    factors = dict(zip(heads, (1 - share.nan_to_num()).tolist(), strict=True))

    def edit(at: int, chosen: tuple[int, ...]) -> Edit:
        factor = torch.tensor([factors[at, head] for head in chosen])[:, None]

        def values(_: LayerView, v: Tensor) -> Tensor:
            return v * factor.to(v)

        def scores(_: LayerView, total: Tensor) -> Tensor:
            return total * factor.to(total)[..., None]

        if side == "value":
            return Edit(at, chosen, lambda _, total: total, values=values)
        return Edit(at, chosen, scores)

    return [edit(at, chosen) for at, chosen in by_layer(heads).items()]


def _shares(
    view: ModelView, tokens: Tensor, heads: Heads, side: str, drop: int
) -> dict[str, Float[Tensor, " head"]]:
    """Covariance share of each writer in each of the heads, on one side. Only writers that come
    before all of these heads are listed: no other can be taken out of every head."""
    # the sweep over writers, which projects none of them, has no value side
    if side == "value":
        table = composition(view, tokens, heads=heads, draws=1, drop=drop, progress=False)
        cs = table.cs[:, HEAD_SIDES.index(side)]
    else:
        layers = sorted({layer for layer, _ in heads})
        table = sweep_writers(view, tokens, layers=layers, drop=drop, progress=False)
        cs = table.cs[[table.heads.index(head) for head in heads], HEAD_SIDES.index(side)]
    first = min(layer for layer, _ in heads)
    writers = zip(table.parts, table.wrote, cs.mT, strict=True)
    # "bias" and "alibi" are parts of scores that no writer made
    return {
        part: part_shares
        for part, layer, part_shares in writers
        if layer < first and part not in ("bias", "alibi")
    }


def _share(shares: Mapping[str, Tensor], name: str) -> Float[Tensor, " head"]:
    """Share of one writer; that of the attention of a block ("attn0") is the sum over its heads."""
    prefix = name.replace("attn", "L") + "H"
    parts = [shares[part] for part in shares if part == name or part.startswith(prefix)]
    return torch.stack(parts).sum(0)


def _controls(
    controls: Sequence[str] | int, shares: Mapping[str, Tensor], writer: str
) -> tuple[str, ...]:
    """Other writers: those named, or as many of the largest absolute share as ``controls`` says.
    The heads of a block are parts of its attention, and so no controls of it."""
    if not isinstance(controls, int):
        named = (controls,) if isinstance(controls, str) else tuple(controls)
        fits = writer not in named and len(set(named)) == len(named)
        expected = f"other writers than {writer!r}, each once"
        require(fits, "controls", expected=expected, got=named)
        return named
    require(controls >= 0, "controls", expected="0 or more", got=controls)
    ranked = sorted(shares, key=lambda name: -abs(float(shares[name].nanmean())))
    own_heads = (f"L{writer.removeprefix('attn')}H",) if writer.startswith("attn") else ()
    excluded = (writer, "constants")
    others = [name for name in ranked if name not in excluded and not name.startswith(own_heads)]
    return tuple(others[:controls])
