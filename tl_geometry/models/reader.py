"""The description of a model of any TransformerLens class: :func:`view`, which every public
function that takes a model calls first.

Nothing of TransformerLens is imported here: asking 4.x for ``HookedTransformer`` raises, so
everything is read from the model object. A bridge's ``cfg`` is not trusted beyond sizes (it reports
attention scale -1, rotary base 10000, causal BERT); facts about attention come from modules and are
verified against a probe, one forward pass over a few random tokens.
"""

from __future__ import annotations

import importlib.metadata
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tl_geometry.base.checks import require_default_device
from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.models.fingerprint import fingerprint, head_trained, held_by, loader_facts
from tl_geometry.models.layers import CORE
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.parameters import part
from tl_geometry.models.runner import TABLES, Runner, brief, without_hooks
from tl_geometry.models.states import AFTER, BEFORE, state_hooks

SIZES = ("n_heads", "d_model", "d_head", "d_vocab", "n_ctx")
CLASS_NAMES = ("HookedTransformer", "TransformerBridge")
PROBE_BATCH, PROBE_LENGTH = 2, 12
"""Size of the probe: two sequences of random tokens."""


class Probe(NamedTuple):
    """The activations of one forward pass over random tokens, without user hooks, and what was
    inferred from them (``ModelView._found``); valid for one fingerprint on one device."""

    made_of: tuple[str, torch.device]
    activations: Mapping[str, Tensor]
    causal: bool
    found: dict[Any, Any]


_PROBES: weakref.WeakKeyDictionary[Any, Probe] = weakref.WeakKeyDictionary()


def class_of(model: Any) -> str:
    """The TransformerLens class behind a model object, or an error that says what would help."""
    names = {c.__name__ for c in type(model).__mro__}
    class_name = next((name for name in CLASS_NAMES if name in names), None)
    fits, got = class_name is not None and len(getattr(model, "blocks", ())) > 0, type(model)
    expected = f"{' or '.join(CLASS_NAMES)} with blocks"
    instead, kind = "a TransformerLens model, or tl_geometry.load(model)", UnsupportedModelError
    require(fits, "model", expected=expected, got=got.__name__, instead=instead, error=kind)
    return str(class_name)


def view(model: Any) -> ModelView:
    """The verified description of a TransformerLens model, which every function of the package that
    takes a model uses.

    Verified once for each set of weights: all state hooks fire, and state l+1 is the output of
    block l. The view of a model that changed is made anew where it is used.

    Raises ``UnsupportedModelError`` by name for models that would give wrong numbers.

    >>> import tl_geometry as tlg
    >>> tlg.view(tlg.zoo.embedded()).states
    range(0, 5)
    """
    require_default_device()
    if isinstance(model, ModelView):
        now = view(model._model)
        same = (now.fingerprint, now.device) == (model.fingerprint, model.device)
        # what the model object itself does not say stays as it is in the view
        return known_view(model) if same else now
    class_name, cfg, parameter = class_of(model), model.cfg, next(iter(model.parameters()))
    hooks, name = state_hooks(len(model.blocks)), loader_facts(model).get("name") or _name(model)
    run = Runner(name=name, class_name=class_name, state_hooks=hooks, _model=model)
    digits = fingerprint(model)
    probe, made_of = _PROBES.get(model), (digits, parameter.device)
    if probe is None or probe.made_of != made_of:
        probe = _PROBES[model] = _probe(run, made_of)
    norm = cfg.normalization_type
    # HookedTransformer calls its norms LNPre or RMSPre where weights were folded
    folded = class_name == "HookedTransformer" and str(norm).endswith("Pre")
    return ModelView(
        name=name,
        class_name=class_name,
        state_hooks=hooks,
        _model=model,
        library=f"transformer_lens {_library_version()}",
        processed=folded or bool(getattr(model, "_weights_processed", False)),
        fingerprint=digits,
        n_layers=len(model.blocks),
        **{size: int(getattr(cfg, size)) for size in SIZES},
        causal=probe.causal,
        position=str(getattr(cfg, "positional_embedding_type", None) or "none"),
        norm=None if norm is None else str(norm).removesuffix("Pre"),
        dtype=parameter.dtype,
        device=parameter.device,
        head_trained=head_trained(model),
        **_special_tokens(model),
        _probe=probe.activations,
        _found=probe.found,
    )


