"""Laws of the split of scores and values (SPEC C, L, M): on every architecture, class and loading
the terms add up to the model's own scores, and they are those of a decoder written out in float64;
what does not add up is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.lib.double import InDouble, exact
from tests.lib.kinds import CORPUS, KINDS, PROMPTS, basis, decoder, far, run
from tests.lib.models import ARCHITECTURES, ENCODERS, bridge_of, hf_model, loadable, tiny, tokens
from tests.lib.reference import scores as reference
from tl_geometry import scores

QUIET: dict[str, Any] = {"progress": False}
WINDOW = (1, CORPUS.shape[1])
IDS = tokens(2, 14, seed=7)
STREAM = (("pos", "cvec"), ("pos", "ctx", "resid"))
every_kind = pytest.mark.parametrize("kind", KINDS)
normalized = pytest.mark.parametrize("normed", [False, True], ids=["raw", "normalized"])


def refused(call: Any, kind: type[Exception] = tlg.GeometryError) -> Any:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


@cache
def basis_of(architecture: str, normed: bool = False, way: tuple[str, bool] | None = None) -> Any:
    model = tiny(*_way(architecture, way))
    return tlg.decompose(model, tokens(16, 16, seed=2), normalize=normed, **QUIET)


def _way(architecture: str, way: tuple[str, bool] | None = None) -> tuple[str, str, bool]:
    model_class, processed = way or loadable(architecture)[0]
    return model_class, architecture, processed


@cache
def exact_basis(kind: str, normed: bool) -> Any:
    with InDouble():
        return tlg.decompose(exact(kind), CORPUS, normalize=normed, **QUIET)


def exact_split(kind: str, basis: Any = None, **options: Any) -> Any:
    with InDouble():
        return tlg.split_scores(exact(kind), PROMPTS, basis, **options)


def patterns(model: Any, ids: Tensor) -> Tensor:
    """The model's own patterns, the heads of all layers one after the other."""
    with torch.no_grad():
        cache = model.run_with_cache(ids)[1]
    layers = range(model.cfg.n_layers)
    return torch.cat([cache[f"blocks.{l}.attn.hook_pattern"] for l in layers], 1)


def read_by(kind: str, layer: int, normed: bool) -> Tensor:
    """What a block reads, by the explicit decoder: its input, or that after the norm."""
    ran = run(kind)
    return reference.normed(decoder(kind), ran, layer) if normed else ran["state", layer]


def gauged(pair: tuple[str, str], *terms: Tensor) -> list[Tensor]:
    """Terms as they are; of ALiBi to a constant of each row."""
    return [x - x[..., :1] if pair[0] == "alibi" else x for x in terms]


# ---- the terms add up


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_terms_sum_to_the_scores_of_the_model(architecture: str) -> None:
    """In every class and loading, for raw and normalised bases; the pattern that they make is the
    model's own. Guards: scores are large, terms differ, nothing is vacuous."""
    for way in loadable(architecture):
        model = tiny(*_way(architecture, way))
        own = patterns(model, IDS)
        for normed, parts in ((False, STREAM[0]), (True, STREAM[1])):
            split = tlg.split_scores(model, IDS, basis_of(architecture, normed, way), parts=parts)
            assert split.parts == ("bias", *parts)
            assert split.reconstruction.worst < 0.5
            assert split.reconstruction.scale > 10
            terms = torch.stack([x.double() for x in split.terms.values()])
            total = split.total()
            inside = split.allowed.expand_as(total)
            bound = 32 * 2**-24 * split.reconstruction.scale
            assert float((terms.sum(0) - total)[inside].abs().max()) <= bound
            assert bool(total[~inside].isneginf().all())
            assert float((split.pattern() - own).abs().max()) <= 2 * bound
            sizes = terms[:, inside].abs().amax(1)
            assert int((sizes > 0.1).sum()) >= 3, "several terms matter"
            assert (split.sinks.isfinite().any()) == (architecture == "gpt-oss")
            assert bool((split.allowed.sum(-1)[:, 0] > 1).all()) == (architecture in ENCODERS)


