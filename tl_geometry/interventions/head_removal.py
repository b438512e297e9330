"""Does a head matter? :func:`remove_heads` replaces the output of whole heads in a live model
(knockouts); :func:`tl_geometry.interventions.head_knockouts` does so head by head and measures.

The mixed values ``z_i = sum_j pattern_ij v_j`` of the chosen heads become zero, their mean over
reference prompts at the same position, or those of another prompt of the batch. Everything behind
the heads is live.

So a knockout sees what the direct effect of a head (what it writes towards a logit,
:func:`tl_geometry.explain_logit`) cannot: on SmolLM2 some heads that write nothing matter because
they change where later heads look, and some that write much are hardly missed.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import require
from tl_geometry.corpus.sources import token_rows
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.interventions.head_edits import (
    HeadsLike,
    by_layer,
    from_another_prompt,
    mixed_values,
)
from tl_geometry.models.batches import default_batch
from tl_geometry.models.edit_lists import LiveEdit
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.live_edits import OutputEdit, StreamEdit, edit_of_outputs
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view

REPLACEMENTS = ("mean", "zero", "prompt")
"""What may stand in place of a head's mixed values: their mean over reference prompts, zero, or
those of another prompt."""


def remove_heads(
    model: ModelLike,
    heads: HeadsLike = None,
    by: str = "mean",
    *,
    reference: TokensLike | None = None,
    prepend_bos: bool | None = None,
    seed: int = 0,
) -> LiveEdit:
    """Context manager, and list of hooks: run the live model without the output of ``heads``.

    Args:
        heads: one head, several, or all (``None``), as (layer, head) or ``"L5H1"``.
        by: what stands in place of their mixed values: ``"mean"``, the mean over ``reference`` at
            the same position; ``"zero"``; ``"prompt"``, those of another prompt of the batch.
        reference: prompts at least as long as those of the passes inside, for ``by="mean"``. The
            means are taken when the context is entered.
        seed: which other prompt each gets.

    User hooks at ``hook_z`` act on what the edit leaves. Raises ``GeometryError`` for a mean
    without reference prompts, for passes longer than these, and for ``"prompt"`` in a batch of one.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> prompts = tlg.zoo.default_windows(model, 16, n=4).tokens
    >>> with tlg.interventions.remove_heads(model, "L1H0", reference=prompts) as edit:
    ...     without = model(prompts)
    >>> edit.passes, bool((without == model(prompts)).all())
    (1, False)
    """
    checks.choice(by, REPLACEMENTS, "by")
    view = as_view(model)
    chosen = by_layer(checks.heads(heads, view.n_layers, view.n_heads))
    fits = by != "mean" or reference is not None
    instead = 'reference=prompts, or by="zero" or by="prompt"'
    what, expected = f'remove_heads(..., by="{by}")', "prompts to take the mean over"
    require(fits, what, expected=expected, got="none", instead=instead)
    rows = None if reference is None else token_rows(view, reference, prepend_bos=prepend_bos)

    def prepare() -> tuple[ModelView, list[StreamEdit]]:
        current = as_view(model)
        if by == "mean" and rows is not None:
            means = mean_outputs(current, rows.tokens, chosen)
            new: dict[int, OutputEdit] = {l: partial(_mean, mean=m) for l, m in means.items()}
        elif by == "zero":
            new = dict.fromkeys(chosen, torch.zeros_like)
        else:
            new = dict.fromkeys(chosen, partial(from_another_prompt, seed=seed, what=what))
        edits = [edit_of_outputs(current, layer, chosen[layer], new[layer]) for layer in chosen]
        return current, edits

    return LiveEdit(prepare)


def mean_outputs(
    view: ModelView, tokens: Tensor, heads: dict[int, tuple[int, ...]]
) -> dict[int, Float[Tensor, "position head d_head"]]:
    """Mean over prompts of the mixed values of some heads of each layer, by position (float64)."""
    sums: dict[int, Tensor] = {}

    def on_layer(layer: LayerView) -> None:
        z = mixed_values(view, layer)[:, :, list(heads[layer.layer])]
        total = z.double().sum(0)
        sums[layer.layer] = sums.get(layer.layer, 0.0) + total

    for batch in tokens.split(default_batch(tokens.shape[1], view.device)):
        view.run_layers(batch, list(heads), on_layer, verify=False)
    return {layer: total / len(tokens) for layer, total in sums.items()}


def _mean(
    z: Float[Tensor, "batch query head d_head"], mean: Float[Tensor, "position head d_head"]
) -> Tensor:
    """The reference's mean in every prompt; refused where prompts are longer than the reference."""
    length, seen = z.shape[1], len(mean)
    instead = "reference= prompts at least as long"
    expected = f"prompts of at most {seen} tokens, as in the reference"
    require(length <= seen, "remove_heads", expected=expected, got=length, instead=instead)
    return mean[:length].to(z).expand_as(z)
