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
from tests.lib.data import refused
from tests.lib.double import InDouble, exact
from tests.lib.kinds import CORPUS, KINDS, OTHERS, PROMPTS, basis, decoder, far, run
from tests.lib.models import ARCHITECTURES, ENCODERS, loadable, tiny, tokens
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


@pytest.mark.parametrize("how", ["swap", "shrink"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom"])
def test_terms_are_swapped_and_shrunk_as_in_the_models_own_code(kind: str, how: str) -> None:
    """The other ways stand in the table of subjects."""
    pairs = (("pos", "pos"), ("bias", "cvec"), ("cvec", "bias"))
    right, hooks = decoder(kind), {}
    for layer, heads in HEADS.items():
        swapped = edits.moving(lambda term: term[order_of(3, 5)], *pairs)
        change = swapped if how == "swap" else shrinking(right, layer, *pairs)
        hooks |= edits.edit_terms(right, layer, heads, basis(kind, layer), change)
    given = (exact_basis(kind), ["pos-pos", "token"], NAMES)
    found = exactly(kind, interventions.term, *given, how=how, seed=5)
    assert same(found, edited(kind, hooks), kind)


@every_kind
def test_terms_of_a_normalised_basis_and_alibi(kind: str) -> None:
    pairs = (("cvec", "cvec"), ("alibi", "alibi")) if kind == "bloom" else (("cvec", "cvec"),)
    change = edits.removing(*pairs)
    hooks = edits.edit_terms(decoder(kind), 1, [3], basis(kind, 1, True), change, normalized=True)
    names = ["-".join(pair) for pair in pairs]
    found = exactly(kind, interventions.term, exact_basis(kind, True), names, "L1H3")
    assert same(found, edited(kind, hooks), kind)


def _reads(model: Any, receiver: str) -> bool:
    """Whether a receiver reads the heads of block 0 (an MLP beside them does not)."""
    try:
        interventions.path(model, "L0H1", receiver, by="zero")
    except tlg.GeometryError:
        return False
    return True


def inside(model: Any, edit: Any) -> Tensor:
    with torch.no_grad(), edit:
        return model(IDS, return_type="logits").clone()


def ways(architecture: str, every: bool) -> list[tuple[str, bool]]:
    """Classes and loadings of an architecture; by day one of them, another for the next one."""
    found, number = list(loadable(architecture)), list(ARCHITECTURES).index(architecture)
    return found if every else found[number % max(1, len(found)) :][:1]


every_way = pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["one", "every"]
)


@every_way
@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in ENCODERS])
def test_edits_that_must_come_to_the_same_do(architecture: str, every: bool) -> None:
    """All terms kept are the clean run, and one removed is all others kept; so are all writers of
    an edge; a path to all readers is the knockout, to some of them less; all that another prompt
    wrote is its run."""
    alibi = ["alibi-alibi"] if architecture in ("bloom", "bloom6", "mpt", "falcon-alibi") else []
    for way in ways(architecture, every):
        model = tiny(way[0], architecture, way[1])
        fit = tlg.decompose(model, tokens(16, 16, seed=2), **QUIET)
        with torch.no_grad():
            clean, other = (model(x, return_type="logits").clone() for x in (IDS, OTHER))
        assert far(other, clean) > 1e-2
        term = partial(interventions.term, model, fit, heads="L1H2")
        assert far(inside(model, term([*EVERY_TERM, *alibi], how="keep")), clean) < 1e-4
        without = inside(model, term("content"))
        rest = term(["position", "token", "mixed", *alibi], how="keep")
        assert far(inside(model, rest), without) < 1e-4
        assert far(without, clean) > 1e-4
        call = partial(interventions.edge, model, IDS, "nobody", "L1H1")
        known = str(refused(call, what="writer").expected)
        names = ("embed", "pos_embed", "constants", "attn0", "mlp0")
        writers = [name for name in names if f"'{name}'" in known]
        sides = ["query", "key", "value"]
        edge = partial(interventions.edge, model, IDS, heads="L1H1", side=sides)
        assert far(inside(model, edge(writers, how="keep")), clean) < 1e-4
        others = edge([w for w in writers if w != "attn0"], how="keep")
        assert far(inside(model, others), inside(model, edge("attn0"))) < 1e-4
        options = {"by": "zero", "reference": IDS}
        knocked = inside(model, interventions.heads(model, ["L0H1", "L0H2"], **options))
        readers = [f"L1H{h}<{which}>" for h in range(model.cfg.n_heads) for which in "qkv"]
        readers += ["mlp0"] if _reads(model, "mlp0") else []
        path = partial(interventions.path, model, ["L0H1", "L0H2"], **options)
        assert far(inside(model, path(receivers=[*readers, "mlp1", "output"])), knocked) < 1e-4
        assert far(inside(model, path(receivers=[*readers, "mlp1"])), knocked) > 1e-4


