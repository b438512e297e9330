"""What each block writes and what its MLP computes, against loops; passes in blocks of rows against
whole ones; and what is said where a model has no such thing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import tiny, tokens
from tl_geometry.base.errors import GeometryError, ReconstructionError, UnsupportedModelError
from tl_geometry.models import row_pass, view
from tl_geometry.models.forward import put_on, take_away
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.mlp import ACTIVATIONS, MLPModule, MLPSpec, mlp_spec
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.write_spec import require_decoder, writing_of
from tl_geometry.models.writers import HeadWrites, Writer, Written, run_written, writer_names


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.fixture
def seen() -> ModelView:
    """A small model that no test leaves changed."""
    return view(tiny("bridge", "gpt2"))


# ---- writers


def test_writers_are_named_in_the_order_of_their_blocks(seen: ModelView) -> None:
    """Embeddings and constants, then of each block its heads (or attention) and its MLP."""
    first = [Writer("embed", -1, -1), Writer("pos_embed", -1, -1), Writer("constants", -1, -1)]
    heads = [[Writer(f"L{at}H{head}", at, head) for head in range(4)] for at in range(2)]
    mlps = [[Writer(f"mlp{at}", at, -1)] for at in range(2)]
    assert list(writer_names(seen, 0)) == first
    assert list(writer_names(seen, 1)) == first + heads[0] + mlps[0]
    assert list(writer_names(seen, 2)) == first + heads[0] + mlps[0] + heads[1] + mlps[1]
    attention = [[Writer(f"attn{at}", at, -1)] for at in range(2)]
    blocks = first + attention[0] + mlps[0] + attention[1] + mlps[1]
    assert list(writer_names(seen, 2, "blocks")) == blocks
    with pytest.raises(GeometryError, match="parts: expected one of"):
        writer_names(seen, 1, "heads")


def test_writes_of_heads_in_factors() -> None:
    """Each head's write, that at some positions of the first context, and their sum."""
    z, W, scale = draw(2, 3, 4, 2), draw(4, 2, 5, seed=1), draw(2, 3, seed=2)
    writes = HeadWrites(0, z, W, scale)
    each = writes.each()
    for head in range(4):
        for b in range(2):
            for i in range(3):
                expected = scale[b, i] * (z[b, i, head] @ W[head])
                assert torch.allclose(each[head, b, i], expected)
    assert torch.allclose(writes.whole(), each.sum(0))
    heads, positions = torch.tensor([3, 0, 3]), torch.tensor([0, 2, 1])
    rows = writes.some(heads, positions)
    assert torch.allclose(rows, each[heads, 0, positions])


def written_of(seen: ModelView, layer: int, ids: Tensor) -> tuple[LayerView, dict[str, Tensor]]:
    found: list[tuple[LayerView, dict[str, Tensor]]] = []
    run_written(seen, ids, [layer], lambda at, written: found.append((at, written.parts())))
    return found[0]


def test_the_writers_of_a_block_by_hand(seen: ModelView) -> None:
    """Heads and MLP write what varies; the rest is constant."""
    ids = tokens()
    layer, parts = written_of(seen, 1, ids)
    names = ["embed.hook_out", "blocks.0.attn.hook_z", "blocks.0.hook_mlp_out"]
    hooks = seen.activations(ids, [*names, "blocks.0.hook_resid_pre"])
    weights, norm = seen.weights(0), seen.attention_norm(0)
    z = hooks["blocks.0.attn.hook_z"].reshape(2, 16, 4, 8)
    constants = weights.b_O.clone()
    for head in range(4):
        always = norm.bias @ weights.W_V[head] + weights.b_V[head]
        expected = (z[:, :, head] - always) @ weights.W_O[head]
        assert torch.allclose(parts[f"L0H{head}"], expected, atol=1e-5)
        constants += always @ weights.W_O[head]
    b_out = seen._model.blocks[0].mlp.b_out.detach()
    assert torch.allclose(parts["mlp0"], hooks["blocks.0.hook_mlp_out"] - b_out, atol=1e-6)
    expected = (constants + b_out).expand_as(layer.h)
    assert torch.allclose(parts["constants"], expected, atol=1e-5)
    first = parts["embed"] + parts["pos_embed"]
    assert torch.allclose(first, hooks["blocks.0.hook_resid_pre"], atol=1e-5)
    assert torch.allclose(torch.stack(list(parts.values())).sum(0), layer.h, atol=1e-5)


