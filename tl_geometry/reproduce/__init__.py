"""Published settings and tables as data, and our numbers beside them: :func:`song_zhong` for Song & Zhong 2023, Tables 1 to 5."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tl_geometry._check import choice, require
from tl_geometry.reproduce.lines_of_thought import sarfati
from tl_geometry.reproduce.protocol import Settings, causal_attention, settings_for
from tl_geometry.reproduce.tables import Reproduction, loaded, published_tables, song_zhong
from tl_geometry.reproduce.topics import topic_bases, topic_windows
from tl_geometry.results import Result
from tl_geometry.zoo.corpus import held_out_documents


def run(
    work: str, *, model: str | None = None, corpus: Sequence[Path] | None = None, row: str | None = None, progress: bool = True
) -> Result:
    """Run the published settings of a work by its name, ``"song-zhong"`` or ``"lines-of-thought"``: what the command line calls."""
    choice(work, ("song-zhong", "lines-of-thought"), "work")
    paths = None if corpus is None else list(corpus)
    if work == "song-zhong":
        return song_zhong(model, paths, row=row, progress=progress)
    missing = [str(p) for p in paths or () if not p.is_file()]
    require(not missing, "--corpus", expected="existing text files", got=", ".join(missing))
    texts = [p.read_text(encoding="utf-8", errors="replace") for p in paths] if paths else list(held_out_documents().texts)
    known = find_spec("sklearn") is not None  # the separability rows need the ml extra
    return sarfati(loaded(model), "\n".join(texts), separate=known, progress=progress)


__all__ = [
    "Reproduction",
    "Settings",
    "causal_attention",
    "published_tables",
    "run",
    "sarfati",
    "settings_for",
    "song_zhong",
    "topic_bases",
    "topic_windows",
]
