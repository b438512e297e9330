"""Every Python block of README, the site and the gallery runs, as a reader would run it.

The blocks of a page run in order in one namespace; a page of the guide starts from the block of
``docs/guide/index.md``. Only what :data:`RULES` says is replaced: GPT-2 by the embedded model (a
rotary model by a small random one), its heads by heads of that, long windows by short ones. A block
that needs the network for more than that is marked ``% not run: REASON`` in the line before it.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import tl_geometry as tlg
from tests.tiny import HAS_HOOKED, randomize
from tl_geometry.models import from_hf

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "guide").glob("*.md"))]
START = DOCS / "guide" / "index.md"
"""Defines what the pages of the guide begin with: model, windows, basis, prompt."""
MARK = "% not run:"
MOST_MARKED = 1
"""Blocks that may be marked, of all."""
LAYERS, LENGTH = 4, 64
"""Blocks and heads of the embedded model; the length of windows here."""
HOOKED = re.compile(r"^(from transformer_lens import HookedTransformer)$", re.MULTILINE)


def _head(found: re.Match[str]) -> str:
    return f'"L{int(found[1]) % LAYERS}H{int(found[2]) % LAYERS}"'


RULES: tuple[tuple[re.Pattern[str], Any], ...] = (
    (
        re.compile(
            r"^model = (HookedTransformer\.from_pretrained\w*|TransformerBridge\.boot_\w+)"
            r'\("gpt2".*$',
            re.MULTILINE,
        ),
        "model = tlg.zoo.embedded()",
    ),
    (
        re.compile(r'^model = TransformerBridge\.boot_\w+\("EleutherAI/pythia.*$', re.MULTILINE),
        "model = rotary()",
    ),
    (re.compile(r'"L(\d+)H(\d+)"'), _head),
    (re.compile(r"\b256\b"), str(LENGTH)),
)


def rotary() -> Any:
    """A small rotary model with random weights that reads the embedded model's tokens."""
    tokenizer = tlg.zoo.tokenizer()
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
    }
    sizes |= {"num_attention_heads": LAYERS, "max_position_embeddings": 2 * LENGTH}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).eval()
    randomize(model)
    return from_hf(model, tokenizer, model_class="bridge", name="rotary")


class Block(NamedTuple):
    """A block of code: the line that it begins in, its text, and why it is not run."""

    line: int
    code: str
    unrun: str | None


def blocks(page: str) -> list[Block]:
    """The Python blocks of a page."""
    found = re.finditer(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    result = []
    for match in found:
        before = page[: match.start()].rstrip("\n").rsplit("\n", 1)[-1]
        unrun = before.removeprefix(MARK).strip() if before.startswith(MARK) else None
        result.append(Block(page.count("\n", 0, match.start()) + 2, match[1], unrun))
    return result


def embedded(code: str) -> str:
    """The code with :data:`RULES` applied."""
    for pattern, replacement in RULES:
        code = pattern.sub(replacement, code)
    return code if HAS_HOOKED else HOOKED.sub("", code)


def run(page: Path, names: dict[str, Any]) -> None:
    """Run the blocks of a page in one namespace, at the line numbers of the page."""
    names["rotary"] = rotary
    for block in blocks(page.read_text("utf-8")):
        if block.unrun is None:
            code = "\n" * (block.line - 1) + embedded(block.code)
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, str(page.relative_to(ROOT)), "exec"), names)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the text that the pages read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tqdm.std.tqdm.display", lambda *_, **__: None)
    text = "\n".join(tlg.zoo.corpus.held_out_documents().texts)
    (tmp_path / "book.txt").write_text(text[:20_000], "utf-8")
    return tmp_path


WITH_CODE = [page for page in PAGES if blocks(page.read_text("utf-8"))]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # open("book.txt").read()
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, reader: Path) -> None:
    names: dict[str, Any] = {}
    if page.parent == START.parent and page != START:
        run(START, names)
    run(page, names)
    plt.close("all")
    assert names


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((DOCS / "gallery").glob("*.py")), ids=lambda p: p.stem)
def test_the_scripts_of_the_gallery_run(path: Path, reader: Path) -> None:
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(path.read_text("utf-8"), path.name, "exec"), names)
    plt.close("all")
    assert names["view"].title


def test_hardly_a_block_is_marked_as_not_run() -> None:
    found = [block for page in PAGES for block in blocks(page.read_text("utf-8"))]
    assert len(found) >= 9
    marked = [block for block in found if block.unrun is not None]
    assert len(marked) <= MOST_MARKED
    assert all(block.unrun for block in marked), "a marked block says why"


def test_a_block_that_fails_is_seen_and_a_marked_one_is_not_run(tmp_path: Path) -> None:
    fence = "```"
    broken = f"# Title\n\n{fence}python\nx = 1\n{fence}\n\n{fence}python\nx.absent\n{fence}\n"
    assert [block.line for block in blocks(broken)] == [4, 8]
    marked = broken.replace(f"{fence}python\nx.", f"{MARK} needs a network\n{fence}python\nx.")
    assert [block.unrun for block in blocks(marked)] == [None, "needs a network"]
    names: dict[str, Any] = {}
    for text, fails in ((broken, True), (marked, False)):
        page = ROOT / "tests" / "absent.md"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "read_text", lambda *_, text=text: text)
            expectation = pytest.raises(AttributeError) if fails else contextlib.nullcontext()
            with expectation:
                run(page, names)
    assert names["x"] == 1


def test_the_rules_replace_the_model_its_heads_and_nothing_else() -> None:
    for load in (
        'HookedTransformer.from_pretrained_no_processing("gpt2")',
        'TransformerBridge.boot_transformers("gpt2")  # or another',
    ):
        assert embedded(f"model = {load}") == "model = tlg.zoo.embedded()"
    assert embedded('heads=["L5H1", "L4H11"]') == 'heads=["L1H1", "L0H3"]'
    assert embedded("tlg.decompose(model, windows)") == "tlg.decompose(model, windows)"
