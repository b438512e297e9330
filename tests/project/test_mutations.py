"""Planted faults still have a place: run all of them with ``python -m tests.mutations``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_the_text_of_a_fault_occurs_exactly_once(fault: Fault) -> None:
    assert len(fault.places(ROOT / "tl_geometry")) == 1
    assert fault.old != fault.new
    assert (ROOT / fault.tests).is_file()


def test_a_text_that_is_gone_or_stands_twice_is_seen(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "one.py").write_text("a = 1\nb = 1\n")
    (tmp_path / "base" / "two.py").write_text("b = 1\n")
    times = [len(Fault("", "base", old, "", "").places(tmp_path)) for old in ("a =", "b =", "c =")]
    assert times == [1, 2, 0]
