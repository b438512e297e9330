"""``python -m tests.mutations``: plant faults in a copy of the package, one at a time, and see the
tests catch every one.

A fault is a file, the text to replace (which must occur exactly once), its replacement, and the
test file that has to fail.
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
    tests: str = "tests/decomposition/test_position_context.py"


FAULTS = (
    Fault(
        "a dropped position",
        "moments.py",
        "block.copy_(h[:, low:high])",
        "block.copy_(h[:, low:high])[:, -1] = 0",
    ),
    Fault(
        "a wrong divisor in pos",
        "decomposition.py",
        "self.moments.sums.sum(0) / self.contexts -",
        "self.moments.sums.sum(0) / (self.contexts + 1) -",
    ),
    Fault(
        "the mean left in pos",
        "decomposition.py",
        "/ self.contexts - self.mean.unsqueeze(1)",
        "/ self.contexts",
    ),
    Fault(
        "the mean left in ctx",
        "decomposition.py",
        "self.context_means - self.mean.unsqueeze(1)",
        "self.context_means",
    ),
    Fault(
        "a batch counted twice",
        "moments.py",
        "self.counts += torch.bincount(",
        "self.counts += 2 * torch.bincount(",
    ),
    Fault(
        "float32 sums",
        "moments.py",
        "block.copy_(h[:, low:high])",
        "block.copy_(h[:, low:high].float())",
    ),
    Fault(
        "pilot shift forgotten",
        "moments.py",
        "return whole + torch.outer(excess, delta)",
        "return whole + 0 * torch.outer(excess, delta)",
    ),
    Fault(
        "second moments not centred on the pilot",
        "moments.py",
        "self.pilot[state] = mean.float()",
        "pass",
    ),
    Fault(
        "window start off by one", "moments.py", "if start <= low < end:", "if start < low < end:"
    ),
    Fault(
        "groups swapped for batches",
        "accumulation.py",
        "(self.done + torch.arange(size, device=device)) % self.plan.groups",
        "torch.arange(size, device=device) % self.plan.groups",
    ),
    Fault(
        "context mean over all columns",
        "moments.py",
        "means = whole / (end - start)",
        "means = whole / h.shape[1]",
    ),
    Fault(
        "sink position in the second moments",
        "moments.py",
        "self._centred(state, h[:, start:end])",
        "self._centred(state, h)",
    ),
    Fault(
        "context share not scaled by T",
        "decomposition.py",
        "clip(t * (m.context_squares",
        "clip((m.context_squares",
    ),
    Fault(
        "no correction for sampling noise",
        "decomposition.py",
        "share = (pos - noise)",
        "share = (pos - 0 * noise)",
    ),
    Fault(
        "textbook context vector",
        "decomposition.py",
        "ctx = cvec.mean(2)",
        "ctx = h.double().mean(2) - mean[:, None]",
    ),
    Fault(
        "last batch dropped",
        "accumulation.py",
        "for start in range(0, h.shape[1], batch):",
        "for start in range(0, h.shape[1] - batch + 1, batch):",
    ),
    Fault(
        "reservoir by arrival",
        "moments.py",
        "kept = sorted(known + drawn)[: self.size]",
        "kept = (known + drawn)[: self.size]",
    ),
    Fault("NaN let through", "accumulation.py", "if not good[i]]", "if False]"),
)

BESIDE = "tests/interventions/test_live_edits.py"
ATTENTION, TYPES, SWEEP, LIVE = (
    f"tests/test_{name}.py" for name in ("attention", "head_types", "sweep", "interventions")
)
FAULTS += (
    Fault(
        "row mean over masked keys too",
        "attention.py",
        "/ allowed.sum(-1, keepdim=True).clamp(min=1)",
        "/ allowed.shape[-1]",
        ATTENTION,
    ),
    Fault(
        "scores not centred",
        "attention.py",
        "known.flatten(0, 1).mT, beta=-1)",
        "known.flatten(0, 1).mT, beta=0)",
        ATTENTION,
    ),
    Fault(
        "query and key part swapped",
        "attention.py",
        "(rows.flatten(3) @ weighted)",
        "(rows.flatten(3) @ weighted).mT",
        ATTENTION,
    ),
    Fault(
        "energies not centred",
        "attention.py",
        "return energy - (sums",
        "return energy - 0 * (sums",
        ATTENTION,
    ),
    Fault(
        "earlier keys forgotten",
        "attention.py",
        "else self.squares.add_(squares)",
        "else squares",
        ATTENTION,
    ),
    Fault(
        "the bias against itself",
        "attention.py",
        "+= (centred * extra)",
        "+= (extra * extra)",
        ATTENTION,
    ),
    Fault(
        "groups by the query alone",
        "attention.py",
        "(query in CONTEXT_PARTS) + (key in CONTEXT_PARTS)",
        "2 * (query in CONTEXT_PARTS)",
        ATTENTION,
    ),
    Fault(
        "uniform heads not seen",
        "attention.py",
        "return self.total <= self.floor",
        "return self.total < 0 * self.floor",
        ATTENTION,
    ),
    Fault(
        "bootstrap without drawing",
        "attention.py",
        "chosen = torch.randint(contexts, (draws, contexts), generator=generator)",
        "chosen = torch.arange(contexts).expand(draws, contexts)",
        ATTENTION,
    ),
    Fault(
        "margin to itself",
        "verbs/shares.py",
        "margin = top[:, 0] - top[:, 1]",
        "margin = top[:, 0] - top[:, -1]",
        ATTENTION,
    ),
    Fault(
        "offsets mirrored",
        "score_shapes.py",
        "index.flatten(), summed.flatten(1)",
        "index.T.flatten(), summed.flatten(1)",
        ATTENTION,
    ),
    Fault(
        "Toeplitz without row means",
        "score_shapes.py",
        "gram = torch.diag(counts) -",
        "gram = torch.diag(counts) - 0 *",
        ATTENTION,
    ),
    Fault(
        "divergence reversed",
        "score_shapes.py",
        "p * (log_p - log_q)",
        "p * (log_q - log_p)",
        ATTENTION,
    ),
    Fault("total variation doubled", "score_shapes.py", ".sum(-1) / 2", ".sum(-1)", ATTENTION),
    Fault(
        "contrast with the token itself",
        "score_shapes.py",
        "apart = allowed & ~torch.eye",
        "apart = allowed | torch.eye",
        ATTENTION,
    ),
    Fault(
        "induction off by one",
        "head_types.py",
        "follows[:, :, 1:] = equal[:, :, :-1]",
        "follows[:, :, :-1] = equal[:, :, 1:]",
        TYPES,
    ),
    Fault(
        "a token duplicates itself",
        "head_types.py",
        "equal & (offset > 0)",
        "equal & (offset >= 0)",
        TYPES,
    ),
    Fault("previous token off by one", "head_types.py", "(offset == 1)", "(offset == 2)", TYPES),
    Fault(
        "the mean left in cvec",
        "verbs/sweep.py",
        "torch.mul(whole, scale, out=parts[2]).sub_(parts[0])",
        "torch.mul(whole, scale, out=parts[2])",
        SWEEP,
    ),
    Fault(
        "the score scale twice",
        "verbs/sweep.py",
        "layer.q, layer.scale, ",
        "layer.q, layer.scale**2, ",
        SWEEP,
    ),
    Fault(
        "positions off by one",
        "verbs/sweep.py",
        "pos = basis.pos_seen[row, :columns]",
        "pos = basis.pos_seen[row].roll(1, 0)[:columns]",
        SWEEP,
    ),
    Fault(
        "dropped mass of the wrong side",
        "verbs/sweep.py",
        "layer.pattern[:, :, self.drop :, : self.drop]",
        "layer.pattern[:, :, self.drop :, self.drop :]",
        SWEEP,
    ),
    Fault(
        "soft cap forgotten",
        "verbs/details.py",
        "if layer.softcap is not None:",
        "if False:",
        SWEEP,
    ),
    Fault("sinks forgotten", "verbs/details.py", "if layer.sinks is None:", "if True:", SWEEP),
    Fault(
        "nulls that keep positions",
        "verbs/details.py",
        "order[drop:] = drop +",
        "order[drop:] = order[drop:] + 0 *",
        SWEEP,
    ),
    Fault(
        "a term added, not removed",
        "interventions/terms.py",
        "whole - _term_score(parts, layer, heads, weight, alibi)",
        "whole + _term_score(parts, layer, heads, weight, alibi)",
        LIVE,
    ),
    Fault(
        "bias terms not kept",
        "interventions/terms.py",
        "weight[BIAS], weight[:, BIAS] = 1, 1",
        "weight[BIAS, BIAS] = 1",
        LIVE,
    ),
    Fault(
        "placebo of another energy",
        "interventions/terms.py",
        "return whole - other * (own / safe)",
        "return whole - other",
        LIVE,
    ),
    Fault(
        "edits on the wrong head",
        "interventions/live.py",
        "(slice(None),) * axis + (self.heads,)",
        "(slice(None),) * axis + ([h - 1 for h in self.heads],)",
        LIVE,
    ),
    Fault(
        "hooks left behind", "interventions/points.py", "self.handle.hook.remove()", "pass", LIVE
    ),
    Fault(
        "a patched query not noticed",
        "interventions/live.py",
        "if float(error) <= bound:",
        "if True:",
        BESIDE,
    ),
    Fault(
        "a mask not noticed", "interventions/points.py", "bool((mask == 0).any())", "False", BESIDE
    ),
    Fault(
        "the stream before a user's hooks",
        "interventions/live.py",
        'self._alone(self._read(n)), "last")',
        'self._alone(self._read(n)), "first")',
        BESIDE,
    ),
    Fault(
        "the edit after a user's hooks",
        "interventions/live.py",
        'self._alone(a), "first")',
        'self._alone(a), "last")',
        BESIDE,
    ),
    Fault(
        "no gradient through the stream",
        "adapters/layers.py",
        '"hook_resid_pre"], detach=verify)',
        '"hook_resid_pre"])',
        BESIDE,
    ),
    Fault(
        "projection of the mean too",
        "interventions/stream.py",
        "((h.double() - m) @ V) @ V.mT",
        "(h.double() @ V) @ V.mT",
        LIVE,
    ),
    Fault(
        "the first copy counted", "interventions/causal.py", "column > periods", "column > 0", LIVE
    ),
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
            raise SystemExit(
                f"{fault.name}: {fault.old!r} occurs {text.count(fault.old)} times in {fault.file}"
            )
        path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", fault.tests]
        environment = {
            **os.environ,
            "PYTHONPATH": str(copy),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return (
            subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, check=False
            ).returncode
            == 1
        )


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
