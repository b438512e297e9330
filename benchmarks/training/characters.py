"""Does a character-level model have the published positional rank and relative norm? (Song & Zhong
2023, Tables 1 and 2, rows "NanoGPT".)
``python -m benchmarks.training nanogpt`` runs it.

The model is trained on a text that the user names (Shakespeare in the paper). It is measured on the
held-out tenth of that text (Table 1) and on another text (Table 2, "robustness"). The published
NanoGPT row of Table 2 repeats that of Table 1. Mean and population standard deviation are over the
states.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import figures as views
from benchmarks.training.embedded import training_texts
from benchmarks.training.formats import shifted
from benchmarks.training.outcome import Claim, Outcome, basis_of, bridge_of, state_measures
from benchmarks.training.random_tokens import held_out_windows, text_windows
from benchmarks.training.setup import Setup, Training, chosen, run_training, setups
from benchmarks.training.trainer import Batch
from tl_geometry import render
from tl_geometry.base.errors import require
from tl_geometry.papers.published import numbers
from tl_geometry.zoo import corpus

PUBLISHED_ROWS = {
    "own text": ("table_1", "NanoGPT Shakespeare"),
    "other text": ("table_2", "NanoGPT Wiki"),
}
"""Text that is measured -> the published table and row it is compared with."""
SUMMARY = {
    "rank": "rank",
    "relative_norm_reference": "relative_norm",
    "relative_norm": "relative_norm",
}
"""Measure -> the published measure it is compared with. The published code computes the reference
form of the relative norm; the paper's own form is compared too."""

SETUPS = setups(Setup, "nanogpt")
"""Settings by scale, from ``setups.toml``. ``SETUPS["paper"].changed({"context": "256"})`` has the
published settings but for one."""


def character_ids(text: str, alphabet: str) -> Int[Tensor, " token"]:
    """The index of each character of a text in an alphabet; characters that are not in it are left
    out.

    >>> character_ids("abxba", "ab").tolist()
    [0, 1, 1, 0]
    """
    id_of = {character: i for i, character in enumerate(alphabet)}
    return torch.tensor(
        [id_of[character] for character in text if character in id_of], dtype=torch.int64
    )


def next_token_loss(model: nn.Module, tokens: Int[Tensor, "context position"]) -> float:
    """Mean cross-entropy of the next token, in nats."""
    device, losses = next(model.parameters()).device, []
    with torch.inference_mode():
        for rows in tokens.to(device).split(64):
            logits = model(rows).logits[:, :-1].mT
            losses.append(F.cross_entropy(logits, rows[:, 1:], reduction="none").double().sum())
    return float(torch.stack(losses).sum()) / tokens[:, 1:].numel()


def nanogpt(
    scale: str | Setup = "cpu",
    texts: Sequence[str] | None = None,
    *,
    name: str = "the user's text",
    other: Sequence[str] | None = None,
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    device: str = "cpu",
    progress: bool = True,
) -> Outcome:
    """Train a character-level model and put its positional rank and relative norm beside the
    published row.

    Args:
        texts: documents to train on, joined; the last tenth is held out. ``None``:
            standard-library modules.
        other: documents for the row of Table 2. Characters that the training text does not have
            are left out. ``None``: held-out standard-library modules.

    The other arguments are those of :func:`~benchmarks.training.random_tokens.randomisation`.

    >>> short = SETUPS["smoke"].changed({"steps": "2"})
    >>> roses, other = ["a rose is a rose. " * 100], ["roses are. " * 50]
    >>> outcome = nanogpt(short, roses, other=other, progress=False)
    >>> list(outcome.tables["summary"][0])[:4]
    ['seed', 'measured', 'measure', 'mean']
    """
    setup = chosen(scale, SETUPS)
    text = "\n".join(training_texts()[:60] if texts is None else texts)
    alphabet = "".join(sorted(set(text)))
    stream = character_ids(text, alphabet)
    # cut before windows are drawn: no held-out character is trained on
    cut = int(0.9 * len(stream))
    # in the alphabet of the training text: other characters have no id
    other_stream = character_ids(
        "\n".join(corpus.held_out_documents().texts if other is None else other), alphabet
    )
    require(len(alphabet) > 1, "text", expected="two characters or more", got=len(alphabet))
    rows: list[dict[str, Any]] = []
    figures: dict[str, Any] = {}
    training: dict[str, Any] = {"out": out, "device": device, "progress": progress}
    sources = {"own text": stream[cut:], "other text": other_stream}
    for seed in seeds:
        windows = {
            label: held_out_windows(ids, setup.context, setup.contexts, seed)
            for label, ids in sources.items()
        }
        training_run = _train(setup, stream[:cut], len(alphabet), windows, seed, training)
        rows += [{"seed": seed, **record} for record in training_run.records]
        if seed == seeds[0]:
            basis = basis_of(
                bridge_of(training_run.model, "NanoGPT"), windows["own text"], "own text"
            )
            figures = {"cosines": views.state_cosines(basis)}
            figures["spirals"] = render.spirals(basis).figure
    label = "standard-library modules" if texts is None else name
    return _outcome(setup, rows, figures, tuple(seeds), label)