_library_version = cache(partial(importlib.metadata.version, "transformer-lens"))
"""TransformerLens's version, which is read from a file of its installation."""


def _probe(run: Runner, made_of: tuple[str, torch.device]) -> Probe:
    """Run the model on random tokens, without user hooks, and check what every other number
    relies on."""
    model, states = run._model, run.state_hooks
    # the least element is NaN where any is, and takes no memory
    bad = [n for n, p in held_by(model).tensors.items() if p.numel() and bool(p.amin().isnan())]
    what, got = f"weights of {run.name}", f"NaN in {brief(bad)}"
    require(not bad, what, expected="numbers", got=got, error=UnsupportedModelError)
    shape, generator = (PROBE_BATCH, min(PROBE_LENGTH, int(model.cfg.n_ctx))), torch.Generator()
    ids = torch.randint(0, int(model.cfg.d_vocab), shape, generator=generator.manual_seed(0))
    ends = [h.replace(BEFORE, AFTER) for h in states[:-1]]
    attending = [l for l, block in enumerate(model.blocks) if part(block, "attn") is not None]
    inside = [f"blocks.{l}.{h}" for l in attending for h in (*CORE, *TABLES)]
    wanted = dict.fromkeys([*states, *ends, *(h for h in inside if h in run._points)])
    with without_hooks(model):
        activations = run.activations(ids, wanted, optional=TABLES)
    # a model spread over several devices hands the stream on
    pairs = [(activations[end].cpu(), activations[h].cpu()) for end, h in zip(ends, states[1:])]
    broken = [l for l, (end, start) in enumerate(pairs) if not torch.equal(end, start)]
    expected = "one residual stream, the output of block l the input of block l+1"
    got = f"another stream after blocks {broken[:8]} of {type(model).__name__}"
    what = f"states of {run.name}"
    require(not broken, what, expected=expected, got=got, error=UnsupportedModelError)
    patterns = [p for h, p in activations.items() if h.endswith("attn.hook_pattern")]
    # a single position cannot tell, and counts as bidirectional
    causal = shape[1] > 1 and all(bool((p.triu(1) == 0).all()) for p in patterns)
    return Probe(made_of, activations, causal, {})


def _name(model: Any) -> str:
    """The name that the model gives itself, of a path the last part; else that of its class."""
    config = getattr(getattr(model, "original_model", None), "config", None)
    names = [getattr(model.cfg, "model_name", None), getattr(config, "_name_or_path", None)]
    placeholders = (None, "", "external", "custom")
    name = next((str(n) for n in names if n not in placeholders), type(model).__name__)
    return Path(name).name if name.startswith(("/", ".", "~")) else name


as_view = view
"""The same function under a name that leaves ``view`` free for what it returns."""


def known_view(model: Any) -> ModelView:
    """The view of a model for what reads text, which weights do not touch, and for edits, which
    compare them when they are used: a view that is given is not compared with the weights again,
    only its special tokens are those of the tokenizer now."""
    if not isinstance(model, ModelView):
        return view(model)
    return replace(model, **_special_tokens(model._model))


def _special_tokens(model: Any) -> dict[str, Any]:
    """The ids of the tokens that begin a text and that pad one, and whether TransformerLens begins
    texts of this model with the first."""
    tokenizer = part(model, "tokenizer")
    cls, bos, pad = (getattr(tokenizer, f"{n}_token_id", None) for n in ("cls", "bos", "pad"))
    bos = bos if cls is None else cls
    prepends = bos is not None and part(model.cfg, "default_prepend_bos") is not False
    return {"bos_id": bos, "prepends_bos": prepends, "pad_id": pad}
