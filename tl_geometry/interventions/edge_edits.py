"""Path patching of one edge: :func:`edge` takes what a writer wrote out of what chosen heads read.

The writer's output w and the reader's norm scale s (QK-norm's too) are those of the clean run on
the same tokens; everything after the reader is live. With h the running stream, and A and gain the
centring and gain of the norm (SPEC M),

    remove      k' = ((h - w) A gain / s) W_K + constants       (queries and values likewise)
    keep        all other writers are taken out
    swap        k' = ((h - w + w') A gain / s) W_K + constants, w' of another prompt

Because s is frozen, removing an edge takes exactly that writer's terms out of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import require
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.interventions.prompts import Edit, Known, flag_of_another, from_another
from tl_geometry.interventions.terms import HeadsLike, heads_by_layer
from tl_geometry.models.batches import default_batch
from tl_geometry.models.edits import NamedHook, NewScores, RunningHeads, edited_attention
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import known_view
from tl_geometry.models.write_spec import require_decoder
from tl_geometry.models.writers import GRAINS, Written, run_written, writer_names

SIDES = ("query", "key", "value")
HOW = ("remove", "keep", "swap")

Read = Mapping[str, Tensor]
"""What one layer read in a clean run: the stream ``"h"``, frozen scales and constants
(``"q_scale"``, ``"q_constant"``, ...), and what the chosen writers had ``"written"`` together."""


def clean_reads(
    view: ModelView, tokens: Tensor, writers: Sequence[str], layers: Iterable[int]
) -> dict[int, Read]:
    """What some layers read in clean passes over ``tokens``."""
    reads: dict[int, list[Read]] = {layer: [] for layer in sorted(layers)}
    frozen = [f"{which}_{name}" for which in "qkv" for name in ("scale", "constant")]

    def take(layer: LayerView, written: Written) -> None:
        parts = written.parts("blocks") | written.parts()
        together = torch.stack([parts[name] for name in writers]).sum(0)
        read = {name: getattr(layer, name) for name in ("h", *frozen)}
        reads[layer.layer].append(read | {"written": together})

    for batch in tokens.split(default_batch(tokens.shape[1], view.device)):
        run_written(view, batch, list(reads), take)
    names = ("h", *frozen, "written")
    return {
        layer: {name: torch.cat([part[name] for part in parts]) for name in names}
        for layer, parts in reads.items()
    }


def edge(
    model: ModelLike,
    prompts: TokensLike,
    writer: str | Sequence[str],
    heads: HeadsLike,
    *,
    side: str | Sequence[str] = "key",
    how: str = "remove",
    counterfactual: TokensLike | None = None,
    drop: int | None = None,
    seed: int = 0,
    prepend_bos: bool | None = None,
) -> Edit:
    """Path patching of an edge: take a writer out of what ``heads`` read, on the ``"query"``,
    ``"key"`` or ``"value"`` side (or several).

    Passes must be over ``prompts`` (some or all of them, in any order), whose clean run gives the
    writer's output and the norm's scale.

    Args:
        writer: ``"embed"`` (token embeddings; beside it ``"pos_embed"``, where there are any),
            ``"L0H3"``, ``"mlp0"``, ``"attn0"``, or several that are edited together. What biases
            of all of these write is ``"constants"``.
        how: see the module; ``"swap"`` takes what the writer wrote in ``counterfactual``, one
            prompt for each, or without these in another of the prompts.
        drop: how many first positions keep their inputs, by default the BOS token alone, so that
            the attention sink stays what it was.

    Raises ``GeometryError`` for a writer that does not come before every reader, and during a pass
    over other tokens; ``UnsupportedModelError`` for encoders; else as
    :func:`~tl_geometry.interventions.term`.

    Source: Wang et al. 2022, arXiv:2211.00593.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tokens = tlg.zoo.default_windows(model, 16, n=2).tokens
    >>> with tlg.interventions.edge(model, tokens, "L0H0", "L1H0"):
    ...     logits = model(tokens)
    """
    view, given = known_view(model), checks.several(side)
    require_decoder(view, f"edges of {view.name}")
    checks.choice(how, HOW, "how")
    used, expected = counterfactual is None or how == "swap", 'how="swap" beside it'
    require(used, "counterfactual", expected=expected, got=f"how={how!r}")
    require(len(given) > 0, "side", expected=f"one of {SIDES} at least", got="none")
    letters = "".join(checks.choice(s, SIDES, "side")[0] for s in given)
    known = Known.of(view, prompts, counterfactual, prepend_bos)
    length = known.rows.tokens.shape[1]
    start = int(known.rows.has_bos) if drop is None else checks.index(drop, length, "drop")
    writers = checks.several(writer)
    chosen, tokens = checks.heads(heads, view.n_layers, view.n_heads), known.rows.tokens
    layers = heads_by_layer(chosen)
    before = writers_before(view, min(layers))
    for name in writers:
        checks.choice(name, [*before], f"writer before block {min(layers)}")
    twice = [name for name in writers if name.startswith(parts_of(writers))]
    once = 0 < len(writers) == len({*writers}) and not twice
    require(once, "writer", expected="writers, none of them part of another", got=writers)
    reads = clean_reads(view, tokens, writers, layers)
    others: dict[int, Read] = {}
    if how == "swap":
        alone = known.counterfactual is None
        source = from_another(tokens, seed) if alone else known.others
        others = clean_reads(view, source, writers, layers)

    def make(_: Known | None) -> list[NamedHook]:
        rows: dict[str, Tensor] = {}
        hooks = [known.hook(rows)]
        for at, some in layers.items():
            change = -reads[at]["written"]
            change = change + others[at]["written"] if how == "swap" else change
            change = reads[at]["written"] - reads[at]["h"] if how == "keep" else change
            change[:, :start] = 0
            side = partial(_side, read=reads[at], change=change, rows=rows, letters=letters)
            scores = partial(_scores, side=side)
            edited: NewScores | None = scores if set(letters) & set("qk") else None
            values = partial(side, letter="v") if "v" in letters else None
            hooks += edited_attention(view, at, some, edited, values)
        return hooks

    options: dict[str, Any] = {"writer": writers, "heads": chosen, "side": given, "how": how}
    options |= {"drop": drop, "seed": seed}
    again = partial(edge, model=view, prompts=known, **options)  # with their counterfactuals
    # heads in whose place others may stand come after the writers too
    last = max(before[name] for name in writers)
    pool = [head for head in checks.heads(None, view.n_layers, view.n_heads) if head[0] > last]
    flags = flag_of_another(seed) if how == "swap" and known.counterfactual is None else None
    return Edit(view, make, known=known, heads=chosen, pool=pool, again=again, flags=flags)


def _side(
    run: RunningHeads,
    letter: str,
    read: Read,
    change: Float[Tensor, "prompt position d_model"],
    rows: Mapping[str, Tensor],
    letters: str,
) -> Float[Tensor, "batch position head d_head"]:
    """Queries, keys or values that read ``change`` more where they are among ``letters``."""
    if letter not in letters:
        return run.own(letter)
    at, layer = rows["rows"], run.layer
    scale, constant = (read[f"{letter}_{name}"][at] for name in ("scale", "constant"))
    mapped = layer.mapped(layer.h + change[at].to(layer.h), letter)
    return (mapped * scale.unsqueeze(-1) + constant)[:, :, list(run.heads)]


def _scores(run: RunningHeads, side: Callable[..., Tensor]) -> Tensor:
    """Scores of other queries or keys."""
    return run.scores(side(run, "q"), side(run, "k"))


def writers_before(view: ModelView, layer: int) -> dict[str, int]:
    """The block of every writer of a layer's input, heads and whole blocks of attention, by name;
    -1 for embeddings and constants."""
    return {w.name: w.layer for grain in GRAINS for w in writer_names(view, layer, grain)}


def parts_of(writers: Sequence[str]) -> tuple[str, ...]:
    """How the names begin of the heads whose block of attention is among the writers."""
    return tuple(f"L{w.removeprefix('attn')}H" for w in writers if w.startswith("attn"))
