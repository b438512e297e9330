"""Throughput of 2, 4, 8 ... single-threaded processes (as many as there are cores) against one,
beside what as many independent forward passes reach on the same machine."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import Row

SIZES = {"smoke": (2, 64, 32, 32, 1), "cpu": (4, 512, 128, 288, 5), "gpu": (4, 512, 128, 288, 2)}
"""Layers, d_model, length, contexts, rounds. Processes are measured on the CPU in every size, more
than two in size "cpu" alone."""

PROGRAM = """
import json, sys, time, torch
import torch.distributed as dist
import tl_geometry as tlg
from benchmarks.decomposition import gpt2
layers, width, length, contexts, rounds = (int(v) for v in sys.argv[1:])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
view = tlg.view(gpt2(layers, width, length))
tokens = torch.randint(0, 500, (contexts, length), generator=torch.Generator().manual_seed(0))
batch = max(1, 1024 // length)
options = {"batch_size": batch, "keep_ctx": False, "keep": 4, "progress": False}
def forward(rows):
    with torch.inference_mode():
        for part in rows.split(batch):
            view.run(part, {view.state_hooks[-1]: lambda h: None})
def one(**more):
    return tlg.decompose(view, tokens, **options, **more)
routes = {
    "one forward": lambda: forward(tokens) if rank == 0 else None,
    "forwards": lambda: forward(tokens[rank::size]),
    "one process": lambda: one() if rank == 0 else None,
    "processes": lambda: one(group=dist.group.WORLD),
}
if rank == 0:
    whole = one()
shared = one(group=dist.group.WORLD)
if rank == 0:
    apart = (whole.pos - shared.pos).abs().max()
    assert apart <= 1e-10 * whole.pos.abs().max(), "the routes disagree"
    moment = whole.second_moment(1)
    assert (moment - shared.second_moment(1)).abs().max() <= 1e-10 * moment.trace()
times = {name: [] for name in routes}
for _ in range(rounds):
    for name, route in routes.items():
        dist.barrier()
        start = time.perf_counter()
        route()
        dist.barrier()
        times[name].append(time.perf_counter() - start)
if rank == 0:
    print(json.dumps(times))
dist.destroy_process_group()
"""


def run(size: str) -> list[Row]:
    """Times of the same contexts on one and on more processes; the note says how many times the
    throughput of one that is."""
    most = max(2, os.cpu_count() or 2) if size == "cpu" else 2
    counts = [2**i for i in range(1, most.bit_length())]
    return [row for count in counts for row in beside_one(size, count)]


def beside_one(size: str, count: int) -> list[Row]:
    """One process and ``count``, in turn."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start += [f"--nproc-per-node={count}", "--no-python", sys.executable, "-c"]
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": root}
    command = [*start, PROGRAM, *map(str, SIZES[size])]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment, cwd=root
    )
    times: dict[str, list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
    rows = []
    for base, many in (("one forward", "forwards"), ("one process", "processes")):
        name, pairs = f"{count} {many}", zip(times[base], times[many], strict=True)
        ratio = statistics.median(b / a for a, b in pairs)
        note = f"{1 / ratio:.2f} times the throughput"
        rows += [
            Row("processes", f"{base}, beside {count}", statistics.median(times[base]), 1.0),
            Row("processes", name, statistics.median(times[many]), ratio, note),
        ]
    return rows
