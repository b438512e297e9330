"""Command lines that are refused: of ``fit``, ``report``, ``trace`` and ``check``."""

from __future__ import annotations

from tests.tables.refusals.changed_models import OWN_CODE, PICKLED
from tests.tables.refusals.row import Command

TEXT = {"a.txt": b"def f(x):\n    return x\n" * 300}
MINE = b"mine, and nothing to do with this library"


def fit(*words: str) -> tuple[str, ...]:
    return ("fit", "--corpus", "a.txt", "--length", "16", "--contexts", "4", *words)


def trace(*words: str) -> tuple[str, ...]:
    return ("trace", "x = 1", "--answer", " x", *words)


def _with(
    name: str, words: tuple[str, ...], what: str, files: dict[str, bytes] | None = None
) -> Command:
    return Command(name=name, words=words, what=what, files=TEXT if files is None else files)


FIT = ("fit", "--corpus", "a.txt")
COMMANDS = (
    _with("an unknown command", ("fitt",), "fitt"),
    _with("an unknown option", fit("--nothing"), "nothing"),
    _with("contexts 0", fit("--contexts", "0"), "contexts"),
    _with("contexts beyond the corpus", fit("--contexts", "9999"), "contexts|windows"),
    _with("length 1", fit("--length", "1"), "length"),
    _with("length beyond n_ctx", fit("--length", "4096"), "length|positions|tokens"),
    _with("a shard of none", fit("--shard", "0/2"), "shard"),
    _with("a shard beyond the last", fit("--shard", "3/2"), "shard"),
    _with("a batch of none", fit("--batch-size", "0"), "batch"),
    _with("a seed below zero", fit("--seed", "-1"), "seed"),
    _with("a seed of a report below zero", ("report", "--seed", "-1"), "seed"),
    _with("a file twice", (*FIT, "--corpus", "a.txt"), "corpus"),
    _with("a corpus that is not there", ("fit", "--corpus", "no.txt"), "no.txt"),
    _with("a corpus that is a folder", ("fit", "--corpus", "."), "corpus"),
    _with("an empty corpus", FIT, "text|empty", {"a.txt": b""}),
    _with("a binary corpus", FIT, "text", {"a.txt": b"abc\0def" * 500}),
    _with("a corpus in Latin-1", FIT, "UTF-8|encoding", {"a.txt": b"caf\xe9 " * 500}),
    _with("a device of no name", fit("--device", "toaster"), "device"),
    _with("a dtype of no name", fit("--dtype", "float7"), "dtype"),
    _with("a basis into a folder", fit("--out", "."), "out"),
    _with("a basis below a file", fit("--out", "a.txt/b.safetensors"), "out|a.txt"),
    _with("a basis over a file of the user", fit(), "--force", {**TEXT, "basis.safetensors": MINE}),
    _with("a report into a file", ("report", "--out", "a.txt"), "out|a.txt"),
    _with("a report over one's file", ("report", "--out", "."), "--force", {"report.html": MINE}),
    _with("an answer of many tokens", trace("--answer", "x y z"), "token"),
    _with("no answer", ("trace", "x = 1"), "answer"),
    _with("no prompt", ("trace", "--answer", "x"), "PROMPT|prompt|WORDS"),
    _with("three texts", trace("y = 2", "z = 3"), "PROMPT"),
    _with("a device that no machine has", trace("--device", "cuda:99"), "device"),
    _with("a position beyond the prompt", trace("--position", "99"), "position"),
    _with("nothing kept", trace("--keep", "0"), "keep"),
    _with("MLPs of no kind", trace("--mlp", "relu"), "mlp"),
    _with("a basis that is not there", trace("--basis", "no.safetensors"), "basis|no.safetensors"),
    _with("a trace into a folder that is not empty", trace("--out", "."), "--force"),
    _with("sections of no name", ("report", "--sections", "heads,bodies"), "sections"),
    _with("a model that is not there", ("check", "gpt-99"), "gpt-99|name"),
    _with("a folder without a model", ("check", "."), "config.json"),
    _with("a pickled model", ("check", "."), "safetensors", PICKLED),
    _with("a model with its own code", ("check", "."), "code", OWN_CODE),
    _with("a config that is no JSON", ("check", "."), "config.json|JSON", {"config.json": b"{"}),
)
TAKEN = {
    "fit": fit("--out", "b.safetensors", "--quiet"),
    "trace": trace("--out", "found", "--keep", "0.3"),
    "check": ("check",),
}
"""The same commands with right words: they end with exit code 0. Whole reports are made in
``tests/laws``."""
