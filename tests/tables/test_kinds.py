"""32 architectures in every class and loading that the installed TransformerLens holds, each
against Hugging Face's own code: logits, states, scores, patterns, one graph, one call of edge
scores, and two edits. What is refused is refused by name, and what is left out cannot be held.

The reference is the same Hugging Face model in float64, run beside the library and never inside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import pytest
import torch
from einops import einsum, rearrange
from torch import Tensor, nn

import tl_geometry as tlg
from tests.lib.data import refused
from tests.lib.models import (
    ARCHITECTURES,
    ENCODERS,
    HAS_HOOKED,
    bridge_of,
    hf_model,
    hooked_of,
    loadable,
    refusal,
    tiny,
    tokens,
)
from tl_geometry import interventions

PROMPTS, CORPUS = tokens(2, 18, seed=7), tokens(24, 20, seed=2)
SHORT, OTHERS = PROMPTS[:, :6], tokens(2, 6, seed=8)
PAIRS = [(5, 9), (7, 3)]
"""An answer and another token for each prompt."""
LAYER, HEAD = 1, 0
"""The head that is edited, in the last layer: nothing follows that its edit would change."""
ROUNDOFF = 2**-24
OUTPUTS = ("o_proj", "c_proj", "out_proj", "dense")
EXPERTS = ("gpt-oss",)
"""Their MLPs are no two or three matrices, so a graph takes what they write as it is."""
FAST = ("gpt2", "llama", "bloom", "gemma2", "gpt-oss", "bert")
"""One of each manner of norm, position, cap and sink, and an encoder."""
WAYS = list(itertools.product(("bridge", "hooked"), (False, True)))


def traced(model: Any, ids: Tensor, answer: int, other: int, mlp: str) -> Any:
    return tlg.trace_logit(model, ids, answer, other=other, mlp=mlp)


def scored(model: Any, ids: Tensor, others: Tensor) -> Any:
    return tlg.edge_scores(model, ids, counterfactual=others, answer=PAIRS, method="gradient")


def without_term(model: Any, basis: Any) -> Any:
    return interventions.term(model, basis, "content", f"L{LAYER}H{HEAD}")


def without_head(model: Any) -> Any:
    return interventions.heads(model, f"L{LAYER}H{HEAD}", by="zero")


@dataclass(frozen=True)
class Reference:
    """A Hugging Face model in float64 and what it computes."""

    hf: Any

    @cached_property
    def out(self) -> Any:
        with torch.no_grad():
            return self.hf(PROMPTS, output_attentions=True, output_hidden_states=True)

    @cached_property
    def patterns(self) -> Tensor:
        """``[batch head query key]``, the heads of all layers one after the other."""
        return torch.cat(list(self.out.attentions), 1).double()

    @cached_property
    def states(self) -> list[Tensor]:
        """Inputs of the blocks over the corpus ``[context position d_model]``."""
        with torch.no_grad():
            found = self.hf(CORPUS, output_hidden_states=True).hidden_states
        return [state.double() for state in found[:-1]]  # the last may be behind the final norm

    @cached_property
    def blocks(self) -> Any:
        lists = [m for m in self.hf.modules() if isinstance(m, nn.ModuleList) and len(m) == 2]
        return lists[0]

    def mixed(self) -> tuple[nn.Module, int]:
        """The module that reads the mixed values of the last layer, and the size of a head."""
        named = self.blocks[LAYER].named_modules()
        found = [m for n, m in named if "att" in n and n.rpartition(".")[2] in OUTPUTS]
        return found[0], self.hf.get_input_embeddings().weight.shape[1] // (
            self.out.attentions[LAYER].shape[1]
        )

    def edited(self, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits where ``change`` acts on the mixed values ``[batch query d_head]`` of the head."""
        module, size = self.mixed()
        at = slice(HEAD * size, (HEAD + 1) * size)

        def hook(_: nn.Module, given: Any) -> Any:
            z = given[0].clone()
            z[..., at] = change(z[..., at])
            return (z, *given[1:])

        handle = module.register_forward_pre_hook(hook)
        try:
            with torch.no_grad():
                return self.hf(PROMPTS).logits
        finally:
            handle.remove()

    def embedding_effect(self, clean: Tensor, other: Tensor) -> float:
        """``(clean - other) . d metric / d (input of the first block)``, mean over prompts, where
        the metric is the difference of two logits at the last position."""
        seen: list[Tensor] = []

        def hook(_: nn.Module, given: Any) -> Any:
            seen.append(given[0].detach().requires_grad_())
            return (seen[-1], *given[1:])

        handle = self.blocks[0].register_forward_pre_hook(hook)
        try:
            self.hf(other)
            logits = self.hf(clean).logits[:, -1]
        finally:
            handle.remove()
        metric = sum(row[answer] - row[wrong] for row, (answer, wrong) in zip(logits, PAIRS))
        slope = torch.autograd.grad(torch.as_tensor(metric), seen[1])[0]
        return float((slope * (seen[1] - seen[0])).sum().detach()) / len(clean)

    def uncapped(self, logits: Tensor) -> Tensor:
        cap = getattr(self.hf.config, "final_logit_softcapping", None)
        return cap * torch.atanh(logits / cap) if cap else logits

    def capped(self, scores: Tensor) -> Tensor:
        cap = getattr(self.hf.config, "attn_logit_softcapping", None)
        return cap * torch.tanh(scores / cap) if cap else scores

    def softmax(self, scores: Tensor) -> Tensor:
        """The pattern of the edited head, beside its sink where it has one."""
        sinks = getattr(getattr(self.blocks[LAYER], "self_attn", None), "sinks", None)
        if sinks is None:
            return scores.softmax(-1)
        sink = sinks[HEAD].detach().double().expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]