def test_parts_of_contexts_tokens_and_directions(seen: ModelView) -> None:
    """Each is the same cut, or the same product, of every part."""
    onto = draw(3, 32).float()
    checked: list[int] = []

    def look(layer: LayerView, written: Written) -> None:
        whole = written.stacked()
        assert torch.allclose(written.context(1).stacked(), whole[:, 1:])
        some = written.tokens(slice(14, 19)).stacked()
        assert torch.allclose(some[:, 0], whole.flatten(1, 2)[:, 14:19])
        assert torch.allclose(written.along(onto).stacked(), whole @ onto.T, atol=1e-4)
        size = len(writer_names(seen, 2)) * written.constants.nbytes
        assert written.kept("writers", size - 1) is None
        kept = written.kept("writers", size)
        assert kept is not None
        assert torch.equal(kept, whole.flatten(1, 2))
        out = torch.zeros_like(whole)
        assert written.stacked(out=out) is out
        assert torch.equal(out, whole)
        checked.append(layer.layer)

    run_written(seen, tokens(), [0, 1], look)
    assert checked == [0, 1]


def test_a_cache_needs_the_hooks_of_the_blocks_that_are_read(seen: ModelView) -> None:
    """For the first block those of that block alone; what is missing is named."""
    needed = list(dict.fromkeys([*seen.layer_hooks(0), *writing_of(seen).hooks(0)]))
    cache = seen.activations(tokens(), needed)
    found: list[int] = []
    run_written(seen, tokens(), [0], lambda at, _: found.append(at.layer), cache=cache)
    assert found == [0]
    with pytest.raises(GeometryError) as error:
        run_written(seen, tokens(), [1], lambda *_: None, cache=cache)
    assert str(error.value).startswith(
        "cache: expected hooks of every writer, got no blocks.1.hook_resid_pre, "
    )
    assert str(error.value).endswith(" more. Use model.run_with_cache(tokens), without filter.")


def test_one_context_is_given_to_the_sample(seen: ModelView) -> None:
    """The sampled row is verified and handed over before the whole batch, with its own writers."""
    order: list[tuple[str, int, bool]] = []

    def note(which: str) -> Any:
        def on_layer(layer: LayerView, written: Written) -> None:
            checked = bool(layer.reconstruction.checks)
            order.append((which, len(layer.h), checked))
            assert torch.allclose(written.stacked().sum(0), layer.h, atol=1e-5)

        return on_layer

    run_written(seen, tokens(), [1], note("all"), sample=(1, note("one")))
    assert order == [("one", 1, True), ("all", 2, False)]


@pytest.mark.parametrize(
    ("hook", "where"),
    [
        ("blocks.1.hook_resid_pre", "the stream before block 1"),
        ("blocks.1.hook_resid_post", "the last state"),
    ],
)
def test_a_stream_that_no_writer_made_is_refused(seen: ModelView, hook: str, where: str) -> None:
    """The message says where; without verify nothing is compared."""
    point = seen._model.hook_dict[hook]
    handle = put_on(point, lambda value, hook: value + 0.5)
    try:
        with pytest.raises(ReconstructionError) as error:
            run_written(seen, tokens(), [1], lambda *_: None, on_end=lambda *_: None)
        assert str(error.value).startswith(
            f"{where} of {seen.name}: expected parts that add up to the model's own numbers, "
            "got sum of the writers off by 0.5 (at most "
        )
        run_written(seen, tokens(), [1], lambda *_: None, on_end=lambda *_: None, verify=False)
    finally:
        take_away(point, handle)


@pytest.mark.parametrize(
    ("architecture", "embeddings", "after", "around"),
    [
        ("gpt2", ["embed", "pos_embed"], False, False),
        ("llama", ["embed"], False, False),
        ("gemma2", ["embed"], True, False),
        ("olmo2", ["embed"], True, False),
        ("bert", ["embed", "pos_embed", "type_embed"], False, True),
    ],
)
def test_how_a_family_writes(
    architecture: str, embeddings: list[str], after: bool, around: bool
) -> None:
    """Embeddings, norms behind attention and norms around additions of each family."""
    seen = view(tiny("bridge", architecture))
    writing = writing_of(seen)
    assert [name for name, _ in writing.embeddings] == embeddings
    assert (writing.embedding_norm is not None) == around
    for at, block in enumerate(writing.blocks):
        assert (block.after_attention is not None, block.around is not None) == (after, around)
        assert block.mlp_hook == f"blocks.{at}.hook_mlp_out"
        assert float(block.b_out.abs().sum()) == 0 if after else block.b_out.shape == (32,)
    hooks = [hook for _, hook in writing.embeddings]
    own = ["blocks.{}.hook_resid_pre", "blocks.{}.attn.hook_z", "blocks.{}.hook_mlp_out"]
    assert writing.hooks(0) == (*hooks, *(name.format(0) for name in own))
    assert writing.hooks(1) == tuple(name.format(1) for name in own)
    if not around:
        require_decoder(seen, "this")
        return
    with pytest.raises(UnsupportedModelError) as error:
        require_decoder(seen, "this")
    assert str(error.value) == (
        "this: expected a decoder, whose blocks add to the stream, "
        "got an encoder, which norms the stream after each addition."
    )


