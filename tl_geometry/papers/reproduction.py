"""Which published work is run, on which model and text? ``tl-geometry reproduce`` calls
:func:`reproduce`, which checks its options, reads the files and calls the function of the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tl_geometry.base.errors import choice, require
from tl_geometry.base.results import Result
from tl_geometry.corpus.text_files import read_texts
from tl_geometry.models.reader import as_view
from tl_geometry.papers.contents import WORKS
from tl_geometry.papers.lines_of_thought import sarfati
from tl_geometry.papers.protocol import settings_for
from tl_geometry.papers.published import loaded, require_row, song_zhong
from tl_geometry.papers.traveling_words import molina
from tl_geometry.zoo.corpus import held_out_documents


def reproduce(
    work: str,
    *,
    model: str | None = None,
    corpus: Sequence[Path] | None = None,
    topics: Sequence[Path] | None = None,
    encoding: str = "utf-8",
    row: str | None = None,
    contexts: int | None = None,
    progress: bool = True,
) -> Result:
    """Run the published settings of a work by its name: ``"song-zhong"``, ``"lines-of-thought"`` or
    ``"traveling-words"`` (which reads weights alone). The command line calls this.

    ``contexts`` replaces the published number of windows (chunks). ``topics`` are documents (four
    in the paper) for similarities and incoherence in Song & Zhong's Table 1.
    """
    choice(work, WORKS, "work")
    texts = read_texts(corpus, encoding)[0] if corpus else None
    documents = read_texts(topics, encoding, "--topics")[0] if topics else None
    if work == "song-zhong":
        require_row(row, "--row")
        view = as_view(loaded(model))
        settings = settings_for(view)
        if contexts is not None:
            settings = replace(settings, contexts=contexts, fresh=min(settings.fresh, contexts))
        options: dict[str, Any] = {"topics": documents, "row": row, "settings": settings}
        return song_zhong(view, texts, progress=progress, **options)
    require(row is None, "--row", expected=f"none with {work}", got=repr(row))
    require(documents is None, "--topics", expected=f"none with {work}", got=f"{topics}")
    if work == "traveling-words":
        unused = corpus or contexts
        require(not unused, "--corpus, --contexts", expected=f"none with {work}", got=f"{unused}")
        return molina(loaded(model))
    text = "\n".join(texts if texts is not None else held_out_documents().texts)
    separate = find_spec("sklearn") is not None  # the separability rows need the ml extra
    return sarfati(loaded(model), text, n=contexts, separate=separate, progress=progress)
