"""How does the format of training text shape the geometry of position? Small transformers are
trained on other formats and measured during training (Song & Zhong 2023, section 5).
``tl-geometry experiment`` calls :func:`experiment`.

- ``randomisation`` trains on text that is partly random, ``addition`` on sums, ``nanogpt`` on
  characters.
- Each trains from scratch (:mod:`tl_geometry.zoo.trainer`) and returns an
  :class:`~tl_geometry.papers.Outcome`: its findings beside what was expected or published.
- Scales are ``"smoke"`` (seconds; too short to mean anything), ``"cpu"`` (minutes) and ``"paper"``
  (published settings).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tl_geometry.base.errors import check_seed, choice, fail, require
from tl_geometry.base.run_files import LOCK, WRITER, check_folder, lock, write_record
from tl_geometry.corpus.text_files import read_texts
from tl_geometry.papers import arithmetic, characters, random_tokens
from tl_geometry.papers.contents import EXPERIMENT_FILES, EXPERIMENTS, SCALES
from tl_geometry.papers.outcome import Outcome

MODULES: dict[str, Any] = {
    "randomisation": random_tokens,
    "addition": arithmetic,
    "nanogpt": characters,
}
"""The module of each experiment, by the name of its function."""


def experiment(
    name: str,
    *,
    scale: str = "cpu",
    out: Path | None = None,
    seeds: Sequence[int] = (0,),
    texts: Sequence[Path] | None = None,
    encoding: str = "utf-8",
    changes: Sequence[str] | None = None,
    device: str = "cpu",
    progress: bool = True,
    force: bool = False,
    command: Sequence[str] = (),
) -> Outcome:
    """Run an experiment by its name, write it to ``out``, and return it. The command line calls
    this.

    ``changes`` are settings that differ from those of the scale, such as ``"context=512"``.
    ``texts`` are files to train on (addition makes its own lines). ``out`` is refused if it holds
    another experiment, a report, or files that no run of tl_geometry wrote (``force`` overwrites
    these files), or if another run is writing to it."""
    module = MODULES[choice(name, EXPERIMENTS, "experiment")]
    setup = module.SETUPS[choice(scale, SCALES, "--scale")].changed(_pairs(changes or ()))
    if texts and name == "addition":
        fail("--text", expected="none for addition, which makes its own", got=len(texts))
    require(len(seeds) > 0, "--seeds", expected="at least one", got="none")
    for seed in seeds:
        check_seed(seed, "--seeds")
    options: dict[str, Any] = {"seeds": tuple(seeds), "out": out}
    options |= {"device": device, "progress": progress}
    if texts:
        options["texts"], names = read_texts(texts, encoding, "--text")
        further = f" and {len(names) - 3} more" if len(names) > 3 else ""
        options["name"] = f"{', '.join(names[:3])}{further}"
    if out is None:
        return getattr(module, name)(setup, **options)
    out.mkdir(parents=True, exist_ok=True)
    with lock(out / LOCK):
        if not check_folder(out, name, EXPERIMENT_FILES, force=force):
            # a folder without a record: write one now, so that a stopped run can be resumed here
            write_record(out, {"written_by": WRITER, "experiment": name})
        outcome: Outcome = getattr(module, name)(setup, **options)
        outcome.save(out, command=command, force=force)
    return outcome


def _pairs(changes: Sequence[str]) -> dict[str, str]:
    """``["context=512"]`` as ``{"context": "512"}``."""
    without_equals = [change for change in changes if "=" not in change]
    require(not without_equals, "--set", expected="NAME=VALUE", got=", ".join(without_equals))
    return {
        name.strip(): value.strip() for name, value in (change.split("=", 1) for change in changes)
    }
