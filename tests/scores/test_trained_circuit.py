"""A trained attention-only model of two layers: its numbers are those of a decomposition by hand,
and the circuit that they show, a previous-token head written into the keys of induction heads, is
the one that the model needs."""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from einops import einsum
from torch import Tensor
from torch.nn import functional as F

import tl_geometry as tlg
from tests.lib.models import HAS_HOOKED
from tl_geometry.base.rows import row_center
from tl_geometry.interventions import EdgeNecessity, edge_necessity, remove_term
from tl_geometry.scores.split import split_scores

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer"),
]
VOCAB, LENGTH, HEADS, D_HEAD, STEPS, BATCH = 64, 49, 2, 32, 500, 16
READERS = [f"L1H{head}" for head in range(HEADS)]


def repeats(n: int, low: int, high: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """BOS and random tokens repeated with a period of each row's own, from ``low`` to ``high`` - 1;
    and which tokens are of a second copy or later."""
    period = torch.randint(low, high, (n, 1), generator=generator)
    rows = torch.randint(1, VOCAB, (n, LENGTH - 1), generator=generator)
    at = torch.arange(LENGTH - 1)[None]
    tokens = torch.cat([torch.zeros(n, 1, dtype=torch.int64), rows.gather(1, at % period)], 1)
    return tokens, F.pad(at >= period, (1, 0))


@cache
def trained() -> Any:
    """The model after 500 steps (about 20 s on one core), in float64."""
    import transformer_lens

    config = transformer_lens.HookedTransformerConfig(
        n_layers=2,
        d_model=64,
        d_head=D_HEAD,
        n_heads=HEADS,
        n_ctx=LENGTH,
        d_vocab=VOCAB,
        attn_only=True,
        normalization_type="LN",
        seed=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # HookedTransformer goes in 4.0
        model = transformer_lens.HookedTransformer(config)
    options: dict[str, Any] = {"lr": 4e-3, "betas": (0.9, 0.98), "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, STEPS, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        for _ in range(STEPS):
            tokens, counted = repeats(BATCH, 8, 25, generator)
            logits = model(tokens)[:, :-1].transpose(1, 2)
            loss = F.cross_entropy(logits, tokens[:, 1:], reduction="none")[counted[:, 1:]].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.cfg.dtype = torch.float64
    return model.double().eval().requires_grad_(False)


PROMPTS, COUNTED = repeats(12, 20, 21, torch.Generator().manual_seed(9))


def previous_token_head(model: Any) -> int:
    """The head of block 0 that attends to the token before most."""
    pattern = model.run_with_cache(PROMPTS)[1]["pattern", 0]
    return int(pattern.diagonal(-1, -2, -1).mean((0, 2)).argmax())


def test_its_numbers_are_those_of_a_decomposition_by_hand() -> None:
    """Written down from the weights: ``x = embed + pos_embed + sum_h z_h W_O^h + constants``,
    ``q_a = (A x_a / s * w) W_Q``, and the shares of every product of parts."""
    model = trained()
    cache = model.run_with_cache(PROMPTS)[1]
    first, second = (block.attn for block in model.blocks)
    norm, scale = model.blocks[1].ln1, cache["blocks.1.ln1.hook_scale"]
    value = einsum(model.blocks[0].ln1.b, first.W_V, "d, h d e -> h e") + first.b_V
    parts = {"embed": cache["embed"], "pos_embed": cache["pos_embed"]}
    constants = first.b_O + einsum(value, first.W_O, "h e, h e d -> d")
    parts["constants"] = constants.expand_as(cache["embed"])
    for head in range(HEADS):
        parts[f"L0H{head}"] = (cache["z", 0][:, :, head] - value[head]) @ first.W_O[head]
    x = torch.stack(list(parts.values()))
    assert float((x.sum(0) - cache["resid_pre", 1]).abs().max()) < 1e-10
    x = (x - x.mean(-1, keepdim=True)) / scale * norm.w

    def side(letter: str) -> Tensor:
        W, b = getattr(second, f"W_{letter}"), getattr(second, f"b_{letter}")
        own = einsum(x, W, "a b i d, h d e -> a b i h e")
        bias = einsum(norm.b, W, "d, h d e -> h e") + b
        return torch.cat([bias.expand_as(own[:1]), own])

    q, k = side("Q"), side("K")
    every = einsum(q, k, "a b i h e, c b j h e -> a c b h i j") / math.sqrt(D_HEAD)
    names = ["bias", *parts]
    split = split_scores(model, PROMPTS, None, layers=1, parts="writers")
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            assert float((split.terms[a, b] - every[i, j]).abs().max()) < 1e-5, (a, b)
    table = tlg.composition(model, PROMPTS, layers=1, drop=1, progress=False)
    assert table.parts == tuple(names)
    allowed = torch.ones(LENGTH - 1, LENGTH - 1).tril().bool()
    term = row_center(every[..., 1:, 1:], allowed)
    total = term.sum((0, 1))
    size = total.square().sum((0, 2, 3))
    cs = einsum(term, total, "a c b h i j, b h i j -> h a c") / size[:, None, None]
    assert float((table.cs[:, 0] - cs.sum(2)).abs().max()) < 1e-5
    assert float((table.cs[:, 1] - cs.sum(1)).abs().max()) < 1e-5


def test_the_circuit_is_found() -> None:
    """Keys are written by the previous-token head, on both induction heads and above both nulls;
    queries and values by the embedding."""
    model = trained()
    found = tlg.composition(model, PROMPTS, layers=1, drop=1, progress=False)
    before = found.parts.index(f"L0H{previous_token_head(model)}")
    embed = found.parts.index("embed")
    for head in range(HEADS):
        assert int(found.cs[head, 1].argmax()) == int(found.gs[head, 1].argmax()) == before
        assert float(found.cs[head, 1, before]) > 0.5
        for null in (found.other_cs, found.random_cs):
            assert float(null[head, 1, before].abs()) < 0.5 * float(found.cs[head, 1, before])
        assert int(found.cs[head, 0].argmax()) == embed
        assert int(found.cs[head, 2].argmax()) == embed


def test_each_label_is_what_costs_most_to_remove() -> None:
    """Law 12, in a circuit that training found: position in the previous-token head, content in the
    induction heads."""
    model = trained()
    corpus = repeats(64, 8, 25, torch.Generator().manual_seed(3))[0]
    basis = tlg.decompose(model, corpus, progress=False)
    table = tlg.sweep_heads(model, PROMPTS, basis, progress=False)

    def loss() -> float:
        losses = F.cross_entropy(model(PROMPTS)[:, :-1].mT, PROMPTS[:, 1:], reduction="none")
        return float(losses[COUNTED[:, 1:]].mean())

    clean = loss()
    for head, label in zip(table.heads, table.by_group.labels, strict=True):
        cost = {}
        for group in table.groups:
            with remove_term(model, basis, group, [head]):
                cost[group] = loss() - clean
        assert label == max(cost, key=lambda group: cost[group]), (head, cost)
        assert head[0] == 0 or cost["content"] > cost["position"] + 0.05
    previous = table.heads.index((0, previous_token_head(model)))
    assert table.by_group.labels[previous] == "position"


def necessity(side: str) -> EdgeNecessity:
    model = trained()
    writer, options = f"L0H{previous_token_head(model)}", {"counted": COUNTED, "drop": 1}
    return edge_necessity(model, PROMPTS, writer, READERS, side=side, controls=3, **options)


def test_that_edge_breaks_induction_and_no_other_does() -> None:
    """Of the keys alone, and not what it writes into queries and values."""
    keys = necessity("key")
    clean = keys.of("clean")
    assert clean < 0.5 < math.log(VOCAB)
    assert float(keys.change("remove").low) > 2
    assert float(keys.change("swap").low) > 2
    for name in keys.conditions[3:]:
        assert float(keys.change("remove", against=name).low) > 1, name
    assert {"L0H0", "L0H1", "embed", "pos_embed"} - set(keys.conditions[5:]) == {keys.writer}
    for side in ("query", "value"):
        other = necessity(side)
        assert float(other.change("remove").high) < 0.3, side
        cost = other.change("embed", against="remove")  # twin: a removal there can cost
        assert float(cost.low) > 0.5, side
