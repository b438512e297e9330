"""Outside ``models`` nobody reaches the model object behind a view, nor spells the name of a
hook."""

from __future__ import annotations

import ast
import re

import pytest

from tests.project.test_import_direction import modules

HOOK = re.compile(r"\bhook_[a-z]|\bblocks\.|\bln_final\b|\bhook_dict\b")
"""Text that is, or begins, a hook name of TransformerLens."""
VIEWS = ("view", "seen", "control")
"""What a view is called where it is a variable or a field."""


def offences(source: str) -> list[str]:
    """Reaches into a view, and hook names in code (docstrings may name them)."""
    tree = ast.parse(source)
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    documentation = {id(node) for node in statements if isinstance(node, ast.Constant)}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            if node.attr == "_model" or (node.attr == "model" and name in VIEWS):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        if not isinstance(node, ast.Constant) or id(node) in documentation:
            continue
        if isinstance(node.value, str) and HOOK.search(node.value):
            found.append(f"line {node.lineno}: {node.value!r}")
    return found


def test_only_models_knows_the_model_object_and_its_hooks() -> None:
    wrong = {
        name: found
        for name, source in modules().items()
        if not name.startswith("models") and (found := offences(source))
    }
    assert not wrong


@pytest.mark.parametrize(
    "planted",
    [
        "rows = view.model.W_E",
        "with torch.no_grad():\n    self.view.model(tokens)",
        "norm = view._model.ln_final",
        'view.run(ids, {"blocks.0.attn.hook_pattern": look})',
        'names = [f"blocks.{l}.hook_attn_out" for l in layers]',
        'view = replace(view, state_hooks=(*hooks, "ln_final.hook_out"))',
    ],
)
def test_a_planted_offence_is_caught(planted: str) -> None:
    assert offences(planted)


@pytest.mark.parametrize(
    "fine",
    [
        '"""A hook such as ``blocks.1.hook_resid_pre``."""',
        "model, view = analysis.model, analysis.view",
        "view.run(ids, {view.pattern_hooks[0]: look})",
    ],
)
def test_what_is_allowed_is_let_through(fine: str) -> None:
    assert not offences(fine)