@every_kind
@normalized
@pytest.mark.parametrize("parts", STREAM, ids=["cvec", "ctx, resid"])
def test_terms_are_those_of_the_explicit_decoder(
    kind: str, normed: bool, parts: tuple[str, ...]
) -> None:
    """Every term of every head in float64, by a route that shares nothing with the library."""
    split = exact_split(kind, exact_basis(kind, normed), parts=parts)
    for layer in range(2):
        h = read_by(kind, layer, normed)
        window = WINDOW if "ctx" in parts else None
        of_stream = reference.position_parts(h, *basis(kind, layer, normed), window=window)
        expected = reference.terms(decoder(kind), run(kind), layer, of_stream, normalized=normed)
        assert set(expected) == set(split.terms)
        largest = max(float(x.abs().max()) for x in expected.values())
        for pair, term in expected.items():
            ours, term = gauged(pair, split.terms[pair][:, 4 * layer : 4 * layer + 4], term)
            assert float((ours - term).abs().max()) < 1e-9 * largest, (pair, layer)


@every_kind
@pytest.mark.parametrize("grain", ["writers", "blocks"])
def test_terms_of_writers_are_those_of_the_explicit_decoder(kind: str, grain: str) -> None:
    split = exact_split(kind, parts=grain, layers=1)
    parts = reference.writers(decoder(kind), run(kind), 1)
    parts = parts if grain == "writers" else reference.by_block(parts)
    assert set(split.parts) == {"bias", *parts}
    expected = reference.terms(decoder(kind), run(kind), 1, parts)
    largest = max(float(x.abs().max()) for x in expected.values())
    for pair, term in expected.items():
        ours, term = gauged(pair, split.terms[pair], term)
        assert float((ours - term).abs().max()) < 1e-9 * largest, pair


def test_writers_of_several_layers_have_one_set_of_names() -> None:
    """Those of the last layer; what has not written yet is zero."""
    model = tiny("bridge", "gpt2")
    split = tlg.split_scores(model, IDS, parts="writers")
    assert split.parts[:4] == ("bias", "embed", "pos_embed", "constants")
    late, early = split.parts.index("L0H1"), slice(0, 4)
    assert float(split.q[late, :, :, early].abs().max()) == 0.0
    assert float(split.q[late, :, :, 4:].abs().max()) > 0.1
    with_bos = torch.cat([torch.zeros(2, 1, dtype=torch.int64), IDS[:, 1:]], 1)
    named = tiny("bridge", "gpt2", text=True)
    splits = [tlg.split_scores(named, x, parts="blocks") for x in (IDS, with_bos)]
    starts = [(split.provenance.window or (None,))[0] for split in splits]
    assert starts == [0, 1], "without a basis a BOS token is left out"


@every_kind
@normalized
def test_values_are_those_of_the_explicit_decoder(kind: str, normed: bool) -> None:
    """Mixed values by source part, and what they write."""
    with InDouble():
        split = tlg.split_values(exact(kind), PROMPTS, exact_basis(kind, normed))
    model, ran = decoder(kind), run(kind)
    for layer, block in enumerate(model.blocks):
        h = read_by(kind, layer, normed)
        parts = reference.position_parts(h, *basis(kind, layer, normed))
        at = slice(4 * layer, 4 * layer + 4)
        for name, z in reference.split_values(model, ran, layer, parts, normalized=normed).items():
            assert far(split.z[split.parts.index(name), :, :, at], z) < 1e-7
            out = torch.einsum("bihe,hed->bihd", z, block.W_O)
            assert far(split.output(name)[:, :, at], out) < 1e-7
        assert far(split.z.sum(0)[:, :, at], ran["z", layer]) < 1e-7
    assert far(split.share.sum(-1), torch.ones(8)) < 1e-12
    assert split.reconstruction.worst < 0.5


# ---- what does not add up is refused


def hooked(model: Any, name: str, change: Any) -> Any:
    """A context in which a user's hook changes an activation."""
    return model.hooks(fwd_hooks=[(name, lambda value, hook: change(value))])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("what", ["q", "k", "pattern"])
def test_a_planted_fault_is_refused(kind: str, what: str) -> None:
    """A part in ten thousand of one query, key or probability; the twin, a hook that changes
    nothing, is taken and named on the result."""
    model, fitted = tiny("bridge", kind), basis_of(kind)

    def off(value: Tensor) -> Tensor:
        value = value.clone()
        value[1, -1, -1] = value[1, -1, -1] * (1 + 1e-3) + 1e-3
        return value

    name = f"blocks.1.attn.hook_{what}"
    with hooked(model, name, off):
        refused(lambda: tlg.split_scores(model, IDS, fitted), tlg.ReconstructionError)
        tlg.split_scores(model, IDS, fitted, layers=0)
    with hooked(model, name, lambda value: value.clone()):
        assert name in tlg.split_scores(model, IDS, fitted).provenance.hooks
    with hooked(model, "blocks.1.attn.hook_v", lambda v: v * 1.01):
        wrong = lambda: tlg.split_values(model, IDS, fitted)
        refused(wrong, tlg.ReconstructionError)
        tlg.split_scores(model, IDS, fitted)