@dataclass(frozen=True)
class Loaded:
    """One class and loading of an architecture, and what is asked of it."""

    model: Any
    processed: bool
    basis: tlg.PositionContext
    split: Any

    @cached_property
    def terms(self) -> Tensor:
        """All terms ``[term batch head query key]`` in float64."""
        return torch.stack([self.split.terms[name].double() for name in self.split.terms])

    @cached_property
    def bound(self) -> float:
        """32 u A, with A from the terms, which are not larger than the products they sum."""
        inside = self.split.total().isfinite()
        return 32 * ROUNDOFF * float(self.terms.abs().sum(0)[inside].max())


@cache
def reference(architecture: str) -> Reference:
    return Reference(hf_model(architecture).double())


@cache
def loaded(architecture: str) -> list[Loaded]:
    found = []
    for model_class, processed in loadable(architecture):
        model = tiny(model_class, architecture, processed)
        basis = tlg.decompose(model, CORPUS, progress=False)
        found.append(Loaded(model, processed, basis, tlg.split_scores(model, PROMPTS, basis)))
    return found


def log_probabilities(logits: Tensor) -> Tensor:
    return logits.detach().double().log_softmax(-1)


ALL = [
    pytest.param(a, marks=[pytest.mark.xdist_group(a), *([] if a in FAST else [pytest.mark.slow])])
    for a in ARCHITECTURES
]
each_kind = pytest.mark.parametrize("architecture", ALL)
HELD = [p for p in ALL if loadable(str(p.values[0]))]
each_held = pytest.mark.parametrize("architecture", HELD)
by_manner = pytest.mark.parametrize(
    "architecture",
    [
        p if p.values[0] in FAST else pytest.param(*p.values, marks=[*p.marks, pytest.mark.nightly])
        for p in HELD
    ],
)
"""By day one of each manner; the graph, edges and edits of the others stand on what ``each_held``
asks of all, their scores and states."""


@each_held
def test_terms_sum_to_hugging_faces_scores(architecture: str) -> None:
    hf = reference(architecture)
    seen = hf.patterns > 1e-30  # smaller ones have lost digits
    theirs = torch.where(seen, hf.patterns, 1.0).log()

    def centred(scores: Tensor) -> Tensor:
        """Softmax leaves a number free in every row."""
        mean = torch.where(seen, scores, 0.0).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
        return torch.where(seen, scores - mean, 0.0)

    for each in loaded(architecture):
        total = each.split.total()
        inside = total.isfinite()
        assert torch.equal(inside, hf.patterns > 0)
        assert int(seen.sum()) > 0.9 * int(inside.sum())
        assert len(each.split.terms) >= 9
        assert bool(each.terms.isfinite().all())
        summed = each.terms.sum(0)
        assert float(summed[inside].abs().max()) > 10
        error = (centred(hf.capped(summed)) - centred(theirs)).abs().max()
        assert float(error) <= each.bound / 2
        assert float((total - summed)[inside].abs().max()) <= each.bound
        assert float((each.split.pattern() - hf.patterns).abs().max()) <= each.bound


@each_held
def test_position_and_mean_are_those_of_hugging_faces_states(architecture: str) -> None:
    for each in loaded(architecture):
        for layer, states in enumerate(reference(architecture).states):
            window = slice(*each.basis.window)
            mean = states[:, window].mean((0, 1))
            pos = states.mean(0) - mean
            found = each.basis.mean[layer].double(), each.basis.pos[layer].double()
            for ours, theirs in zip(found, (mean, pos[window])):
                if each.processed:  # centring takes the mean over d_model away
                    theirs = theirs - theirs.mean(-1, keepdim=True)
                    ours = ours - ours.mean(-1, keepdim=True)
                assert float(theirs.abs().max()) > 0.1
                assert float((ours - theirs).abs().max()) < 1e-5 * float(states.abs().max())


