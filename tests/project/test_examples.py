"""Every Python block of README, the site and the gallery runs, as a reader would run it.

The blocks of a page run in order in one namespace. Only what :data:`RULES` says is replaced: GPT-2
by the embedded model, its heads by heads of that, long windows by short ones, weights that a reader
has by random ones. A block that needs the network for more is marked ``% not run: REASON``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import tl_geometry as tlg
from tests.lib.models import HAS_HOOKED, randomize, tiny
from tl_geometry.models import from_hf

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / "README.md", ROOT / "paper" / "gallery.md"),
    *sorted([*DOCS.glob("*.md"), *(DOCS / "guide").glob("*.md")]),
]
START = DOCS / "guide" / "index.md"
"""Defines what the pages of the guide begin with: model, windows, basis, prompt."""
APART = (DOCS / "recipes.md", DOCS / "how_to.md")
"""Pages whose sections stand by themselves, after the blocks before the first section."""
MARK = "% not run:"
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
    (re.compile(r"^model = HookedTransformer\(cfg\).*$", re.MULTILINE), "model = trained()"),
    (re.compile(r"^model = tlg\.load\(.*$", re.MULTILINE), "model = tlg.zoo.embedded()"),
    (re.compile(r"^from sae_lens import SAE$", re.MULTILINE), ""),
    (re.compile(r"SAE\.from_pretrained\(.*\)"), "autoencoder()"),
    (re.compile(r'load_dataset\("[^"]+"'), 'load_dataset("text", data_files="book.txt"'),
    (re.compile(r'^layer, name = 5, "blocks.5', re.MULTILINE), 'layer, name = 1, "blocks.1'),
    (re.compile(r'"L(\d+)H(\d+)"'), _head),
    (re.compile(r"\b256\b"), str(LENGTH)),
)


def rotary() -> Any:
    """A small rotary model with random weights that reads the embedded model's tokens."""
    tokenizer = tlg.zoo.embedded().tokenizer
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}
    sizes |= dict.fromkeys(("num_hidden_layers", "num_attention_heads"), LAYERS)
    sizes["max_position_embeddings"] = 2 * LENGTH
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).eval()
    randomize(model)
    return from_hf(model, tokenizer, name="rotary")


@torch.no_grad()
def trained() -> Any:
    """A small HookedTransformer of attention alone, without norms and tokenizer."""
    if not HAS_HOOKED:
        return tiny("bridge", "gpt2")
    sizes = {"n_layers": 2, "n_heads": 4, "d_head": 8, "d_model": 32, "n_ctx": 64, "d_vocab": 61}
    module = importlib.import_module("transformer_lens")
    cfg = module.HookedTransformerConfig(**sizes, attn_only=True, normalization_type=None, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the class is gone in version 4
        return module.HookedTransformer(cfg)


class Autoencoder(torch.nn.Module):
    """A dictionary with random directions, in the form that SAELens has."""

    def __init__(self, d_model: int = 128, features: int = 256) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        decoder = torch.nn.functional.normalize(torch.randn(features, d_model, generator=g), dim=-1)
        self.W_dec, self.b_dec = torch.nn.Parameter(decoder), torch.nn.Parameter(decoder.mean(0))

    def encode(self, h: Tensor) -> Tensor:
        """Activations ``[... feature]``."""
        return torch.relu((h - self.b_dec) @ self.W_dec.mT)


HELPERS = {"rotary": rotary, "trained": trained, "autoencoder": Autoencoder}
"""What :data:`RULES` put in place of what needs a network."""


class Block(NamedTuple):
    """A block of code: the line that it begins in, its text, why it is not run, and how many
    sections of the page begin before it."""

    line: int
    code: str
    unrun: str | None
    section: int


def blocks(page: str) -> list[Block]:
    """The Python blocks of a page."""
    found = re.finditer(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    result = []
    for match in found:
        before = page[: match.start()].rstrip("\n").rsplit("\n", 1)[-1]
        unrun = before.removeprefix(MARK).strip() if before.startswith(MARK) else None
        line, section = (page.count(text, 0, match.start()) for text in ("\n", "\n## "))
        result.append(Block(line + 2, match[1], unrun, section))
    return result


def embedded(code: str) -> str:
    """The code with :data:`RULES` applied."""
    for pattern, replacement in RULES:
        code = pattern.sub(replacement, code)
    return code if HAS_HOOKED else HOOKED.sub("", code)


def run(page: Path, names: dict[str, Any], section: int | None = None) -> None:
    """Run the blocks of a page (or those of one section) in one namespace, at the line numbers of
    the page."""
    names |= HELPERS
    for block in blocks(page.read_text("utf-8")):
        if block.unrun is None and section in (None, block.section):
            code = "\n" * (block.line - 1) + embedded(block.code)
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, str(page.relative_to(ROOT)), "exec"), names)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the text that the pages read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tqdm.std.tqdm.display", lambda *_, **__: None)
    text = "\n".join(tlg.zoo.corpus.held_out_documents().texts)
    (tmp_path / "book.txt").write_text(text[:30_000], "utf-8")
    return tmp_path


WITH_CODE = [page for page in PAGES if blocks(page.read_text("utf-8")) and page not in APART]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # open("book.txt").read()
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.nightly] * (page.stem != "README"))
        for page in WITH_CODE
    ],
)
def test_the_blocks_of_a_page_run(page: Path, reader: Path) -> None:
    names: dict[str, Any] = {}
    if page.parent == START.parent and page != START:
        run(START, names)
    run(page, names)
    plt.close("all")
    assert names


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("page", APART, ids=lambda page: page.stem)
def test_every_section_runs_after_the_first_block(page: Path, reader: Path) -> None:
    start: dict[str, Any] = {}
    run(page, start, 0)
    text = page.read_text("utf-8")
    sections = sorted({block.section for block in blocks(text)})
    assert sections == list(range(text.count("\n## ") + 1)), "every section has code"
    for section in sections[1:]:
        run(page, dict(start), section)
        plt.close("all")


def test_few_blocks_are_not_run_and_rules_replace_the_model_and_its_heads(tmp_path: Path) -> None:
    found = [block for page in PAGES for block in blocks(page.read_text("utf-8"))]
    assert len(found) >= 9
    assert sum(block.unrun is not None for block in found) <= 1
    assert embedded('model = TransformerBridge.boot_transformers("gpt2")') == (
        "model = tlg.zoo.embedded()"
    )
    assert embedded('heads=["L5H1", "L4H11"]') == 'heads=["L1H1", "L0H3"]'
    fence, page = "```", DOCS / "planted.md"
    text = f"{fence}python\nx = 1\n{fence}\n\n{MARK} a reason\n{fence}python\nx.absent\n{fence}\n"
    for planted, fails in ((text, False), (text.replace(MARK, ""), True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "read_text", lambda *_, planted=planted: planted)
            with pytest.raises(AttributeError) if fails else contextlib.nullcontext():
                run(page, {})


GALLERY = [
    pytest.param(
        path,
        id=path.stem,
        marks=[pytest.mark.smollm2] if "smollm2()" in path.read_text("utf-8") else [],
    )
    for path in sorted((DOCS / "gallery").glob("*/*.py"))
]


@pytest.mark.nightly
@pytest.mark.parametrize("path", GALLERY)
def test_the_scripts_of_the_gallery_run(path: Path, reader: Path) -> None:
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(path.read_text("utf-8"), path.name, "exec"), names)
    plt.close("all")
    assert names["view"].title
