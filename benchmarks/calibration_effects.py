"""Calibration of what edits of a live model do: Student's intervals of paired differences, p-values
of exchangeable pairs, and all that the table of effects prints of real prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from benchmarks.calibration_outcomes import SIZE, Origin, Outcome, covered, outcome
from tl_geometry.base.intervals import paired_interval, sign_flip_p

TWELVE = "12 prompts"
TEXT = 4
"""Prompts of one text, where prompts are not independent."""


@cache
def real_changes() -> Tensor:
    """Loss that removing the content terms of the embedded model's last block costs in each of 400
    windows: a population of paired differences."""
    import tl_geometry as tlg
    from tl_geometry.interventions import term
    from tl_geometry.models.output_head import token_losses

    model = tlg.zoo.embedded()
    view = tlg.view(model)
    ids = tlg.zoo.default_windows(model, 32, n=400).tokens
    basis = tlg.decompose(view, ids[:64], progress=False)

    def losses() -> Tensor:
        log_p = view.logits(ids, {}).float().log_softmax(-1)
        return token_losses(log_p[:, :-1], ids[:, 1:]).double().mean(1)

    clean = losses()
    with term(model, basis, "content", [(view.n_layers - 1, h) for h in range(4)]):
        return losses() - clean


def paired_effects(repeats: int) -> list[Outcome]:
    """Student's interval of paired differences, and sign flips of exchangeable pairs."""
    out: list[Outcome] = []
    population = real_changes()
    for n in (10, 16):
        start, g = time.perf_counter(), torch.Generator().manual_seed(n)
        chosen = torch.randint(len(population), (n, repeats), generator=g)
        found = paired_interval(population[chosen])
        hits = covered(found, population.mean()).unsqueeze(1)
        origin = Origin("losses of the embedded model", "none (drawn)", f"{n} prompts")
        out.append(outcome(f"loss of an edit, {n} real prompts", hits, start, origin))
    draws: dict[str, Callable[[torch.Generator], Tensor]] = {
        "normal": lambda g: torch.randn(12, generator=g),
        "heavy-tailed": lambda g: (
            torch.randn(12, generator=g) / torch.randn(3, 12, generator=g).square().mean(0).sqrt()
        ),
        "log-normal pairs": lambda g: torch.randn(2, 12, generator=g).mul(1.5).exp().diff(dim=0)[0],
    }
    for name, draw in draws.items():
        start, g = time.perf_counter(), torch.Generator().manual_seed(1)
        p = torch.tensor([sign_flip_p(draw(g)) for _ in range(repeats)])
        hits = (p <= 0.05).double().unsqueeze(1)
        label, origin = f"sign flips of 12 prompts, {name}", Origin("differences", "none", TWELVE)
        out.append(outcome(label, hits, start, origin, goal=SIZE))
    skewed = torch.randn(repeats, 12, generator=torch.Generator().manual_seed(1)).exp()
    p = torch.tensor([sign_flip_p(x - x.new_tensor(0.5).exp()) for x in skewed])
    name, hits = "sign flips as a test of the mean, skewed (not offered)", (p <= 0.05).double()
    origin, start = Origin("log-normal differences", "none", TWELVE), time.perf_counter()
    return [*out, outcome(name, hits[:, None], start, origin, goal=SIZE, promised=False)]


@cache
def real_losses() -> tuple[tuple[str, ...], Tensor]:
    """Conditions, and the loss ``[condition prompt]`` under edits of the content terms of the
    embedded model's last block, on 120 windows."""
    import tl_geometry as tlg

    model = tlg.zoo.embedded()
    windows = tlg.zoo.default_windows(model, 32, n=120)
    basis = tlg.decompose(model, windows[:64], progress=False)
    heads = [f"L3H{h}" for h in range(4)]
    edits = {
        how: tlg.interventions.term(model, basis, "content", heads, how=how)
        for how in ("remove", "keep", "swap", "shrink")
    }
    for name in ("position", "token", "mixed"):
        edits[f"remove {name}"] = tlg.interventions.term(model, basis, name, heads)
    found = tlg.effects(model, windows, edits)
    return ("clean", *found.edits), torch.cat([found.clean[None], found.edited])


def necessity(prompts: int, repeats: int, *, texts: bool = False) -> list[Outcome]:
    """The interval of every change of loss against its mean over all windows, and the p-value of
    the removal against every other condition once the two have changed places at random: prompts
    drawn independently, or :data:`TEXT` in a row half of whose losses are those of one window."""
    start, (conditions, losses) = time.perf_counter(), real_losses()
    removed = conditions.index("remove")
    truth = (losses - losses[0]).mean(1)[1:]
    others = [i for i in range(len(losses)) if i != removed]
    inside, rejected = [], []

    for seed in range(repeats):
        g = torch.Generator().manual_seed(seed)
        own, text = (torch.randint(losses.shape[1], (prompts,), generator=g) for _ in range(2))
        exchanged = torch.rand(len(others), prompts, generator=g) < 0.5
        drawn = losses[:, own]
        if texts:
            first = torch.arange(prompts) // TEXT * TEXT
            drawn = (drawn + losses[:, text[first]]) / 2
            exchanged = exchanged[:, first]
        inside.append(covered(paired_interval((drawn - drawn[0])[1:].mT), truth))
        p = []
        for other, places in zip(others, exchanged, strict=True):
            values = drawn.clone()
            values[removed, places], values[other, places] = (
                drawn[other, places],
                drawn[removed, places],
            )
            p.append(sign_flip_p(values[removed] - values[other]))
        rejected.append((torch.tensor(p) <= 0.05).double())
    alike = f"texts of {TEXT} prompts, 0.5" if texts else "none (drawn)"
    origin = Origin("losses of the embedded model", alike, f"{prompts} prompts")
    name = f"necessity, {prompts} prompts{f' of texts of {TEXT} (not offered)' if texts else ''}"
    return [
        outcome(f"changes of loss, {name}", torch.stack(inside), start, origin, promised=not texts),
        outcome(
            f"p-values of the removal, {name}",
            torch.stack(rejected),
            start,
            origin,
            goal=SIZE,
            promised=not texts,
        ),
    ]


def simulations(n: Callable[[int], int]) -> list[Callable[[], list[Outcome]]]:
    """The rows of this part of the table; ``n`` scales the repeats."""
    return [
        lambda: paired_effects(n(2000)),
        lambda: necessity(10, n(400)),
        lambda: necessity(16, n(400)),
        lambda: necessity(16, n(200), texts=True),
    ]
