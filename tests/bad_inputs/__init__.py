"""Inputs that a user gives by mistake or in good faith, as data: what is called, and whether it is
taken or refused, and how.

``CALLS`` goes through the API, ``COMMANDS`` through the command line. A refusal is a
``GeometryError`` (on the command line exit 2 and one line) whose text matches ``refused``; what is
taken returns a value that ``check`` accepts.

``python -m tests.bad_inputs`` makes all calls as a user would, without the checks of annotations
that tests switch on, and prints what came of each as JSON; ``tests/project/test_bad_inputs.py``
judges.
"""

from __future__ import annotations

from tests.bad_inputs import (
    commands,
    dictionaries,
    edges,
    folders,
    inference,
    known,
    labels,
    live,
    ownership,
    results,
    text,
    tokens,
)
from tests.bad_inputs.cases import Call, Command

_NEW = (text, ownership, live, folders, labels, inference, dictionaries, edges, known)
CALLS: list[Call] = [*tokens.CALLS, *results.CALLS]
COMMANDS: list[Command] = [*commands.COMMANDS]
for _module in _NEW:
    CALLS += _module.CALLS
    COMMANDS += _module.COMMANDS
