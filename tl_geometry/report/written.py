"""How does a report come to its folder? :func:`build` makes section by section: the table of an
item is computed, or read where it is there, and the page is written again after every section.

``report.json`` holds one hash of model, tokens and settings. Tables are read in a folder with the
same hash alone; so a stopped report goes on where it was. Files are replaced atomically."""

from __future__ import annotations

import hashlib
import json
import re
import traceback
from collections.abc import Callable, Sequence
from csv import QUOTE_NONNUMERIC
from pathlib import Path
from typing import Any

import pandas as pd

from tl_geometry import __version__
from tl_geometry.base.errors import GeometryError, require
from tl_geometry.base.files import as_path, write_bytes
from tl_geometry.base.results import hash_tokens
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.models.model_like import ModelLike
from tl_geometry.report import folder
from tl_geometry.report.analysis import Analysis
from tl_geometry.report.folder import PAGE, RECORD, WRITER, check_folder, record_of
from tl_geometry.report.items import SECTIONS, Item, Section, seconds
from tl_geometry.report.page import Block, Card, document


def build(
    model: ModelLike,
    windows: TokenWindows,
    out: str | Path,
    *,
    quick: bool = False,
    sections: Sequence[str] | None = None,
    fresh: bool = False,
    force: bool = False,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """The whole analysis of a model on a corpus, as a page with its tables.

    Args:
        windows: from :func:`tl_geometry.windows`. Half of them, at most 32, are kept from the
            basis, for the sweep over all heads.
        out: folder to write ``report.html``, a CSV for each table and ``report.json`` to.
        quick: leave out the slow sections, unless ``sections`` names them.
        sections: some of ``heads``, ``states``, ``weights``, ``flow``, ``overview``.
        fresh: compute every table again. Without it, one that a report of the same model, tokens
            and settings has written is read.
        force: write into a folder that holds other things; its other files stay.
        say: gets a line before each section, with the time that it will take.

    Returns the record that ``report.json`` holds. ``record["failed"]`` names the items that ended
    with an unexpected error; what is refused is a card on the page.

    Raises ``GeometryError`` for a folder that holds other things, or a report of another model, and
    for a single window. Of fewer than 64 nothing is said of what heads do.

    >>> import tempfile
    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     build(model, windows, folder, sections=["overview"])["failed"]
    {}
    """
    usual = [s.key for s in SECTIONS if not (quick and s.slow)]
    out, names = as_path(out), usual if sections is None else sections
    folder.check_sections(names)
    chosen = [s for s in SECTIONS if s.key in names]
    check_folder(out, force=force)
    require(len(windows) > 1, "windows", expected="2 or more", got=1, instead="more text")
    a = Analysis(model=model, windows=windows, seed=seed)
    facts = _facts(a)
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    record: dict[str, Any] = {"written_by": WRITER, "hash": digest, **facts}
    record |= {"command": list(command), "failed": {}, "finished": False}
    before = record_of(out).get("hash")
    same, got = before == digest, "one of another model, corpus or version"
    instead = "another --out, or --force"
    fits = same or force or before is None
    require(fits, "--out", expected="a report of the same", got=got, instead=instead)
    if fresh or not same:
        # no table of another report may be read for one of this; other files stay
        stale = chosen if same or before is None else SECTIONS
        for path in (p for section in stale for item in section.items for p in _files(out, item)):
            path.unlink(missing_ok=True)
    _save(out / RECORD, json.dumps(record, indent=1))
    parts: list[tuple[Section, list[Block | Card]]] = []
    for section in chosen:
        blocks = _blocks(a, section, out, say or (lambda line: None))
        parts.append((section, blocks))
        cards = [block for block in blocks if isinstance(block, Card)]
        record["failed"] |= {card.what: card.why for card in cards if card.trace}
        _save(out / PAGE, document(a, parts, chosen[len(parts) :]))
    _save(out / RECORD, json.dumps({**record, "finished": True}, indent=1))
    return record | {"finished": True}


def _facts(a: Analysis) -> dict[str, Any]:
    """Everything that the numbers depend on."""
    of_model = ("name", "fingerprint", "processed", "dtype")
    facts: dict[str, Any] = {name: str(getattr(a.view, name)) for name in of_model}
    facts |= {"tokens": a.windows.token_hash, "shape": list(a.windows.tokens.shape)}
    facts |= {"corpus": a.windows.corpus, "hooks": list(a.view.hooked())}
    if a.windows.labels is not None:
        labels = hash_tokens(a.windows.labels.unsqueeze(0))
        facts |= {"labels": labels, "names": list(a.windows.label_names)}
    return facts | {"bos": bool(a.windows.has_bos), "seed": a.seed, "version": __version__}


def _save(path: Path, text: str) -> None:
    write_bytes(path, text.encode(errors="backslashreplace"))


def _blocks(
    a: Analysis, section: Section, out: Path, say: Callable[[str], None]
) -> list[Block | Card]:
    """The items of a section, read or made."""
    done = {i.key for i in section.items if all(path.is_file() for path in _files(out, i))}
    missing = [item for item in section.items if item.key not in done]
    time = f"about {max(1, round(seconds(a, missing)))} s" if missing else "read"
    say(f"{section.title}: {time}")
    blocks: list[Block | Card] = []
    for item in section.items:
        make = _read if item.key in done else _made
        try:
            blocks += make(a, item, out)
        except Exception as error:
            blocks.append(_card(item.words["title"], error))
    return blocks


def _files(out: Path, item: Item) -> tuple[Path, Path]:
    """The table and the figures of an item; it is read where both are there."""
    return out / f"{item.key}.csv", out / "figures" / f"{item.key}.html"


def _card(what: str, error: Exception) -> Card:
    """Why something is missing, with the traceback of what is no refusal."""
    if isinstance(error, GeometryError):
        return Card(what=what, why=str(error))
    trace = "".join(traceback.format_exception(error))
    return Card(what=what, why=f"{type(error).__name__}: {error}", trace=trace)


def _made(a: Analysis, item: Item, out: Path) -> list[Block | Card]:
    """Compute an item and write it. The table stays where a figure cannot be drawn."""
    result, (csv, drawn) = item.compute(a), _files(out, item)
    table = a.tables[item.key] = item.frame(a, result)
    _save(csv, table.to_csv(index=False, lineterminator="\n", quoting=QUOTE_NONNUMERIC))
    figures, cards = [], []
    for draw in item.figures:
        try:
            view = draw(a, result)
            figures.append(f"<!--{' '.join(getattr(view, 'scripts', ()))}-->{view.html()}")
        except Exception as error:
            cards.append(_card(f"A figure of “{item.words['title']}”", error))
    if not cards:
        _save(drawn, "\n".join(figures))
    return [_block(item, table, "".join(figures)), *cards]


def _read(a: Analysis, item: Item, out: Path) -> list[Block | Card]:
    """An item that the folder holds."""
    csv, drawn = _files(out, item)
    # only an empty cell is none: a token may read "NA" or "null"
    table = a.tables[item.key] = pd.read_csv(csv, keep_default_na=False, na_values=[""])
    return [_block(item, table, drawn.read_text(encoding="utf-8"))]


def _block(item: Item, table: pd.DataFrame, figures: str) -> Block:
    answers = [ask.answer(table, item.key) for ask in item.asks]
    found = [answer for answer in answers if answer is not None]
    scripts = " ".join(re.findall(r"<!--([^>]*)-->", figures)).split()
    return Block(item=item, table=table, figures=figures, scripts=scripts, findings=found)
