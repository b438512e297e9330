"""Token randomisation: where training text is random, the geometry of position is destroyed (Song &
Zhong 2023, section 5.1).

1. Three models are trained on text, on text whose second half is random tokens, and on random
   tokens.
2. Each is measured on all three formats: a 3 x 3 grid of positional bases per state.
3. The break (the largest step between neighbours) is expected where the random half begins, and few
   low frequencies where it lies.

The target of the last position of text is random already, so that what the model has to do changes
one position before the tokens do.

Measures of one half are those of that half alone: its own positions, less their mean, without the
position before the middle. Otherwise the jump of the mean between the halves, which is common to
all positions of the second, would make random positions look alike and therefore smooth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tl_geometry.base.errors import fail, require
from tl_geometry.base.results import Provenance, Result
from tl_geometry.measures import positional
from tl_geometry.papers import figures as views
from tl_geometry.papers.formats import FORMATS, randomise, shifted
from tl_geometry.papers.outcome import (
    Finding,
    Outcome,
    basis_of,
    bridge_of,
    state_measures,
    table_of,
)
from tl_geometry.papers.setup import PAPER, SMOKE, Setup, Table, chosen, run_training
from tl_geometry.zoo import corpus
from tl_geometry.zoo.trainer import Batch


@dataclass(frozen=True, kw_only=True)
class RandomisationSetup(Setup):
    """``tokenizer`` is a name or directory for Hugging Face (``""``: the embedded model's);
    ``characters`` of the text are read; ``shown`` are the states in the figures."""

    tokenizer: str = ""
    characters: int = 10_000_000
    shown: tuple[int, ...] = (1, 5)


SETUPS: dict[str, RandomisationSetup] = {
    "smoke": RandomisationSetup(
        **SMOKE,
        context=24,
        batch=8,
        steps=20,
        frequencies=3,
        characters=100_000,
        shown=(1, 2),
    ),
    "cpu": RandomisationSetup(
        scale="cpu",
        layers=4,
        heads=4,
        d_model=64,
        context=64,
        batch=16,
        steps=2000,
        warmup=100,
        learning_rate=3e-3,
        final_learning_rate=3e-4,
        dropout=0.0,
        measurements=5,
        contexts=1024,
        frequencies=4,
        shown=(1, 3),
    ),
    "paper": RandomisationSetup(
        **PAPER,
        layers=8,
        heads=8,
        d_model=512,
        context=256,
        tokenizer="gpt2",
        contexts=6400,
        frequencies=10,
        characters=10**12,
    ),
}
"""Settings by scale. Published sources disagree on two of them: the text has context 512, appendix
and configuration 256 (used here); the paper has a warm-up of 1000 steps (used here), the
configuration 200. ``setup.changed({"context": "512"})`` takes the other."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FormatBases(Result):
    """Positional bases after training: ``pos["full", "baseline"] [state position d_model]`` is that
    of a model trained on ``"full"``, measured on ``"baseline"``; the random half of ``"partial"``
    begins at position ``half``."""

    version: ClassVar[int] = 2
    pos: dict[tuple[str, str], Float[Tensor, "state position d_model"]]
    half: int


def token_stream(
    setup: RandomisationSetup, texts: Sequence[str] | None, name: str
) -> tuple[Int[Tensor, " token"], Int[Tensor, " position"], int, str]:
    """Training ids, held-out ids, size of the vocabulary and a label. A user's text is cut 9 to
    1."""
    from transformers import AutoTokenizer

    from tl_geometry import zoo

    try:
        tokenizer = (
            AutoTokenizer.from_pretrained(setup.tokenizer) if setup.tokenizer else zoo.tokenizer()
        )
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        fail(
            "tokenizer",
            expected="one that can be loaded",
            got=f"{setup.tokenizer!r} ({reason})",
            instead="--set tokenizer=DIRECTORY, or --set tokenizer= for the embedded one",
        )

    def ids(documents: Sequence[str]) -> Tensor:
        return torch.tensor(
            [
                i
                for d in documents
                for i in tokenizer(d, add_special_tokens=False, verbose=False)["input_ids"]
            ]
        )

    if texts is not None:
        stream = ids(_first(texts, setup.characters))
        cut = int(0.9 * len(stream))
        return stream[:cut], stream[cut:], len(tokenizer), name
    held_out = corpus.held_out_documents().texts
    return (
        ids(_first(corpus.training_texts(), setup.characters)),
        ids(held_out),
        len(tokenizer),
        "standard-library modules",
    )


def _first(texts: Sequence[str], characters: int) -> list[str]:
    """Texts from the first on, as many as have that many characters together; the last is cut."""
    kept: list[str] = []
    for text in texts:
        kept.append(text[:characters])
        characters -= len(kept[-1])
        if characters <= 0:
            break
    return kept


def text_windows(
    stream: Int[Tensor, " token"], length: int, n: int, seed: int
) -> Int[Tensor, "context position"]:
    """``n`` windows at random places of a token stream (for training: drawn with replacement)."""
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
    """At most ``n`` of the windows of a token stream that do not overlap, in a seeded order."""
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
    >>> found = halves(torch.cat([smooth, 9 + noise])[None], 16, 2)
    >>> bool(found["roughness_first"] < 0.2), bool(found["roughness_second"] > 1)
    (True, True)
    """
    found: dict[str, Tensor] = {}
    for name, part in (("first", pos[:, : half - 1]), ("second", pos[:, half:])):
        part = part - part.mean(1, keepdim=True)
        found[f"fracture_{name}"] = positional.fracture_score(part).score
        found[f"roughness_{name}"] = positional.roughness(part)
        found[f"low_frequency_{name}"] = positional.low_frequency_share(part, frequencies)
    return found


def _grid(
    setup: RandomisationSetup,
    model: nn.Module,
    windows: Tensor,
    trained: str,
    d_vocab: int,
    keep: dict[tuple[str, str], Tensor],
) -> list[dict[str, Any]]:
    """Measures of one model on the three formats, a row per format and state; the bases go into
    ``keep``."""
    half, rows, bridge = setup.context // 2, [], bridge_of(model, f"trained on {trained}")
    for format in FORMATS:
        basis = basis_of(bridge, randomise(windows, format, d_vocab, half=half, seed=1), format)
        keep[trained, format] = basis.pos.float().cpu()
        parts = halves(basis.pos, half - basis.window[0], setup.frequencies)
        for i, row in enumerate(state_measures(basis, setup.frequencies)):
            of_halves = {n: float(v[i]) for n, v in parts.items()}
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
        scale: ``"smoke"``, ``"cpu"``, ``"paper"``, or settings of one's own
            (``SETUPS["cpu"].changed({"steps": "500"})``).
        texts: documents to train on, the last tenth held out for measuring; ``None``:
            standard-library modules, others for measuring.
        name: what they are called on the page.
        seeds: a run for each; figures show the first.
        out: folder for checkpoints, from which a stopped run goes on, and weights of each measured
            step.
        device: where the models are trained.
        progress: show a bar.

    The curves hold a row for each seed, training format, inference format, number of steps and
    state.

    >>> short = SETUPS["smoke"].changed({"steps": "2"})
    >>> outcome = randomisation(short, ["for i in range(3): print(i) " * 400], progress=False)
    >>> outcome.tables["bases"].pos["full", "partial"].shape
    torch.Size([3, 23, 32])
    """
    setup = chosen(scale, SETUPS)
    some = any(state <= setup.layers for state in setup.shown)
    require(some, "shown", expected=f"a state of 0 to {setup.layers}", got=setup.shown)
    stream, other, d_vocab, label = token_stream(setup, texts, name)
    folder = None if out is None else Path(out)
    rows: list[dict[str, Any]] = []
    bases: dict[tuple[str, str], Tensor] = {}
    for seed in seeds:
        windows = held_out_windows(other, setup.context, setup.contexts, seed)
        for trained in FORMATS:

            def batch_at(step: int, trained: str = trained, seed: int = seed) -> Batch:
                places = (seed * 3 + FORMATS.index(trained)) * 10_000_019 + step
                taken = text_windows(stream, setup.context + 1, setup.batch, places)
                return shifted(
                    randomise(taken, trained, d_vocab, half=setup.context // 2, seed=places)
                )

            keep: dict[tuple[str, str], Tensor] = {}
            model = setup.model(d_vocab, seed).to(device)
            place = None if folder is None else folder / f"{trained}-{seed}"
            losses, records = run_training(
                setup,
                model,
                batch_at,
                lambda _, m, t=trained, w=windows, k=keep: _grid(setup, m, w, t, d_vocab, k),
                seed=seed,
                folder=place,
                progress=progress,
            )
            rows += [
                {"seed": seed, **r, "training_loss": math.fsum(losses[-50:]) / len(losses[-50:])}
                for r in records
            ]
            if seed == seeds[0]:
                if not keep:  # the run was finished before
                    _grid(setup, model, windows, trained, d_vocab, keep)
                bases |= keep
    return _outcome(setup, rows, bases, tuple(seeds), label)


def _outcome(
    setup: RandomisationSetup,
    rows: list[dict[str, Any]],
    bases: dict[tuple[str, str], Tensor],
    seeds: tuple[int, ...],
    label: str,
) -> Outcome:
    provenance = Provenance(corpus=label, window=(1, setup.context), seed=seeds[0])
    curves = table_of(rows, provenance)
    final = table_of([r for r in rows if r["step"] == setup.steps], provenance)
    grids = FormatBases(pos=bases, half=setup.context // 2, provenance=provenance)
    shown = [s for s in setup.shown if s <= setup.layers]
    where: dict[str, Any] = {"half": setup.context // 2, "start": 1, "source": provenance.line()}
    figures = {f"planes_state_{s}": views.format_planes(bases, s, **where) for s in shown}
    figures |= {f"cosines_state_{s}": views.format_cosines(bases, s, **where) for s in shown}
    figures["curves"] = views.training_curves(
        [r for r in rows if r["trained"] == r["measured"] and r["state"] == shown[-1]],
        ("low_frequency", "low_frequency_first", "low_frequency_second", "jump"),
        by="trained",
        caption=f"Each line is a seed: a model on its own format, at state {shown[-1]}.",
        source=provenance.line(),
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
        findings=tuple(findings(final, setup)),
        tables={"final": final, "curves": curves, "bases": grids},
        figures=figures,
        notes=notes,
    )


def findings(final: Table, setup: RandomisationSetup) -> list[Finding]:
    """What the final table says about the two claims at the states that blocks read, for every
    seed."""
    seen = _Final(final, range(setup.layers), sorted(set(final.column("seed"))))
    found = [
        _low_frequency(seen, measured, where, part)
        for measured in ("full", "baseline")
        for where, part in (("state 0", slice(0, 1)), ("the other states", slice(1, None)))
    ]
    for measure, name in (("fracture_at", "largest turn"), ("jump_at", "longest step")):
        found += _places(seen, measure, name, setup.context // 2)
    for measure in ("fracture", "jump", "roughness_first", "roughness_second"):
        text, half = (
            _shown(seen.values(measure, form, form), 2 if measure.startswith("rough") else 1)
            for form in ("baseline", "partial")
        )
        name = measure.replace("_", " ")
        found.append(
            Finding(
                claim=f"{name}, half-random text against text (each measured on its own format)",
                expected="the second half breaks, the first does not",
                found=f"text {text}; half-random {half}",
            )
        )
    return found


class _Final(NamedTuple):
    """The final table, the states that blocks read, and the seeds."""

    table: Table
    states: range
    seeds: list[Any]

    def values(self, measure: str, trained: str, measured: str) -> list[list[float]]:
        """A list of values by state for each seed."""
        where = {"trained": trained, "measured": measured}
        return [
            [float(self.table.column(measure, **where, seed=s, state=l)[0]) for l in self.states]
            for s in self.seeds
        ]


def _shown(rows: list[list[float]], digits: int) -> str:
    return "; ".join(", ".join(f"{v:.{digits}f}" for v in row) for row in rows)


def _low_frequency(seen: _Final, measured: str, where: str, part: slice) -> Finding:
    """Whether training on random tokens halves the share of low frequencies."""
    text = seen.values("low_frequency", "baseline", "baseline")
    random = seen.values("low_frequency", "full", measured)
    sums = [(math.fsum(a[part]), math.fsum(b[part])) for a, b in zip(text, random, strict=True)]
    shares = (_shown([row[part] for row in rows], 2) for rows in (text, random))
    trained = f"trained on random tokens and measured on {measured}, against text"
    return Finding(
        claim=f"low-frequency share at {where}, {trained}",
        expected="falls by half in every seed (mean over states)",
        found="text {}; random {}".format(*shares),
        holds=all(b <= a / 2 for a, b in sums),
    )


def _places(seen: _Final, measure: str, name: str, half: int) -> Iterator[Finding]:
    """Where the basis breaks: in the middle where half of the text was random, elsewhere where none
    was."""
    first = f"first position after the {name}"
    for measured in ("partial", "baseline"):
        places = [[v + 1 for v in row] for row in seen.values(measure, "partial", measured)]
        yield Finding(
            claim=f"trained on half-random text, measured on {measured}: {first}",
            expected=f"within 2 of {half} at every state",
            found=_shown(places, 0),
            holds=all(abs(p - half) <= 2 for row in places for p in row),
        )
    control = [[v + 1 for v in row] for row in seen.values(measure, "baseline", "baseline")]
    away = all(abs(p - half) > 2 for row in control for p in row)
    smooth = "anywhere: a smooth curve turns fastest where it passes its mean"
    yield Finding(
        claim=f"control, trained and measured on text: {first}",
        expected=f"not near {half}" if measure == "jump_at" else smooth,
        found=_shown(control, 0),
        holds=away if measure == "jump_at" else None,
    )
