"""Live models: threads, hooks, moved, copied and edited models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tl_geometry as tlg
from tests.bad_inputs.cases import Call, Command, World, removed

COMMANDS: list[Command] = []


def fresh() -> Any:
    """The embedded model again, for an input that changes it."""
    return tlg.zoo.embedded()


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, return_type="logits")


def edit(model: Any, w: World) -> Any:
    return tlg.interventions.remove_term(model, w.basis, "pos-pos", "L1H0")


def inside(w: World, act: Callable[[Any], Any]) -> Any:
    """What ``act`` gives on a fresh model, inside an edit of it."""
    model = fresh()
    with edit(model, w):
        return act(model)


def copied(model: Any) -> Any:
    with torch.no_grad():
        return copy.deepcopy(model)


def copy_before(w: World) -> Any:
    model = fresh()
    before = copied(model)
    with edit(model, w):
        logits(model, w.ids[:2])
        return logits(before, w.ids[:2]), logits(w.model, w.ids[:2])


def is_edited(w: World, found: Any) -> bool:
    with removed(w):
        wanted = logits(w.model, w.ids[:2])
    values = found if isinstance(found, list) else [found]
    clean = logits(w.model, w.ids[:2])
    edited = all(torch.allclose(value, wanted, atol=1e-4) for value in values)
    return edited and not torch.allclose(clean, wanted, atol=1e-4)


def in_threads(w: World, work: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(3) as pool:
        return [task.result() for task in [pool.submit(work) for _ in range(9)]]


def threads_inside(w: World) -> list[Tensor]:
    with removed(w):
        return in_threads(w, lambda: logits(w.model, w.ids[:2]))


def threads_of_a_list(w: World) -> Any:
    model = fresh()
    with model.hooks(fwd_hooks=edit(model, w).hooks()):
        logits(model, w.ids[:2])
        return in_threads(w, lambda: logits(model, w.ids[:2]))


def recomputed(model: Any, w: World) -> Any:
    weight = next(p for p in model.parameters() if p.dim() == 2)
    out = checkpoint(lambda ids: model(ids, return_type="logits"), w.ids[:2], use_reentrant=False)
    return torch.autograd.grad(out.sum(), weight)[0]  # pyright: ignore


def with_nan(part: str) -> Any:
    """A fresh model with one NaN in the last parameter whose name has ``part``."""
    model = fresh()
    named = [
        p for n, p in model.named_parameters() if part in n.replace("_original_component.", "")
    ]
    named[-1].data[..., 0] = torch.nan
    return model


def cast(dtype: torch.dtype) -> Any:
    """A model in another dtype than it was looked at in."""
    model = fresh()
    tlg.check_model(model)
    with redirect_stdout(StringIO()):  # TransformerLens says it
        return model.to(dtype)


def scaled(model: Any, factor: float = 2.0) -> None:
    """Weights changed past their version counter, in a part that no edited head reads."""
    named = dict(model.named_parameters())
    named[[n for n in named if "mlp" in n][-1]].data.mul_(factor)


def scaled_after_hooks(w: World) -> Any:
    model = fresh()
    hooks = edit(model, w).hooks()
    scaled(model)
    return model.run_with_hooks(w.ids[:2], fwd_hooks=hooks)


def processed(w: World) -> Any:
    model = fresh()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.enable_compatibility_mode(disable_warnings=True)
    return model


def quantised(w: World) -> Any:
    model = fresh()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ao.quantization.quantize_dynamic(
            model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True
        )
        first = next(iter(model.original_model.modules()))
        packed: Any = torch.ao.nn.quantized
        first.add_module("packed", packed.dynamic.Linear(2, 2))
    return tlg.check_model(model)


@contextmanager
def patched(model: Any, module: Any) -> Any:
    forward = module.forward
    module.forward = lambda *given, **named: forward(*given, **named)
    try:
        yield model
    finally:
        del module.forward


def flags_under(w: World, what: str) -> str:
    """The flags of a split on a model that somebody has changed."""
    model = fresh()
    if what == "hook":
        point = model.hook_dict["blocks.0.hook_mlp_out"]
        point.add_hook(lambda value, hook: value * 1.1, is_permanent=True)
        split = tlg.split_scores(model, w.windows[:2], w.basis, heads="L1H0")
    else:
        with patched(model, model.blocks[0].mlp.original_component):
            split = tlg.split_scores(model, w.windows[:2], w.basis, heads="L1H0")
    return " ".join(split.provenance.flags)


def padded(value: float) -> Any:
    """A model whose hooks mask the last keys of the second prompt."""

    def hook(scores: Tensor, hook: Any) -> Tensor:
        out = scores.clone()
        if len(out) > 1:
            out[1, :, -2:, -3] = value
        return out

    model = fresh()
    for name, point in model.hook_dict.items():
        if name.endswith("attn.hook_attn_scores"):
            point.add_hook(hook, is_permanent=True)
    return model


def generated(model: Any, w: World, cached: bool) -> Any:
    return model.generate(
        w.ids[:1, :6], max_new_tokens=2, do_sample=False, use_past_kv_cache=cached, verbose=False
    )


def unused(w: World) -> Any:
    with removed(w) as opened:
        pass
    return opened


def unused_projection(w: World) -> Any:
    with tlg.interventions.project_stream(w.model, w.basis, 1) as opened:
        return opened


def refused_inside(w: World) -> Any:
    """A refusal that the user caught is no pass that nobody saw."""
    with removed(w) as opened:
        try:
            w.model(w.ids[:2, 1:])
        except ValueError:
            return opened


def fails_inside(w: World) -> str:
    try:
        with removed(w):
            raise KeyError("mine")
    except KeyError as error:
        return str(error)


def counted(w: World) -> Any:
    found = removed(w)
    with found:
        w.model(w.ids[:2])
    w.model.run_with_hooks(w.ids[:2], fwd_hooks=found.hooks())
    return found


PASSES = [
    Call("threads inside an edit", threads_inside, check=is_edited),
    Call("threads under a list of hooks", threads_of_a_list, "passes of one thread"),
    Call("an edit without a pass", unused, "a forward pass inside the with block"),
    Call(
        "an edit that only looks at logits made before",
        lambda w: inside(w, lambda model: logits(w.model, w.ids[:2])),
        "a forward pass inside the with block",
    ),
    Call(
        "an edit of the last layer in a pass that stops before it",
        lambda w: inside(w, lambda model: tlg.view(model).run(w.ids[:2])),
        "a forward pass inside the with block",
    ),
    Call("a refusal that was caught inside", refused_inside),
    Call("an error inside an edit", fails_inside, check=lambda w, v: "mine" in v),
    Call("passes that are counted", counted, check=lambda w, v: "2 passes edited" in repr(v)),
    Call("a projection without a pass", unused_projection, "a forward pass inside the with block"),
    Call(
        "gradient checkpointing inside an edit",
        lambda w: inside(w, lambda model: recomputed(model, w)),
        check=lambda w, v: bool(v.abs().max() > 0),
    ),
    Call(
        "generation with a cache inside an edit",
        lambda w: inside(w, lambda model: generated(model, w, True)),
        "use_past_kv_cache=False",
    ),
    Call(
        "generation without a cache inside an edit",
        lambda w: inside(w, lambda model: generated(model, w, False)),
    ),
]
MODELS = [
    Call(
        "a copy made inside an edit",
        lambda w: inside(w, lambda m: logits(copied(m), w.ids[:2])),
        "copied outside of edits",
    ),
    Call(
        "a copy made before an edit", copy_before, check=lambda w, v: torch.allclose(*v, atol=1e-5)
    ),
    Call(
        "weights that change inside an edit",
        lambda w: inside(w, lambda m: (logits(m, w.ids[:2]), scaled(m))),
        "weights that it was made for",
    ),
    Call("weights that change after hooks()", scaled_after_hooks, "weights that it was made for"),
    Call(
        "weights processed after the basis",
        lambda w: edit(processed(w), w).__enter__(),
        "the model it was computed from",
    ),
    Call("quantised weights", quantised, "not quantised"),
    Call(
        "a hook, among the flags",
        lambda w: flags_under(w, "hook"),
        check=lambda w, v: "under hooks at blocks.0" in v,
    ),
    Call(
        "a replaced forward, among the flags",
        lambda w: flags_under(w, "forward"),
        check=lambda w, v: "forward" in v,
    ),
    *[
        Call(
            f"padding hooks of {value:g}",
            lambda w, value=value: tlg.split_scores(
                padded(value), w.windows[:3], w.basis, heads="L1H0"
            ),
            r"mask of layer.*under hooks at.*1 of 3 prompts",
        )
        for value in (-torch.inf, -1e5, -1e9)
    ],
    *[
        Call(
            f"NaN in {part}",
            lambda w, part=part: tlg.check_model(with_nan(part)),
            rf"NaN in \S*{part.split('.')[0]}",
        )
        for part in ("wte", "wpe", "ln_1", "attn", "ln_2", "mlp", "ln_f")
    ],
    *[
        Call(
            f"a model cast to {str(dtype).removeprefix('torch.')} after a look",
            lambda w, dtype=dtype: tlg.check_model(cast(dtype)),
            check=lambda w, v: v.refused == (),
        )
        for dtype in (torch.float64, torch.bfloat16)
    ],
    Call(
        "a basis of the model before it was cast",
        lambda w: edit(cast(torch.float64), w).__enter__(),
        "the model it was computed from",
    ),
    Call(
        "a compiled wrapper as the model", lambda w: tlg.view(torch.compile(w.model)), "_orig_mod"
    ),
]


CALLS: list[Call] = [*PASSES, *MODELS]
