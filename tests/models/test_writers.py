"""The writers of the stream sum to it on every architecture, class and loading, are the same for
all of them, and planted faults are caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.lib.models import (
    ARCHITECTURES,
    HAS_HOOKED,
    loadable,
    tiny,
    tiny_hooked,
    tiny_native,
    tokens,
)
from tl_geometry.base.errors import GeometryError, ReconstructionError
from tl_geometry.models import from_hf, view
from tl_geometry.models.reader import as_view
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.write_spec import writing_of
from tl_geometry.models.writers import CONSTANTS, Written, run_written, writer_names

PROMPTS = tokens(batch=2, length=12, seed=7)


def parts_of(model: Any, grain: str = "writers") -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """States and their parts, the last state included."""
    states: list[Tensor] = []
    parts: list[dict[str, Tensor]] = []

    def look(h: Tensor, written: Written) -> None:
        states.append(h)
        parts.append(written.parts(grain))

    seen = view(model)
    layers = range(seen.n_layers)
    run_written(seen, PROMPTS, layers, lambda l, w: look(l.h, w), on_end=look)
    return states, parts


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_writers_sum_to_the_stream_and_agree_between_loadings(architecture: str) -> None:
    first: list[dict[str, Tensor]] = []
    for kind, processed in loadable(architecture):
        model = tiny(kind, architecture, processed)
        for grain in ("writers", "blocks"):
            states, parts = parts_of(model, grain)
            assert len(states) == 3
            for layer, (h, some) in enumerate(zip(states, parts, strict=True)):
                assert list(some) == [w.name for w in writer_names(view(model), layer, grain)]
                total = torch.stack([p.double() for p in some.values()]).sum(0)
                size = torch.stack([p.abs() for p in some.values()]).sum(0).max()
                error = float((total - h.double()).abs().max())
                assert error <= reconstruction_bound(2**-24, float(size))
        heads = [name for name in parts_of(model)[1][-1] if name.startswith("L1H")]
        assert len(heads) == view(model).n_heads
        centred = [
            {n: x - x.mean(-1, keepdim=True) for n, x in p.items()} for p in parts_of(model)[1]
        ]
        first = first or centred
        for mine, theirs in zip(centred, first, strict=True):
            assert list(mine) == list(theirs)
            for name, part in mine.items():
                assert float((part - theirs[name]).abs().max()) < 3e-5, (kind, processed, name)


@pytest.mark.parametrize("architecture", ["gpt2", "gptj", "bert", "neox", "opt"])
def test_float64_sums_to_1e_12(architecture: str) -> None:
    for kind in [kind for kind, processed in loadable(architecture) if not processed]:
        states, parts = parts_of(tiny(kind, architecture, dtype=torch.float64))
        for h, some in zip(states, parts, strict=True):
            assert float((sum(some.values(), torch.zeros(())) - h).abs().max()) < 1e-12 * 100


def test_the_first_block_reads_the_embeddings_alone() -> None:
    names = {
        "gpt2": ["embed", "pos_embed", CONSTANTS],
        "llama": ["embed", CONSTANTS],
        "bert": ["embed", "pos_embed", "type_embed", CONSTANTS],
        "bloom": ["embed", CONSTANTS],
    }
    for architecture, expected in names.items():
        seen = view(tiny("bridge", architecture))
        assert [w.name for w in writer_names(seen, 0)] == expected
        blocks = [w.name for w in writer_names(seen, 2, "blocks")]
        assert blocks == [*expected, "attn0", "mlp0", "attn1", "mlp1"]


def test_a_view_with_final_norm_reads_the_same_blocks() -> None:
    """The final norm of a model that was never trained is the norm of an encoder's last block."""
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=32)
    model = from_hf(transformers.GPT2LMHeadModel(config), None, model_class="bridge")
    assert writing_of(as_view(model).with_final_norm()).blocks[-1].around is None


