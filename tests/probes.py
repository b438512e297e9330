"""Which tests evaluate a piece of code? :mod:`tests.mutate` asks before it plants a fault there.

:func:`probed` writes a call of ``__reached__(number)`` around each expression, or before each
statement, that is asked for; all else, and every line number, stays as it is. The call gives None,
so that ``(__reached__(3) or x)`` is ``x``. Running a file costs no more than without, where tracing
every line would cost half as much again.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from tests.faults import Fault, starts_of_lines

NAME = "__reached__"
"""The built-in function that probed code calls."""
NOTES = "PROBE_NOTES"
"""The environment variable with the folder for what other processes reach."""
ELSEWHERE = f"""
import atexit, builtins, os
found = set()
builtins.{NAME} = found.add
def note():
    folder = os.environ["{NOTES}"]
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, str(os.getpid())), "w") as file:
        file.write(" ".join(map(str, found)))
atexit.register(note)
"""
"""``sitecustomize.py`` of a probed tree, which each process that a test starts runs first."""
Span = tuple[int, int]
"""The first byte of a piece of code, and the first one behind it."""


def probed(source: bytes, places: dict[int, Fault]) -> bytes:
    """The file with a probe for each fault, by its number."""
    tree, starts = ast.parse(source), starts_of_lines(source)
    inserted = []
    for number, fault in places.items():
        (start, end), is_statement = _place(tree, starts, (fault.start, fault.end))
        if is_statement:
            inserted.append((start, 1, -len(source), f"{NAME}({number}); "))
        else:
            inserted.append((start, 1, -end, f"({NAME}({number}) or ("))
            inserted.append((end, 0, -start, "))"))
    # from the end of the file, so that what is inserted moves nothing that comes later in the loop;
    # of several at one place the closing ones stand first, and pairs do not cross
    for position, _, _, text in sorted(inserted, reverse=True):
        source = source[:position] + text.encode() + source[position:]
    return source


def when(source: bytes, fault: Fault) -> str:
    """When a piece of code is evaluated: at the ``"import"`` of its module, by a ``"call"``, or as
    a default of a ``"signature"``."""
    above = _nodes_above(ast.parse(source), starts_of_lines(source), (fault.start, fault.end))
    for parent, child in itertools.pairwise(above):
        if isinstance(parent, ast.FunctionDef) and child is parent.args:
            return "signature"
        if isinstance(parent, ast.Lambda) or (
            isinstance(parent, ast.FunctionDef) and child in parent.body
        ):
            return "call"
    return "import"


def _place(tree: ast.AST, starts: list[int], wanted: Span) -> tuple[Span, bool]:
    """Where the probe of a piece of code goes, and whether that is a statement."""
    above = list(_nodes_above(tree, starts, wanted))
    for parent, child in itertools.pairwise(above):
        if isinstance(parent, (ast.FunctionDef, ast.Lambda)) and child is parent.args:
            # a default is evaluated when the function is defined, and matters when it is called
            node = parent.body if isinstance(parent, ast.Lambda) else _first_evaluated(parent.body)
            break
        if isinstance(parent, ast.Match) and any(isinstance(node, ast.pattern) for node in above):
            # a pattern is no expression
            node = parent.subject
            break
    else:
        node = above[-1]
    return _span(node, starts), isinstance(node, ast.stmt)


def _nodes_above(node: ast.AST, starts: list[int], wanted: Span) -> Iterator[ast.AST]:
    """The node itself, the child of it that holds the piece of code, and so on down to the
    piece."""
    yield node
    if hasattr(node, "lineno") and _span(node, starts) == wanted:
        return
    for child in ast.iter_child_nodes(node):
        if any(_holds(part, starts, wanted) for part in ast.walk(child)):
            yield from _nodes_above(child, starts, wanted)
            return


def _holds(node: ast.AST, starts: list[int], wanted: Span) -> bool:
    if not hasattr(node, "lineno"):
        return False
    start, end = _span(node, starts)
    return start <= wanted[0] and wanted[1] <= end


def _first_evaluated(body: list[ast.stmt]) -> ast.AST:
    """The first thing that a function evaluates when it is called: a statement of one line, or the
    condition or the like of a longer one."""
    for statement in body:
        match statement:
            case ast.Expr(value=ast.Constant()):  # a docstring
                continue
            case ast.If() | ast.While():
                return statement.test
            case ast.For():
                return statement.iter
            case ast.With():
                return statement.items[0].context_expr
            case ast.Match():
                return statement.subject
            case ast.Try():
                return _first_evaluated(statement.body)
            case ast.FunctionDef() | ast.ClassDef():
                continue
            case _:
                return statement
    return body[0]


def _span(node: ast.AST, starts: list[int]) -> Span:
    start = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
    return start, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