def test_parts_of_the_callers_own() -> None:
    model = tiny("bridge", "llama")
    with torch.no_grad():
        cache = model.run_with_cache(IDS)[1]
    stream = torch.stack([cache[f"blocks.{l}.hook_resid_pre"] for l in range(2)])
    share = torch.rand(stream.shape[:-1], generator=torch.Generator().manual_seed(0)).unsqueeze(-1)
    parts = {"first": share * stream, "rest": (1 - share) * stream}
    split = tlg.split_scores(model, IDS, parts=parts)
    assert split.parts == ("bias", "first", "rest")
    assert split.shares().groups == ()
    one = tlg.split_scores(model, IDS, parts={n: x[1] for n, x in parts.items()}, layers=1)
    assert torch.equal(one.q, split.q[..., 4:, :])
    off = {"first": parts["first"], "rest": parts["rest"] + 1e-2}
    bad: dict[str, Any] = {
        "does not sum": off,
        "no part": {},
        "reserved": {"bias": stream},
        "a name with a hyphen": {"a-b": stream},
        "another shape": {"all": stream[..., :-1]},
        "too many layers": {"all": torch.cat([stream, stream])},
        "NaN": {"all": stream * torch.nan},
        "a misspelt name": ("pos", "cvecs"),
        "letters": "pos",
    }
    for parts in bad.values():
        assert refused(lambda parts=parts: tlg.split_scores(model, IDS, parts=parts)).what
    tlg.split_scores(model, IDS, parts={"all": stream})  # twin


def test_a_basis_that_does_not_fit_is_refused() -> None:
    model, fitted = tiny("bridge", "gpt2"), basis_of("gpt2")
    other = bridge_of(hf_model("gpt2", seed=1))
    split = tlg.split_scores
    assert refused(lambda: split(other, IDS, fitted)).what == "basis"
    assert refused(lambda: split(model, tokens(2, 20), fitted)).what == "tokens"
    assert refused(lambda: split(model, IDS)).what == "basis"
    single = tlg.decompose(model, tokens(1, 16), **QUIET)
    assert refused(lambda: split(model, IDS, single)).what == "split"
    some = tlg.decompose(model, tokens(4, 16), states=[0], **QUIET)
    assert refused(lambda: split(model, IDS, some)).what == "state"
    refused(lambda: split(model, IDS, fitted, memory_budget=1000), tlg.BudgetError)
    split(model, IDS, some, layers=0)  # twins
    split(model, IDS, fitted)


@pytest.mark.once
def test_parts_too_large_for_their_rounding() -> None:
    """A mean that holds an enormous vector which cvec cancels: first a flag, then a refusal."""
    model, width = tiny("bridge", "gpt2"), 32
    flags = {}
    with torch.no_grad():
        stream = model.run_with_cache(IDS)[1]["blocks.0.hook_resid_pre"]
    direction = torch.randn(width, generator=torch.Generator().manual_seed(0))

    def call(size: float) -> Any:
        huge = (size * direction).expand_as(stream)
        parts = {"a": huge, "b": stream - huge}
        return tlg.split_scores(model, IDS, layers=0, parts=parts)

    for size in (1.0, 1e2):
        flags[size] = call(size).provenance.flags
    refused(lambda: call(1e6))  # they sum to the stream only as far as float32 goes
    assert not any("rounding" in flag for flag in flags[1.0])
    assert any("rounding" in flag for flag in flags[1e2])


# ---- other ways in


