"""Train the embedded model: ``python -m benchmarks.training.embedded --out DIR``.

A GPT-2 of 4 layers, 128 dimensions and 4 heads, context 128, with a byte-level BPE of 2,048 tokens,
on Python source that is already on disk (:func:`training_files`), without the held-out modules of
:mod:`tl_geometry.zoo.corpus`. Two phases share one schedule:

1. windows of 64 that repeat random tokens with a random period (6 to 32), at first over 64 symbols,
   then over the whole vocabulary: the previous-token and induction heads form here, from the
   ordinary initialisation;
2. windows of 128: 20 rows of natural text, 6 rows of repeated random tokens and 6 rows of repeated
   natural snippets (random periods of 8 to 60; a fixed period would teach a positional shortcut).

Every window begins with the BOS id. The first copy of random tokens cannot be predicted and takes
no part in the loss: with it in, no induction head had formed after 3,000 steps; without it the loss
on the repeats falls from step 150 on.

Everything is a function of :data:`SEED` and of the files on disk, whose hash is written into the
card.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.training.trainer import IGNORE, Batch, TrainSettings, train
from tl_geometry.base.checks import head_name
from tl_geometry.corpus import repeated_random_tokens
from tl_geometry.scores import head_type_scores
from tl_geometry.zoo import corpus
from tl_geometry.zoo.embedded_model import SEED, hugging_face

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

log = logging.getLogger(__name__)
VOCABULARY, CONTEXT, BOS = 2048, 128, 0
SYMBOL_STEPS, REPEAT_STEPS = 400, 700
"""Random tokens are of 64 symbols before step SYMBOL_STEPS, and all rows are repeats before step
REPEAT_STEPS."""
SETTINGS = TrainSettings(
    steps=3600,
    learning_rate=2.5e-3,
    final_learning_rate=1e-4,
    warmup=100,
    weight_decay=0.1,
    betas=(0.9, 0.98),
    seed=SEED,
    checkpoint_every=200,
)
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
"""Folders of the standard library that are not trained on: installed packages and tests."""


def training_files() -> list[Path]:
    """Python sources of the standard library (tests, installed packages and held-out modules left
    out) and of torch, in a fixed order."""
    lib = corpus.stdlib()
    sources = sorted(lib.rglob("*.py"))
    sources = [p for p in sources if not SKIPPED.intersection(p.relative_to(lib).parts)]
    sources = [p for p in sources if p.relative_to(lib).as_posix() not in corpus.HELD_OUT]
    return sources + sorted(Path(torch.__file__).parent.rglob("*.py"))


def training_texts() -> list[str]:
    """The training documents as text (undecodable bytes replaced), in the order of
    :func:`training_files`."""
    return [p.read_text(encoding="utf-8", errors="replace") for p in training_files()]


def new_model() -> GPT2LMHeadModel:
    """The model before training: the untrained control, initialised as GPT-2 is, but with a
    standard deviation of 0.06 where GPT-2 has 0.02 (``config.json`` of the stored model)."""
    return hugging_face(trained=False)


def train_tokenizer(texts: Iterable[str], path: Path) -> None:
    """Train the byte-level BPE (id 0 is the BOS token) and write it to ``path``."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts,
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.save(str(path))


def encode(texts: list[str], path: Path) -> Tensor:
    """Token ids of all texts, one after the other, each followed by the BOS id."""
    from tokenizers import Tokenizer

    encoded = Tokenizer.from_file(str(path)).encode_batch(texts)
    return torch.from_numpy(
        np.concatenate([np.asarray([*e.ids, BOS], dtype=np.int32) for e in encoded])
    ).long()


def batches(stream: Tensor) -> Callable[[int], Batch]:
    """``batch_at(step)`` of the mixture described at the top of this module, over a token
    stream."""

    def row(
        generator: torch.Generator, format: str, length: int, symbols: int, periods: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        def integer(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=generator))

        start = integer(0, len(stream) - length)
        natural = stream[start : start + length]
        if format == "natural":
            return natural, natural
        period, at = integer(periods[0], periods[1] + 1), torch.arange(length)
        if format == "snippet":
            tokens = natural[at % period]
            return tokens, tokens
        # ids from 1: 0 is BOS
        tokens = torch.randint(1, symbols + 1, (period,), generator=generator)[at % period]
        return tokens, torch.where(at < period, IGNORE, tokens)

    def batch_at(step: int) -> Batch:
        # the factor is larger than the steps of any run, so that no two seeds share a batch
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
        if step < REPEAT_STEPS:
            symbols = 64 if step < SYMBOL_STEPS else VOCABULARY - 1
            rows = [row(generator, "random", 64, symbols, (6, 32)) for _ in range(64)]
        else:
            formats = ["natural"] * 20 + ["random"] * 6 + ["snippet"] * 6
            rows = [row(generator, f, CONTEXT, VOCABULARY - 1, (8, 60)) for f in formats]
        tokens, targets = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
        return torch.cat([torch.full((len(rows), 1), BOS), tokens[:, :-1]], dim=1), targets

    return batch_at


SIGNIFICANT_BITS = 14
"""Of each stored weight, in place of 24: zeros compress, and keep the wheel below 5 MB. The losses
of the card change by 6e-6 at most."""


def round_weights(model: GPT2LMHeadModel) -> None:
    """Round every weight to :data:`SIGNIFICANT_BITS`, in place."""
    with torch.no_grad():
        for weight in model.parameters():
            fraction, exponent = torch.frexp(weight)
            steps = (fraction * 2**SIGNIFICANT_BITS).round()
            weight.copy_(torch.ldexp(steps / 2**SIGNIFICANT_BITS, exponent))


