"""Dictionaries of features, graphs, and results that are shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import tl_geometry as tlg
from tests.bad_inputs.cases import Call, Command, World

FEATURES = 6


def features(world: World, **changed: Any) -> tuple[Any, ...]:
    """Activations of the first four windows, a decoder and its bias, some replaced."""
    generator = torch.Generator().manual_seed(0)
    shape = len(world.ids[:4]), world.ids.shape[1], FEATURES
    own = {
        "activations": torch.rand(shape, generator=generator),
        "decoder": torch.randn(FEATURES, world.model.cfg.d_model, generator=generator),
        "bias": torch.zeros(world.model.cfg.d_model),
    }
    return tuple((own | changed).values())


def autoencoder(world: World, architecture: str = "standard", **settings: Any) -> Any:
    """What an SAELens object looks like; each of ``settings`` is one of its ``cfg``."""
    _, decoder, bias = features(world)
    cfg = SimpleNamespace(architecture=lambda: architecture, **settings)
    encode = lambda h: torch.relu(h @ decoder.mT)
    decode = lambda activations: activations @ decoder + bias
    return SimpleNamespace(encode=encode, decode=decode, W_dec=decoder, b_dec=bias, cfg=cfg)


def shares(world: World, source: Any, layer: int = 1, **options: Any) -> Any:
    known = tlg.circuits.dictionary(source, layer, world.model)
    options = {"heads": f"L{layer}H0"} | options
    return tlg.circuits.feature_shares(world.model, world.windows[:4], known, **options)


def without_threshold(world: World, **options: Any) -> Any:
    source = autoencoder(world, "batchtopk")
    source.topk_threshold = torch.tensor(0.0)
    return shares(world, source, **options)


def graph(world: World) -> Any:
    found = tlg.composition(world.model, world.windows[:4], heads="L1H0", progress=False)
    return found.to_networkx(n=3)


NAN = float("nan")
CALLS: list[Call] = [
    Call("features as a tuple", lambda w: shares(w, features(w)), None),
    Call(
        "activations of as many prompts as a batch has",
        lambda w: shares(w, features(w, activations=torch.ones(2, 12, FEATURES)), batch_size=2),
        "those of 4 prompts",
    ),
    Call("an autoencoder", lambda w: shares(w, autoencoder(w)), None),
    Call("no autoencoder at all", lambda w: shares(w, object()), "encode, W_dec, b_dec"),
    Call("a tuple of two", lambda w: shares(w, features(w)[:2]), "activations, decoder, bias"),
    Call(
        "a decoder with its axes swapped",
        lambda w: shares(w, features(w, decoder=torch.ones(w.model.cfg.d_model, FEATURES))),
        "feature d_model",
    ),
    Call(
        "a decoder of another width",
        lambda w: shares(w, features(w, decoder=torch.ones(FEATURES, 9), bias=torch.ones(9))),
        "d_model 9",
    ),
    Call(
        "activations of other prompts",
        lambda w: shares(w, features(w, activations=torch.ones(3, 12, FEATURES))),
        "those of 4 prompts",
    ),
    Call(
        "activations of shorter prompts",
        lambda w: shares(w, features(w, activations=torch.ones(4, 11, FEATURES))),
        "4, 12",
    ),
    Call(
        "activations with NaN",
        lambda w: shares(w, features(w, activations=torch.full((4, 12, FEATURES), NAN))),
        "finite",
    ),
    Call(
        "features that are never active",
        lambda w: shares(w, features(w, activations=torch.zeros(4, 12, FEATURES))),
        None,
        lambda w, found: len(found.feature_ids) == 0 and bool(found.cs.isfinite().all()),
    ),
    Call("a transcoder", lambda w: shares(w, autoencoder(w, "skip_transcoder")), "transcoder"),
    Call("a temporal one", lambda w: shares(w, autoencoder(w, "temporal")), "temporal"),
    Call(
        "an autoencoder of whitened states",
        lambda w: shares(w, autoencoder(w, normalize_activations="covariance_whitening")),
        "whitening",
    ),
    Call(
        "an autoencoder of an MLP's output",
        lambda w: shares(w, autoencoder(w, hook_name="blocks.1.hook_mlp_out")),
        "hook_mlp_out",
    ),
    Call(
        "features chosen over a batch, in two batches",
        lambda w: without_threshold(w, batch_size=2),
        "one batch",
    ),
    Call("the same in one batch", lambda w: without_threshold(w, batch_size=4), None),
    Call("heads of another block", lambda w: shares(w, features(w), heads="L2H0"), "layer"),
    Call("a block that is not there", lambda w: shares(w, features(w), layer=9), "0 to 3"),
    Call("more dropped than there is", lambda w: shares(w, features(w), drop=12), "drop"),
    Call("a negative number of pairs", lambda w: shares(w, features(w), pairs=-1), "pairs"),
    Call("no contexts in a batch", lambda w: shares(w, features(w), batch_size=0), "batch_size"),
    Call(
        "writers without a basis",
        lambda w: tlg.split_scores(w.model, w.windows[:2], parts="writers", heads="L1H0"),
    ),
    Call(
        "position without a basis",
        lambda w: tlg.split_scores(w.model, w.windows[:2], heads="L1H0"),
        'parts="writers"',
    ),
    Call("a graph for networkx", graph, None, lambda w, found: found.number_of_edges() == 3),
]
COMMANDS: list[Command] = []
