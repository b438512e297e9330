"""Records of version 1's answers: numbers that a redesign may not change beyond rounding.

``python -m tests.lib.recording [--accept] [KIND ...]`` compares what the subjects answer now with
``tests/records/KIND.npz`` and prints every difference (key, old, new); with ``--accept`` it writes
the new answers, to be read as a diff and given with a reason.

A key is ``subject/variant/quantity``. Of an array are kept: shape, sum, sum of absolutes, one fixed
projection and the largest absolute (float64), the numbers of NaN and infinities, and up to 48
evenly spaced values (float32). Strings are kept as they are, long lists of them by their digest.

Numbers must agree to 1e-5 of the array's largest absolute, the rounding of float32 paths; sums over
n entries to ``sqrt(n)`` times that. A row may name a looser tolerance, with its reason.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

RECORDS = Path(__file__).resolve().parents[1] / "records"
TOLERANCE = 1e-5
KEPT = 48
"""Values of an array that are kept: enough that a number that moves alone is often among them."""
LOOSER = {"embedded": 3.0, "smollm2": 10.0}
"""Kinds whose trained weights have outlier coordinates, so that rounding is larger: by how much."""
LONGEST = 64
"""Longer lists of strings are kept as a digest."""


@dataclass(frozen=True)
class Numbers:
    """What is kept of an array. ``sums`` are sum, sum of absolutes, projection, largest absolute,
    over finite entries; ``odd`` counts NaN, inf and -inf."""

    shape: tuple[int, ...]
    sums: tuple[float, float, float, float]
    odd: tuple[int, int, int]
    values: np.ndarray

    @staticmethod
    def of(array: np.ndarray) -> Numbers:
        flat = np.asarray(array, dtype=np.float64).ravel()
        nan, inf, minus = (int(f(flat).sum()) for f in (np.isnan, np.isposinf, np.isneginf))
        finite = np.where(np.isfinite(flat), flat, 0.0)
        absolute = np.abs(finite)
        weights = np.cos(1.0 + np.arange(flat.size))
        largest = float(absolute.max()) if flat.size else 0.0
        sums = (float(finite.sum()), float(absolute.sum()), float(finite @ weights), largest)
        return Numbers(
            array.shape, sums, (nan, inf, minus), flat[_places(flat.size)].astype(np.float32)
        )

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=int))

    def differs(self, new: Numbers, tolerance: float) -> str | None:
        """How another array differs, if it does."""
        if (self.shape, self.odd) != (new.shape, new.odd):
            return f"shape {self.shape} with {self.odd} NaN, inf, -inf"
        if not np.array_equal(np.isfinite(self.values), np.isfinite(new.values)):
            return "NaN or infinities elsewhere"
        allowed = tolerance * self.sums[3]
        finite = np.isfinite(self.values)
        gap = np.abs(self.values[finite].astype(np.float64) - new.values[finite])
        # a kept value is itself rounded to float32
        worst = float(gap.max(initial=0.0)) - 1.2e-7 * self.sums[3]
        off = [worst, *(abs(a - b) / self.size**0.5 for a, b in zip(self.sums[:3], new.sums[:3]))]
        off.append(abs(self.sums[3] - new.sums[3]))
        if max(off) <= allowed:
            return None
        share = max(off) / self.sums[3] if self.sums[3] else float("inf")
        return f"off by {share:.1e} of its largest value, {tolerance:.0e} allowed"

    def __str__(self) -> str:
        shown = ", ".join(f"{v:.6g}" for v in self.values[:4])
        more = ", ..." if len(self.values) > 4 else ""
        return f"{list(self.shape)} sum {self.sums[0]:.8g} [{shown}{more}]"


Entry = Numbers | str | tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """A key whose old and new entries differ; ``None`` where there is none."""

    key: str
    old: Entry | None
    new: Entry | None
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {self.why}\n    old: {_shown(self.old)}\n    new: {_shown(self.new)}"


@cache
def _places(size: int) -> np.ndarray:
    return np.unique(np.linspace(0, size - 1, min(size, KEPT)).round().astype(int))


def _shown(entry: Entry | None) -> str:
    return "none" if entry is None else str(entry)[:200]


def entry_of(answer: Any) -> Entry:
    """What is kept of an answer (:func:`tests.lib.subjects.row.plain`)."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, list):
        if len(answer) <= LONGEST:
            return tuple(answer)
        digest = hashlib.sha256("\n".join(answer).encode()).hexdigest()[:24]
        return (f"{len(answer)} strings, sha256 {digest}", answer[0], answer[-1])
    return Numbers.of(answer)


def compare(
    old: Mapping[str, Entry], new: Mapping[str, Entry], tolerances: Mapping[str, float] = {}
) -> list[Difference]:
    """Differences of two records, by key; a key may have a tolerance of its own."""
    return list(_differences(old, new, tolerances))