@every_kind
def test_a_cache_is_as_good_as_a_pass(kind: str) -> None:
    model, fitted = tiny("bridge", kind), basis_of(kind)
    with torch.no_grad():
        cache = model.run_with_cache(IDS)[1]
        other = model.run_with_cache(tokens(2, 14, seed=8))[1]
        few = model.run_with_cache(IDS, names_filter="blocks.0.hook_resid_pre")[1]
    both: list[dict[str, Any]] = [{"basis": fitted}, {"parts": "writers"}]
    for options in both:
        with_cache = tlg.split_scores(model, IDS, cache=cache, **options)
        assert torch.equal(with_cache.q, tlg.split_scores(model, IDS, **options).q)
        for wrong in (other, few, {}, [1]):
            call = lambda wrong=wrong, o=options: tlg.split_scores(model, IDS, cache=wrong, **o)
            assert refused(call).what == "cache"
    values = tlg.split_values(model, IDS, fitted, cache=cache)
    assert torch.equal(values.z, tlg.split_values(model, IDS, fitted).z)


@pytest.mark.once
def test_every_spelling_of_tokens_and_heads() -> None:
    model = tiny("bridge", "gpt2", text=True)
    text = "w7 w9 w11 w5 w8"
    ids = model.to_tokens(text, prepend_bos=False)
    fitted = tlg.decompose(model, tokens(16, 16, seed=2), **QUIET)
    one = tlg.split_scores(model, ids, fitted, heads="L1H2")
    for given in (ids.tolist(), ids.numpy()):
        assert torch.equal(tlg.split_scores(model, given, fitted, heads=(1, 2)).q, one.q)
    found = tlg.split_scores(model, text, fitted, heads=["1.2"], prepend_bos=False)
    assert torch.equal(found.q, one.q)
    assert one.str_tokens == ("w7", "w9", "w11", "w5", "w8")
    several = tlg.split_scores(model, ids, fitted, heads=["L1H2", "L0H3", "L1H0"])
    assert several.heads == ((1, 2), (0, 3), (1, 0))
    assert torch.equal(several.q[..., 0, :], one.q[..., 0, :])
    for wrong in ("L2H0", "L0H4", [], "head"):
        refused(lambda wrong=wrong: tlg.split_scores(model, ids, fitted, heads=wrong))


@pytest.mark.once
def test_terms_are_taken_under_every_name_that_is_shown() -> None:
    llama, gpt2 = basis_of("llama"), basis_of("gpt2")
    shown = {}
    for kind, fitted in (("llama", llama), ("gpt2", gpt2), ("llama", basis_of("llama", True))):
        split = tlg.split_scores(tiny("bridge", kind), IDS, fitted, heads="L0H1")
        shown[kind, fitted.provenance.normalized] = split.bias_label
        expected = split.term("bias", "bias")
        for name in (("bias", "bias"), "bias-bias", split.bias_label):
            assert torch.equal(split.terms[name], expected)
        table = split.shares()
        assert split.bias_label in repr(table)
        assert "bias-bias" in table.to_dataframe().term.tolist()
        refused(lambda split=split: split.terms["pos-cvecs"])
    assert shown == {
        ("llama", False): "mean-mean",
        ("gpt2", False): "bias-bias",
        ("llama", True): "relative position",
    }
    qwen3 = tlg.split_scores(tiny("bridge", "qwen3"), IDS, basis_of("qwen3", True), heads="L0H1")
    assert qwen3.bias_label == "mean-mean", "the scale of a QK-norm varies by token"


@pytest.mark.once
def test_a_split_is_saved_and_loaded(tmp_path: Any) -> None:
    split = tlg.split_scores(tiny("bridge", "bloom"), IDS, basis_of("bloom"))
    values = tlg.split_values(tiny("bridge", "bloom"), IDS, basis_of("bloom"))
    again = scores.ScoreSplit.load(split.save(tmp_path / "split.safetensors"))
    for name in ("q", "k", "bias", "key_range", "softcap", "sinks"):
        assert torch.equal(getattr(again, name), getattr(split, name))
    assert (again.heads, again.parts, again.checks) == (split.heads, split.parts, split.checks)
    assert torch.equal(again.pattern(), split.pattern())
    assert again.shares().to_dataframe().equals(split.shares().to_dataframe())
    other = type(values).load(values.save(tmp_path / "values.safetensors"))
    assert other.to_dataframe().equals(values.to_dataframe())


# ---- rotary planes


