"""What is no model, models in a state that would make numbers wrong, and loading."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import tl_geometry as tlg
from tests.lib.models import hf_model
from tests.lib.worlds import EMBEDDED
from tests.tables.refusals.changed_models import OWN_CODE, PICKLED, made
from tests.tables.refusals.row import NAN, Group, Scene, calls
from tl_geometry import models

UNSUPPORTED = tlg.UnsupportedModelError
RECONSTRUCTION = tlg.ReconstructionError


def of_transformers(s: Scene) -> Any:
    with torch.random.fork_rng():
        return hf_model("gpt2")


def with_nan(part: str) -> Any:
    """A model with NaN in the last parameter whose name has ``part``."""
    model = made("gpt2")
    named = [p for n, p in model.named_parameters() if part in n]
    named[-1].data[..., 0] = NAN
    return model


def looked_at(model: Any) -> Any:
    """Numbers that ``check_model`` and a small decomposition need."""
    tlg.check_model(model)
    return tlg.decompose(model, torch.arange(3, 43).view(4, 10), progress=False)


def quantised(s: Scene) -> Any:
    """A model with a layer of packed integers."""
    model = made("gpt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its quantisation moves elsewhere
        quantise: Any = torch.ao.quantization.quantize_dynamic
        quantise(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
    return model


def hooked(s: Scene, act: Callable[..., Any], name: str = "blocks.1.attn.hook_q") -> Any:
    """A split under a hook of the user."""
    with s.model.hooks(fwd_hooks=[(name, act)]):
        return tlg.split_scores(s.model, s.ids, s.w.basis, heads="L1H0")


def grows(value: torch.Tensor, hook: Any) -> torch.Tensor:
    return 1.1 * value


def long(row: int) -> Any:
    """A sweep of 520 positions, every other of which is compared, with one row changed."""
    model, ids = made("gpt2", n_positions=520), 3 + torch.arange(1040).view(2, 520) % 53
    basis = tlg.decompose(model, ids, progress=False)
    act = lambda pattern, hook: pattern.index_fill(2, torch.tensor([row]), 1 / 520)
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", act)]):
        return tlg.sweep_heads(model, ids, basis, layers=1, progress=False)


def load(s: Scene, name: Any, **options: Any) -> Any:
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        return models.load(name, **options)


def folder(s: Scene, files: dict[str, bytes]) -> Any:
    for name, content in files.items():
        s.path(name, content)
    return s.folder


NO_MODEL = {
    "a name": ({"model": "gpt2"}, "model", UNSUPPORTED),
    "None": ({"model": None}, "model", UNSUPPORTED),
    "a model of transformers": ({"model": of_transformers}, "model", UNSUPPORTED),
}

GROUPS = (
    Group(
        name="a model",
        call=lambda s, model: tlg.check_model(model),
        right={"a bridge": {"model": lambda s: s.model}},
        wrong=NO_MODEL,
    ),
    Group(
        name="decompose of a model",
        call=lambda s, model: tlg.decompose(model, torch.arange(3, 43).view(4, 10), progress=False),
        right={"a bridge": {"model": lambda s: s.model}},
        wrong={**NO_MODEL, "activations": ({"model": torch.zeros(4, 5, 6)}, "model")},
    ),
    Group(
        name="weights",
        call=lambda s, model: looked_at(model),
        right={
            "numbers": {"model": lambda s: made("gpt2")},
            "in float64": {"model": lambda s: made("gpt2", dtype=torch.float64)},
            "in bfloat16": {"model": lambda s: made("gpt2", dtype=torch.bfloat16)},
        },
        wrong={
            **{
                f"NaN in {part}": (
                    {"model": lambda s, part=part: with_nan(part)},
                    "weights",
                    UNSUPPORTED,
                )
                for part in ("wte", "wpe", "ln_1", "attn", "ln_2", "mlp", "ln_f")
            },
            "quantised": ({"model": quantised}, "weights", UNSUPPORTED),
        },
    ),
    calls(
        "hooks of the user",
        right={
            "one that looks": lambda s: hooked(s, lambda value, hook: None),
            "one that acts on the stream": lambda s: hooked(s, grows, "blocks.0.hook_mlp_out"),
            "one that changes a row between": lambda s: long(-2),
        },
        wrong={
            "one that changes queries": (lambda s: hooked(s, grows), "layer 1", RECONSTRUCTION),
            "one that changes the last row": (lambda s: long(-1), "layer 1", RECONSTRUCTION),
            "one that masks keys of a prompt": (
                lambda s: hooked(s, masks_a_key, "blocks.1.attn.hook_attn_scores"),
                "mask|layer 1",
                RECONSTRUCTION,
            ),
        },
    ),
    Group(
        name="load",
        call=load,
        of="name",
        about=".",
        right={"the embedded model's folder": lambda s: EMBEDDED},
        wrong={
            "a model that is not there": ({"name": "gpt-99"}, "model|gpt-99"),
            "a folder that is not there": ({"name": "./nothing"}, "model"),
            "a folder without a model": ({"name": lambda s: s.folder}, "model"),
            "a dtype of integers": ({"name": "gpt2", "dtype": torch.int64}, "dtype"),
            "a device of no name": ({"name": "gpt2", "device": "toaster"}, "device"),
            "a config that is no JSON": lambda s: folder(s, {"config.json": b"{"}),
            "a pickled model": lambda s: folder(s, PICKLED),
            "a model with its own code": lambda s: folder(s, OWN_CODE),
        },
    ),
)


def masks_a_key(scores: torch.Tensor, hook: Any) -> torch.Tensor:
    """The last queries of the second prompt do not see one key."""
    out = scores.clone()
    out[1, :, -2:, -3] = -1e9
    return out