# ---- MLPs

FORMULAS = {
    "gelu": lambda x: x * (1 + math.erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + math.exp(-x)),
    "relu": lambda x: max(x, 0.0),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "relu_squared": lambda x: max(x, 0.0) ** 2,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_activations_are_their_formulas(name: str) -> None:
    """Below, at and above zero; no other activation is tried."""
    assert set(ACTIVATIONS) == set(FORMULAS)
    for x in (-3.0, -0.7, 0.0, 0.4, 2.0):
        found = float(ACTIVATIONS[name](torch.tensor(x, dtype=torch.float64)))
        assert found == pytest.approx(FORMULAS[name](x), abs=1e-9)


def norm(kind: str | None, seed: int) -> NormWeights:
    return NormWeights(
        norm_type=kind, gain=draw(3, seed=seed), bias=draw(3, seed=seed + 1), eps=0.5
    )


@pytest.mark.parametrize("gated", [False, True])
def test_an_mlp_is_two_or_three_matrices_between_norms(gated: bool) -> None:
    """Norm, activation of one product, times the other where there is a gate, matrix, norm."""
    W_gate, W_in, W_out = draw(3, 4), draw(3, 4, seed=1), draw(4, 3, seed=2)
    b_gate, b_in, b_out = draw(4, seed=3), draw(4, seed=4), draw(3, seed=5)
    spec = MLPSpec(
        before=norm("LN", 6),
        after=norm("RMS", 8),
        parallel=False,
        activation="relu_squared",
        stored_gate=W_gate.float(),
        b_gate=b_gate,
        stored_in=W_in.float() if gated else None,
        b_in=b_in if gated else None,
        stored_out=W_out.float(),
        b_out=b_out,
    )
    assert spec.W_gate.dtype == spec.W_out.dtype == torch.float64
    h = draw(2, 3, seed=10)
    W_gate, W_in, W_out = (W.float().double() for W in (W_gate, W_in, W_out))
    x = h - h.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt() * draw(3, seed=6) + draw(3, seed=7)
    hidden = (x @ W_gate + b_gate).clamp(min=0) ** 2
    hidden = hidden * (x @ W_in + b_in) if gated else hidden
    out = hidden @ W_out + b_out
    out = out / (out.square().mean(-1, keepdim=True) + 0.5).sqrt() * draw(3, seed=8)
    assert torch.allclose(spec.apply(h), out + draw(3, seed=9))
    assert (spec.hidden(x)[1] is not None) == (spec.W_in is not None) == gated


def test_a_module_is_run_between_its_norms() -> None:
    """Its first output, where it gives several."""

    class Double(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, str]:
            return 2 * x, "router"

    none = NormWeights(norm_type=None, gain=torch.ones(3), bias=torch.zeros(3), eps=0.0)
    found = MLPModule(before=norm("RMS", 1), after=none, parallel=False, module=Double())
    h = draw(2, 3)
    assert torch.allclose(found.apply(h), 2 * norm("RMS", 1).apply(h))


def test_a_mixture_of_experts_has_no_matrices() -> None:
    """The message names the block, the module and what to do."""
    seen = view(tiny("bridge", "gpt-oss"))
    with pytest.raises(UnsupportedModelError) as error:
        mlp_spec(seen, 1)
    assert str(error.value).startswith(
        f"MLP of block 1 of {seen.name}: expected two or three matrices with an activation between "
        "them, got "
    )
    assert str(error.value).endswith('. Use trace_logit(..., mlp="leaf"), with MLPs as inputs.')


# ---- blocks of rows


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of more than ten tokens run in blocks of few rows."""
    monkeypatch.setattr(row_pass, "LONG", 4 * 100)
    monkeypatch.setattr(row_pass, "ROW_CELLS", 2 * 4 * 40)


@pytest.mark.usefixtures("short")
def test_a_pass_in_rows_gives_what_a_whole_pass_does() -> None:
    """States, patterns, the mask of a sliding window, checks, and the logits of each position."""
    seen = view(tiny("bridge", "gemma2"))
    ids = tokens(length=16)
    assert (seen.in_rows(10), seen.in_rows(11)) == (False, True)
    whole: list[LayerView] = []
    seen.run_layers(ids, [0, 1], whole.append)
    rows: list[LayerView] = []
    patterns: dict[tuple[int, int], Tensor] = {}
    seen.run_layers(
        ids, [0, 1], rows.append, on_rows=lambda at, start, p: patterns.update({(at, start): p})
    )
    assert len(patterns) > 4
    for one, other in zip(rows, whole, strict=True):
        assert one.pattern is None
        assert torch.equal(one.allowed, other.allowed)
        assert torch.allclose(one.q, other.q, atol=1e-5)
        assert set(one.reconstruction.checks) == set(other.reconstruction.checks)
        assert one.reconstruction.scale == pytest.approx(other.reconstruction.scale, rel=1e-5)
        assert other.pattern is not None
        for (at, start), p in patterns.items():
            if at == one.layer:
                own = other.pattern[:, :, start : start + p.shape[2], : p.shape[3]]
                assert torch.allclose(p, own, atol=1e-5)
    logits = seen.logits(ids)
    for position in (0, 5, 15):
        assert torch.allclose(seen.logits_at(ids, position), logits[:, position], atol=1e-4)
        assert torch.allclose(
            seen.logits(ids, position=position)[:, 0], logits[:, position], atol=1e-4
        )
    held: dict[str, Tensor] = {}
    hooks = {name: lambda h, n=name: held.update({n: h}) for name in seen.state_hooks}
    seen.run_in_rows(ids, hooks)
    own = seen.activations(ids, seen.state_hooks)
    for name in seen.state_hooks:
        assert torch.allclose(held[name], own[name], atol=1e-4)


@pytest.mark.usefixtures("short")
def test_a_window_that_no_score_shows_is_that_of_the_settings() -> None:
    """GPT-Neo's local layer in rows sees six keys, the token itself among them."""
    seen = view(tiny("bridge", "gpt-neo"))
    assert seen.in_rows(16)
    rows: list[LayerView] = []
    seen.run_layers(tokens(), [0, 1], rows.append, on_rows=row_pass.no_rows)
    for layer, width in zip(rows, (16, 6), strict=True):
        assert layer.pattern is None
        cells = [[0 <= i - j < width for j in range(16)] for i in range(16)]
        assert layer.allowed.tolist() == cells


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("architecture", "rows"),
    [("gpt2", True), ("bloom", False), ("gpt-oss", False), ("bert", False)],
)
def test_models_that_run_in_rows(architecture: str, rows: bool) -> None:
    """Not those with a bias for each cell, sinks, or attention to both sides."""
    assert view(tiny("bridge", architecture)).in_rows(32) is rows


