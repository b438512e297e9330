"""How are the induction circuits of ``zoo.known("induction")`` trained, and where are they stored?
Two layers of attention without MLPs; ``python -m tl_geometry.zoo.induction --out DIR`` makes them.

Rows are BOS and random tokens repeated; each row draws its period. Only tokens of a second copy or
later are predicted, so that nothing but induction lowers the loss. Weights are stored in
half precision (0.1 MB a model).
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from tl_geometry.base.errors import require
from tl_geometry.zoo.trainer import IGNORE, Batch, TrainSettings, train

log = logging.getLogger(__name__)
VOCAB, LENGTH, LAYERS, HEADS, D_HEAD = 64, 49, 2, 4, 16
SEEDS = (0, 1, 2)
"""Seeds whose weights are stored, for learned and for rotary positions."""
PERIODS = (8, 24)
"""Least and largest period of a row."""
_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def settings(seed: int) -> TrainSettings:
    """The training of one model: about 40 seconds on one core."""
    return TrainSettings(
        steps=1500,
        learning_rate=8e-3,
        final_learning_rate=1e-5,
        warmup=50,
        betas=(0.9, 0.98),
        seed=seed,
    )


def new_model(positions: str, seed: int) -> Any:
    """The model before training: GPT-2 (``"learned"``) or Llama (``"rotary"``), with MLPs of one
    unit that are zero and stay so.

    >>> new_model("rotary", 0).config.num_hidden_layers
    2
    """
    import transformers

    width = HEADS * D_HEAD
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if positions == "learned":
            shape = {"n_embd": width, "n_layer": LAYERS, "n_head": HEADS, "n_inner": 1}
            still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            config: Any = transformers.GPT2Config(**shape, **still, **_SHARED, n_positions=LENGTH)
            model: Any = transformers.GPT2LMHeadModel(config)
        else:
            shape = {"hidden_size": width, "num_hidden_layers": LAYERS, "intermediate_size": 1}
            shape |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
            rope = {"rope_type": "default", "rope_theta": 100.0}
            config = transformers.LlamaConfig(
                **shape, **_SHARED, max_position_embeddings=LENGTH, rope_parameters=rope
            )
            model = transformers.LlamaForCausalLM(config)
    for name, value in model.named_parameters():
        if ".mlp." in name:
            value.data.zero_()
            value.requires_grad_(False)
    return model.eval()


def repeats(
    n: int, generator: torch.Generator, periods: tuple[int, int] = PERIODS
) -> tuple[Int[Tensor, "batch position"], Bool[Tensor, "batch position"]]:
    """BOS and random tokens repeated, with a period drawn for each row from ``periods`` (both ends
    included); and which tokens are of a second copy or later."""
    period = torch.randint(periods[0], periods[1] + 1, (n, 1), generator=generator)
    rows = torch.randint(1, VOCAB, (n, LENGTH - 1), generator=generator)
    at = torch.arange(LENGTH - 1)[None]
    tokens = torch.cat([torch.zeros(n, 1, dtype=torch.int64), rows.gather(1, at % period)], 1)
    return tokens, F.pad(at >= period, (1, 0))


def batch_at(seed: int, step: int) -> Batch:
    """16 rows, and as targets the tokens that can be predicted."""
    tokens, counted = repeats(16, torch.Generator().manual_seed(seed * 1_000_003 + step))
    return tokens[:, :-1], torch.where(counted, tokens, IGNORE)[:, 1:]


def path(positions: str, seed: int, folder: Path | None = None) -> Path:
    """Where the weights are stored."""
    folder = Path(__file__).parent / "assets" / "induction" if folder is None else folder
    return folder / f"{positions}_{seed}.safetensors"


def hugging_face(positions: str, seed: int) -> Any:
    """The trained model, from its stored weights, as a ``transformers`` model.

    Raises ``GeometryError`` for a seed that is not stored.

    >>> hugging_face("learned", 2).config.n_layer
    2
    """
    from safetensors.torch import load_file

    require(seed in SEEDS, "seed", expected=f"one of {SEEDS}, which are stored", got=seed)
    model = new_model(positions, seed)
    model.load_state_dict(load_file(path(positions, seed)), strict=False)  # MLPs are not stored
    model.config._attn_implementation = "eager"
    return model


def main(argv: list[str] | None = None) -> int:
    """Train every model, and write its weights into ``--out``."""
    from safetensors.torch import save_file

    parser = argparse.ArgumentParser(description="Train the induction circuits of the zoo.")
    parser.add_argument("--out", type=Path, default=path("learned", 0).parent)
    out: Path = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    torch.set_num_threads(1)
    for positions in ("learned", "rotary"):
        for seed in SEEDS:
            model = new_model(positions, seed)
            losses = train(
                model, lambda step, seed=seed: batch_at(seed, step), settings(seed), progress=False
            )
            trained = {k: v.half() for k, v in model.named_parameters() if v.requires_grad}
            save_file(trained, path(positions, seed, out))
            log.info("%s, seed %d: loss %.3f", positions, seed, sum(losses[-50:]) / 50)
    return 0


if __name__ == "__main__":
    sys.exit(main())