def next_token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy (nats) of each next token ``[batch position-1]``."""
    return F.cross_entropy(logits[:, :-1].mT.float(), tokens[:, 1:], reduction="none")


def natural_loss(model: GPT2LMHeadModel, stream: Tensor) -> float:
    """Cross-entropy (nats per token) over non-overlapping windows of a token stream, each begun
    with the BOS id."""
    rows = stream[: len(stream) // (CONTEXT - 1) * (CONTEXT - 1)].view(-1, CONTEXT - 1)
    total = 0.0
    with torch.inference_mode():
        for part in rows.split(64):
            inputs = torch.cat([torch.full((len(part), 1), BOS), part], dim=1)
            losses = next_token_losses(model(inputs).logits, inputs)
            total += losses.sum(dtype=torch.float64).item()
    return total / rows.numel()


def ngram_losses(training: Tensor, held_out: Tensor) -> dict[str, float]:
    """Held-out cross-entropy of a unigram model (counts plus one) and of a bigram model
    interpolated with it (weight 0.9 on the bigram)."""
    counts = torch.bincount(training, minlength=VOCABULARY).double()
    unigram = (counts + 1) / (len(training) + VOCABULARY)
    pairs = torch.bincount(training[:-1] * VOCABULARY + training[1:], minlength=VOCABULARY**2)
    pairs = pairs.double().view(VOCABULARY, VOCABULARY)
    bigram = pairs / pairs.sum(1, keepdim=True).clamp(min=1)
    mixed = 0.9 * bigram[held_out[:-1], held_out[1:]] + 0.1 * unigram[held_out[1:]]
    return {"unigram": -unigram[held_out].log().mean().item(), "bigram": -mixed.log().mean().item()}


def head_scores(model: GPT2LMHeadModel, period: int = 25) -> dict[str, Any]:
    """The three best previous-token and induction heads on repeated random tokens (distinct, two
    copies), and the loss on each copy."""
    tokens = repeated_random_tokens(period, 2, 64, low=1, high=VOCABULARY, seed=SEED, bos_id=BOS)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        out = model(tokens, output_attentions=True)
    loss = next_token_losses(out.logits, tokens)
    scores: dict[str, Any] = {
        "period": period,
        "loss_first_copy": loss[:, :period].mean().item(),
        "loss_second_copy": loss[:, period:].mean().item(),
    }
    by_layer = [head_type_scores(pattern, tokens).scores for pattern in out.attentions]
    for head_type in ("previous", "induction"):
        of_type = torch.stack([layer[head_type] for layer in by_layer])
        best = of_type.flatten().topk(3)
        names = [head_name(divmod(i, of_type.shape[1])) for i in best.indices.tolist()]
        values = [round(value, 3) for value in best.values.tolist()]
        scores[head_type] = dict(zip(names, values, strict=True))
    return scores


def write_tokenizer_config(out: Path) -> None:
    """What Hugging Face needs beside ``tokenizer.json``."""
    special = dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "model_max_length": CONTEXT}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def data_card(
    texts: list[str], stream: Tensor, documents: corpus.HeldOut, held_out: Tensor
) -> dict[str, Any]:
    """What the model was trained and tested on."""
    data = {
        "training_files": len(texts),
        "training_tokens_available": len(stream),
        "sha256": hashlib.sha256(stream.numpy().tobytes()).hexdigest(),
        "held_out_modules": list(documents.names),
        "held_out_tokens": len(held_out),
    }
    return {"data": data, "mixture": __doc__.split("\n\n", 1)[1].strip() if __doc__ else ""}


def model_card(
    out: Path, model: GPT2LMHeadModel, losses: Sequence[float], stream: Tensor, held_out: Tensor
) -> dict[str, Any]:
    """What the training gave: the file, losses beside those of simpler models, and head types."""
    return {
        "note": (
            "Demonstrates the library and is evidence for nothing. The untrained control "
            "is new_model() under the same seed."
        ),
        "model_sha256": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
        "steps": len(losses),
        "tokens_seen": len(losses) * 4096,  # 64 rows of 64 tokens, or 32 of 128
        "final_training_loss": math.fsum(losses[-100:]) / len(losses[-100:]),
        "held_out_loss": natural_loss(model, held_out),
        "untrained_loss": natural_loss(new_model(), held_out),
        **{f"{k}_loss": v for k, v in ngram_losses(stream, held_out).items()},
        "repeated_random_tokens": head_scores(model),
    }


def main(argv: list[str] | None = None) -> int:
    """Train and write a Hugging Face directory with ``card.json`` into ``--out``."""
    about = "Train the embedded model from the Python sources on this machine."
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    torch.set_num_threads(arguments.threads)
    texts = training_texts()
    if not (out / "tokenizer.json").exists():
        train_tokenizer(texts, out / "tokenizer.json")
    stream = encode(texts, out / "tokenizer.json")
    documents = corpus.held_out_documents()
    held_out = encode(list(documents.texts), out / "tokenizer.json")
    model, checkpoint = new_model(), out / "training.safetensors"

    def on_step(step: int, _: object) -> None:
        if (step + 1) % 200 == 0:
            loss = natural_loss(model, held_out[:40_000])
            log.info("step %d: held-out loss %.3f", step + 1, loss)

    losses = train(
        model, batches(stream), SETTINGS, checkpoint=checkpoint, on_step=on_step, progress=False
    )
    round_weights(model)
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    write_tokenizer_config(out)
    card = {
        **data_card(texts, stream, documents, held_out),
        **model_card(out, model, losses, stream, held_out),
    }
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    log.info("%s", json.dumps(card))
    return 0


if __name__ == "__main__":
    sys.exit(main())
