"""Does training on random tokens destroy the geometry of position, and only where they are random?
(Song & Zhong 2023, section 5.1.)
``python -m benchmarks.training randomisation`` runs it.

1. Three models are trained: on text, on text whose second half is random tokens, and on random
   tokens only.
2. Each is measured on all three formats. This gives a 3 x 3 grid of positional bases per state.
3. The break (the largest step between neighbours) is expected where the random half begins, and a
   small share of low frequencies inside that half.

The target of the last text position is random already, so the model's task changes one position
before the tokens do.

Measures of one half are taken on the positions of that half alone, after their own mean is
subtracted, and without the position before the middle. Otherwise the jump of the mean between the
halves, which all positions of the second half share, would make random positions look alike and
therefore smooth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import tl_geometry as tlg
from benchmarks.training import figures as views
from benchmarks.training.embedded import training_texts
from benchmarks.training.formats import FORMATS, randomise, shifted
from benchmarks.training.outcome import (
    Claim,
    Outcome,
    Rows,
    basis_of,
    bridge_of,
    column,
    final,
    state_measures,
)
from benchmarks.training.setup import Setup, Training, chosen, run_training, setups
from benchmarks.training.trainer import Batch
from tl_geometry.base.errors import fail, require
from tl_geometry.measures import positional
from tl_geometry.zoo import corpus
from tl_geometry.zoo.embedded_model import tokenizer


@dataclass(frozen=True, kw_only=True)
class RandomisationSetup(Setup):
    """``tokenizer`` is a name or directory for Hugging Face (``""``: that of the embedded model),
    ``characters`` how much of the text is read, ``shown`` the states in the figures (published: 1
    and 5)."""

    tokenizer: str = ""
    characters: int = 10_000_000
    shown: tuple[int, ...] = (1, 5)


SETUPS = setups(RandomisationSetup, "randomisation")
"""Settings by scale, from ``setups.toml``. ``SETUPS["paper"].changed({"context": "512"})`` has the
published settings but for one."""


def token_stream(
    setup: RandomisationSetup, texts: Sequence[str] | None, name: str
) -> tuple[Int[Tensor, " token"], Int[Tensor, " position"], int, str]:
    """Training ids, held-out ids, size of the vocabulary and a label. The last tenth of a user's
    text is held out."""
    tokenizer = _tokenizer(setup.tokenizer)

    def ids(documents: Iterable[str]) -> Tensor:
        # not verbose: no warning that a document is longer than the tokenizer's model reads
        encoded = (tokenizer(d, add_special_tokens=False, verbose=False) for d in documents)
        return torch.tensor([i for document in encoded for i in document["input_ids"]])

    if texts is None:
        stream = ids(_first_texts(training_texts(), setup.characters))
        held_out = ids(corpus.held_out_documents().texts)
        return stream, held_out, len(tokenizer), "standard-library modules"
    stream = ids(_first_texts(texts, setup.characters))
    # cut before windows are drawn: no held-out token is trained on
    n_training = int(0.9 * len(stream))
    return stream[:n_training], stream[n_training:], len(tokenizer), name


def _tokenizer(name: str) -> Any:
    """A tokenizer by name or directory, that of the embedded model for ``""``."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name) if name else tokenizer()
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        fail(
            "tokenizer",
            expected="one that can be loaded",
            got=f"{name!r} ({reason})",
            instead="--set tokenizer=DIRECTORY, or --set tokenizer= for the embedded one",
        )


def _first_texts(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The first texts, ``characters`` characters in all; the last text is cut."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def text_windows(
    stream: Int[Tensor, " token"], length: int, n: int, seed: int
) -> Int[Tensor, "context position"]:
    """``n`` windows for training, at random places of a token stream, with replacement."""
    require(
        len(stream) > length,
        "text",
        expected=f"more than {length} tokens",
        got=len(stream),
        instead="a longer text",
    )
    starts = torch.randint(
        len(stream) - length + 1, (n,), generator=torch.Generator().manual_seed(seed)
    )
    return stream[starts[:, None] + torch.arange(length)]


