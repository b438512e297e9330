"""``python -m tests.scores.long_prompt_memory trace 8192``: what a function takes for one prompt of
so many tokens on a small rotary model. Prints the time of the processor in seconds and the peak of
memory above the start in MiB. ``--cells N``, for tests: blocks of N cells, at any length."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import tl_geometry as tlg
from benchmarks.harness import grown
from tests.lib.models import randomize
from tl_geometry.models import ModelView, from_hf, row_pass


def long_llama(length: int) -> ModelView:
    """A random rotary model of two layers."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=length,
    )
    config._attn_implementation = "eager"
    hf: Any = transformers.LlamaForCausalLM(config).eval()
    randomize(hf, 0)
    return tlg.view(from_hf(hf, None, model_class="bridge", name="tiny-llama"))


FUNCTIONS = ("split", "sweep", "explain", "trace", "decompose", "whole")
"""What can be measured; ``"whole"`` is ``decompose`` of whole prompts."""


def measured(name: str, length: int) -> tuple[float, float]:
    """Seconds and MiB of one function."""
    model = long_llama(length)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 256, (1, length), generator=generator)
    windows = torch.randint(3, 256, (2, length), generator=generator)
    assert model.in_rows(length) == (name != "whole")

    def decompose() -> tlg.PositionContext:
        few: dict[str, Any] = {"batch_size": 1, "groups": 2, "keep": 0, "keep_ctx": False}
        return tlg.decompose(model, windows, **few, progress=False)

    basis: Any = decompose() if name == "sweep" else None
    routes: dict[str, Callable[[], object]] = {
        "split": lambda: tlg.split_scores(model, ids, parts="blocks").top_cells(3),
        "sweep": lambda: tlg.sweep_heads(model, ids, basis, progress=False),
        "explain": lambda: tlg.explain_logit(model, ids, -1, 5),
        "trace": lambda: tlg.trace_logit(model, ids, 5),
        "decompose": decompose,
        "whole": decompose,
    }
    with grown() as used:
        start = time.process_time()
        routes[name]()
        seconds = time.process_time() - start
    return seconds, used.mib


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", choices=FUNCTIONS, nargs="+")
    parser.add_argument("length", type=int)
    parser.add_argument("--cells", type=int)
    given = parser.parse_args()
    if given.cells is not None:
        row_pass.LONG, row_pass.ROW_CELLS = 0, given.cells
    long = row_pass.LONG
    for name in given.names:
        row_pass.LONG = 2**62 if name == "whole" else long
        seconds, mib = measured(name, given.length)
        sys.stdout.write(f"{name} {seconds:.1f} {mib:.1f}\n")


if __name__ == "__main__":
    main()