def _differences(
    old: Mapping[str, Entry], new: Mapping[str, Entry], tolerances: Mapping[str, float]
) -> Iterator[Difference]:
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Numbers) and isinstance(b, Numbers):
            if why := a.differs(b, tolerances.get(key, TOLERANCE)):
                yield Difference(key, a, b, why)
        elif a != b:
            words = "new" if a is None else "gone" if b is None else "other words"
            yield Difference(key, a, b, words)


def store(kind: str, entries: Mapping[str, Entry], folder: Path = RECORDS) -> Path:
    """Write the record of a kind of model."""
    numbers = {k: v for k, v in sorted(entries.items()) if isinstance(v, Numbers)}
    texts = {k: v for k, v in sorted(entries.items()) if not isinstance(v, Numbers)}
    shapes = [[*n.shape] for n in numbers.values()]
    about = {"keys": list(numbers), "shapes": shapes, "odd": [n.odd for n in numbers.values()]}
    folder.mkdir(exist_ok=True)
    path = folder / f"{kind}.npz"
    np.savez_compressed(
        path,
        about=np.array(json.dumps(about | {"texts": texts}, ensure_ascii=False)),
        sums=np.array([n.sums for n in numbers.values()]).T,
        values=np.concatenate([n.values for n in numbers.values()]),
    )
    return path


@cache
def load(kind: str, folder: Path = RECORDS) -> dict[str, Entry]:
    """The record of a kind of model, read once."""
    with np.load(folder / f"{kind}.npz", allow_pickle=False) as file:
        about, sums, values = json.loads(str(file["about"])), file["sums"], file["values"]
    entries: dict[str, Entry] = {}
    for key, text in about["texts"].items():
        entries[key] = text if isinstance(text, str) else tuple(text)
    start = 0
    for i, key in enumerate(about["keys"]):
        shape = tuple(about["shapes"][i])
        stop = start + len(_places(int(np.prod(shape, dtype=int))))
        odd = tuple(about["odd"][i])
        entries[key] = Numbers(shape, tuple(sums[:, i].tolist()), odd, values[start:stop])
        start = stop
    return entries


def keyed(name: str, variant: str, answers: Mapping[str, Any]) -> dict[str, Entry]:
    """The entries of one subject."""
    return {f"{name}/{variant}/{q}": entry_of(value) for q, value in answers.items()}


def of_subject(kind: str, name: str, variant: str) -> dict[str, Entry]:
    """The entries of a subject, as it answers now; of two kinds also what results say of
    themselves, without what machines and versions change."""
    from tests.lib.subjects import called
    from tests.lib.subjects.row import results_in

    result, answers, _ = called(kind, name, variant)
    said = []
    for each in results_in(result) if kind in ("gpt2", "llama") else ():
        p = each.provenance
        where = (p.corpus, p.token_hash, p.has_bos, p.window, p.contexts, p.normalized)
        flags = (flag for flag in p.flags if "transformer_lens" not in flag)
        about = (type(each).__name__, *where, p.preset, p.seed, *p.sources, *flags)
        columns = " ".join(map(str, each.columns()))
        said.append("; ".join(map(str, (*about, getattr(each, "chance", ""), columns))))
    return keyed(name, variant, answers | ({"said": said} if said else {}))


def record(kind: str) -> dict[str, Entry]:
    """The entries of all subjects of a kind."""
    from tests.lib.subjects import cases

    each = (of_subject(kind, subject.name, variant) for subject, variant in cases(kind))
    return {key: entry for entries in each for key, entry in entries.items()}


def tolerances(kind: str, keys: Iterable[str]) -> dict[str, float]:
    """The tolerance of each key: the usual one, or that which its row asks for."""
    from tests.lib.subjects import SUBJECTS
    from tests.lib.subjects.row import match

    found = {}
    for key in keys:
        name, _, rest = key.partition("/")
        own = match(SUBJECTS[name].tolerance, rest) if name in SUBJECTS else None
        found[key] = (own[0] if own else TOLERANCE) * LOOSER.get(kind, 1.0)
    return found


def changes(kind: str) -> list[Difference]:
    """How the answers of a kind differ from its record."""
    new = record(kind)
    old = load(kind) if (RECORDS / f"{kind}.npz").exists() else {}
    return compare(old, new, tolerances(kind, new))


def accept(kinds: Sequence[str]) -> None:
    """Renew the records of some kinds, and print what changes."""
    for kind in kinds:
        _print(kind, changes(kind))
        store(kind, record(kind))


def _print(kind: str, differences: Sequence[Difference]) -> None:
    sys.stdout.write(f"{kind}: {len(differences)} differences\n")
    for difference in differences:
        sys.stdout.write(f"  {difference}\n")


def main(arguments: Sequence[str]) -> int:
    """Compare, or with ``--accept`` renew; 1 where something differs and was not accepted."""
    from tests.lib.worlds import KINDS

    renew = "--accept" in arguments
    kinds = [a for a in arguments if a != "--accept"] or KINDS
    if renew:
        from tests.tables import test_recorded_signatures

        test_recorded_signatures.accept()
        accept(kinds)
        return 0
    found = {kind: changes(kind) for kind in kinds}
    for kind, differences in found.items():
        _print(kind, differences)
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
