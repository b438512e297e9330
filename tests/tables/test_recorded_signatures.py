"""Public functions, methods and classes take what is recorded, in its order and with its defaults:
``tests/records/signatures.json``, which ``python -m tests --accept`` renews."""

from __future__ import annotations

import inspect
import json

import pytest

from tests.lib.recording import RECORDS
from tests.tables.test_signatures import functions, public

pytestmark = pytest.mark.once
RECORD = RECORDS / "signatures.json"


def signatures() -> dict[str, str]:
    """Parameters with their defaults, without types, by public name."""
    names = public()
    made = {name: each for name, each in names.items() if inspect.isclass(each)}
    found = {}
    for name, each in [*functions(names), *made.items()]:
        taken = inspect.signature(each)
        bare = [p.replace(annotation=p.empty) for p in taken.parameters.values()]
        found[name] = str(inspect.Signature(bare))
    return dict(sorted(found.items()))


def accept() -> None:
    RECORD.write_text(json.dumps(signatures(), indent=0, ensure_ascii=False) + "\n")


def test_signatures_are_those_recorded() -> None:
    known = json.loads(RECORD.read_text())
    assert signatures() == known