def held_out_windows(
    stream: Int[Tensor, " token"], length: int, n: int, seed: int
) -> Int[Tensor, "context position"]:
    """At most ``n`` windows of a token stream that do not overlap, chosen and ordered by
    ``seed``."""
    require(
        len(stream) >= 2 * length,
        "text",
        expected=f"{2 * length} held-out tokens",
        got=len(stream),
        instead="a longer text",
    )
    rows = stream[: len(stream) // length * length].view(-1, length)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:n]]


def halves(
    pos: Float[Tensor, "state position d_model"], half: int, frequencies: int
) -> dict[str, Float[Tensor, " state"]]:
    """Fracture, roughness and low-frequency share of the first ``half - 1`` rows and of those from
    ``half`` on, each less its own mean.

    The row between them belongs to no half: its tokens are text, its target is random.

    >>> noise = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    >>> smooth = torch.linspace(-1, 1, 16)[:, None] * torch.ones(3)
    >>> measures = halves(torch.cat([smooth, 9 + noise])[None], 16, 2)
    >>> bool(measures["roughness_first"] < 0.2), bool(measures["roughness_second"] > 1)
    (True, True)
    """
    measures: dict[str, Tensor] = {}
    for name, half_rows in (("first", pos[:, : half - 1]), ("second", pos[:, half:])):
        # with the jump of the mean in it, random rows would look alike and therefore smooth
        half_rows = half_rows - half_rows.mean(1, keepdim=True)
        measures[f"fracture_{name}"] = positional.fracture_score(half_rows).score
        measures[f"roughness_{name}"] = positional.roughness(half_rows)
        measures[f"low_frequency_{name}"] = positional.low_frequency_share(half_rows, frequencies)
    return measures


def _bases(
    setup: RandomisationSetup, model: nn.Module, windows: Tensor, trained: str, d_vocab: int
) -> dict[str, tlg.PositionContext]:
    """Bases of one model on the three formats."""
    half, bridge = setup.context // 2, bridge_of(model, f"trained on {trained}")
    # one seed: all models are measured on the same random tokens at every step
    rows = {format: randomise(windows, format, d_vocab, half=half, seed=1) for format in FORMATS}
    return {format: basis_of(bridge, tokens, format) for format, tokens in rows.items()}


def _measures(
    setup: RandomisationSetup, bases: dict[str, tlg.PositionContext], trained: str
) -> list[dict[str, Any]]:
    """Measures of one model on the three formats, a row per format and state."""
    rows: list[dict[str, Any]] = []
    for format, basis in bases.items():
        half_measures = halves(basis.pos, setup.context // 2 - basis.window[0], setup.frequencies)
        for i, row in enumerate(state_measures(basis, setup.frequencies)):
            of_halves = {name: float(value[i]) for name, value in half_measures.items()}
            rows.append({"trained": trained, "measured": format, **row, **of_halves})
    return rows


def randomisation(
    scale: str | RandomisationSetup = "cpu",
    texts: Sequence[str] | None = None,
    *,
    name: str = "the user's text",
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    device: str = "cpu",
    progress: bool = True,
) -> Outcome:
    """Train on three formats and measure each model on all three (Song & Zhong 2023, section 5.1
    and Figures 42 to 50).

    Args:
        scale: ``"smoke"``, ``"cpu"``, ``"paper"``, or changed settings
            (``SETUPS["cpu"].changed({"steps": "500"})``).
        texts: documents to train on; the last tenth is held out for measuring. ``None``: modules of
            the standard library and of torch, with held-out modules for measuring.
        name: what the findings call them.
        seeds: one run for each; figures show the first.
        out: folder for the weights of each measured step, and for checkpoints from which a stopped
            run resumes.
        device: where the models are trained.
        progress: show a bar.

    ``tables["curves"]`` has a row for each seed, training format, inference format, number of steps
    and state.

    >>> short = SETUPS["smoke"].changed({"steps": "2"})
    >>> outcome = randomisation(short, ["for i in range(3): print(i) " * 400], progress=False)
    >>> outcome.arrays["trained on full, measured on partial"].shape
    torch.Size([3, 23, 32])
    """
    setup = chosen(scale, SETUPS)
    drawable = any(state <= setup.layers for state in setup.shown)
    require(drawable, "shown", expected=f"a state of 0 to {setup.layers}", got=setup.shown)
    stream, held_out, d_vocab, label = token_stream(setup, texts, name)
    training: dict[str, Any] = {"out": out, "device": device, "progress": progress}
    rows: list[dict[str, Any]] = []
    pos: dict[tuple[str, str], Tensor] = {}
    for seed in seeds:
        windows = held_out_windows(held_out, setup.context, setup.contexts, seed)
        for trained in FORMATS:
            training_run = _train(setup, stream, d_vocab, windows, trained, seed, training)
            # a mean over batches, because the loss of a single batch is noisy
            last_losses = training_run.losses[-50:]
            loss = math.fsum(last_losses) / len(last_losses)
            rows += [
                {"seed": seed, **record, "training_loss": loss} for record in training_run.records
            ]
            if seed == seeds[0]:
                bases = _bases(setup, training_run.model, windows, trained, d_vocab)
                pos |= {
                    (trained, measured): basis.pos.float().cpu()
                    for measured, basis in bases.items()
                }
    return _outcome(setup, rows, pos, tuple(seeds), label)


def _train(
    setup: RandomisationSetup,
    stream: Tensor,
    d_vocab: int,
    windows: Tensor,
    trained: str,
    seed: int,
    training: dict[str, Any],
) -> Training:
    half = setup.context // 2

    def batch_at(step: int) -> Batch:
        # the factor is larger than the steps of any run, so that no two runs share a batch
        batch_seed = (seed * 3 + FORMATS.index(trained)) * 10_000_019 + step
        text = text_windows(stream, setup.context + 1, setup.batch, batch_seed)
        return shifted(randomise(text, trained, d_vocab, half=half, seed=batch_seed))

    def measure(_: int, model: nn.Module) -> list[dict[str, Any]]:
        return _measures(setup, _bases(setup, model, windows, trained, d_vocab), trained)

    name = f"{trained}-{seed}"
    return run_training(setup, d_vocab, batch_at, measure, name=name, seed=seed, **training)


def _outcome(
    setup: RandomisationSetup,
    rows: list[dict[str, Any]],
    pos: dict[tuple[str, str], Tensor],
    seeds: tuple[int, ...],
    label: str,
) -> Outcome:
    half = setup.context // 2
    finished = final(rows, setup)
    shown = [s for s in setup.shown if s <= setup.layers]
    figures = {f"planes_state_{s}": views.format_planes(pos, s, half=half, start=1) for s in shown}
    figures["curves"] = views.training_curves(
        [r for r in rows if r["trained"] == r["measured"] and r["state"] == shown[-1]],
        ("low_frequency", "low_frequency_first", "low_frequency_second", "jump"),
        "trained",
    )
    notes = (
        "Rows of each grid are training formats, columns inference formats. The first position of "
        "a window is left out. Measures of a half are those of its own positions less their own "
        "mean, without the position before the middle: its target is random already, so that what "
        "the model has to do changes one position before the tokens. split_half near one says "
        "that sampling noise is small. Numbers in the findings are by state, 0 to the input of "
        "the last block, a group for each seed.",
    )
    return Outcome(
        name="randomisation",
        title="Token randomisation",
        setup=setup,
        seeds=seeds,
        corpus=label,
        findings=tuple(findings(finished, setup)),
        tables={"final": finished, "curves": rows},
        arrays={f"trained on {a}, measured on {b}": x for (a, b), x in pos.items()},
        figures=figures,
        notes=notes,
    )


MEASURES_OF_HALVES = {"fracture": 1, "jump": 1, "roughness_first": 2, "roughness_second": 2}
"""Measures that tell a broken second half from text -> the decimals that they are shown with."""


def findings(final: Rows, setup: RandomisationSetup) -> list[Claim]:
    """What the final table says, for every seed: does the basis break in the middle, and does the
    share of low frequencies fall? Only states that a block reads count, so the last one is left
    out."""
    seeds, half = sorted(set(column(final, "seed"))), setup.context // 2

    def values(measure: str, trained: str, measured: str) -> list[list[float]]:
        """A list of values by state for each seed."""
        where = {"trained": trained, "measured": measured}
        return [column(final, measure, **where, seed=seed)[: setup.layers] for seed in seeds]

    text = values("low_frequency", "baseline", "baseline")
    claims = [
        _low_frequency(
            text, values("low_frequency", "full", measured), measured, where, state_slice
        )
        for measured in ("full", "baseline")
        for where, state_slice in (("state 0", slice(0, 1)), ("the other states", slice(1, None)))
    ]
    for measure, name in (("fracture_at", "largest turn"), ("jump_at", "longest step")):
        claims += _places(values, measure, f"first position after the {name}", half)
    for measure, digits in MEASURES_OF_HALVES.items():
        text, partial = (
            _by_state(values(measure, form, form), digits) for form in ("baseline", "partial")
        )
        name = measure.replace("_", " ")
        claims.append(
            Claim(
                statement=f"{name}, half-random text against text (each measured on its own "
                "format)",
                expected="the second half breaks, the first does not",
                found=f"text {text}; half-random {partial}",
            )
        )
    return claims


def _places(
    values: Callable[[str, str, str], list[list[float]]], measure: str, place_text: str, half: int
) -> Iterator[Claim]:
    """Claims about where the basis breaks: in the middle after training on half-random text, and
    elsewhere after training on text (the control)."""

    def places(trained: str, measured: str) -> list[list[float]]:
        # measures name a step by the position before it, claims by the position after it
        return [[v + 1 for v in row] for row in values(measure, trained, measured)]

    for measured in ("partial", "baseline"):
        broken = places("partial", measured)
        yield Claim(
            statement=f"trained on half-random text, measured on {measured}: {place_text}",
            expected=f"within 2 of {half} at every state",
            found=_by_state(broken, 0),
            holds=all(abs(place - half) <= 2 for row in broken for place in row),
        )
    control, is_judged = places("baseline", "baseline"), measure == "jump_at"
    unjudged = "anywhere: a smooth curve turns fastest where it passes its mean"
    away_from_half = all(abs(place - half) > 2 for row in control for place in row)
    yield Claim(
        statement=f"control, trained and measured on text: {place_text}",
        expected=f"not near {half}" if is_judged else unjudged,
        found=_by_state(control, 0),
        holds=away_from_half if is_judged else None,
    )


def _by_state(rows: list[list[float]], digits: int) -> str:
    """Values by state, a group for each seed, as text."""
    return "; ".join(", ".join(f"{v:.{digits}f}" for v in row) for row in rows)


def _low_frequency(
    text: list[list[float]],
    random: list[list[float]],
    measured: str,
    where: str,
    state_slice: slice,
) -> Claim:
    """Whether training on random tokens halves the share of low frequencies."""
    text, random = ([row[state_slice] for row in rows] for rows in (text, random))
    trained = f"trained on random tokens and measured on {measured}, against text"
    return Claim(
        statement=f"low-frequency share at {where}, {trained}",
        expected="falls by half in every seed (mean over states)",
        found=f"text {_by_state(text, 2)}; random {_by_state(random, 2)}",
        holds=all(
            math.fsum(random_shares) <= math.fsum(text_shares) / 2
            for text_shares, random_shares in zip(text, random, strict=True)
        ),
    )