@pytest.mark.parametrize("architecture", ["llama", "gptj", "neox", "llama-yarn", "gemma3", "gpt2"])
def test_planes_add_up_to_their_terms(architecture: str) -> None:
    model = tiny("bridge", architecture)
    split = tlg.split_scores(model, IDS, basis_of(architecture), heads=["L1H1", "L0H2"])
    choices = ["near", "middle", "far", "pass"]
    numbered = range(split.head_planes.theta.shape[1])
    for planes in (choices, list(numbered)):
        parts = [split.on_planes(choice).summed() for choice in planes]
        assert far(torch.stack(parts).sum(0), split.summed()) < 1e-5
        assert sum(float(part.abs().max()) > 0.1 for part in parts) > (architecture != "gpt2")
    together = split.on_planes("near").summed() + split.on_planes("pass").summed()
    assert far(split.on_planes(["near", "pass"]).summed(), together) < 1e-5
    below = split.on_planes((0.0, 16.0))
    assert torch.equal(below.q, split.on_planes("near").q)
    shares: Any = (
        split.planes().to_dataframe().groupby(["layer", "head"], sort=False)[["cs", "gs"]].sum()
    )
    assert float((shares - 1).abs().max(axis=None)) < 1e-5
    for wrong in ("nearest", len(numbered), (5.0, 1.0), -1):
        refused(lambda wrong=wrong: split.on_planes(wrong))


@pytest.mark.parametrize("architecture", ["llama", "gptj", "neox", "llama-yarn", "gpt-oss"])
def test_the_kernel_is_the_constant_term_of_a_normalized_split(architecture: str) -> None:
    """At every cell a function of i - j alone; on a raw basis it is not."""
    model, fitted = tiny("bridge", architecture), basis_of(architecture, True)
    kernel = scores.relative_kernel(model, fitted, heads=["L1H1", "L0H2"])
    split = tlg.split_scores(model, IDS, fitted, heads=kernel.heads)
    length = IDS.shape[1]
    offsets = torch.arange(length).unsqueeze(1) - torch.arange(length)
    expected = kernel.by_plane(offsets.flatten()).sum(1).unflatten(1, (length, length))
    term = split.terms["relative position"]
    spread = float(term.max() - term.min())
    assert spread > 0.1
    assert float((term - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    raw = tlg.split_scores(model, IDS, basis_of(architecture), heads=kernel.heads)
    raw_term = raw.terms["mean-mean"]
    assert float((raw_term[:, :, 5, 3] - raw_term[:, :, 6, 4]).abs().max()) > 1e-3
    table = kernel.to_dataframe()
    for _, row in table[table.wavelength < 1e6].iterrows():
        at = torch.tensor([row.peak, row.peak + 0.37 * row.wavelength])
        values = kernel.by_plane(at)[kernel.heads.index((row.layer, row["head"])), int(row.plane)]
        assert float((values[0] - row.amplitude).abs()) < 1e-6 * abs(row.amplitude) + 1e-9
        assert float(values[1]) < row.amplitude
    refused(lambda: scores.relative_kernel(model, basis_of(architecture)))
    for other, kind in (("gpt2", tlg.UnsupportedModelError), ("qwen3", tlg.UnsupportedModelError)):
        call = lambda other=other: scores.relative_kernel(
            tiny("bridge", other), basis_of(other, True)
        )
        refused(call, kind)


def test_offset_profiles_are_means_over_diagonals() -> None:
    for kind in ("gpt2", "gemma2", "bert"):
        ids = tokens(12, 9, seed=7)
        split = tlg.split_scores(tiny("bridge", kind), ids, basis_of(kind), heads="L0H1")
        for term, drop in ((None, None), (("pos", "cvec"), 0)):
            table = scores.offset_profile(split, term, drop=drop).to_dataframe().set_index("offset")
            matrix = split.summed() if term is None else split.terms[term]
            start = 1 if drop is None else drop
            matrix = matrix[:, 0, start:, start:].double()
            allowed = split.allowed[0, start:, start:]
            for offset in [int(x) for x in table.index]:
                found: Any = table.loc[offset]
                cells = allowed.diagonal(-offset)
                assert int(cells.sum()) == found.cells
                if not found.cells:  # beyond a sliding window
                    assert (kind, found.isna().sum()) == ("gemma2", 3)
                    continue
                means = matrix.diagonal(-offset, 1, 2)[:, cells].mean(1)
                reach = 2.200985160 * float(means.std()) / 12**0.5  # t of 11 degrees of freedom
                expected = [float(means.mean()) + x for x in (0, -reach, reach)]
                assert found[["mean", "low", "high"]].tolist() == pytest.approx(
                    expected, rel=1e-6, abs=1e-9
                )
            assert (table.index[0] < 0) == (kind == "bert")
