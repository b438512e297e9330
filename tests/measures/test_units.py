"""Tolerances are relative: what is found in states or weights is found in ones of other units. An
absolute tolerance, planted in a copy of the module, is off in large units or in small ones."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.modules import copy_of
from tl_geometry import decompose_activations
from tl_geometry.base.errors import GeometryError
from tl_geometry.decomposition import variance
from tl_geometry.interventions import surrogates
from tl_geometry.measures import differences
from tl_geometry.scores import position_null
from tl_geometry.weights import bilinear, subspaces

UNITS = (1e-10, 1.0, 1e10)
"""Two sides of a product change by the square."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def total_variance(module: Any, unit: float) -> tuple[bool, bool]:
    """Whether states vary; whether equal ones do, which leave rounding alone."""
    h = unit * (random(2, 8, 6, 4) + 1)
    equal = (unit * (random(2, 1, 1, 4) + 1)).expand(2, 8, 6, 4)
    totals = [module.sums_of_squares(decompose_activations(x).moments)["total"] for x in (h, equal)]
    return bool((totals[0] > 0).all()), bool((totals[1] > 0).any())


def centred_positions(module: Any, unit: float) -> tuple[bool, bool]:
    """Whether centred positions are taken; whether ones off by 1e-4 of their size are."""
    pos = random(12, 5)
    pos = unit * (pos - pos.mean(0))
    taken = []
    for x in (pos, pos + 1e-4 * unit):
        try:
            module.theorem1(x, k=3, m=1)
            taken.append(True)
        except GeometryError:
            taken.append(False)
    return taken[0], taken[1]


def off_the_diagonal(module: Any, unit: float) -> tuple[bool, bool]:
    """Whether a matrix has energy off its diagonal; whether a diagonal one has."""
    rotation = torch.linalg.qr(random(6, 6)).Q
    found = []
    for right in (random(6, 6, seed=1), rotation):  # rotation @ rotation.T is 1 but for rounding
        factors = module.Factors((unit * rotation)[None], (unit * right)[None])
        found.append(bool(factors.off_diagonal_energy > 0))
    return found[0], found[1]


def directions_of_rank_two(module: Any, unit: float) -> tuple[bool, bool]:
    """Whether rows of rank 2 have a second direction, and a third."""
    rows = unit * (random(1, 4, 2) @ random(1, 2, 9, seed=1))
    second, third = module._leading(rows, 3)[0].norm(dim=0)[1:]
    return bool(second > 0.5), bool(third > 0)


def centred_directions(module: Any, unit: float) -> tuple[bool, bool]:
    """Whether random directions are centred where the factors are, and where they are not."""
    left, right = random(1, 12, 3), random(1, 12, 3, seed=1)
    basis = torch.linalg.qr(random(12, 2, seed=2)).Q
    found = []
    for x in (left - left.mean(1, keepdim=True), left):
        factors = bilinear.Factors(unit * x, unit * right)
        low, _ = module.part_of(factors, basis, "random", k=2)
        found.append(bool(low.right.sum(-2).abs().max() < 1e-6))
    return found[0], found[1]


def groups_differ(module: Any, unit: float) -> tuple[bool, bool]:
    """Whether groups differ; whether ones that are equal but for rounding do."""
    equal = random(1, 20) * (1 + 1e-7 * random(8, 20, seed=1))
    found = []
    for x in (unit * random(8, 20), unit * equal):
        deviations = x - x.mean(0)
        gram = deviations @ deviations.mT
        found.append(module.independence(gram, x.square().sum(), 0, ordered=False) > 0)
    return found[0], found[1]


class Absolute(ast.NodeTransformer):
    """Makes tolerances absolute: ``x > 1e-12 * size`` becomes ``x > 1e-12``."""

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        bound = node.comparators[0]
        if isinstance(bound, ast.BinOp) and isinstance(bound.left, ast.Constant):
            node.comparators[0] = bound.left
        return node


CASES: list[tuple[Callable[[Any, float], tuple[bool, bool]], ModuleType]] = [
    (total_variance, variance),
    (centred_positions, differences),
    (off_the_diagonal, bilinear),
    (directions_of_rank_two, subspaces),
    (centred_directions, surrogates),
    (groups_differ, position_null),
]


@pytest.mark.parametrize(("found", "module"), CASES)
def test_what_is_found_has_no_units(found: Any, module: ModuleType) -> None:
    assert {found(copy_of(module), unit) for unit in UNITS} == {(True, False)}
    absolute = copy_of(module, Absolute())
    assert any(found(absolute, unit) != (True, False) for unit in UNITS)
