"""Graphs of a logit, edge scores, pruned runs, writers and features."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import tl_geometry as tlg
from tests.tables.refusals.row import NAN, Group, Scene
from tests.tables.refusals.scores import BASES, HEADS
from tl_geometry import circuits

FEATURES = 6


def traced(s: Scene, prompt: Any = None, target: Any = 5, **options: Any) -> Any:
    prompt = s.ids[:1, :6] if prompt is None else prompt
    return tlg.trace_logit(s.model, prompt, target, **{"keep": 0.3, **options})


def scored(s: Scene, prompts: Any = None, others: Any = None, **options: Any) -> Any:
    """Edge scores of two prompts and their counterfactuals."""
    prompts = s.ids[:2, :8] if prompts is None else prompts
    others = s.w.other[:2, :8] if others is None else others
    given: dict[str, Any] = {} if "metric" in options else {"answer": (11, 12)}
    given |= {"counterfactual": others, "method": "gradient", **options}
    return tlg.edge_scores(s.model, prompts, **given)


def metric(read: Any) -> Any:
    """A metric as an option: options that are functions stand for their values."""
    return lambda s: read


def pruned(s: Scene, circuit: Any, **options: Any) -> Any:
    given = {"draws": 1, "answer": (11, 12), "counterfactual": s.w.other[:2, :8], **options}
    return tlg.faithfulness(s.model, s.ids[:2, :8], circuit, **given)


def composed(s: Scene, tokens: Any = None, **options: Any) -> Any:
    given: dict[str, Any] = {"heads": "L1H0", "draws": 2, "progress": False, **options}
    return tlg.composition(s.model, s.ids if tokens is None else tokens, **given)


def features(s: Scene, **changed: Any) -> tuple[Any, ...]:
    """Activations of the prompts, a decoder and its bias, some replaced."""
    generator = torch.Generator().manual_seed(0)
    own = {
        "activations": torch.rand(*s.ids.shape, FEATURES, generator=generator),
        "decoder": torch.randn(FEATURES, s.d_model, generator=generator),
        "bias": torch.zeros(s.d_model),
    }
    return tuple((own | changed).values())


def autoencoder(s: Scene) -> Any:
    """What an object of SAELens looks like."""
    _, decoder, bias = features(s)
    return SimpleNamespace(
        encode=lambda h: torch.relu(h @ decoder.mT),
        decode=lambda activations: activations @ decoder + bias,
        W_dec=decoder,
        b_dec=bias,
        cfg=SimpleNamespace(architecture=lambda: "standard"),
    )


def shared(s: Scene, source: Any = None, layer: int = 1, **options: Any) -> Any:
    known = circuits.dictionary(features(s) if source is None else source, layer, s.model)
    return circuits.feature_shares(s.model, s.ids, known, **{"heads": f"L{layer}H0", **options})


NEITHER = {
    "answers in words": ({"answer": "x y z"}, "answer"),
    "equal answers": ({"answer": (5, 5)}, "answer"),
    "answers beyond the vocabulary": ({"answer": (5, 10**6)}, "answer|other"),
    "answers of three prompts": ({"answer": [(5, 6)] * 3}, "answer"),
}
"""What is no pair (answer, other) for two prompts."""

GROUPS = (
    Group(
        name="trace_logit",
        call=traced,
        of="target",
        about="answer",
        right={
            "a token": {},
            "another token": {"other": 9},
            "a counterfactual": {"counterfactual": lambda s: s.w.other[:1, :6]},
            "a position": {"position": 3},
            "MLPs as they are": {"mlp": "leaf"},
            "leaves of a basis": {"basis": lambda s: s.w.basis},
        },
        wrong={
            **{name: case for name, case in BASES.items() if name != "a table"},
            "a normalised basis": ({"basis": lambda s: s.w.normalized_basis}, "basis|trace_logit"),
            "two prompts": ({"prompt": lambda s: s.ids[:2]}, "prompt"),
            "a token beyond": 10**6,
            "a text of many tokens": "x y z",
            "the token itself": ({"other": 5}, "answer"),
            "a counterfactual of another length": (
                {"counterfactual": lambda s: s.w.other[:1, :7]},
                "counterfactual",
            ),
            "a basis between two prompts": (
                {"counterfactual": lambda s: s.w.other[:1, :6], "basis": lambda s: s.w.basis},
                "basis",
            ),
            "nothing kept": ({"keep": 0.0}, "keep"),
            "more than all kept": ({"keep": 1.5}, "keep"),
            "20 a share in words": ({"keep": "0.5"}, "keep"),
            "MLPs of no kind": ({"mlp": "relu"}, "mlp"),
        },
    ),
    Group(
        name="edge_scores",
        call=scored,
        of="metric",
        right={
            "pairs": {},
            "pairs of several lengths": {
                "prompts": [[3, 4, 5], [3, 4]],
                "others": [[3, 9, 5], [9, 4]],
            },
            "answers of each": {"answer": torch.tensor([[5, 6], [7, 8]])},
            "a metric": metric(lambda logits: logits[:, -1, 5]),
            "integrated": {"method": "integrated", "steps": 2},
            "contrast": {"method": "contrast"},
        },
        wrong={
            **NEITHER,
            "a pair of two lengths": (
                {"prompts": [[3, 4, 5], [3, 4]], "others": [[3, 9, 5], [9, 4, 7]]},
                "counterfactual",
            ),
            "no prompts": ({"prompts": []}, "tokens|prompts|counterfactual"),
            "a method of no name": ({"method": "eap"}, "method"),
            "a name as a metric": "kl",
            "a metric and answers": (
                {"metric": metric(lambda logits: logits[:, -1, 5]), "answer": (5, 6)},
                "metric",
            ),
            "a metric over the batch": metric(lambda logits: logits.mean()),
            "a metric that is NaN": metric(lambda logits: logits[:, -1, 5] * NAN),
            "a metric without a gradient": metric(lambda logits: logits[:, -1, 5].detach()),
        },
    ),
    Group(
        name="faithfulness",
        call=pruned,
        base={"circuit": lambda s: s.w.edges},
        of="circuit",
        about="circuit|heads",
        right={
            "scores": {"fractions": (0.1, 1)},
            "a head": "L1H0",
            "edges": ["embed->output", "embed->L0H0<q>"],
        },
        wrong={
            **NEITHER,
            "no head of the model": ({"circuit": "L99H0"}, "head|layer"),
            "no edge of the model": ({"circuit": ["L1H0->embed"]}, "circuit"),
            "nothing": [],
            "None": ({"circuit": None}, "circuit"),
            "a basis": lambda s: s.w.basis,
            "scores of another model": ({"circuit": lambda s: s.rotary.edges}, "circuit|edges"),
            "no fractions": ({"fractions": ()}, "fraction"),
            "a fraction of 0": ({"fractions": [0.0]}, "fraction"),
            "nothing to explain": ({"counterfactual": lambda s: s.ids[:2, :8]}, "metric"),
        },
    ),
    Group(
        name="composition",
        call=composed,
        right={"a head": {}, "some queries": {"queries": [3, 5]}},
        wrong={
            **HEADS,
            "one prompt": ({"tokens": lambda s: s.ids[:1]}, "tokens|prompts"),
            "parts of no name": ({"parts": "tokens"}, "parts"),
            "nothing left": ({"drop": 99}, "drop|tokens"),
        },
    ),
    Group(
        name="features",
        call=shared,
        of="source",
        about="dictionary",
        right={
            "three tensors": {},
            "an autoencoder": autoencoder,
            "none active": lambda s: features(s, activations=torch.zeros(3, 18, 6)),
        },
        wrong={
            "no autoencoder": lambda s: object(),
            "a decoder with its axes swapped": lambda s: features(
                s, decoder=torch.ones(s.d_model, FEATURES)
            ),
            "another width": lambda s: features(s, decoder=torch.ones(6, 9), bias=torch.ones(9)),
            "activations with NaN": (
                {"source": lambda s: features(s, activations=torch.full((3, 18, 6), NAN))},
                "activations",
            ),
            "a block beyond": ({"layer": 99}, "layer"),
            "nothing left": ({"drop": 18}, "tokens"),
        },
    ),
)