@every_way
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_activation_patching_of_a_whole_state_is_the_other_run(
    architecture: str, every: bool
) -> None:
    """One head of it is less."""
    for way in ways(architecture, every):
        model = tiny(way[0], architecture, way[1])
        with torch.no_grad():
            clean, other = (model(x, return_type="logits").clone() for x in (IDS, OTHER))
        patch = {"by": "counterfactual", "reference": IDS, "counterfactual": OTHER}
        mlp = [] if architecture in ENCODERS else ["mlp1"]
        for names in ("resid0", "resid2", ["resid0", "attn0", "attn1", *mlp]):
            found = inside(model, interventions.heads(model, names, **patch))
            assert far(found, other) < 1e-4, names
        one = inside(model, interventions.heads(model, "L0H1", **patch))
        assert min(far(one, clean), far(one, other)) > 1e-5


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


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_writers_of_an_edge_are_edited_together_from_a_position_on(kind: str) -> None:
    right, clean, other = decoder(kind), run(kind), decoder(kind).run(OTHERS)
    here, there = (scores.writers(right, r, 1) for r in (clean, other))
    for group in (here, there):
        group |= scores.by_block(group)
    cases: list[tuple[Any, str, str, Tensor]] = [
        (["embed", "mlp0"], "remove", "query", -here["embed"] - here["mlp0"]),
        ("attn0", "remove", "value", -here["attn0"]),
        ("constants", "keep", "key", here["constants"] - clean["state", 1]),
        ("L0H1", "swap", "key", there["L0H1"] - here["L0H1"]),
    ]
    for writer, how, side, change in cases:
        options = {"side": side, "how": how, "drop": 2}
        options |= {"counterfactual": OTHERS} if how == "swap" else {}
        change = torch.cat([torch.zeros_like(change[:, :2]), change[:, 2:]], 1)
        hooks = edits.edit_edge(right, clean, 1, [1, 2], side[0], change)
        found = exactly(kind, interventions.edge, PROMPTS, writer, ["L1H1", "L1H2"], **options)
        assert same(found, edited(kind, hooks), kind), (writer, how)


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
            refused(lambda ids=ids: model(ids), what="tokens inside an edit")
            model(IDS)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_mlps_and_states_are_replaced_as_in_the_models_own_code(kind: str) -> None:
    right, clean, other = decoder(kind), run(kind), decoder(kind).run(OTHERS)
    pairs = {"reference": PROMPTS, "counterfactual": OTHERS}
    wide = CORPUS[:6, :12]
    corpus = right.run(wide)
    for name, key in [("mlp0", ("mlp", 0)), ("resid1", ("state", 1)), ("resid2", ("state", 2))]:
        mean = corpus[key][:, :10].mean(0).expand_as(clean[key])
        for by, value in {"counterfactual": other[key], "mean": mean}.items():
            given = pairs if by == "counterfactual" else {"reference": wide}
            found = exactly(kind, interventions.heads, [name], by=by, **given)
            wanted = edited(kind, {key: lambda x, r, value=value: value})
            assert same(found, wanted, kind), (by, name)
    whole = {(0, h): torch.zeros_like(clean["z", 0][:, :, h]) for h in range(4)}
    whole[1, 3] = torch.zeros_like(whole[0, 0])
    found = exactly(kind, interventions.heads, ["attn0", "L1H3"], by="zero")
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

    call = partial(exactly, kind, interventions.heads, "L0H1")
    every: list[Any] = [([5], [5]), ([-1, 0], [9, 0]), ("subject", [2]), (np.int64(5), [5])]
    every += [([torch.tensor(5), "subject"], [5, 2])]
    for positions, numbers in every:
        found = call(**pairs, by="counterfactual", positions=positions)
        assert far(found, edited(kind, at(numbers))) < 1e-9, positions
        assert far(found, clean["logits", 0]) > 1e-5
    for wrong in (1.5, True, [None], "nobody"):
        refused(partial(call, by="zero", positions=wrong, reference=rows), what="position")
    refused(partial(call, **pairs), what="counterfactual")  # by their mean


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("receivers", [["mlp0"], ["mlp1", "output"], ["L1H2<q>", "<k>", "<v>"]])
def test_a_path_is_patched_as_in_the_models_own_code(kind: str, receivers: list[str]) -> None:
    right, other = decoder(kind), decoder(kind).run(OTHERS)
    names = edits.Layout.of(right).readers
    full = [n for r in receivers for n in names if n == r or (n[:2] == "L1" and n[-3:] == r)]
    receivers = list({name[-3:]: name for name in full}.values())
    new = {(0, h): other["z", 0][:, :, h] for h in (1, 3)}
    pairs = {"by": "counterfactual", "reference": PROMPTS, "counterfactual": OTHERS}
    for position in (None, 6):
        patched = edits.path_patch(right, PROMPTS, new, receivers, position=position)["logits", 0]
        options = {**pairs, "positions": position}
        found = exactly(kind, interventions.path, ["L0H1", "L0H3"], receivers, **options)
        assert far(found, patched) < 1e-9, receivers
        assert position or far(patched, run(kind)["logits", 0]) > 1e-5, receivers


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


