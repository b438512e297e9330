"""Laws of edits of a running model (SPEC L, M, P.8): inside an edit a model says what a decoder
written out in float64 says whose scores, inputs or mixed values were changed in its own code; on
every architecture, class and loading edits that must come to the same do; what an edit would get
wrong is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.lib.double import InDouble, exact
from tests.lib.kinds import CORPUS, KINDS, OTHERS, PROMPTS, basis, decoder, far, run
from tests.lib.models import ARCHITECTURES, ENCODERS, HAS_HOOKED, loadable, tiny, tokens
from tests.lib.reference import edits, scores
from tl_geometry import interventions

QUIET: dict[str, Any] = {"progress": False}
IDS, OTHER = tokens(3, 14, seed=7), tokens(3, 14, seed=8)
HEADS = {0: (1,), 1: (0, 2)}
NAMES = ["L0H1", (1, 0), "1.2"]
EVERY_TERM = ("position", "content", "token", "mixed")
ROTARY = ("llama", "gemma2")
every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def exact_basis(kind: str, normed: bool = False) -> Any:
    with InDouble():
        return tlg.decompose(exact(kind), CORPUS, normalize=normed, **QUIET)


def within(model: Any, edit: Any, ids: Tensor) -> Tensor:
    """Logits inside an edit, which are those of a pass with its list of hooks."""
    with torch.no_grad():
        with edit:
            inside = model(ids, return_type="logits").clone()
        listed = model.run_with_hooks(ids, return_type="logits", fwd_hooks=edit)
    assert torch.equal(inside, listed)
    return inside


def exactly(kind: str, make: Callable[..., Any], *args: Any, **options: Any) -> Tensor:
    """Logits of a model in float64 inside an edit."""
    with InDouble():
        model = exact(kind)
        return within(model, make(model, *args, **options), PROMPTS)


def edited(kind: str, hooks: Any, ids: Tensor = PROMPTS) -> Tensor:
    """Logits of the explicit decoder with hooks."""
    return decoder(kind).run(ids, hooks)["logits", 0]


def same(found: Tensor, right: Tensor, kind: str, ids: Tensor = PROMPTS) -> bool:
    """Equal logits, which are not those of the clean run."""
    assert far(right, decoder(kind).run(ids)["logits", 0]) > 1e-3
    return far(found, right) < 1e-9


def order_of(prompts: int, seed: int) -> list[int]:
    """Which prompt each prompt gets: in a random order, the one before it."""
    order = torch.randperm(prompts, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[order.index(i) - 1] for i in range(prompts)]


def refused(
    what: str, call: Callable[..., Any], *args: Any, error: Any = tlg.GeometryError, **options: Any
) -> Any:
    """The error of a call, whose text names ``what``."""
    with pytest.raises(error) as caught:
        call(*args, **options)
    assert what in str(caught.value), caught.value
    return caught.value


# ---- terms


def shrinking(decoder: Any, layer: int, *names: scores.Term) -> edits.Change:
    """``(1 - a) S`` with the covariance share a, from position 1 on."""

    def change(S: Tensor, found: Any) -> Tensor:
        allowed = decoder.blocks[layer].allowed(S.shape[-1])
        X = torch.stack([found[name] for name in names]).sum(0)
        new = S.clone()
        for b, h in np.ndindex(*S.shape[:2]):
            x, s = X[b, h], S[b, h]
            cells: list[tuple[Tensor, Tensor]] = []
            for i in range(1, S.shape[-1]):
                keys = [j for j in range(1, S.shape[-1]) if allowed[i, j]]
                cells.append((x[i, keys] - x[i, keys].mean(), s[i, keys] - s[i, keys].mean()))
            part, whole = torch.cat([a for a, _ in cells]), torch.cat([b for _, b in cells])
            new[b, h] = (1 - part @ whole / (whole @ whole)) * s
        return new

    return change


TERMS: dict[str, tuple[Any, tuple[scores.Term, ...]]] = {
    "a pair": (("pos", "cvec"), (("pos", "cvec"),)),
    "a group": ("content", (("cvec", "cvec"),)),
    "several": (["pos-pos", "token"], (("pos", "pos"), ("bias", "cvec"), ("cvec", "bias"))),
}


@pytest.mark.parametrize("names", TERMS)
@pytest.mark.parametrize("how", ["remove", "keep", "mean", "swap", "shrink"])
@every_kind
def test_a_term_is_edited_as_in_the_models_own_code(kind: str, how: str, names: str) -> None:
    given, pairs = TERMS[names]
    right, hooks = decoder(kind), {}
    for layer, heads in HEADS.items():
        changes = {
            "remove": edits.removing(*pairs),
            "keep": edits.keeping(*pairs),
            "mean": edits.averaging(*pairs),
            "swap": edits.swapping(order_of(3, 5), *pairs),
            "shrink": shrinking(right, layer, *pairs),
        }
        hooks |= edits.edit_terms(right, layer, heads, basis(kind, layer), changes[how])
    term, fit = interventions.term, exact_basis(kind)
    found = exactly(kind, term, fit, given, NAMES, how=how, seed=5)
    assert same(found, edited(kind, hooks), kind)


@every_kind
def test_terms_of_a_normalised_basis_and_alibi(kind: str) -> None:
    pairs = (("cvec", "cvec"), ("alibi", "alibi")) if kind == "bloom" else (("cvec", "cvec"),)
    change = edits.removing(*pairs)
    hooks = edits.edit_terms(decoder(kind), 1, [3], basis(kind, 1, True), change, normalized=True)
    names = ["-".join(pair) for pair in pairs]
    found = exactly(kind, interventions.term, exact_basis(kind, True), names, "L1H3")
    assert same(found, edited(kind, hooks), kind)


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in ENCODERS])
def test_all_terms_are_the_scores(architecture: str) -> None:
    """In every class and loading all terms kept are the clean run, and one of them removed is all
    others kept with it."""
    for way in loadable(architecture):
        model = tiny(way[0], architecture, way[1])
        fit = tlg.decompose(model, tokens(16, 16, seed=2), **QUIET)
        clean = model(IDS, return_type="logits").detach()
        alibi = (
            ["alibi-alibi"] if architecture in ("bloom", "bloom6", "mpt", "falcon-alibi") else []
        )
        make = partial(interventions.term, model, fit, heads="L1H2")
        every = within(model, make([*EVERY_TERM, *alibi], how="keep"), IDS)
        assert far(every, clean) < 1e-4
        without = within(model, make("content"), IDS)
        others = within(model, make([*EVERY_TERM[::2], "mixed", *alibi], how="keep"), IDS)
        assert far(without, others) < 1e-4
        assert far(without, clean) > 1e-4


def test_terms_by_other_names() -> None:
    """Pairs, names, groups, and the labels under which (bias, bias) is shown."""
    model, fit = exact("gpt2"), exact_basis("gpt2")
    make = partial(exactly, "gpt2", interventions.term, fit, heads="L1H0")
    assert torch.equal(make(("pos", "cvec")), make(["pos-cvec"]))
    assert torch.equal(make("mean-mean"), make([("bias", "bias")]))
    assert torch.equal(make(("token", "mixed")), make(["mixed", "token", "token"]))
    assert not torch.equal(make("token"), make("mixed"))
    for wrong in ("pos-nothing", ("pos", "pos", "pos"), "cs", 3, ["content", 5]):
        refused("term", interventions.term, model, fit, wrong, "L1H0")


# ---- planes


@pytest.mark.parametrize("kind", ROTARY)
def test_planes_are_edited_as_in_the_models_own_code(kind: str) -> None:
    right = decoder(kind)
    for keep, how in ((False, "remove"), (True, "keep")):
        hooks: Any = {}
        for layer, heads in HEADS.items():
            hooks |= edits.edit_planes(right, layer, heads, [0, 2], keep=keep)
        found = exactly(kind, interventions.planes, [0, 2], NAMES, how=how)
        assert same(found, edited(kind, hooks), kind)
    half = right.blocks[0].W_Q.shape[-1] // 2
    wave = [2 * np.pi * right.rotary_base ** (m / half) for m in range(half)]  # type: ignore[operator]
    near = [m for m in range(half) if wave[m] <= 16]
    assert 0 < len(near) < half
    hooks = edits.edit_planes(right, 1, [2], near)
    for name in ("near", (0.0, 16.0), near):
        found = exactly(kind, interventions.planes, name, "L1H2")
        assert same(found, edited(kind, hooks), kind)


@pytest.mark.parametrize("kind", ROTARY)
def test_planes_of_another_prompt_and_random_ones(kind: str) -> None:
    right, order = decoder(kind), order_of(3, 2)

    def swap(S: Tensor, run: Any) -> Tensor:
        X = scores.plane_terms(right, 1, run["q", 1], run["k", 1])[1]
        new = S.clone()
        new[:, 2] = (S - X + X[order])[:, 2]
        return new

    found = exactly(kind, interventions.planes, 1, "L1H2", how="swap", seed=2)
    assert same(found, edited(kind, {("scores", 1): swap}), kind)
    one_each = [edited(kind, edits.edit_planes(right, 1, [2], [m])) for m in range(4)]
    drawn = [exactly(kind, interventions.planes, 1, "L1H2", draw=seed) for seed in range(6)]
    picked = {min(range(4), key=lambda m: far(x, one_each[m])) for x in drawn}
    assert all(min(far(x, y) for y in one_each) < 1e-9 for x in drawn)  # one plane, as was asked
    assert 1 not in picked, "never the chosen one"
    assert len(picked) > 1


# ---- edges


@pytest.mark.parametrize("side", ["query", "key", "value"])
@every_kind
def test_an_edge_is_edited_as_in_the_models_own_code(kind: str, side: str) -> None:
    right, clean, other = decoder(kind), run(kind), decoder(kind).run(OTHERS)
    here, there = (scores.writers(right, r, 1) for r in (clean, other))
    for group in (here, there):
        group |= scores.by_block(group)
    state = clean["state", 1]
    cases: list[tuple[Any, str, Tensor]] = [
        ("L0H2", "remove", -here["L0H2"]),
        (["embed", "mlp0"], "remove", -here["embed"] - here["mlp0"]),
        ("attn0", "remove", -here["attn0"]),
        ("constants", "keep", here["constants"] - state),
        ("L0H1", "swap", there["L0H1"] - here["L0H1"]),
    ]
    for writer, how, change in cases:
        options = {"side": side, "how": how, "drop": 2, "counterfactual": OTHERS}
        change = torch.cat([torch.zeros_like(change[:, :2]), change[:, 2:]], 1)
        hooks = edits.edit_edge(right, clean, 1, [1, 2], side[0], change)
        found = exactly(kind, interventions.edge, PROMPTS, writer, ["L1H1", "L1H2"], **options)
        assert same(found, edited(kind, hooks), kind), (writer, how)


@every_kind
def test_edges_of_several_sides_and_of_another_prompt(kind: str) -> None:
    right, clean, order = decoder(kind), run(kind), order_of(3, 4)
    w = scores.writers(right, clean, 1)["mlp0"]
    hooks = edits.edit_edge(right, clean, 1, [0], "q", -w)
    hooks = {**hooks, **edits.edit_edge(right, clean, 1, [0], "k", -w)}
    both = {"side": ("query", "key"), "drop": 0}
    found = exactly(kind, interventions.edge, PROMPTS, "mlp0", "L1H0", **both)
    assert same(found, edited(kind, hooks), kind)
    hooks = edits.edit_edge(right, clean, 1, [0], "k", w[order] - w)
    swap = {"how": "swap", "seed": 4, "drop": 0}
    found = exactly(kind, interventions.edge, PROMPTS, "mlp0", "L1H0", **swap)
    assert same(found, edited(kind, hooks), kind)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom"])
def test_a_shrunk_edge_takes_its_share_of_the_scores(kind: str) -> None:
    right, clean = decoder(kind), run(kind)
    w = scores.writers(right, clean, 1)["mlp0"]

    def change(S: Tensor, run: Any) -> Tensor:
        gone = decoder(kind).run(PROMPTS, edits.edit_edge(right, clean, 1, [0], "k", -w))
        X = S - gone["scores", 1]
        new = shrinking(right, 1, ("x", "x"))(S, {("x", "x"): X})
        return torch.cat([new[:, :1], S[:, 1:]], 1)

    shrink = {"how": "shrink", "drop": 1}
    w[:, :1] = 0
    found = exactly(kind, interventions.edge, PROMPTS, "mlp0", "L1H0", **shrink)
    assert same(found, edited(kind, {("scores", 1): change}), kind)


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in ENCODERS])
def test_an_edge_from_all_writers_is_the_clean_input(architecture: str) -> None:
    """In every class and loading: all writers kept change nothing, and one removed is all others
    kept."""
    for way in loadable(architecture):
        model = tiny(way[0], architecture, way[1])
        known = str(refused("writer", interventions.edge, model, IDS, "nobody", "L1H1").expected)
        names = ("embed", "pos_embed", "constants", "attn0", "mlp0")
        writers = [name for name in names if f"'{name}'" in known]
        clean = model(IDS, return_type="logits").detach()
        for side in ("query", "key", "value"):
            make = partial(interventions.edge, model, IDS, heads="L1H1", side=side)
            assert far(within(model, make(writers, how="keep"), IDS), clean) < 1e-4
            without = within(model, make("attn0"), IDS)
            others = [w for w in writers if w != "attn0"]
            assert far(within(model, make(others, how="keep"), IDS), without) < 1e-4


def test_a_pass_is_known_by_its_prompts() -> None:
    """Any part of the prompts in any order; no others."""
    model = tiny("bridge", "gpt2")
    edit = interventions.edge(model, IDS[[0, 1, 2, 0]], "L0H1", "L1H0")
    with edit, torch.no_grad():
        whole = model(IDS)
        assert far(model(IDS[[2, 0]]), whole[[2, 0]]) < 1e-5
    assert far(whole, model(IDS).detach()) > 1e-3
    for ids in (OTHER, IDS[:, :9], torch.cat([IDS[:1], OTHER[:1]])):
        with edit:
            refused("tokens inside an edit", model, ids)
            model(IDS)


# ---- heads, MLPs and the stream


@every_kind
def test_replaced_activations_are_those_of_the_models_own_code(kind: str) -> None:
    right, clean, other = decoder(kind), run(kind), decoder(kind).run(OTHERS)
    pairs = {"reference": PROMPTS, "counterfactual": OTHERS}
    wide, order = CORPUS[:6, :12], order_of(3, 1)
    corpus = right.run(wide)
    z = {"zero": lambda r, l, h: torch.zeros_like(clean["z", l][:, :, h])}
    z["mean"] = lambda r, l, h: corpus["z", l][:, :10, h].mean(0)
    z["counterfactual"] = lambda r, l, h: other["z", l][:, :, h]
    for by, new in z.items():
        values = {(l, h): new(None, l, h) for l, heads in HEADS.items() for h in heads}
        given = {"mean": {"reference": wide}, "counterfactual": pairs}.get(by, {})
        put_in = partial(exactly, kind, interventions.heads, by=by, **given)
        assert same(put_in(NAMES), edited(kind, edits.knockout(right, values)), kind), by
        states = [("resid1", ("state", 1)), ("resid2", ("state", 2))]
        for name, key in [("mlp0", ("mlp", 0)), *(states if by != "zero" else [])]:
            put = {"zero": torch.zeros_like(clean[key]), "counterfactual": other[key]}
            put["mean"] = corpus[key][:, :10].mean(0).expand_as(clean[key])
            right_logits = edited(kind, {key: lambda x, r, value=put[by]: value})
            assert same(put_in([name]), right_logits, kind), (by, name)
    swap: Any = {("z", 1): lambda z, r: torch.cat([z[:, :, :3], z[order][:, :, 3:]], 2)}
    found = exactly(kind, interventions.heads, "L1H3", by="prompt", seed=1)
    assert same(found, edited(kind, swap), kind)
    whole = {(0, h): torch.zeros_like(clean["z", 0][:, :, h]) for h in range(4)}
    found = exactly(kind, interventions.heads, ["attn0", "L1H3"], by="zero")
    whole[1, 3] = torch.zeros_like(whole[0, 0])
    assert same(found, edited(kind, edits.knockout(right, whole)), kind)


def test_positions_by_number_and_by_name() -> None:
    kind = "llama"
    right, clean, other = decoder(kind), run(kind), decoder(kind).run(OTHERS)
    rows = tlg.TokenWindows(tokens=PROMPTS, has_bos=False, positions={"subject": 2})
    pairs = {"reference": rows, "counterfactual": OTHERS}

    def at(positions: list[int]) -> Any:
        z = clean["z", 0].clone()
        z[:, positions, 1] = other["z", 0][:, positions, 1]
        return edits.knockout(right, {(0, 1): z[:, :, 1]})

    every: list[Any] = [([5], [5]), ([-1, 0], [9, 0]), ("subject", [2]), (np.int64(5), [5])]
    every += [([torch.tensor(5), "subject"], [5, 2])]
    for positions, numbers in every:
        options = {"by": "counterfactual", **pairs, "positions": positions}
        found = exactly(kind, interventions.heads, "L0H1", **options)
        assert far(found, edited(kind, at(numbers))) < 1e-9, positions
        assert far(found, clean["logits", 0]) > 1e-5
    for wrong in (1.5, True, [None], "nobody"):
        options = {"by": "zero", "positions": wrong, **pairs}
        refused("position", exactly, kind, interventions.heads, "L0H1", **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_activation_patching_of_a_whole_state_is_the_other_run(architecture: str) -> None:
    """In every class and loading: state 0 of the counterfactual gives the counterfactual's logits,
    and so do all heads and MLPs with it; zero heads and their mean say something else."""
    for way in loadable(architecture):
        model = tiny(way[0], architecture, way[1])
        with torch.no_grad():
            clean, other = (model(x, return_type="logits").clone() for x in (IDS, OTHER))
        assert far(other, clean) > 1e-2
        patch = {"by": "counterfactual", "reference": IDS, "counterfactual": OTHER}
        for names in (["resid0"], ["resid1"], ["resid2"], ["resid0", "attn0", "attn1", "mlp1"]):
            found = within(model, interventions.heads(model, names, **patch), IDS)
            assert far(found, other) < 1e-4, names
        one = within(model, interventions.heads(model, "L0H1", **patch), IDS)
        assert far(one, clean) > 1e-5
        assert far(one, other) > 1e-3
        mean = within(model, interventions.heads(model, "L1H2", reference=OTHER), IDS)
        assert far(mean, within(model, interventions.heads(model, "L1H2", by="zero"), IDS)) > 1e-5


def test_several_edits_made_together_are_those_made_alone() -> None:
    model = tiny("bridge", "llama")
    together = interventions.each(model, ["L0H1", "mlp1", "resid1"], reference=OTHER)
    assert list(together) == ["L0H1", "mlp1", "resid1"]
    for name, edit in together.items():
        alone = interventions.heads(model, name, reference=OTHER)
        assert torch.equal(within(model, edit, IDS), within(model, alone, IDS))
    assert list(interventions.each(model, by="zero"))[-1] == "L1H3"


# ---- paths


def receivers_of(kind: str) -> list[list[str]]:
    names = edits.Layout.of(decoder(kind)).readers
    key = next(n for n in names if n.startswith("L1") and n.endswith("<k>"))
    value = next(n for n in names if n.startswith("L1") and n.endswith("<v>"))
    return [["L1H2<q>"], [key], [value], ["L1H2<q>", key, value], ["mlp0"], ["mlp1", "output"]]


@every_kind
def test_a_path_is_patched_as_in_the_models_own_code(kind: str) -> None:
    right, other = decoder(kind), decoder(kind).run(OTHERS)
    pairs = {"reference": PROMPTS, "counterfactual": OTHERS}
    values = {
        "zero": lambda h: torch.zeros_like(other["z", 0][:, :, h]),
        "counterfactual": lambda h: other["z", 0][:, :, h],
        "mean": lambda h: run(kind)["z", 0][:, :, h].mean(0),
    }
    for n, receivers in enumerate([*receivers_of(kind), ["mlp0", *receivers_of(kind)[0]]]):
        by = list(values)[n % 3]
        new = {(0, h): values[by](h) for h in (1, 3)}
        for position in (None, 6):
            if position is not None and receivers[0] not in ("mlp0", receivers_of(kind)[2][0]):
                continue  # at other readers of the last block little is left of one position
            patched = edits.path_patch(right, PROMPTS, new, receivers, position=position)
            options = {"by": by, **pairs, "positions": position}
            found = exactly(kind, interventions.path, ["L0H1", "L0H3"], receivers, **options)
            assert far(found, patched["logits", 0]) < 1e-9, (receivers, by)
            assert far(patched["logits", 0], run(kind)["logits", 0]) > 1e-5, receivers


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in ENCODERS])
def test_a_path_through_all_readers_is_the_knockout(architecture: str) -> None:
    """In every class and loading; a part of the readers is less."""
    for way in loadable(architecture):
        model = tiny(way[0], architecture, way[1])
        readers = [f"L1H{h}<{which}>" for h in range(model.cfg.n_heads) for which in "qkv"]
        readers += ["mlp0"] if _reads(model, "mlp0") else []
        readers += ["mlp1", "output"]
        options = {"by": "zero", "reference": IDS}
        knocked = within(model, interventions.heads(model, ["L0H1", "L0H2"], **options), IDS)
        path = partial(interventions.path, model, ["L0H1", "L0H2"], **options)
        assert far(within(model, path(receivers=readers), IDS), knocked) < 1e-4
        assert far(within(model, path(receivers=readers[:-1]), IDS), knocked) > 1e-4


def _reads(model: Any, receiver: str) -> bool:
    """Whether a receiver reads the heads of block 0 (an MLP beside them does not)."""
    try:
        interventions.path(model, "L0H1", receiver, by="zero")
    except tlg.GeometryError:
        return False
    return True


def test_one_head_of_a_shared_key_stands_for_all() -> None:
    model = tiny("bridge", "llama")
    two = [
        within(model, interventions.path(model, "L0H1", name, by="zero"), IDS)
        for name in ("L1H3<k>", "L1H2-3<k>")
    ]
    assert torch.equal(*two)


# ---- surrogates


def fitted(W: np.ndarray, V: np.ndarray, parts: str) -> np.ndarray:
    """The least squares fit to a matrix of ``V L V^T`` (r), a diagonal (d), or both."""
    size, rank = V.shape
    columns = [np.outer(V[:, a], V[:, b]).ravel() for a in range(rank) for b in range(rank)]
    columns = columns if "r" in parts else []
    if "d" in parts:
        columns += [np.diag(np.eye(size)[i]).ravel() for i in range(size)]
    A = np.stack(columns, 1)
    return (A @ np.linalg.lstsq(A, W.ravel(), rcond=None)[0]).reshape(W.shape)


@pytest.mark.parametrize("kind", ["gpt2", "bloom"])
def test_a_surrogate_is_the_best_matrix_of_its_form(kind: str) -> None:
    right, (layer, head) = decoder(kind), (1, 2)
    block, (mean, pos) = right.blocks[layer], basis(kind, layer)
    centre = np.eye(len(mean)) - 1 / len(mean)
    W_Q, W_K = ((block.norm.gain[:, None] * W[head]).numpy() for W in (block.W_Q, block.W_K))
    W = block.score_scale * (centre @ W_Q) @ (centre @ W_K).T
    rows = pos[1:].numpy() @ centre  # the window of the basis
    V = np.linalg.svd(rows)[2][:4].T
    projected = V @ V.T @ W @ V @ V.T
    diagonal, none = np.diag(np.diag(W)), np.zeros_like(W)
    wanted = {"structured": fitted(W, V, "rd"), "low_rank": projected, "diagonal": diagonal}
    assert np.allclose(projected, fitted(W, V, "r"))
    for part, other in (wanted | {"none": none}).items():

        def replaced(S: Tensor, run: Any, other: np.ndarray = other) -> Tensor:
            x = scores.normed(right, run, layer)
            new = S.clone()
            new[:, head] += x @ torch.from_numpy(other - W) @ x.mT
            return new

        options = {"part": part, "rank": 4}
        found = exactly(kind, interventions.surrogate, exact_basis(kind), (layer, head), **options)
        assert same(found, edited(kind, {("scores", layer): replaced}), kind), part


def test_surrogates_with_random_directions_and_with_rotation() -> None:
    model, fit = exact("gpt2"), exact_basis("gpt2")
    make = partial(exactly, "gpt2", interventions.surrogate, fit, "L1H2")
    drawn = [make(rank=4, random=True, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert far(drawn[0], drawn[2]) > 1e-3
    assert far(drawn[0], make(rank=4)) > 1e-3
    for rank in (0, 33):
        refused("rank", interventions.surrogate, model, fit, "L1H2", rank=rank)
    rotary = exact_basis("llama")
    call = partial(exactly, "llama", interventions.surrogate, rotary, "L1H2")
    for part in ("structured", "diagonal"):
        refused("low_rank", call, error=tlg.UnsupportedModelError, part=part)
    whole = decoder("llama")
    V = np.linalg.svd(basis("llama", 1)[1][1:].numpy())[2][:4].T

    def low_rank(S: Tensor, run: Any) -> Tensor:
        y = scores.normed(whole, run, 1) @ torch.from_numpy(V @ V.T)
        x = scores.normed(whole, run, 1)
        # bilinear in the stream: the products of queries and keys without their biases
        sides = [
            [
                whole.project(1, w, t.unsqueeze(2).expand(-1, -1, n, -1), torch.ones(1), bias=False)
                for w, n in (("q", 4), ("k", 2))
            ]
            for t in (x, y)
        ]
        of_x, of_y = (torch.einsum("bihe,bjhe->bhij", q, k) for q, k in sides)
        new = S.clone()
        new[:, 2] += whole.blocks[1].score_scale * (of_y - of_x)[:, 2]
        return new

    wanted = edited("llama", {("scores", 1): low_rank})
    assert same(call(part="low_rank", rank=4), wanted, "llama")


# ---- the running model


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_edits_act_on_the_stream_as_other_hooks_leave_it(kind: str) -> None:
    """A patched stream gives the patched terms, whether the patch or the edit comes first; a patch
    at the very input of the edited block, put on after the edit, is refused."""
    right, other = decoder(kind), decoder(kind).run(OTHERS)
    name, late = "blocks.0.hook_resid_post", "blocks.1.hook_resid_pre"

    def patched(h: Tensor, more: Any) -> Tensor:
        h = h.clone()
        h[:, 3:6] = other["state", 1][:, 3:6].to(h)
        return h

    hooks = edits.edit_terms(right, 1, [0, 2], basis(kind, 1), edits.removing(("cvec", "cvec")))
    wanted = edited(kind, {**hooks, ("state", 1): patched})
    with InDouble(), torch.no_grad():
        model = exact(kind)
        edit = interventions.term(model, exact_basis(kind), "content", ["L1H0", "L1H2"])
        user = [(name, lambda value, hook: patched(value, hook))]
        with edit:
            found = [model.run_with_hooks(PROMPTS, fwd_hooks=user)]
        with model.hooks(fwd_hooks=user), edit:
            found.append(model(PROMPTS))
        found.append(model.run_with_hooks(PROMPTS, fwd_hooks=[*edit, *user]))
        found.append(model.run_with_hooks(PROMPTS, fwd_hooks=[(late, user[0][1]), *edit]))
        hooks = [*edit, (late, user[0][1])]
        refused("inside an edit", model.run_with_hooks, PROMPTS, fwd_hooks=hooks)
    for logits in found:
        assert same(logits, wanted, kind)


@pytest.mark.parametrize("which", ["term", "edge", "heads", "path", "planes", "surrogate"])
def test_gradients_pass_through_edits(which: str) -> None:
    """Autograd agrees with a central difference of the logits inside the edit."""
    kind = "gpt2" if which == "surrogate" else "llama"
    direction = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0)).double()
    with InDouble():
        model, fit = exact(kind), exact_basis(kind)
        edit = {
            "term": lambda: interventions.term(model, fit, "content", NAMES),
            "planes": lambda: interventions.planes(model, [0], NAMES),
            "edge": lambda: interventions.edge(model, PROMPTS, "L0H1", "L1H1", side="query"),
            "heads": lambda: interventions.heads(model, ["L0H1"], by="prompt"),
            "path": lambda: interventions.path(model, "L0H1", ["L1H1<q>", "mlp1"], by="prompt"),
            "surrogate": lambda: interventions.surrogate(model, fit, "L1H1", rank=4),
        }[which]()

        def logit(step: Tensor) -> Tensor:
            point = "blocks.0.hook_mlp_out"  # behind the states by which prompts are known
            move = (point, lambda value, hook: value + step * direction)
            return model.run_with_hooks(PROMPTS, fwd_hooks=[move, *edit])[1, -1, 7]

        step = torch.zeros((), dtype=torch.float64, requires_grad=True)
        found = torch.autograd.grad(logit(step), step)[0]
        with torch.no_grad():
            ends = [logit(torch.tensor(x, dtype=torch.float64)) for x in (1e-5, -1e-5)]
        clean = model.run_with_hooks(
            PROMPTS,
            fwd_hooks=[("blocks.0.hook_mlp_out", lambda value, hook: value + step * direction)],
        )
        plain = torch.autograd.grad(clean[1, -1, 7], step)[0]
    wanted = (ends[0] - ends[1]) / 2e-5
    assert abs(float(found - wanted)) < 1e-6 * float(wanted.abs())
    assert abs(float(found - plain)) > 1e-4 * float(plain.abs())


def test_the_model_is_as_before_and_says_what_it_saw() -> None:
    model, fit = tiny("bridge", "gpt2"), tlg.decompose(tiny("bridge", "gpt2"), CORPUS, **QUIET)
    clean, edit = model(IDS).detach(), interventions.term(model, fit, "content", NAMES)
    hooks = lambda: sum(len(point.fwd_hooks) for point in model.hook_dict.values())
    before = hooks()
    with edit:
        model.reset_hooks()  # takes away those of others
        assert far(model(IDS).detach(), clean) > 1e-3
        model(IDS[:1])
    assert hooks() == before
    assert edit.passes == 2
    assert torch.equal(model(IDS).detach(), clean)
    with pytest.raises(KeyError), edit:
        raise KeyError
    assert hooks() == before
    with torch.no_grad():
        model.run_with_hooks(IDS, fwd_hooks=edit)
    assert edit.passes == 3


def test_an_edit_that_no_pass_reached_raises() -> None:
    model = tiny("bridge", "gpt2")
    edits_ = [
        interventions.heads(model, "L1H0", by="zero"),
        interventions.heads(model, "mlp1", by="zero"),
        interventions.edge(model, IDS, "L0H1", "L1H0"),
        interventions.path(model, "L0H1", "output", by="zero"),
    ]
    for edit in [*edits_, edits_[0] + edits_[1]]:
        with pytest.raises(tlg.GeometryError, match="forward pass"), edit:
            pass
        with pytest.raises(tlg.GeometryError, match="forward pass"), edit:
            model(IDS, stop_at_layer=1)
        with edit:
            model(IDS)


def test_sums_of_edits_are_edits() -> None:
    kind = "llama"
    right = decoder(kind)
    hooks = edits.edit_terms(right, 1, [0], basis(kind, 1), edits.removing(("cvec", "cvec")))
    hooks = {
        **hooks,
        **edits.knockout(right, {(0, 1): torch.zeros_like(run(kind)["z", 0][:, :, 1])}),
    }
    make = lambda m: (
        interventions.term(m, exact_basis(kind), "content", "L1H0")
        + interventions.heads(m, "L0H1", by="zero")
    )
    assert same(exactly(kind, make), edited(kind, hooks), kind)
    with InDouble():
        both = make(exact(kind))
        assert set(both.heads) == {(1, 0), (0, 1)}
        with torch.no_grad(), both:
            exact(kind)(PROMPTS)
        assert both.passes == 1
        # the same head twice is no sum: the second edit does not find the head's own scores
        twice = interventions.term(exact(kind), exact_basis(kind), "content", "L1H0")
        twice = twice + interventions.term(exact(kind), exact_basis(kind), "position", "L1H0")
        refused("inside an edit", exact(kind).run_with_hooks, PROMPTS, fwd_hooks=twice)


# ---- what would be wrong is refused


@cache
def basis_of(model_class: str) -> Any:
    return tlg.decompose(tiny(model_class, "gpt2", text=True), CORPUS, **QUIET)


def by_position(model: Any, model_class: str = "bridge") -> dict[str, Any]:
    """Edits in which a column of a tensor is taken for a position."""
    return {
        "term": interventions.term(model, basis_of(model_class), "pos-pos", "L1H0"),
        "mean": interventions.heads(model, "L1H0", reference=IDS),
        "mean of an MLP": interventions.heads(model, "mlp1", reference=IDS),
        "zero at a position": interventions.heads(model, "L1H0", by="zero", positions=2),
    }


def test_a_pass_that_goes_on_after_cached_keys_is_refused() -> None:
    model = tiny("bridge", "gpt2", text=True)
    for edit in by_position(model).values():
        with torch.no_grad(), edit:
            found = model.original_model(IDS[:, :6], use_cache=True)
            more = {"past_key_values": found.past_key_values}
            refused("inside an edit", model.original_model, IDS[:, 6:7], **more)


def test_padding_is_refused() -> None:
    """A batch that is padded on the left, also where all rows are padded alike."""
    model = tiny("bridge", "gpt2", text=True)
    mask = torch.ones_like(IDS)
    mask[:, :4] = 0
    for edit in by_position(model).values():
        with torch.no_grad(), edit:
            for rows in (slice(None), slice(1)):
                refused("inside an edit", model, IDS[rows], attention_mask=mask[rows])
            model(IDS, attention_mask=torch.ones_like(IDS))


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
def test_padding_and_caches_of_hooked_transformer_are_refused() -> None:
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache as Cache

    model = tiny("hooked", "gpt2", text=True)
    mask = torch.ones_like(IDS)
    mask[:, :4] = 0
    for edit in by_position(model, "hooked").values():
        cache = Cache.init_cache(model.cfg, "cpu", len(IDS))
        with torch.no_grad(), edit:
            for rows in (slice(None), slice(1)):
                padded = {"attention_mask": mask[rows], "padding_side": "left"}
                refused("inside an edit", model, IDS[rows], **padded)
            model(IDS[:, :6], past_kv_cache=cache)
            refused("inside an edit", model, IDS[:, 6:7], past_kv_cache=cache)


@pytest.mark.parametrize("point", ["hook_q", "hook_k", "hook_z"])
def test_other_hooks_on_an_edited_head_are_refused(point: str) -> None:
    """And those on a head that is not edited are not."""
    model = tiny("bridge", "gpt2", text=True)
    edit = interventions.term(model, basis_of("bridge"), "content", "L1H0")
    for head, wrong in ((0, True), (3, False)):

        def patch(value: Tensor, hook: Any, head: int = head) -> Tensor:
            value = value.clone()
            if value.dim() == 3:
                value[..., 8 * head : 8 * head + 8] += 1
            else:
                value[:, :, head] += 1
            return value

        hooks = [(f"blocks.1.attn.{point}", patch), *edit]
        if wrong:
            error = tlg.ReconstructionError
            refused("inside an edit", model.run_with_hooks, IDS, error=error, fwd_hooks=hooks)
        else:
            model.run_with_hooks(IDS, fwd_hooks=hooks)


def test_prompts_must_fit_the_basis() -> None:
    model = tiny("bridge", "gpt2", text=True)
    with_bos = torch.cat([torch.zeros(24, 1, dtype=torch.int64), CORPUS[:, 1:]], 1)
    rows = IDS.clone()
    rows[:, 0] = 0
    fit = tlg.decompose(model, with_bos, **QUIET)
    edit = interventions.term(model, fit, "content", "L1H0")
    other = interventions.term(model, basis_of("bridge"), "content", "L1H0")
    within(model, edit, rows)
    within(model, other, IDS)
    refused("has_bos", within, model, edit, IDS)
    refused("has_bos", within, model, other, torch.cat([rows[:1], IDS[1:]]))
    refused("positions", within, model, other, tokens(2, 21))
    refused("basis", interventions.term, tiny("bridge", "llama"), fit, "content", "L1H0")
    one = tlg.decompose(model, CORPUS[:1], **QUIET)
    refused("contexts", interventions.term, model, one, "content", "L1H0")


Refusal = tuple[Callable[[Any], Any], str]
REFUSALS: dict[str, Refusal] = {
    "no head": (lambda m: interventions.planes(m, "pass", "L2H0"), "head"),
    "a negative head": (lambda m: interventions.heads(m, (0, -1), by="zero"), "head"),
    "a truth value": (lambda m: interventions.heads(m, [(0, True)], by="zero"), "head"),
    "no MLP": (lambda m: interventions.heads(m, "mlp2", by="zero"), "mlp2"),
    "no state": (lambda m: interventions.heads(m, "resid3", by="zero"), "resid3"),
    "an unknown way": (lambda m: interventions.planes(m, "pass", "L0H0", how="mean"), "how"),
    "an unknown value": (lambda m: interventions.heads(m, "L0H0", by="one"), "by"),
    "planes that are not there": (
        lambda m: within(m, interventions.planes(m, "near", "L0H0"), IDS),
        "planes",
    ),
    "a mean over nothing": (lambda m: within(m, interventions.heads(m, "L0H0"), IDS), "reference"),
    "counterfactuals of nothing": (
        lambda m: within(m, interventions.heads(m, "L0H0", by="counterfactual"), IDS),
        "reference",
    ),
    "prompts without counterfactuals": (
        lambda m: interventions.heads(m, "L0H0", by="counterfactual", reference=IDS),
        "counterfactuals",
    ),
    "a name without prompts": (
        lambda m: within(m, interventions.heads(m, "L0H0", by="zero", positions="end"), IDS),
        "reference",
    ),
    "a short reference": (
        lambda m: within(m, interventions.heads(m, "L0H0", reference=IDS[:, :9]), IDS),
        "positions",
    ),
    "a position beyond": (
        lambda m: within(m, interventions.heads(m, "L0H0", by="zero", positions=14), IDS),
        "position",
    ),
    "another prompt than one": (
        lambda m: within(m, interventions.heads(m, "L0H0", by="prompt"), IDS[:1]),
        "prompts",
    ),
    "a mean term of one": (
        lambda m: within(
            m, interventions.term(m, basis_of("bridge"), "content", how="mean"), IDS[:1]
        ),
        "prompts",
    ),
    "a writer behind": (lambda m: interventions.edge(m, IDS, "L1H0", "L1H1"), "writer"),
    "a writer behind one of two": (
        lambda m: interventions.edge(m, IDS, "L0H0", ["L1H1", "L0H2"]),
        "writer",
    ),
    "no side": (lambda m: interventions.edge(m, IDS, "L0H0", "L1H1", side="keys"), "side"),
    "a shrunk value": (
        lambda m: interventions.edge(m, IDS, "L0H0", "L1H1", side="value", how="shrink"),
        "side",
    ),
    "all positions dropped": (
        lambda m: interventions.edge(m, IDS, "L0H0", "L1H1", drop=14),
        "drop",
    ),
    "a receiver before": (lambda m: interventions.path(m, "L1H0", "L1H1<q>", by="zero"), "senders"),
    "a receiver of no name": (
        lambda m: interventions.path(m, "L0H0", "L1H1", by="zero"),
        "receivers",
    ),
    "no receiver": (lambda m: interventions.path(m, "L0H0", [], by="zero"), "receivers"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_makes_no_edit_is_refused(name: str) -> None:
    call, what = REFUSALS[name]
    refused(what, call, tiny("bridge", "gpt2", text=True))


def test_what_looks_like_it_is_taken() -> None:
    """The twin: numbers of any kind, sets of heads, a mean of two, one pair."""
    model = tiny("bridge", "gpt2", text=True)
    zero = lambda heads: within(model, interventions.heads(model, heads, by="zero"), IDS)
    one = zero("L0H2")
    same_head: list[Any] = [(0, 2), (np.int64(0), torch.tensor(2)), "0.2", ["L0H2", "l0h2"]]
    assert all(torch.equal(zero(heads), one) for heads in same_head)
    assert torch.equal(zero([(0, 2), (1, 1)]), zero(((0, 2), (1, 1))))
    within(model, interventions.term(model, basis_of("bridge"), "content", how="mean"), IDS[:2])
    within(model, interventions.heads(model, "L0H0", by="prompt"), IDS[:2])
    within(model, interventions.heads(model, "L0H0", by="zero", positions=13), IDS)
    pair: dict[str, Any] = {"reference": IDS[0], "counterfactual": OTHER[0]}
    within(model, interventions.heads(model, "mlp1", by="counterfactual", **pair), IDS[:1])


def test_encoders_have_heads_and_no_writers() -> None:
    model = tiny("bridge", "bert")
    assert (
        far(within(model, interventions.heads(model, "L1H0", by="zero"), IDS), IDS.new_ones(1)) > 0
    )
    error = tlg.UnsupportedModelError
    refused("encoder", interventions.edge, model, IDS, "L0H0", "L1H0", error=error)
    refused("encoder", interventions.path, model, "L0H0", "output", error=error, by="zero")


def test_an_edit_of_a_model_that_changed_is_refused() -> None:
    from tests.lib.models import bridge_of, hf_model

    model = bridge_of(hf_model("gpt2"))
    edit = interventions.heads(model, "L0H0", by="zero")
    with edit:
        model(IDS)
    with torch.no_grad():
        model.blocks[0].attn.W_O.data.mul_(1.5)
    with pytest.raises(tlg.GeometryError, match="weights"), edit:
        pass
