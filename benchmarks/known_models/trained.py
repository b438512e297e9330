"""How are the trained circuits of ``known`` made, and where are they stored? ``python -m
benchmarks.known_models.trained --out DIR`` trains them, each in less than a minute on one core.
:mod:`~benchmarks.known_models` loads the stored weights.

- ``"induction"``: two layers of attention without MLPs. Rows are BOS and random tokens repeated;
  each row draws its period. Only tokens of a second copy or later are predicted, so that nothing
  but induction lowers the loss.
- ``"sum"``: one layer with an MLP. Rows are BOS, a key k, digits ``x_1 ... x_7`` and their sums
  with the key, ``y_i = (x_i + k) mod 10``. Only the sums are predicted. Attention has to bring
  digit and key together. The MLP has to add them: a function of x plus a function of k cannot be
  largest at ``(x + k) mod 10`` for all x and k.

Weights are stored in half precision (0.1 MB a model at most).
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from benchmarks.training.trainer import IGNORE, Batch, TrainSettings, train
from tl_geometry.base.errors import require

log = logging.getLogger(__name__)
SEEDS = (0, 1, 2)
"""Seeds whose weights are stored, for learned and for rotary positions."""
PERIODS = (8, 24)
"""Least and largest period of a row of repeated tokens."""
SYMBOLS = 64
"""Size of the vocabulary of repeated tokens, BOS included."""
COPIES_LENGTH = 49
"""Tokens of a row of repeated tokens: BOS and two copies of the largest period."""
DIGITS, SUMMED = 10, 7
"""How many digits there are (tokens 1 to 10; keys are tokens 11 to 20), and how many digits a row
sums."""

Rows = tuple[Int[Tensor, "batch position"], Bool[Tensor, "batch position"]]
"""Tokens, and which of them are predicted."""


def repeats(n: int, generator: torch.Generator, periods: tuple[int, int] = PERIODS) -> Rows:
    """BOS and random tokens repeated. Each row draws its period from ``periods``, both ends
    included. Tokens of a second copy or later are predicted."""
    period = torch.randint(periods[0], periods[1] + 1, (n, 1), generator=generator)
    rows = torch.randint(1, SYMBOLS, (n, COPIES_LENGTH - 1), generator=generator)
    at = torch.arange(COPIES_LENGTH - 1)[None]
    tokens = torch.cat([torch.zeros(n, 1, dtype=torch.int64), rows.gather(1, at % period)], 1)
    return tokens, F.pad(at >= period, (1, 0))


def sums(n: int, generator: torch.Generator) -> Rows:
    """BOS, a key, digits, and the sums of digit and key modulo 10. The sums are predicted.

    >>> sums(1, torch.Generator().manual_seed(0))[0][0, :9].tolist()
    [0, 15, 10, 4, 1, 4, 10, 8, 4]
    """
    key = torch.randint(DIGITS, (n, 1), generator=generator)
    tokens = in_tokens(key, torch.randint(DIGITS, (n, SUMMED), generator=generator))
    return tokens, (torch.arange(tokens.shape[1]) >= 2 + SUMMED).expand(n, -1)


def in_tokens(
    key: Int[Tensor, "batch 1"], digits: Int[Tensor, "batch token"]
) -> Int[Tensor, "batch position"]:
    """Rows of tokens: BOS, key, digits, and the sum of each digit with the key modulo 10."""
    given = [torch.zeros_like(key), 1 + DIGITS + key, 1 + digits]
    return torch.cat([*given, 1 + (digits + key) % DIGITS], 1)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a circuit was trained on, and its sizes. With ``d_mlp`` 0 it has no MLPs."""

    rows: Callable[[int, torch.Generator], Rows]
    vocab: int
    length: int
    layers: int
    width: int
    d_mlp: int
    batch: int
    settings: TrainSettings
    heads: int = 4

    def batch_at(self, seed: int, step: int) -> Batch:
        """Inputs and targets of one step: only predicted tokens are targets."""
        # the factor is larger than the steps of any run, so that no two seeds share a batch
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        tokens, counted = self.rows(self.batch, generator)
        return tokens[:, :-1], torch.where(counted, tokens, IGNORE)[:, 1:]