@pytest.mark.usefixtures("short")
def test_prompts_run_whole_under_user_hooks(seen: ModelView) -> None:
    """A hook would take a block for a prompt."""
    point = seen._model.hook_dict["blocks.0.hook_mlp_out"]
    handle = put_on(point, lambda value, hook: None)
    try:
        assert not seen.in_rows(32)
    finally:
        take_away(point, handle)
    assert seen.in_rows(32)


@pytest.mark.parametrize(("share", "agrees"), [(0.9, True), (1.1, False)])
def test_blocks_may_be_off_by_a_thousand_units(
    share: float, agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the largest state, whatever its sign."""
    whole = torch.tensor([1.0, -8.0])
    off = torch.tensor([share * 1e3 * 2**-24 * 8, 0.0])
    monkeypatch.setattr(row_pass, "_short_states", lambda layers: (whole, whole - off))
    monkeypatch.setattr(row_pass, "LONG", 0)
    seen = view(tiny("bridge", "llama"))
    monkeypatch.setitem(seen._layers.memo, "rows", None)
    del seen._layers.memo["rows"]
    assert seen.in_rows(5) is agrees


def test_tables_belong_to_all_contexts() -> None:
    """Other activations are cut to the contexts that are asked for."""
    given = {"a.hook_q": draw(3, 2), "a.hook_cos": draw(3, 4), "a.hook_sin": draw(3, 5)}
    found = row_pass.of_contexts(given, slice(1, 2))
    assert {name: x.shape for name, x in found.items()} == {
        "a.hook_q": (1, 2),
        "a.hook_cos": (3, 4),
        "a.hook_sin": (3, 5),
    }
