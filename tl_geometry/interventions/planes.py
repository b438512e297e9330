"""Which rotary planes do the work of a head? Remove, keep or swap planes of its attention scores in
a live model.

With S the scores of a head and ``X = sum_{m in planes} X^(m)`` the part of them that the chosen
planes carry (:mod:`tl_geometry.scores.planes`):

    remove      S - X
    keep        X (and ALiBi)
    swap        S - X + X', X' that of another prompt of the batch, at the same positions

The control of removing or keeping planes is the same edit of as many planes drawn at random for
each head. Swapping shows how much of what these planes carry is specific to the prompt. No basis
is needed: the planes are those of the running queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.interventions.head_edits import (
    Heads,
    HeadsLike,
    bias_of,
    by_layer,
    edit_of_heads,
    from_another_prompt,
)
from tl_geometry.models.edit_lists import LiveEdit
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.live_edits import Edit
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.rotary import rotary_planes
from tl_geometry.scores.planes import HeadPlanes, PlanesLike, describe_planes

PlaneEdit = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(scores, part of the chosen planes, ALiBi) -> new scores, all ``[batch head query key]``."""


def part_on_planes(
    layer: LayerView, heads: Sequence[int], coordinates: Bool[Tensor, "head d_head"]
) -> Float[Tensor, "batch head query key"]:
    """The part of the heads' scores that comes from the chosen coordinates of queries and keys."""
    q, k = layer.q[:, :, heads] * coordinates.to(layer.q), layer.k[:, :, heads]
    return layer.scale * einsum(q, k, "b i h e, b j h e -> b h i j")


def chosen_planes(
    layer: LayerView, heads: Sequence[int], planes: PlanesLike, control: int | None
) -> Bool[Tensor, "head d_head"]:
    """The coordinates of the chosen planes of some heads; with ``control`` those of as many planes
    drawn at random with that seed, for each head anew."""
    rotary = rotary_planes(layer)
    of_heads = HeadPlanes.of([rotary] * len(heads), layer.h.shape[1])
    chosen = of_heads.chosen(planes)
    none_asked = not isinstance(planes, str | int) and len(planes) == 0
    require(
        none_asked or bool(chosen.any()),
        "planes",
        expected="planes that the heads have",
        got=f"none of {describe_planes(planes)} in layer {layer.layer}, whose wavelengths are "
        f"{', '.join(f'{wavelength:.3g}' for wavelength in rotary.wavelength.tolist()[:8])}",
        instead="others, or longer prompts",
    )
    if control is not None:
        chosen = torch.stack(
            [
                random_planes(row, of_heads.theta[0], control, layer.layer, head)
                for row, head in zip(chosen, heads, strict=True)
            ]
        )
    return of_heads.coordinates(chosen).to(layer.h.device)


def random_planes(
    chosen: Bool[Tensor, " plane"],
    theta: Float[Tensor, " plane"],
    seed: int,
    layer: int = 0,
    head: int = 0,
) -> Bool[Tensor, " plane"]:
    """As many planes as are chosen, drawn from all that are rotated; never exactly the chosen ones,
    which would be no control.

    >>> chosen = torch.tensor([True, True, False, False, False])
    >>> theta = torch.tensor([1.0, 0.1, 0.01, 0.001, 0.0])
    >>> drawn = random_planes(chosen, theta, seed=3)
    >>> int(drawn.sum()), bool((drawn == chosen).all()), bool(drawn[-1])
    (2, False, False)
    """
    is_rotated, count = theta.abs() > 0, int(chosen.sum())
    rotated = is_rotated.nonzero().flatten()
    fits = count < len(rotated) and not bool((chosen & ~is_rotated).any())
    expected = f"fewer than all {len(rotated)} rotated planes, and no other, for a control"
    require(fits, "planes", expected=expected, got=f"{count} planes")
    # another seed for each layer and head: 1009 is more than a model has of either
    generator = torch.Generator().manual_seed((seed * 1009 + layer) * 1009 + head)
    while True:
        drawn = torch.zeros_like(chosen)
        drawn[rotated[torch.randperm(len(rotated), generator=generator)[:count]]] = True
        if count == 0 or not torch.equal(drawn, chosen):
            return drawn


def _edit(
    model: ModelLike, planes: PlanesLike, heads: HeadsLike, change: PlaneEdit, control: int | None
) -> LiveEdit:
    # the edit reads the planes in every pass: a copy, so that the caller may change the list
    planes = tuple(planes) if isinstance(planes, list) else planes

    def layer_edit(at: int, heads: tuple[int, ...]) -> Edit:
        def scores(layer: LayerView, total: Tensor) -> Tensor:
            coordinates = chosen_planes(layer, heads, planes, control)
            part = part_on_planes(layer, list(heads), coordinates)
            return change(total, part, bias_of(layer, heads))

        return Edit(at, heads, scores)

    def edits(view: ModelView, chosen: Heads) -> list[Edit]:
        return [layer_edit(at, heads) for at, heads in by_layer(chosen).items()]

    return edit_of_heads(model, heads, edits)


def remove_planes(
    model: ModelLike, planes: PlanesLike, heads: HeadsLike = None, *, control: int | None = None
) -> LiveEdit:
    """Context manager: run the live model with some rotary planes taken out of the scores of
    ``heads`` (all for ``None``), ``S - sum_{m in planes} X^(m)``.

    ``with remove_planes(model, "near", "L16H0"): model(tokens)``. ``planes`` are numbers, bands of
    wavelengths in tokens (:class:`tl_geometry.scores.Band`), or names: ``"near"``, ``"middle"`` and
    ``"far"`` for the length of the running prompts, ``"pass"`` for coordinates that are not
    rotated. With ``control=seed`` as many planes, drawn at random for each head, are removed
    instead.

    The edit and its refusals are like those of :func:`tl_geometry.interventions.remove_term`;
    ``GeometryError`` also where no head has the planes.
    """
    return _edit(model, planes, heads, lambda total, part, bias: total - part, control)


def keep_planes(
    model: ModelLike, planes: PlanesLike, heads: HeadsLike = None, *, control: int | None = None
) -> LiveEdit:
    """Context manager: keep only some rotary planes of the scores of ``heads`` (and ALiBi), or with
    ``control=seed`` as many planes drawn at random (see :func:`remove_planes`)."""

    def change(total: Tensor, part: Tensor, bias: Tensor | None) -> Tensor:
        return part if bias is None else part + bias

    return _edit(model, planes, heads, change, control)


def swap_planes(
    model: ModelLike, planes: PlanesLike, heads: HeadsLike = None, *, seed: int = 0
) -> LiveEdit:
    """Context manager: give some rotary planes of the scores of ``heads`` the values of another
    prompt of the batch at the same positions, ``S - X + X'`` (at least two prompts)."""

    def change(total: Tensor, part: Tensor, bias: Tensor | None) -> Tensor:
        return total - part + from_another_prompt(part, seed, "swap_planes")

    return _edit(model, planes, heads, change, None)