_SETTINGS = TrainSettings(
    steps=1500, learning_rate=8e-3, final_learning_rate=1e-5, warmup=50, betas=(0.9, 0.98)
)
TASKS = {
    "induction": Task(
        rows=repeats,
        vocab=SYMBOLS,
        length=COPIES_LENGTH,
        layers=2,
        width=64,
        d_mlp=0,
        batch=16,
        settings=_SETTINGS,
    ),
    "sum": Task(
        rows=sums,
        vocab=1 + 2 * DIGITS,
        length=2 + 2 * SUMMED,
        layers=1,
        width=48,
        d_mlp=96,
        batch=32,
        settings=replace(_SETTINGS, steps=3000, learning_rate=4e-3),
    ),
}
"""The tasks by name."""


def new_model(name: str, positions: str, seed: int) -> Any:
    """The model before training: GPT-2 (``"learned"``) or Llama (``"rotary"``). A task without MLPs
    has MLPs of one unit that are zero and frozen.

    >>> new_model("induction", "rotary", 0).config.num_hidden_layers
    2
    """
    import transformers

    task = TASKS[name]
    shared: dict[str, Any] = {
        "vocab_size": task.vocab,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if positions == "learned":
            shape = {"n_embd": task.width, "n_layer": task.layers, "n_head": task.heads}
            shape |= {"n_inner": task.d_mlp or 1, "n_positions": task.length}
            still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            config: Any = transformers.GPT2Config(**shape, **still, **shared)
            model: Any = transformers.GPT2LMHeadModel(config)
        else:
            shape = {"hidden_size": task.width, "num_hidden_layers": task.layers}
            shape |= {"num_attention_heads": task.heads, "num_key_value_heads": task.heads}
            shape |= {"intermediate_size": task.d_mlp or 1, "max_position_embeddings": task.length}
            rope = {"rope_type": "default", "rope_theta": 100.0}
            config = transformers.LlamaConfig(**shape, **shared, rope_parameters=rope)
            model = transformers.LlamaForCausalLM(config)
    for weight, value in model.named_parameters():
        if ".mlp." in weight and not task.d_mlp:
            value.data.zero_()
            value.requires_grad_(False)
    return model.eval()


def path(name: str, positions: str, seed: int, folder: Path | None = None) -> Path:
    """Where the weights of a model are stored, by default beside this module."""
    folder = Path(__file__).parent / "weights" if folder is None else folder
    return folder / f"{name}_{positions}_{seed}.safetensors"


def hugging_face(name: str, positions: str, seed: int) -> Any:
    """The trained model, from its stored weights, as a ``transformers`` model.

    Raises ``GeometryError`` for a seed that is not stored.

    >>> hugging_face("induction", "learned", 2).config.n_layer
    2
    """
    from safetensors.torch import load_file

    require(seed in SEEDS, "seed", expected=f"one of {SEEDS}, which are stored", got=seed)
    model = new_model(name, positions, seed)
    found = model.load_state_dict(load_file(path(name, positions, seed)), strict=False)
    # a file lacks only frozen parameters, the MLPs that are zero
    lost = [weight for weight in found.missing_keys if TASKS[name].d_mlp or ".mlp." not in weight]
    require(not lost, "stored weights", expected="all that were trained", got=f"none of {lost}")
    model.config._attn_implementation = "eager"
    return model


def main(argv: list[str] | None = None) -> int:
    """Train every model, or those of the task ``--only``; write their weights into ``--out``."""
    from safetensors.torch import save_file

    parser = argparse.ArgumentParser(description="Train the known circuits.")
    parser.add_argument("--out", type=Path, default=path("sum", "learned", 0).parent)
    parser.add_argument("--only", choices=tuple(TASKS), help="one of the tasks")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    torch.set_num_threads(1)
    for name in TASKS if arguments.only is None else (arguments.only,):
        task = TASKS[name]
        for positions in ("learned", "rotary"):
            for seed in SEEDS:
                model = new_model(name, positions, seed)
                losses = train(
                    model,
                    lambda step, task=task, seed=seed: task.batch_at(seed, step),
                    replace(task.settings, seed=seed),
                    progress=False,
                )
                learnt = {k: v.half() for k, v in model.named_parameters() if v.requires_grad}
                save_file(learnt, path(name, positions, seed, out))
                loss = sum(losses[-50:]) / 50
                log.info("%s, %s, seed %d: loss %.3f", name, positions, seed, loss)
    return 0


if __name__ == "__main__":
    sys.exit(main())
