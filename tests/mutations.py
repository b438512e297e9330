"""``python -m tests.mutations [WORD ...]``: plant faults in a copy of the project, one at a time,
and see the tests catch every one (with words: those faults whose name has one of them). All of them
take long: a nightly command.

A fault is a package, the text to replace (which must occur exactly once in it, in whichever
module), its replacement, and the test file that has to fail.
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
    package: str
    old: str
    new: str
    tests: str

    def places(self, packages: Path) -> list[Path]:
        """The module that holds the text, once for every time that it does."""
        modules = sorted((packages / self.package).glob("*.py"))
        return [p for p in modules for _ in range(p.read_text("utf-8").count(self.old))]


BASIS = "tests/decomposition/test_position_context.py"
SUMS, TYPES, SWEEP, LEFT_OUT = (
    f"tests/scores/test_{n}.py" for n in ("sums", "head_types", "sweep", "leave_out")
)
ROTARY, PLANES = "tests/models/test_rotary.py", "tests/scores/test_planes.py"
TERMS, LIVE = (f"tests/interventions/test_{n}.py" for n in ("terms", "live_edits"))
UNSEEN = "tests/interventions/test_unseen_edits.py"
MOVED = "tests/models/test_moved_and_masked.py"
LISTS = "tests/interventions/test_hook_lists.py"
WRITERS, EDGES = "tests/models/test_writers.py", "tests/interventions/test_edges.py"
BY_WRITERS, LOGITS = "tests/scores/test_writers.py", "tests/scores/test_logits.py"
COMPOSITION = "tests/scores/test_composition.py"
LABELS = "tests/scores/test_labels.py"
FAULTS = (
    Fault(
        "a label by covariance alone",
        "scores",
        "clear = by_cs.clear & by_gs.clear & same & (by_cs.share > share_over)",
        "clear = by_cs.clear & (by_cs.share > share_over)",
        LABELS,
    ),
    Fault(
        "row 0 of every batch verified and no other",
        "scores",
        "return (last + 1 + int(torch.randint(rows - 1, (), generator=draws))) % rows",
        "return 0",
        SWEEP,
    ),
    Fault(
        "gain shares without a group of the basis by the whole basis",
        "scores",
        "both = torch.stack([sums.numerators, sums.gains])",
        "both = torch.stack([sums.numerators, sums.numerators])",
        LEFT_OUT,
    ),
    Fault(
        "a missing output bias",
        "models",
        'self.dense[f"mlp{layer}"] = mlp - block.b_out.to(h)',
        'self.dense[f"mlp{layer}"] = mlp - 2 * block.b_out.to(h)',
        WRITERS,
    ),
    Fault(
        "a wrong frozen scale behind attention",
        "models",
        "own.W, own.scale = norm.centre(own.W) * norm.gain.to(h), own.scale / scale",
        "own.W, own.scale = norm.centre(own.W) * norm.gain.to(h), own.scale / scale.mean()",
        WRITERS,
    ),
    Fault(
        "the embedding counted twice",
        "models",
        "found = dict(self.dense) | {CONSTANTS: self.constants}",
        'found = dict(self.dense) | {CONSTANTS: self.constants + self.dense["embed"]}',
        WRITERS,
    ),
    Fault(
        "a writer of the same layer included",
        "models",
        "            on_layer(seen, written[0])",
        "            written[0].extend(found)\n            on_layer(seen, written[0])",
        BY_WRITERS,
    ),
    Fault(
        "the source-independent write left in the heads",
        "models",
        "always = paid.unsqueeze(-1) * value",
        "always = 0 * paid.unsqueeze(-1) * value",
        WRITERS,
    ),
    Fault(
        "a turned key that keeps its rotation",
        "scores",
        "back = _adjoint(layer, which, whole)[..., pick, :] * frozen",
        "back = whole[..., pick, :] * frozen",
        BY_WRITERS,
    ),
    Fault(
        "a gain without its constants",
        "scores",
        'own = einsum(weight, constant[:, :, pick], "n b i h e, b i h e -> n h")',
        'own = 0 * einsum(weight, constant[:, :, pick], "n b i h e, b i h e -> n h")',
        BY_WRITERS,
    ),
    Fault(
        "another context of the same prompt",
        "scores",
        "z = (heads.z * heads.scale[..., None, None]).roll(shift, 0)",
        "z = (heads.z * heads.scale[..., None, None]).roll(0, 0)",
        COMPOSITION,
    ),
    Fault(
        "a source with its constants",
        "scores",
        "value = (layer.v - layer.v_constant)[0].double()",
        "value = layer.v[0].double()",
        LOGITS,
    ),
    Fault(
        "a score that is not centred",
        "scores",
        "(k[:, source] - k[:, seen].mean(1)).mT",
        "k[:, source].mT",
        LOGITS,
    ),
    Fault(
        "an edge with the running scale",
        "interventions",
        "whole = mapped * clean.scale[which].unsqueeze(-1) + clean.constant[which]",
        "whole = mapped / layer.norm.scale(layer.h + change)[..., None, None]"
        " + clean.constant[which]",
        EDGES,
    ),
    Fault(
        "the sink removed with the edge",
        "interventions",
        "change[:, :drop] = 0",
        "pass",
        EDGES,
    ),
    Fault(
        "controls of values ranked by keys",
        "interventions",
        "cs = table.cs[:, SIDES.index(side)]",
        'cs = table.cs[:, SIDES.index("key")]',
        EDGES,
    ),
    Fault(
        "an edge alone without the edge",
        "interventions",
        "change = written - clean.h if keep else -written",
        "change = -clean.h if keep else -written",
        EDGES,
    ),
    Fault(
        "the error of the features dropped",
        "scores",
        "dense = torch.stack([error, scale",
        "dense = torch.stack([0 * error, scale",
        "tests/scores/test_features.py",
    ),
    Fault(
        "a bias that is not rescaled with the stream",
        "scores",
        "return scale * (activations @ self.decoder.to(h) + self.bias.to(h)) + shift",
        "return scale * (activations @ self.decoder.to(h)) + self.bias.to(h) + shift",
        "tests/scores/test_features.py",
    ),
    Fault(
        "values that stay under an edge",
        "models",
        "        if self.edit.values is not None:\n            out =",
        "        if self.edit.values is None:\n            out =",
        EDGES,
    ),
    Fault(
        "a dropped position",
        "decomposition",
        "block.copy_(h[:, low:high])",
        "block.copy_(h[:, low:high])[:, -1] = 0",
        BASIS,
    ),
    Fault(
        "a wrong divisor in pos",
        "decomposition",
        "self.moments.sums.sum(0) / self.contexts -",
        "self.moments.sums.sum(0) / (self.contexts + 1) -",
        BASIS,
    ),
    Fault(
        "the mean left in pos",
        "decomposition",
        "/ self.contexts - self.mean.unsqueeze(1)",
        "/ self.contexts",
        BASIS,
    ),
    Fault(
        "the mean left in ctx",
        "decomposition",
        "self.context_means - self.mean.unsqueeze(1)",
        "self.context_means",
        BASIS,
    ),
    Fault(
        "a batch counted twice",
        "decomposition",
        "self.counts += torch.bincount(",
        "self.counts += 2 * torch.bincount(",
        BASIS,
    ),
    Fault(
        "float32 sums",
        "decomposition",
        "block.copy_(h[:, low:high])",
        "block.copy_(h[:, low:high].float())",
        BASIS,
    ),
    Fault(
        "shift not undone",
        "decomposition",
        "+ torch.outer(excess, delta)",
        "+ 0 * torch.outer(excess, delta)",
        BASIS,
    ),
    Fault(
        "second moments not centred on the shift",
        "decomposition",
        "self.shift[state] = mean.float()",
        "pass",
        BASIS,
    ),
    Fault(
        "window start off by one",
        "decomposition",
        "if start <= low < end:",
        "if start < low < end:",
        BASIS,
    ),
    Fault(
        "the last group of a batch left out",
        "decomposition",
        "slice(first, last + 1)",
        "slice(first, max(last, first + 1))",
        BASIS,
    ),
    Fault(
        "groups swapped for batches",
        "decomposition",
        "torch.bucketize(contexts, ",
        "torch.bucketize(contexts - self.done, ",
        BASIS,
    ),
    Fault(
        "the caller's rows kept",
        "corpus",
        "return ids.to(torch.int64, copy=True)",
        "return ids.to(torch.int64)",
        "tests/corpus/test_sources.py",
    ),
    Fault(
        "a text cut anywhere",
        "corpus",
        "return at - before + match.start()",
        "return at",
        "tests/corpus/test_texts.py",
    ),
    Fault(
        "a window drawn twice",
        "corpus",
        "again = (len(rows),) if self._replace else ()",
        "again = (len(rows),)",
        "tests/corpus/test_texts.py",
    ),
    Fault(
        "a file that changed",
        "base",
        "if _stamp(file) != self._stamp:",
        "if False:",
        "tests/corpus/test_texts.py",
    ),
    Fault(
        "context mean over all positions",
        "decomposition",
        "means = whole / (end - start)",
        "means = whole / h.shape[1]",
        BASIS,
    ),
    Fault(
        "sink position in the second moments",
        "decomposition",
        "self._centred(state, h[:, start:end])",
        "self._centred(state, h)",
        BASIS,
    ),
    Fault(
        "context share not scaled by T",
        "decomposition",
        "above_rounding(t * (m.context_squares",
        "above_rounding((m.context_squares",
        BASIS,
    ),
    Fault(
        "no correction for sampling noise",
        "decomposition",
        "(pos - noise).clamp",
        "pos.clamp",
        BASIS,
    ),
    Fault(
        "textbook context vector",
        "decomposition",
        "ctx = reduce(cvec, ",
        "ctx = reduce(h.double() - mean[..., None, None, :], ",
        BASIS,
    ),
    Fault(
        "last batch dropped",
        "decomposition",
        "for start in range(0, h.shape[1], batch):",
        "for start in range(0, h.shape[1] - batch + 1, batch):",
        BASIS,
    ),
    Fault(
        "reservoir by arrival",
        "decomposition",
        "kept = sorted(known + drawn)[: self.size]",
        "kept = (known + drawn)[: self.size]",
        BASIS,
    ),
    Fault("NaN let through", "decomposition", "if not good[i]]", "if False]", BASIS),
    Fault(
        "row mean over masked keys too",
        "base",
        "allowed.sum(-1, keepdim=True).clamp(min=1)",
        "allowed.shape[-1]",
        SUMS,
    ),
    Fault(
        "scores not centred",
        "scores",
        "known.flatten(0, 1).mT, beta=-1)",
        "known.flatten(0, 1).mT, beta=0)",
        SUMS,
    ),
    Fault(
        "query and key part swapped",
        "scores",
        "(rows @ weighted.mT)",
        "(weighted @ rows.mT)",
        SUMS,
    ),
    Fault(
        "energies not centred", "scores", "return energy - (sums", "return energy - 0 * (sums", SUMS
    ),
    Fault(
        "earlier keys forgotten", "scores", "else self.squares.add_(squares)", "else squares", SUMS
    ),
    Fault("the bias against itself", "scores", "(weight * added).sum", "(added * added).sum", SUMS),
    Fault(
        "groups by the query alone",
        "scores",
        "(query in CONTEXT_PARTS) + (key in CONTEXT_PARTS)",
        "2 * (query in CONTEXT_PARTS)",
        SUMS,
    ),
    Fault(
        "uniform heads not seen",
        "scores",
        "return self.total <= self.floor",
        "return self.total < 0 * self.floor",
        SUMS,
    ),
    Fault(
        "a basis with the context's own group",
        "scores",
        "without(self.share, {own, left_out} - {-1})",
        "without(self.share, {left_out} - {-1})",
        LEFT_OUT,
    ),
    Fault(
        "contexts of a group left out of the basis alone",
        "scores",
        "samples = [self._shares(g, contexts=together)",
        "samples = [self._shares(g)",
        LEFT_OUT,
    ),
    Fault(
        "left out groups still in cvec",
        "scores",
        "(torch.ones_like(both[0]) - both.sum(0))",
        "(both.sum(0) * 0 + (both[0] + both[1] == 0))",
        LEFT_OUT,
    ),
    Fault(
        "labels without their interval",
        "scores",
        "clear if certain is None else clear & certain",
        "clear",
        LEFT_OUT,
    ),
    Fault(
        "contexts of the basis that do not turn with it",
        "scores",
        "table = pairs.unsqueeze(1) + known *",
        "table = pairs.unsqueeze(1) + 0 *",
        LEFT_OUT,
    ),
    Fault(
        "p-value without the data itself",
        "scores",
        "p = (1 + (cs[:, 1:] >= position).sum(1)).double() / (1 + DRAWS)",
        "p = (cs[:, 1:] >= position).sum(1).double() / DRAWS",
        LEFT_OUT,
    ),
    Fault(
        "a jackknife without its correction",
        "base",
        "value = value + corrected - whole",
        "value = value",
        LEFT_OUT,
    ),
    Fault(
        "normal quantiles",
        "base",
        "stats.t.ppf((1 + level) / 2, freedom.double().numpy())",
        "stats.norm.ppf((1 + level) / 2) + 0 * freedom.double().numpy()",
        LEFT_OUT,
    ),
    Fault(
        "margin to itself",
        "scores",
        "margin = top[:, 0] - top[:, 1]",
        "margin = top[:, 0] - top[:, -1]",
        SUMS,
    ),
    Fault(
        "offsets mirrored",
        "scores",
        "places.flatten(), summed",
        "places.T.flatten(), summed",
        SUMS,
    ),
    Fault(
        "Toeplitz without row means",
        "scores",
        "torch.diag(counts) - dummies",
        "torch.diag(counts) - 0 * dummies",
        SUMS,
    ),
    Fault(
        "divergence reversed",
        "scores",
        ".mul_(self.p).sum(-1) - q.amax(-1).log()",
        ".mul_(-q).sum(-1) + q.amax(-1).log()",
        SUMS,
    ),
    Fault("total variation doubled", "scores", ".sum(-1) / 2", ".sum(-1)", SUMS),
    Fault(
        "contrast with the token itself",
        "scores",
        "apart = allowed & ~torch.eye",
        "apart = allowed | torch.eye",
        SUMS,
    ),
    Fault(
        "induction off by one",
        "scores",
        "follows[:, :, 1:] = equal[:, :, :-1]",
        "follows[:, :, :-1] = equal[:, :, 1:]",
        TYPES,
    ),
    Fault(
        "a token duplicates itself",
        "scores",
        "equal & (offset > 0)",
        "equal & (offset >= 0)",
        TYPES,
    ),
    Fault("previous token off by one", "scores", "(offset == 1)", "(offset == 2)", TYPES),
    Fault(
        "the mean left in cvec",
        "scores",
        "out=out[2]).sub_(out[0])",
        "out=out[2])",
        SWEEP,
    ),
    Fault(
        "the score scale twice",
        "scores",
        "layer.q, layer.scale)",
        "layer.q, layer.scale**2)",
        SWEEP,
    ),
    Fault(
        "positions off by one",
        "scores",
        ".expand_as(pos), pos]).to(layer.h)",
        ".expand_as(pos), pos.roll(1, 0)]).to(layer.h)",
        SWEEP,
    ),
    Fault(
        "dropped mass of the wrong side",
        "scores",
        "pattern[..., drop:, :drop]",
        "pattern[..., drop:, drop:]",
        SWEEP,
    ),
    Fault("soft cap forgotten", "models", "if self.softcap is not None:", "if False:", SWEEP),
    Fault("sinks forgotten", "models", "if self.sinks is None:", "if True:", SWEEP),
    Fault(
        "nulls that keep positions",
        "scores",
        "apart = r - (r @ truth)",
        "apart = r - 0 * (r @ truth)",
        LEFT_OUT,
    ),
    Fault(
        "a term added, not removed",
        "interventions",
        "whole - _term_score(parts, layer, heads, weight, alibi)",
        "whole + _term_score(parts, layer, heads, weight, alibi)",
        TERMS,
    ),
    Fault(
        "bias terms not kept",
        "interventions",
        "weight[BIAS], weight[:, BIAS] = 1, 1",
        "weight[BIAS, BIAS] = 1",
        TERMS,
    ),
    Fault(
        "a swap that removes only",
        "interventions",
        "return whole - term + other",
        "return whole - term",
        TERMS,
    ),
    Fault(
        "a shrinking over all cells",
        "interventions",
        "row_center(x[..., drop:, drop:].double(), allowed)",
        "row_center(x.double(), layer.allowed.to(whole.device))",
        TERMS,
    ),
    Fault(
        "effects paired with the wrong row",
        "interventions",
        "values[self._row(condition)] - values[self._row(against)]",
        "values[self._row(condition)] - values[self._row(against)].flip(0)",
        TERMS,
    ),
    Fault(
        "edits on the wrong head",
        "models",
        "(slice(None),) * axis + (self.heads,)",
        "(slice(None),) * axis + ([h - 1 for h in self.heads],)",
        TERMS,
    ),
    Fault("hooks left behind", "models", "take_away(self.point, self.handle)", "pass", TERMS),
    Fault("a patched query not noticed", "models", "if float(error) <= bound:", "if True:", LIVE),
    Fault("a mask not noticed", "models", "bool((mask == 0).any())", "False", LIVE),
    Fault(
        "the stream before a user's hooks",
        "models",
        'self._read(n), "last")',
        'self._read(n), "first")',
        LIVE,
    ),
    Fault(
        "the edit after a user's hooks",
        "models",
        '(n, a, "first")',
        '(n, a, "last")',
        LIVE,
    ),
    Fault(
        "no gradient through the stream",
        "models",
        '.hook_resid_pre"], detach=detach)',
        '.hook_resid_pre"])',
        LIVE,
    ),
    Fault(
        "projection of the mean too",
        "interventions",
        "((h.double() - m) @ V) @ V.mT",
        "(h.double() @ V) @ V.mT",
        TERMS,
    ),
    Fault(
        "the other pairing",
        "models",
        'if pairing == "half" else index // 2',
        'if pairing != "half" else index // 2',
        ROTARY,
    ),
    Fault(
        "a scaled base ignored",
        "models",
        'theta = theta if rotation.pairing == "half" else theta[::2]',
        "theta = 10000.0 ** (-torch.arange(d_rot // 2, dtype=torch.float64) * 2 / d_rot)",
        ROTARY,
    ),
    Fault(
        "planes in the wrong order",
        "models",
        "torch.cat([theta[turned], theta.new_tensor(rest)])",
        "torch.cat([theta[turned].flip(0), theta.new_tensor(rest)])",
        ROTARY,
    ),
    Fault(
        "the angle with the wrong sign",
        "models",
        "phase = torch.atan2(sin.double(), cos.double())",
        "phase = torch.atan2(-sin.double(), cos.double())",
        ROTARY,
    ),
    Fault(
        "a kernel of j - i",
        "scores",
        "both = torch.stack([q * k, quarter * k])",
        "both = torch.stack([q * k, -quarter * k])",
        PLANES,
    ),
    Fault(
        "planes of another layer's order in the sums",
        "scores",
        "out.index_add_(2, planes.plane.to(out.device), each)",
        "out.index_add_(2, planes.plane.flip(0).to(out.device), each)",
        PLANES,
    ),
    Fault(
        "wavelengths without the turn",
        "scores",
        "return 2 * math.pi / self.theta.abs()",
        "return 1 / self.theta.abs()",
        PLANES,
    ),
    Fault(
        "the offset share of the same prompts",
        "scores",
        "beta = (whole.sums - group.sums)[:, used] @ inverse",
        "beta = whole.sums[:, used] @ inverse * (len(groups) - 1) / len(groups)",
        PLANES,
    ),
    Fault(
        "other planes removed than said",
        "interventions",
        "return found.coordinates(chosen).to(layer.h.device)",
        "return ~found.coordinates(chosen).to(layer.h.device)",
        "tests/interventions/test_planes.py",
    ),
    Fault(
        "a list that reads before others",
        "models",
        "order.move_to_end(handle.hook.id)",
        "order.move_to_end(handle.hook.id, last=False)",
        LISTS,
    ),
    Fault(
        "a list that takes edited heads",
        "models",
        "require_free(self.heads, taken)",
        "require_free((), taken)",
        LISTS,
    ),
    Fault(
        "a list that takes any tokens",
        "models",
        "same = self.shown == self.embed(ids.to(self.shown.device))",
        "same = self.shown == self.shown",
        LISTS,
    ),
    Fault(
        "a list that takes any positions",
        "models",
        'self.running.named = {"position_ids": ids}',
        "self.running.named = {}",
        LISTS,
    ),
    Fault("the first copy counted", "interventions", "column > periods", "column > 0", TERMS),
    Fault(
        "one pass for all threads",
        "models",
        "class _Running(threading.local):",
        "class _Running:",
        UNSEEN,
    ),
    Fault("hooks of all threads", "models", "if get_ident() != thread:", "if False:", UNSEEN),
    Fault("an edit nobody saw", "models", "self.passes > 0 or self.reached,", "True,", UNSEEN),
    Fault("a copy that is edited", "models", "module is self.point,", "True,", UNSEEN),
    Fault("a probe of another device", "models", "(mark, parameter.device,", "(mark,", MOVED),
    Fault("NaN let through", "models", "if bool(value.isnan())", "if False", MOVED),
    Fault(
        "a saved mask value as a score",
        "models",
        "seen & (scores != torch.tensor(ignore).to(scores))",
        "seen",
        MOVED,
    ),
)


def caught(fault: Fault) -> bool:
    """Plant one fault in a copy of the project and say whether its tests fail."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("tl_geometry", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        places = fault.places(copy / "tl_geometry")
        if len(places) != 1:
            raise SystemExit(f"{fault.name}: {fault.old!r} occurs {len(places)} times")
        text = places[0].read_text(encoding="utf-8")
        places[0].write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", fault.tests]
        environment = {
            **os.environ,
            "PYTHONPATH": str(copy),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False)
        return done.returncode == 1


def main(words: list[str]) -> int:
    """Plant the faults; return how many were missed."""
    chosen = [f for f in FAULTS if not words or any(word in f.name for word in words)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for fault, seen in zip(chosen, found := list(pool.map(caught, chosen)), strict=True):
            sys.stdout.write(f"{'caught' if seen else 'MISSED'}: {fault.name} ({fault.package})\n")
    sys.stdout.write(f"{sum(found)} of {len(chosen)} planted faults caught\n")
    return len(chosen) - sum(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
