"""Which small faults can be planted in a line of code? :mod:`tests.mutate` draws some of them and
asks whether a test fails.

A fault is one changed node of the syntax tree: an operator, a comparison, a constant, a negated
condition, two arguments in the other order, a keyword argument or a statement that is left out, a
returned tuple in the other order. Text is left as it is (docstrings, messages, names of columns):
a fault in it is found by reading. So are annotations, which the type checker reads.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
TEXT_CALLS = ("fail", "message", "warn", "TypeVar", "Literal")
"""Calls whose arguments are text for people or for the type checker."""
TEXT_KEYWORDS = ("expected", "got", "instead", "what", "help", "title", "caption", "label")
"""Keyword arguments that hold text for people."""


class Fault(NamedTuple):
    """One planted fault: the new text of a file from byte ``start`` to byte ``end``."""

    path: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int

    @property
    def package(self) -> str:
        """The package of the file; files beside the packages count as ``"."``."""
        parts = Path(self.path).parts
        return parts[1] if len(parts) > 2 else "."

    def lines(self, source: str) -> range:
        """The lines of the innermost statement that holds it, without its body; those of the body
        for the head of a function: a default matters where its function is called."""
        found = range(0)
        for node in ast.walk(ast.parse(source)):  # what is inside comes later
            if isinstance(node, ast.stmt):
                start = min(x.lineno for x in (node, *getattr(node, "decorator_list", [])))
                end = (node.end_lineno or 0) + 1
                body = getattr(node, "body", None)
                first = body[0].lineno if body else end
                if start <= self.line < end:
                    head = range(start, max(first, start + 1))
                    found = range(first, end) if isinstance(node, ast.FunctionDef) else head
        return found

    def planted(self, source: bytes) -> bytes:
        """The file with the fault in it."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def faults(path: str, source: str) -> list[Fault]:
    """All faults of a file that can be planted, in the order of its lines."""
    starts, found = starts_of_lines(source.encode()), []
    for node in _nodes_of_code(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        before = source.encode()[start:end].decode()
        for kind, changed in changes(node):
            after = ast.unparse(ast.fix_missing_locations(changed))
            if isinstance(node, ast.expr):
                after = f"({after})"  # the node may stand inside an expression that binds tighter
            found.append(Fault(path, node.lineno, kind, before, after, start, end))  # type: ignore[attr-defined]
    return sorted(found, key=lambda fault: (fault.line, fault.start, fault.kind, fault.after))


def starts_of_lines(source: bytes) -> list[int]:
    """The number of the first byte of each line."""
    lengths = [len(line) for line in source.splitlines(keepends=True)]
    return list(itertools.accumulate(lengths, initial=0))


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The faults of one node, each as its kind and the changed node."""
    match node:
        case ast.BinOp() if type(node.op) in OPERATORS and not _is_text(node):
            yield "operator", _with(node, op=OPERATORS[type(node.op)]())
        case ast.BinOp(op=ast.MatMult()):
            yield "order of a product", _with(node, left=node.right, right=node.left)
        case ast.BoolOp():
            yield "and, or", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield "sign or negation", node.operand
        case ast.Compare():
            first = COMPARISONS[type(node.ops[0])]()
            yield "comparison", _with(node, ops=[first, *node.ops[1:]])
        case ast.Constant(value=bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield "constant", ast.Constant(value + 1)
        case ast.Constant(value=float() as value):
            yield "constant", ast.Constant(2 * value if value else 1.0)
        case ast.IfExp():
            yield "condition negated", _with(node, body=node.orelse, orelse=node.body)
        case ast.Return(value=ast.Tuple(elts=[_, _, *_])):
            assert isinstance(node.value, ast.Tuple)
            reverse = _with(node.value, elts=node.value.elts[::-1])
            yield "order of what is returned", _with(node, value=reverse)
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield "statement left out", ast.Pass()
        case ast.Call():
            yield from _call_changes(node)
        case ast.GeneratorExp() | ast.ListComp() | ast.SetComp() | ast.DictComp():
            for number, generator in enumerate(node.generators):
                if generator.ifs:
                    changed = copy.deepcopy(node)
                    changed.generators[number].ifs = []
                    yield "condition left out", changed


def _call_changes(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    """Two arguments of one form in the other order, and each keyword argument left out."""
    match node.args:
        # of two forms, such as a name and a text, every test that runs the line would fail
        case [first, second, *rest] if type(first) is type(second) and not _is_text(first):
            if ast.dump(first) != ast.dump(second):
                yield "order of arguments", _with(node, args=[second, first, *rest])
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in TEXT_KEYWORDS:
            others = [other for other in node.keywords if other is not keyword]
            yield f"{keyword.arg}= left out", _with(node, keywords=others)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of a node with other fields."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _is_text(node: ast.AST) -> bool:
    """Whether an expression holds text, whose faults are found by reading."""
    return any(
        isinstance(x, ast.JoinedStr) or (isinstance(x, ast.Constant) and isinstance(x.value, str))
        for x in ast.walk(node)
    )


def _nodes_of_code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree that code runs: no annotations, no text, no imports for types."""
    if hasattr(node, "lineno"):
        yield node
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST) and not _skipped(node, name, child):
                yield from _nodes_of_code(child)


def _skipped(parent: ast.AST, field: str, child: ast.AST) -> bool:
    """Whether a part of a node is an annotation or text."""
    if field in ("annotation", "returns", "type_params"):
        return True
    if isinstance(child, (ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(child, ast.keyword) and child.arg in TEXT_KEYWORDS:
        return True
    if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
        return True
    called = child.func if isinstance(child, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in TEXT_CALLS
