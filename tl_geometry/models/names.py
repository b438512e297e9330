"""Which model names does the installed TransformerLens list? The command line and
:func:`tl_geometry.models.load` ask; the list is read without importing TransformerLens, which takes
ten seconds."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
from pathlib import Path
from typing import NamedTuple

from tl_geometry.base.errors import fail, require

EXPECTED = "a local directory, or a name that the installed TransformerLens knows"
"""What a message says that was expected, where a name is unknown."""
CLASSES = ("bridge", "hooked")
DTYPES = ("float32", "float64", "bfloat16", "float16")
"""Values of ``--class`` and ``--dtype``."""
OURS = ("smollm2", "minilm")
"""Names of :mod:`tl_geometry.zoo`, which are not in TransformerLens's list."""


class Name(NamedTuple):
    """A name looked up in TransformerLens's list: whether it is there, and for a message what came
    where it is not, and similar names."""

    listed: bool
    unknown: str
    near: str


def look_up(name: str, model_class: str) -> Name:
    """A name in TransformerLens's list; one that is not there is refused, unless a bridge may find
    it as ``owner/name`` on the Hugging Face hub."""
    official, known = listed_names()
    near = " or ".join(map(repr, difflib.get_close_matches(name, known, n=3, cutoff=0.5)))
    entry = Name(
        listed=name.lower() in {n.lower() for n in known},
        unknown=f"{name!r}, which is not among its {len(official)} models",
        near=near or "a local directory",
    )
    on_hub = model_class == "bridge" and "/" in name
    require(
        entry.listed or on_hub, "model", expected=EXPECTED, got=entry.unknown, instead=entry.near
    )
    return entry


def check_name(name: str | None, model_class: str) -> None:
    """:func:`look_up` for what a command is given: nothing, a name of the zoo, a directory, or a
    name of the list."""
    if name is not None and name not in OURS and not Path(name).expanduser().is_dir():
        look_up(name, model_class)


def listed_names() -> tuple[list[str], list[str]]:
    """Official names, and these with their aliases, from the source of TransformerLens."""
    spec = importlib.util.find_spec("transformer_lens")
    if spec is None or not spec.submodule_search_locations:
        fail("transformer-lens", expected="an installed package", got="none")
    folder = Path(spec.submodule_search_locations[0])
    source = ast.parse((folder / "supported_models.py").read_text(encoding="utf-8"))
    lists = {
        node.target.id: ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(node.value, ast.List | ast.Dict)  # written out, not computed
    }
    official: list[str] = lists["OFFICIAL_MODEL_NAMES"]
    aliases: dict[str, list[str]] = lists.get("MODEL_ALIASES", {})
    if not aliases:  # TransformerLens 4 keeps them in a file
        data = folder / "tools" / "model_registry" / "data" / "model_aliases.json"
        aliases = json.loads(data.read_text(encoding="utf-8"))["aliases"]
    return official, [*official, *(name for more in aliases.values() for name in more)]
