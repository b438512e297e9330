"""What takes a model, one call each, for the pretended device (:mod:`tests.pretend_device`) and for
GPUs (``tests/models/test_gpu.py``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import tl_geometry as tlg
from tests.tiny import tokens
from tl_geometry import circuits, interventions, scores
from tl_geometry.scores.details import DETAILS

QUIET: dict[str, Any] = {"progress": False}
STREAMED = (
    *("decompose", "sweep_heads", "sweep_heads, intervals", "sweep_heads, all details"),
    *("sweep_writers", "composition", "edge_scores", "faithfulness", "trajectories", "skip_map"),
)
"""Calls that go over their tokens batch by batch."""
CONTEXTS = 24
"""Contexts of the streamed calls: the size of a batch says how many batches they are."""


def calls(
    d_vocab: int,
    *,
    rotary: bool,
    batch: int = CONTEXTS,
    place: Callable[[Tensor], Tensor] = lambda ids: ids,
) -> dict[str, Callable[[Any], Any]]:
    """Calls by name; each makes what it needs with the model that it is given. ``batch`` is the
    size of a batch, ``place`` moves tokens to where the caller has them."""
    few, many = (place(tokens(n, 14, seed=n) % d_vocab) for n in (12, CONTEXTS))
    other = place(tokens(CONTEXTS, 14, seed=1) % d_vocab)
    both: dict[str, Any] = {"prompts": many, "counterfactuals": other, "targets": (5, 9)}
    both["batch_size"] = batch
    streamed: dict[str, Any] = QUIET | {"batch_size": batch}
    basis = lambda m: tlg.decompose(m, many, **streamed)
    sweep = lambda m, *detail: tlg.sweep_heads(m, many, basis(m), detail=detail, **streamed)
    targets = [(5, 9)] * len(few)
    knocked: dict[str, Any] = {"targets": targets, "attributions": True, **QUIET}
    paths: dict[str, Any] = {"controls": 2, **QUIET}
    readers = ["mlp1", "output"]
    head_paths = interventions.head_paths
    found: dict[str, Callable[[Any], Any]] = {
        "check_model": lambda m: (tlg.check_model(m), basis(m)),  # the model is looked at once
        "decompose": basis,
        "split_scores": lambda m: tlg.split_scores(m, few[:1], basis(m)),
        "split_writers": lambda m: tlg.split_scores(m, few[:1], parts="writers"),
        "split_values": lambda m: tlg.split_values(m, few[:1], basis(m)),
        "sweep_heads": sweep,
        "sweep_heads, intervals": lambda m: sweep(m, "intervals"),
        "sweep_heads, all details": lambda m: sweep(m, *DETAILS),
        "sweep_writers": lambda m: tlg.sweep_heads(m, many, parts="writers", **streamed),
        "composition": lambda m: tlg.composition(m, many, **streamed),
        "explain_logit": lambda m: tlg.explain_logit(m, few[:1], 13, 5),
        "explain_logits": lambda m: circuits.explain_logits(m, few, targets),
        "trace_logit": lambda m: tlg.trace_logit(m, few[:1], 5, against=9, keep=1.0),
        "edge_scores": lambda m: tlg.edge_scores(m, **both),
        "faithfulness": lambda m: tlg.faithfulness(m, ["L0H0", "L1H1"], **both),
        "head_knockouts": lambda m: interventions.head_knockouts(m, few, "difference", **knocked),
        "head_paths": lambda m: head_paths(m, few, "L0H0", readers, "loss", **paths),
        "live_paths": lambda m: head_paths(
            m, few, "L0H0", readers, "loss", between="live", **paths
        ),
        "edge_necessity": lambda m: interventions.edge_necessity(
            m, many[:4], "L0H0", "L1H0", controls=1
        ),
        "weight_geometry": lambda m: tlg.weight_geometry(m, basis(m), rank=3),
        "token_readout": lambda m: tlg.token_readout(m, features=2),
        "token_paths": lambda m: tlg.token_paths(m, few[:1]),
        "trajectories": lambda m: tlg.trajectories(m, many, batch_size=batch),
        "skip_map": lambda m: tlg.skip_map(m, many, **streamed),
    }
    if rotary:
        normalized = lambda m: tlg.decompose(m, many, normalize=True, **QUIET)
        found["sweep_heads, normalised"] = lambda m: tlg.sweep_heads(
            m, many, normalized(m), **streamed
        )
        found["relative_kernel"] = lambda m: scores.relative_kernel(m, normalized(m))
    # the twin: the only call whose result depends on where the model is
    found["planted"] = lambda m: torch.ones(1) * (next(m.parameters()).device.type == "cpu")
    return found


def verdicts(
    here: Any, there: Any, place: Callable[[Tensor], Tensor], *names: str, rotary: bool
) -> Iterator[tuple[str, str]]:
    """Every call (or those of some names) on a model on the CPU, and on another of the same weights
    on a device, with tokens on the CPU and where ``place`` puts them: its name, and ``"same"`` or
    what is wrong."""
    placed = calls(here.cfg.d_vocab, rotary=rotary, place=place)
    for name, run in calls(here.cfg.d_vocab, rotary=rotary).items():
        if names and name not in names:
            continue
        expected = numbers_of(run(here))
        verdict = "same" if len(expected) else "empty"
        for of_tokens, run_there in (("here", run), ("there", placed[name])):
            try:
                found = numbers_of(run_there(there))
            except RuntimeError as error:
                verdict = f"raises with tokens {of_tokens}: {error}"
                break
            verdict = verdict if close(found, expected) else f"differs with tokens {of_tokens}"
        yield name, verdict


def close(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether all numbers are equal to three digits, or to 1e-4 (and 1e-7 of the largest number of
    their tensor)."""
    return len(found) == len(expected) and all(
        x.shape == y.shape
        and torch.allclose(
            x,
            y,
            rtol=1e-3,
            atol=1e-4 + 1e-7 * float(y.nan_to_num(0, 0, 0).abs().max()),
            equal_nan=True,
        )
        for x, y in zip(found, expected, strict=True)
    )


def numbers_of(result: Any) -> list[Tensor]:
    """All real numbers in a result, on the CPU, where they must be already."""
    found: list[Tensor] = []

    def take(value: Any) -> None:
        if isinstance(value, Tensor):
            assert value.device.type == "cpu", "a result stays on its device"
            if value.is_floating_point() and value.numel():
                found.append(value.double())
        elif isinstance(value, float):
            found.append(torch.tensor(value, dtype=torch.float64))
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                take(getattr(value, field.name))
        elif isinstance(value, Mapping):
            for each in value.values():
                take(each)
        elif isinstance(value, tuple | list):
            for each in value:
                take(each)

    take(result)
    return found