def test_native_bridges() -> None:
    for norm, position in (("LN", "standard"), ("RMS", "rotary")):
        parts = parts_of(tiny_native(norm, position))[1]
        assert len(parts[-1]) == 12 + (position == "standard")


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
def test_attention_only_shortformer_and_parallel_models() -> None:
    options: list[dict[str, Any]] = [
        {"attn_only": True, "normalization_type": None},
        {"attn_only": True, "normalization_type": "LN", "n_layers": 3},
        {"positional_embedding_type": "shortformer"},
        {"parallel_attn_mlp": True, "normalization_type": "LN"},
    ]
    for settings in options:
        parts = parts_of(tiny_hooked(**settings))[1][-1]
        assert any(name.startswith("mlp") for name in parts) != bool(settings.get("attn_only"))
        assert ("pos_embed" in parts) == ("positional_embedding_type" not in settings)


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
def test_the_bias_of_a_norm_behind_attention_is_a_constant() -> None:
    """A LayerNorm behind attention, which no family has: those that have a norm there have an
    RMSNorm, which has no bias."""
    from transformer_lens.components.layer_norm import LayerNorm

    model = tiny_hooked(normalization_type="RMS", use_normalization_before_and_after=True)
    generator = torch.Generator().manual_seed(0)
    for block in model.blocks:
        block.ln1_post = LayerNorm(model.cfg)
        block.ln1_post.b.data = torch.randn(model.cfg.d_model, generator=generator)
    model.setup()
    states, parts = parts_of(model)
    for h, some in zip(states[1:], parts[1:], strict=True):
        assert float((sum(some.values(), torch.zeros(())) - h).abs().max()) < 1e-4


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
@pytest.mark.parametrize("grain", ["writers", "blocks"])
def test_kept_writes_are_those_of_now(architecture: str, grain: str) -> None:
    """Constants grow with each block, and an encoder's norms change what was written before."""
    changed: list[bool] = []
    first: list[Tensor] = []

    def look(written: Written) -> None:
        kept, now = written.kept(grain, 2**40), written.stacked(grain).flatten(1, 2)
        assert kept is not None
        assert torch.equal(kept, now)
        first.append(now[: len(first[0])] if first else now)
        changed.append(not torch.equal(first[0], first[-1]))
        assert written.kept(grain, now.nbytes // 2) is None

    model = tiny("bridge", architecture)
    seen = view(model)
    layers = range(seen.n_layers)
    run_written(seen, PROMPTS, layers, lambda _, w: look(w), on_end=lambda _, w: look(w))
    assert changed == [False, True, True]


def test_writers_come_from_a_cache_too() -> None:
    model = tiny("bridge", "gpt2")
    cache = model.run_with_cache(PROMPTS)[1]
    found: list[dict[str, Tensor]] = []
    run_written(view(model), PROMPTS, [1], lambda _, w: found.append(w.parts()), cache=cache)
    own = parts_of(model)[1][1]
    assert all(torch.allclose(found[0][name], own[name], atol=1e-5) for name in own)
    with pytest.raises(GeometryError, match="hook_mlp_out"):
        held = {k: v for k, v in cache.items() if "mlp" not in k}
        run_written(view(model), PROMPTS, [1], lambda _, w: None, cache=held)


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "bert"])
def test_a_hook_that_writes_into_the_stream_is_noticed(architecture: str) -> None:
    model = tiny("bridge", architecture)

    def write(value: Tensor, hook: Any) -> Tensor:
        return value + 0.01

    with (
        model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", write)]),
        pytest.raises(ReconstructionError, match="sum of the writers"),
    ):
        parts_of(model)


@pytest.mark.parametrize(
    ("hook", "place"),
    [
        ("blocks.1.hook_resid_pre", "the stream before block 1 of tiny-gpt2"),
        ("blocks.1.hook_resid_post", "the last state of tiny-gpt2"),
    ],
)
@pytest.mark.parametrize("from_cache", [False, True])
def test_where_writers_do_not_add_up_is_said(hook: str, place: str, from_cache: bool) -> None:
    model = tiny("bridge", "gpt2")

    def run(verify: bool) -> None:
        cache = model.run_with_cache(PROMPTS)[1] if from_cache else None
        ends: list[Tensor] = []
        nothing: Callable[..., None] = lambda *_: None
        options: dict[str, Any] = {"verify": verify, "cache": cache}
        run_written(
            view(model), PROMPTS, [0, 1], nothing, on_end=lambda h, _: ends.append(h), **options
        )
        assert len(ends) == 1

    with model.hooks(fwd_hooks=[(hook, lambda value, hook: value + 0.01)]):
        with pytest.raises(ReconstructionError, match=f"{place}: expected"):
            run(verify=True)
        run(verify=False)
    run(verify=True)


FAULTS: dict[str, Callable[[Written], None]] = {
    "no output bias": lambda w: w.dense.update(mlp0=w.dense["mlp0"] - w.writing.blocks[0].b_out),
    "another scale": lambda w: setattr(w.heads[0], "scale", 1.001 * w.heads[0].scale),
    "the embedding twice": lambda w: w.dense.update(embed=2 * w.dense["embed"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_do_not_add_up(fault: str) -> None:
    """Before they are added up: a check adds only what was written since the one before it."""

    def sound(layer: Any, written: Written) -> None:
        written.check(layer.h, layer.roundoff)

    def faulty(layer: Any, written: Written) -> None:
        FAULTS[fault](written)
        with pytest.raises(ReconstructionError, match="sum of the writers"):
            written.check(layer.h, layer.roundoff)

    for look in (sound, faulty):
        run_written(view(tiny("bridge", "gpt2")), PROMPTS, [1], look, verify=False)


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "bert"])
def test_a_check_that_follows_another_adds_up_the_same(architecture: str) -> None:
    """Sums go on from the check before; behind a norm of everything written they begin anew."""
    errors: list[Tensor] = []

    def look(_: Any, written: Written) -> None:
        assert written._summed is not None
        parts = written.stacked()
        now, sizes = parts.sum(0, dtype=torch.float64), parts.abs().sum(0)
        total, size = (x + y for x, y in zip(written._summed[1:], constants(written), strict=True))
        errors.append(((total - now).abs() / sizes).max())
        assert torch.allclose(size, sizes, rtol=1e-5)

    def constants(written: Written) -> tuple[Tensor, Tensor]:
        return written.constants, written.constants.abs()

    seen = view(tiny("bridge", architecture))
    run_written(seen, PROMPTS, range(seen.n_layers), look, on_end=lambda h, w: look(h, w))
    assert len(errors) == seen.n_layers + 1
    assert max(errors) < 1e-6