@by_manner
def test_a_graph_sums_to_hugging_faces_logit(architecture: str) -> None:
    hf = reference(architecture)
    logits = hf.uncapped(hf.hf(SHORT[:1]).logits[0, -1].detach())
    answer, other = int(logits.argmax()), int(logits.argmin())
    wanted = float(logits[answer] - logits[other])
    assert wanted > 0.1
    mlp = "leaf" if architecture in EXPERTS else "frozen"
    for each in loaded(architecture):
        call = lambda mlp, model=each.model: traced(model, SHORT[:1], answer, other, mlp)
        if architecture in ENCODERS:
            assert "logits" in refused(partial(call, "frozen"), tlg.UnsupportedModelError).what
            continue
        if architecture in EXPERTS:
            assert "MLP" in refused(partial(call, "frozen"), tlg.UnsupportedModelError).what
        graph = call(mlp)
        table = graph.tokens().to_dataframe()
        scale = float(table["value"].abs().sum()) + abs(wanted)
        assert graph.value == pytest.approx(wanted, abs=1e-5 * scale)
        if architecture not in EXPERTS:
            assert table["value"].sum() == pytest.approx(graph.value, abs=1e-5 * scale)
        assert (table["value"].abs() > 1e-3).sum() >= 4


@by_manner
def test_edges_out_of_the_embedding_are_hugging_faces_gradient(architecture: str) -> None:
    wanted = reference(architecture).embedding_effect(SHORT, OTHERS)
    for each in loaded(architecture):
        if architecture in ENCODERS:
            call = partial(scored, each.model, SHORT, OTHERS)
            assert "edges" in refused(call, tlg.UnsupportedModelError).what
            continue
        table = scored(each.model, SHORT, OTHERS).to_dataframe()
        out = table[table["source"] == "embed"]["score"]
        assert len(out) >= 8
        assert out.abs().max() > 1e-3
        assert out.sum() == pytest.approx(wanted, abs=1e-5 * float(out.abs().sum()))


@by_manner
def test_a_head_without_a_term_is_hugging_faces_with_other_scores(architecture: str) -> None:
    hf = reference(architecture)
    clean = log_probabilities(hf.out.logits)
    for each in loaded(architecture):
        at = each.split.heads.index((LAYER, HEAD))
        total, term = (
            x[:, at].double() for x in (each.split.total(), each.split.terms["cvec-cvec"])
        )
        left = hf.softmax(hf.capped(torch.where(total.isfinite(), total - term, -torch.inf)))
        with torch.no_grad():
            v = each.model.run_with_cache(PROMPTS)[1]["v", LAYER]
        heads = hf.out.attentions[LAYER].shape[1]
        if v.dim() == 3:  # some bridges keep the heads in one row
            v = rearrange(v, "b j (g e) -> b j g e", e=hf.mixed()[1])
        v = v[:, :, HEAD * v.shape[2] // heads].double()
        moved = einsum(left - hf.patterns[:, at], v, "b i j, b j e -> b i e")
        wanted = log_probabilities(hf.edited(lambda z, moved=moved: z + moved))
        with without_term(each.model, each.basis), torch.no_grad():
            found = log_probabilities(each.model(PROMPTS, return_type="logits"))
        assert float((wanted - clean).abs().max()) > 0.05
        assert float((found - wanted).abs().max()) < 3e-5 * float(wanted.abs().max())


@by_manner
def test_a_head_that_is_removed_writes_nothing(architecture: str) -> None:
    hf = reference(architecture)
    wanted, clean = (log_probabilities(x) for x in (hf.edited(torch.zeros_like), hf.out.logits))
    assert float((wanted - clean).abs().max()) > 0.05
    for each in loaded(architecture):
        if each.processed:
            continue  # its values have lost their bias to the output: zero is another number
        with without_head(each.model), torch.no_grad():
            found = log_probabilities(each.model(PROMPTS, return_type="logits"))
        assert float((found - wanted).abs().max()) < 3e-5 * float(wanted.abs().max())


@each_kind
def test_what_is_left_out_cannot_be_held(architecture: str) -> None:
    """TransformerLens raises, or computes something else than Hugging Face."""
    wanted = log_probabilities(reference(architecture).out.logits)
    for model_class, processed in set(WAYS) - set(loadable(architecture)):
        assert refusal(model_class, architecture, processed)
        if model_class == "hooked" and not HAS_HOOKED:
            continue  # there is no such class
        make = bridge_of if model_class == "bridge" else hooked_of
        try:
            model = make(hf_model(architecture), processed)
            with torch.no_grad():
                found = log_probabilities(model(PROMPTS, return_type="logits"))
        except Exception:  # whatever TransformerLens raises for what it cannot hold
            continue
        assert float((found - wanted).abs().max()) > 0.01 * float(wanted.abs().max())


def test_few_architectures_are_left_out() -> None:
    held = [len(loadable(architecture)) for architecture in ARCHITECTURES]
    assert len(held) >= 29
    assert held.count(0) <= (3 if HAS_HOOKED else 0)
    assert sum(held) >= (85 if HAS_HOOKED else 57)
