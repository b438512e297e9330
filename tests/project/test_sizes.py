"""The project stays small: the limits of ``tests/sizes.py``, and the table in CONTRIBUTING."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import sizes


@pytest.mark.parametrize("name", sizes.today())
def test_nothing_is_larger_than_its_limit(name: str) -> None:
    now, limit = sizes.today()[name], sizes.SIZES[name].limit
    assert now <= limit, f"{name}: {now:,} of {limit:,}: something that says less has to go"


def test_the_table_is_near_what_is_there() -> None:
    stored = sizes.stored()
    assert stored.keys() == sizes.SIZES.keys()
    for name, now in sizes.today().items():  # run python -m tests.sizes
        assert abs(stored[name] - now) <= 0.02 * now + 1, name


def test_docstrings_comments_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Says.\n\nMore."""\n\n# a comment\nX = 1\n"""Of X."""\nY = (\n    2\n)\n')
    assert sizes.lines_of_code(module) == 4
