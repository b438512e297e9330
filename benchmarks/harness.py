"""Interleaved timing: every route runs in turn, and a ratio is the median of the ratios round by
round."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

import tl_geometry as tlg
from tl_geometry.models.model_view import ModelView

STEADY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}
"""Settings under which glibc keeps what was freed. It otherwise hands large buffers back to the
kernel and takes them again page by page: by chance up to a third of a forward pass, in one route or
in the other."""


def steady() -> None:
    """Start this program again with :data:`STEADY`, unless it has been."""
    if sys.platform == "linux" and not STEADY.items() <= os.environ.items():
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], os.environ | STEADY
        )


def child(program: str, *arguments: object) -> str:
    """What a Python program prints in a process of its own, with the allocator as users have it."""
    environment = {k: v for k, v in os.environ.items() if k not in STEADY}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout


@dataclass(frozen=True)
class Row:
    """One route of one benchmark: median seconds, and the median ratio to the baseline (NaN for
    what is not a ratio of times); peak memory above the start in MiB, where it was measured."""

    benchmark: str
    route: str
    seconds: float
    ratio: float
    note: str = ""
    mib: float = math.nan


def interleave(
    benchmark: str,
    routes: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 5,
    notes: Mapping[str, str] | None = None,
    processor: bool = False,
) -> list[Row]:
    """Time every route ``rounds`` times in turn after one warm-up; ratios are to the first route,
    round by round. ``processor`` times what this process computes, not what it waits for."""
    clock = time.process_time if processor else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in routes}
    for route in routes.values():
        route()
    for _ in range(rounds):
        for name, route in routes.items():
            synchronize()
            start = clock()
            route()
            synchronize()
            times[name].append(clock() - start)
    base = times[next(iter(routes))]
    return [
        Row(
            benchmark,
            name,
            statistics.median(t),
            statistics.median([a / b for a, b in zip(t, base, strict=True)]),
            (notes or {}).get(name, ""),
        )
        for name, t in times.items()
    ]


def paired(
    benchmark: str,
    route: str,
    view: ModelView,
    batches: Sequence[Tensor],
    run: Callable[[Iterator[Tensor]], object],
    *,
    rounds: int,
    plain: Callable[[Tensor], object] | None = None,
) -> list[Row]:
    """Time a streaming ``route`` and the plain forward pass over the same batches, without the
    output head (``plain``; the view's own by default), in turn, after one batch of each; another
    one is first in every round. The ratio is the median over the rounds, its note the least and
    the most.

    A bridge computes its logits even with ``return_type=None``; the baseline ends before them, as
    the streaming routes do.
    """
    forward = plain or (lambda batch: view.run(batch, {view.state_hooks[-1]: lambda h: None}))

    def passes() -> None:
        with torch.inference_mode():
            for batch in batches:
                forward(batch)

    works = {"run": lambda: run(iter(batches)), "forward": passes}
    times: list[tuple[float, float]] = []
    run(iter(batches[:1]))
    with torch.inference_mode():
        forward(batches[0])
    for i in range(rounds):
        seconds = {}
        for name in sorted(works, reverse=bool(i % 2)):
            synchronize()
            start = time.perf_counter()
            works[name]()
            synchronize()
            seconds[name] = time.perf_counter() - start
        times.append((seconds["run"], seconds["forward"]))
    ratios = sorted(a / b for a, b in times)
    return [
        Row(
            benchmark,
            "forward without the output head",
            statistics.median(b for _, b in times),
            1.0,
        ),
        Row(
            benchmark,
            route,
            statistics.median(a for a, _ in times),
            statistics.median(ratios),
            f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
        ),
    ]


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _status(field: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0])


def peak() -> int:
    """Peak memory of this process in KiB. Not ``ru_maxrss``, which a child of a larger process
    inherits."""
    return _status("VmHWM")


def resident() -> float:
    """Memory of this process now, in MiB."""
    return _status("VmRSS") / 1024


@dataclass
class Growth:
    """How far peak memory rose above what was held before, in MiB: of the GPU where there is one,
    else of the process."""

    mib: float = 0.0

    def on(self, row: Row) -> Row:
        """The row with a note."""
        note = f"{row.note} peak {self.mib:.0f} MiB above the start".strip()
        return dataclasses.replace(row, note=note, mib=self.mib)


@contextmanager
def grown() -> Iterator[Growth]:
    """Measure the peak of a piece of code."""
    found = Growth()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        found.mib = (torch.cuda.max_memory_allocated() - before) / 2**20
        return
    ctypes.CDLL(None).malloc_trim(
        0
    )  # freed memory that the allocator holds would hide what is used again
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is resident
    before = resident()
    yield found
    found.mib = peak() / 1024 - before


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine()
    )
    return {
        "tl-geometry": tlg.__version__,
        "transformer-lens": version("transformer-lens"),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "device": device,
    }


def show(rows: list[Row], *, as_json: bool = False) -> None:
    """Print the rows as a table, or as JSON with the machine."""
    if as_json:
        sys.stdout.write(
            json.dumps({"machine": machine(), "rows": [asdict(r) for r in rows]}) + "\n"
        )
        return
    for row in rows:
        sys.stdout.write(
            f"{row.benchmark:28} {row.route:34} {row.seconds:9.4f} s  x{row.ratio:8.3f}  "
            f"{row.note}".rstrip()
            + "\n"
        )


def made_on() -> str:
    """Machine, versions and day, for the page that a benchmark writes."""
    here = machine()
    names = ("cores", "torch", "transformer-lens")
    return ", ".join([*(f"{name} {here[name]}" for name in names), str(date.today())])