def _train(
    setup: Setup,
    stream: Tensor,
    d_vocab: int,
    windows: dict[str, Tensor],
    seed: int,
    training: dict[str, Any],
) -> Training:
    def batch_at(step: int) -> Batch:
        # the factor is larger than the steps of any run, so that no two seeds share a batch
        batch_seed = seed * 10_000_019 + step
        return shifted(text_windows(stream, setup.context + 1, setup.batch, batch_seed))

    def measure(_: int, model: nn.Module) -> list[dict[str, Any]]:
        bridge, rows = bridge_of(model, "NanoGPT"), []
        for measured, tokens in windows.items():
            loss = next_token_loss(model, tokens)
            basis = basis_of(bridge, tokens, measured)
            states = state_measures(basis, setup.frequencies)
            rows += [{"measured": measured, "loss": loss, **row} for row in states]
        return rows

    name = f"seed-{seed}"
    return run_training(setup, d_vocab, batch_at, measure, name=name, seed=seed, **training)


def _outcome(
    setup: Setup,
    rows: list[dict[str, Any]],
    figures: dict[str, Any],
    seeds: tuple[int, ...],
    label: str,
) -> Outcome:
    summary = [
        _beside_published(
            [r for r in rows if (r["step"], r["seed"], r["measured"]) == (setup.steps, seed, text)],
            measure,
        )
        for text in PUBLISHED_ROWS
        for seed in seeds
        for measure in SUMMARY
    ]
    curves = views.training_curves(
        [r for r in rows if r["state"] == min(1, setup.layers)],
        ("loss", "rank", "relative_norm", "low_frequency"),
        "measured",
    )
    note = (
        "Mean and population standard deviation are over the states, as in the published tables. "
        "relative norm reference divides by the raw states, as the published code does; relative "
        "norm by the centred ones, as the paper says."
    )
    return Outcome(
        name="nanogpt",
        title="NanoGPT",
        setup=setup,
        seeds=seeds,
        corpus=label,
        findings=tuple(_findings(summary, rows, seeds)),
        tables={"summary": summary, "curves": rows},
        figures=figures | {"curves": curves},
        notes=(note,),
    )


def _beside_published(rows: list[dict[str, Any]], measure: str) -> dict[str, Any]:
    """Mean and standard deviation of a measure over the states at the end of a run (``rows`` has
    one row per state), beside those of the published table."""
    values = [r[measure] for r in rows]
    table, row = PUBLISHED_ROWS[rows[0]["measured"]]
    mean, sd = numbers()[table][row][SUMMARY[measure]]
    return {
        "seed": rows[0]["seed"],
        "measured": rows[0]["measured"],
        "measure": measure,
        "mean": math.fsum(values) / len(values),
        "sd": statistics.pstdev(values),
        "published_mean": mean,
        "published_sd": sd,
        "loss": rows[0]["loss"],
    }


def _findings(
    summary: list[dict[str, Any]], rows: list[dict[str, Any]], seeds: Sequence[int]
) -> Iterator[Claim]:
    """Each measure beside the published one, and whether the loss falls."""
    for text, measure in product(PUBLISHED_ROWS, SUMMARY):
        summary_rows = [r for r in summary if (r["measured"], r["measure"]) == (text, measure)]
        mean, sd = (summary_rows[0][f"published_{name}"] for name in ("mean", "sd"))
        yield Claim(
            statement=f"{text}: {measure.replace('_', ' ')} over states",
            expected=f"{mean}({sd}) published",
            found="; ".join(f"{r['mean']:.2f}({r['sd']:.2f})" for r in summary_rows),
        )
    losses = [
        [r["loss"] for r in rows if (r["measured"], r["seed"]) == ("own text", seed)]
        for seed in seeds
    ]
    yield Claim(
        statement="held-out loss (nats per character)",
        expected="falls",
        found="; ".join(f"{run_losses[0]:.3f} to {run_losses[-1]:.3f}" for run_losses in losses),
        holds=all(run_losses[-1] < run_losses[0] for run_losses in losses),
    )