def test_a_surrogate_of_a_rotary_model_is_of_low_rank() -> None:
    rotary = exact_basis("llama")
    call = partial(exactly, "llama", interventions.surrogate, rotary, "L1H2")
    for part in ("structured", "diagonal"):
        refused(partial(call, part=part), tlg.UnsupportedModelError, "low_rank")
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
        refused(lambda: model.run_with_hooks(PROMPTS, fwd_hooks=hooks), what="inside an edit")
    for logits in found:
        assert same(logits, wanted, kind)


@pytest.mark.parametrize("which", ["term", "planes", "edge", "heads", "path"])
def test_gradients_pass_through_edits(which: str) -> None:
    """Autograd agrees with a central difference of the logits inside the edit."""
    direction = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0)).double()
    with InDouble():
        model, names = exact("llama"), ["L1H0", "L1H2"]
        edit = {
            "term": lambda: interventions.term(model, exact_basis("llama"), "content", names),
            "planes": lambda: interventions.planes(model, [0], names),
            "edge": lambda: interventions.edge(model, PROMPTS, "L0H1", "L1H1", side="query"),
            "heads": lambda: interventions.heads(model, ["L0H1"], by="prompt"),
            "path": lambda: interventions.path(model, "L0H1", ["L1H1<q>", "mlp1"], by="prompt"),
        }[which]()

        def logit(step: Tensor, hooks: Any = edit) -> Tensor:
            # behind the states by which prompts are known
            move = ("blocks.0.hook_mlp_out", lambda value, hook: value + step * direction)
            return model.run_with_hooks(PROMPTS, fwd_hooks=[move, *hooks])[1, -1, 7]

        step = torch.zeros((), dtype=torch.float64, requires_grad=True)
        found, plain = (torch.autograd.grad(logit(step, h), step)[0] for h in (edit, ()))
        with torch.no_grad():
            up, down = (logit(torch.tensor(x, dtype=torch.float64)) for x in (1e-5, -1e-5))
    wanted = float(up - down) / 2e-5
    assert abs(float(found) - wanted) < 1e-6 * abs(wanted)
    assert abs(float(found - plain)) > 1e-4 * float(plain.abs())  # the twin: without the edit


def test_sums_of_edits_are_edits() -> None:
    kind = "llama"
    right = decoder(kind)
    hooks = edits.edit_terms(right, 1, [0], basis(kind, 1), edits.removing(("cvec", "cvec")))
    silent = {(0, 1): torch.zeros_like(run(kind)["z", 0][:, :, 1])}
    hooks = {**hooks, **edits.knockout(right, silent)}
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
        refused(lambda: exact(kind).run_with_hooks(PROMPTS, fwd_hooks=twice), what="inside an edit")
