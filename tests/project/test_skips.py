"""In CI a skip that nothing explains fails the run; elsewhere it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import skips

ROOT = Path(__file__).resolve().parents[2]


def test_reasons_that_hold_here_are_expected() -> None:
    holding = [
        pattern for pattern, holds in skips.expected().items() if holds and "." not in pattern
    ]
    assert skips.unexpected(holding, {"CI": "true"}) == []
    assert set(
        skips.unexpected(
            [p for p, holds in skips.expected().items() if not holds and "." not in p], {"CI": "1"}
        )
    ) == {p for p, holds in skips.expected().items() if not holds and "." not in p}
    assert skips.unexpected(["no Chromium here (looked for chromium)"], {"CI": "true"}) == [
        "no Chromium here (looked for chromium)"
    ]
    assert skips.unexpected(["no Chromium here (looked for chromium)"], {}) == []
    assert skips.reason(("file.py", 3, "Skipped: because")) == "because"


@pytest.mark.parametrize(("ci", "code"), [("true", 1), ("", 0)])
def test_a_run_with_an_unexplained_skip_fails_in_ci_only(
    ci: str, code: int, tmp_path: Path
) -> None:
    of_a_test = 'import pytest\n\ndef test_it():\n    pytest.skip("the moon is down")\n'
    of_a_file = 'import pytest\n\npytest.skip("the sun is up", allow_module_level=True)\n'
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_planted.py").write_text(of_a_test + "\n\ndef test_other():\n    pass\n")
    (tmp_path / "test_planted_file.py").write_text(of_a_file)
    (tmp_path / "test_sound.py").write_text("def test_sound():\n    pass\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    environment = {**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert done.returncode == code, done.stdout + done.stderr
    for planted in ("the moon is down", "the sun is up"):
        assert (f"not expected in CI: {planted}" in done.stdout) == bool(code)
