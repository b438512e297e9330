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


@pytest.mark.parametrize("way", ["in the test", "of the file"])
@pytest.mark.parametrize(("ci", "code"), [("true", 1), ("", 0)])
def test_a_run_with_an_unexplained_skip_fails_in_ci_only(
    way: str, ci: str, code: int, tmp_path: Path
) -> None:
    body = 'import pytest\n\ndef test_it():\n    pytest.skip("the moon is down")\n'
    if way == "of the file":
        body = 'import pytest\n\npytest.skip("the moon is down", allow_module_level=True)\n'
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_planted.py").write_text(body + "\n\ndef test_other():\n    pass\n")
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
    assert ("not expected in CI: the moon is down" in done.stdout) == bool(code)
