"""``python -m tests.mutations``: plant faults in a copy of the package, one at a time, and see the tests catch every one.

A fault is a file, the text to replace (which must occur exactly once), its replacement, and the test file that has to fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Fault(NamedTuple):
    """One planted fault."""

    name: str
    file: str
    old: str
    new: str
    tests: str = "tests/test_decomposition.py"


FAULTS = (
    Fault("a dropped position", "moments.py", "low:high] += einsum(", "low : high - 1] += einsum("),
    Fault(
        "a wrong divisor in pos",
        "decomposition.py",
        "self.moments.sums.sum(0) / self.contexts -",
        "self.moments.sums.sum(0) / (self.contexts + 1) -",
    ),
    Fault("the mean left in pos", "decomposition.py", "/ self.contexts - self.mean.unsqueeze(1)", "/ self.contexts"),
    Fault("the mean left in ctx", "decomposition.py", "self.context_means - self.mean.unsqueeze(1)", "self.context_means"),
    Fault("a batch counted twice", "moments.py", "self.counts += torch.bincount(", "self.counts += 2 * torch.bincount("),
    Fault("float32 sums", "moments.py", "block = h[:, low:high].double()", "block = h[:, low:high].float().double()"),
    Fault(
        "pilot shift forgotten", "moments.py", "return whole + torch.outer(excess, delta)", "return whole + 0 * torch.outer(excess, delta)"
    ),
    Fault("second moments not centred on the pilot", "moments.py", "self.pilot[state] = h.double().mean((0, 1)).float()", "pass"),
    Fault("window start off by one", "moments.py", "if start <= low < end:", "if start < low < end:"),
    Fault(
        "groups swapped for batches",
        "capture.py",
        "(self.done + torch.arange(size)) % self.plan.groups",
        "torch.arange(size) % self.plan.groups",
    ),
    Fault("context mean over all columns", "moments.py", "means = whole / (end - start)", "means = whole / h.shape[1]"),
    Fault("sink position in the second moments", "moments.py", "self._add_second(state, h[:, start:end])", "self._add_second(state, h)"),
    Fault("context share not scaled by T", "decomposition.py", "clip(t * (m.context_squares", "clip((m.context_squares"),
    Fault("no correction for sampling noise", "decomposition.py", "share = (pos - noise)", "share = (pos - 0 * noise)"),
    Fault("textbook context vector", "decomposition.py", "ctx = cvec.mean(2)", "ctx = h.double().mean(2) - mean[:, None]"),
    Fault(
        "last batch dropped",
        "capture.py",
        "for start in range(0, h.shape[1], batch):",
        "for start in range(0, h.shape[1] - batch + 1, batch):",
    ),
    Fault(
        "reservoir by arrival",
        "moments.py",
        "return [pair for pair in sorted(known + drawn)[: self.size]",
        "return [pair for pair in (known + drawn)[: self.size]",
    ),
    Fault("NaN let through", "capture.py", "if not finite[i]]", "if False]"),
)


def caught(fault: Fault) -> bool:
    """Plant one fault in a copy of the project and say whether its tests fail."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("tl_geometry", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "tl_geometry" / fault.file
        text = path.read_text(encoding="utf-8")
        if text.count(fault.old) != 1:
            raise SystemExit(f"{fault.name}: {fault.old!r} occurs {text.count(fault.old)} times in {fault.file}")
        path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", fault.tests]
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False).returncode == 1


def main() -> int:
    """Plant every fault; return how many were missed."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = list(pool.map(caught, FAULTS))
    for fault, seen in zip(FAULTS, found, strict=True):
        sys.stdout.write(f"{'caught' if seen else 'MISSED'}: {fault.name} ({fault.file})\n")
    sys.stdout.write(f"{sum(found)} of {len(FAULTS)} planted faults caught\n")
    return len(FAULTS) - sum(found)


if __name__ == "__main__":
    sys.exit(main())
