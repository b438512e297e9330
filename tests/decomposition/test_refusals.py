"""What a basis, its checkpoints and its parts refuse and say, in whole sentences, and what is
joined when parts are merged: small bases of random states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.refusals import refused
from tests.tiny import tiny
from tests.views import with_methods
from tl_geometry import decompose, decompose_activations
from tl_geometry.base.results import Provenance
from tl_geometry.decomposition import checkpoints, merge_parts, stream_pass
from tl_geometry.decomposition.accumulator import Accumulation, Plan
from tl_geometry.decomposition.from_activations import decompose_tensor
from tl_geometry.decomposition.position_context import PositionContext, require_basis

DECOMPOSE: Any = decompose
"""Also of what is no model."""


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def basis_of(h: Tensor, **options: Any) -> PositionContext:
    return decompose_activations(h, moments_dtype=torch.float64, **options)


def replaced(basis: PositionContext, **fields: Any) -> PositionContext:
    """The same basis with another provenance."""
    return dataclasses.replace(basis, provenance=dataclasses.replace(basis.provenance, **fields))


@pytest.fixture(scope="module")
def basis() -> PositionContext:
    return basis_of(gaussian(0, 2, 12, 6, 3), window=(1, 6), states=[0, 1])


# ---- a basis


def test_what_is_no_basis_is_refused(tmp_path: Path, basis: PositionContext) -> None:
    """With what makes one: a path is loaded, anything else decomposed."""
    expected = "basis: expected a PositionContext, got"
    load, run = "Use PositionContext.load(path).", "Use decompose(model, tokens)."
    assert refused(lambda: require_basis("a")) == f"{expected} 'a'. {load}"
    assert refused(lambda: require_basis(Path("a"))) == f"{expected} {Path('a')!r}. {load}"
    assert refused(lambda: require_basis(3)) == f"{expected} 3. {run}"
    assert refused(lambda: require_basis(None, "null")).startswith("null: expected a Position")
    require_basis(basis)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda b: b.index(2),
            "state: expected one of (0, 1), got 2. Use decompose(..., states=None) for all.",
        ),
        (lambda b: b.pos_at(6), "position: expected an index from 0 to 5, got 6."),
        (
            lambda b: basis_of(gaussian(0, 4, 3, 2), second_moments=False).second_moment(0),
            "second_moment: expected second moments, got a basis without. "
            "Use decompose(..., second_moments=True).",
        ),
        (
            lambda b: b.anova(null=basis_of(gaussian(0, 4, 6, 3))),
            "null: expected a basis of states (0, 1), got (0,).",
        ),
        (
            lambda b: b.transform(torch.zeros(3, 2, 6, 3)),
            "activations: expected [state batch position d_model] with 2 states and d_model 3, got "
            "float32 tensor of shape (3, 2, 6, 3). Use basis.states to see which states it holds.",
        ),
        (
            lambda b: b.transform(torch.zeros(2, 2, 3, 3), positions=[0, 1, 6]),
            "positions: expected 3 from 0 to 5, got 3: [0, 1, 6].",
        ),
        (
            lambda b: b.transform(torch.zeros(2, 2, 3, 3), positions=[0, 1]),
            "positions: expected 3 from 0 to 5, got 2: [0, 1].",
        ),
        (
            lambda b: replaced(b, normalized=True).require_raw("this"),
            "this: expected a basis of raw states, got one of normalised states. "
            "Use decompose(..., normalize=False).",
        ),
        (
            lambda b: basis_of(gaussian(0, 1, 3, 2)).require_identifiable("this"),
            "this: expected a basis of at least 2 contexts (with one, position and content cannot "
            "be told apart), got 1. Use decompose(model, more windows).",
        ),
        (lambda b: PositionContext.merge([]), "merge: expected at least one basis, got none."),
        (
            lambda b: PositionContext.merge([b, basis_of(gaussian(1, 2, 4, 6, 3), states=[1])]),
            "merge: states: expected (0, 1), got (1,).",
        ),
        (
            lambda b: PositionContext.merge([b, replaced(b, dtype="float16")]),
            "merge: dtype: expected 'float64', got 'float16'. "
            "Use partial results of one model and one setting.",
        ),
        (
            lambda b: PositionContext.merge([b, b]),
            "merge: expected disjoint contexts, got parts 0 and 1 with the same sums. "
            "Use each shard once, or decompose over all tokens.",
        ),
    ],
)
def test_refusals_of_a_basis_are_whole_sentences(
    call: Callable[[PositionContext], object], text: str, basis: PositionContext
) -> None:
    """What was expected, what came, and what to call instead."""
    assert refused(lambda: call(basis)) == text


def test_second_moments_are_centred_by_default(basis: PositionContext) -> None:
    """Or those of the raw states."""
    flat = gaussian(0, 2, 12, 6, 3)[1, :, 1:].reshape(-1, 3)
    centred = flat - flat.mean(0)
    assert torch.allclose(basis.second_moment(1), centred.T @ centred)
    assert torch.allclose(basis.second_moment(1, centered=False), flat.T @ flat)


def test_positions_outside_the_window_have_their_vectors(basis: PositionContext) -> None:
    """About the mean of the window."""
    h = gaussian(0, 2, 12, 6, 3)
    mean = h[:, :, 1:].mean((1, 2))
    for position in range(6):
        expected = h[:, :, position].mean(1) - mean
        assert torch.allclose(basis.pos_at(position), expected)
    assert basis.length == 6
    assert basis.group_of.tolist() == [
        g for g, n in enumerate(basis.group_counts) for _ in range(n)
    ]


def test_a_tensor_has_four_orthogonal_parts() -> None:
    """With and without an axis of states; the sum of squares is that of the parts."""
    h = gaussian(2, 2, 4, 5, 3).float()
    parts = decompose_tensor(h)
    assert parts.mean.dtype == torch.float64
    for state in range(2):
        one = decompose_tensor(h[state])
        assert all(torch.allclose(a, b[state]) for a, b in zip(one, parts, strict=True))
    assert torch.allclose(parts.total(), h.double())
    assert torch.allclose(parts.cvec, parts.ctx.unsqueeze(2) + parts.resid)
    squares = 20 * parts.mean.square().sum() + 4 * parts.pos.square().sum()
    squares = squares + 5 * parts.ctx.square().sum() + parts.resid.square().sum()
    assert float(squares) == pytest.approx(float(h.double().square().sum()))


# ---- parts that are merged


def test_merged_provenance_has_all_hashes_and_flags() -> None:
    """Each flag once, in the order of the parts; one part keeps its hash."""
    parts = [
        Provenance(token_hash="a", flags=("x",)),
        Provenance(token_hash="b", flags=("y", "x"), model="other"),
    ]
    merged = merge_parts.merged_provenance(parts, 9, ["z"])
    assert (merged.token_hash, merged.contexts, merged.flags) == ("a+b", 9, ("x", "y", "z"))
    assert merged.model is None
    assert merge_parts.merged_provenance(parts[:1], 9, []).token_hash == "a"
    pair = [torch.ones(2, 1), torch.zeros(2, 3)]
    joined = merge_parts.together(pair, dim=1)
    assert joined is not None
    assert joined.shape == (2, 4)
    assert merge_parts.together([pair[0], None]) is None


def test_contexts_that_parts_share_are_counted_or_refused() -> None:
    """Up to half of the smaller part is a remark; parts without hashes are not compared."""
    sums = [basis_of(gaussian(seed, 4, 3, 2)).moments for seed in (1, 2, 3)]
    hashes = [torch.tensor(x) for x in ([1, 2, 3, 4], [3, 4, 5, 6, 7, 8], [8, 9])]
    remark = "3 contexts are in more than one of the merged parts"
    assert merge_parts.same_contexts(sums, hashes) == [remark]
    assert merge_parts.same_contexts(sums, [hashes[0], None, hashes[2]]) == []
    assert refused(lambda: merge_parts.same_contexts(sums[:2], [hashes[0], hashes[0][1:]])) == (
        "merge: expected disjoint contexts, got 3 contexts that are in parts 0 and 1. "
        "Use each shard once, or decompose over all tokens."
    )


# ---- checkpoints and arguments


def begun(**fields: Any) -> Accumulation:
    return Accumulation(
        Plan(states=(0,), window=(0, 4), groups=2),
        Provenance(**fields),
        length=4,
        d_model=2,
        contexts=6,
        device="cpu",
        labels=torch.tensor([0, 0, 1, 1, 2, 2]),
    )


def fill(work: Accumulation, h: Tensor) -> Accumulation:
    def feed(contexts: slice, on_state: Callable[[int, Tensor], None]) -> None:
        on_state(0, h[contexts])

    work.update(torch.arange(len(h)), feed, torch.arange(4 * len(h)).view(-1, 4), 0)
    return work


def test_a_checkpoint_goes_on_where_it_was(tmp_path: Path) -> None:
    """The sums of both halves are those of the whole; the settings are those of the run."""
    h, path = gaussian(4, 6, 4, 2), tmp_path / "c"
    first = fill(begun(), h[:3])
    checkpoints.save(first, path)
    run, basis = checkpoints.read(path)
    assert basis.contexts == 3
    assert run["labels"] == checkpoints.label_hash(first, 3) != checkpoints.label_hash(first, 4)
    settings = run["settings"]
    assert settings == checkpoints.settings(first, 3)
    wanted = {"length": 4, "window": [0, 4], "contexts": 6, "groups": 2, "keep": 32, "seed": 0}
    assert settings.items() >= wanted.items()
    assert (settings["groups begin at"], settings["moments_dtype"]) == ([2], "torch.float32")
    assert checkpoints.settings(first, 2)["groups begin at"] == []
    again = begun()
    checkpoints.resume(again, path)
    assert (again.done, again.token_hash, again.has_bos) == (3, first.token_hash, False)
    assert [len(x) for x in again.hashes] == [3]
    assert [m.shape for m in again.means] == [(1, 3, 2)]
    assert len(again.reservoir) == 3
    assert torch.equal(again.largest.norm, first.largest.norm)
    assert again.moments.fixed == {0}


def test_a_checkpoint_of_another_run_says_what_differs(tmp_path: Path) -> None:
    """Each setting with both values; labels without them."""
    path = tmp_path / "c"
    checkpoints.save(fill(begun(model="a"), gaussian(4, 3, 4, 2)), path)
    use = "Use another checkpoint= path."
    assert refused(lambda: checkpoints.resume(begun(model="b", corpus="c"), path)) == (
        f"checkpoint {path}: expected the run that wrote it, "
        f"got another: model='a' (now 'b'), corpus=None (now 'c'). {use}"
    )
    work = begun(model="a")
    work.labels = torch.tensor([0, 0, 2, 1, 2, 2])
    assert refused(lambda: checkpoints.resume(work, path)) == (
        f"checkpoint {path}: expected the labels of the first 3 contexts that it was made with, "
        f"got others. {use}"
    )
    work.labels = torch.tensor([0, 0, 1, 5, 5, 5])  # later labels may change
    checkpoints.resume(work, path)
    assert work.done == 3


def test_checkpoints_go_where_they_can_be_written(tmp_path: Path) -> None:
    """Not over a folder, nor below a file; folders are made as they are needed."""
    stream_pass._writable(tmp_path / "new" / "folder" / "c")
    (tmp_path / "file").write_text("")
    stream_pass._writable(tmp_path / "file")
    use = "Use a path in a folder of your own."
    for path in (tmp_path, tmp_path / "file" / "c"):
        assert refused(lambda p=path: stream_pass._writable(p)) == (
            f"checkpoint: expected a file that can be written, got {path}. {use}"
        )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: DECOMPOSE(torch.zeros(2, 3, 4)),
            "model: expected a TransformerLens model, got float32 tensor of shape (2, 3, 4). "
            "Use decompose_activations(...) for activations and caches.",
        ),
        (
            lambda: DECOMPOSE({"blocks.0.hook_resid_pre": torch.zeros(1)}),
            "model: expected a TransformerLens model, got dict. "
            "Use decompose_activations(...) for activations and caches.",
        ),
        (
            lambda: decompose(tiny("bridge", "gpt2")),
            "tokens: expected tokens to run the model on, got None. "
            "Use decompose(model, windows(model, texts, length, ...)).",
        ),
        (
            lambda: decompose_activations(torch.zeros(2, 3, 4).long()),
            "activations: expected floating [context position d_model] or "
            "[state context position d_model], got int64 tensor of shape (2, 3, 4). "
            "Use decompose(model, tokens) for token ids.",
        ),
        (
            lambda: decompose_activations([1.0]),
            "activations: expected a tensor or an ActivationCache, got [1.0]. "
            "Use decompose(model, tokens) to run a model.",
        ),
    ],
)
def test_arguments_of_the_wrong_kind_name_the_right_function(
    call: Callable[[], object], text: str
) -> None:
    """States, ids, and nothing to run on."""
    assert refused(call) == text


def test_states_that_no_norm_reads_are_named() -> None:
    """Blocks and the output head apart; the others have their norms, by row."""
    view = tlg.view(tiny("bridge", "gpt2"))
    first, last = view.attention_norm(0), view.final_norm()
    assert last is not None
    none = dataclasses.replace(last, norm_type=None)
    blocks = "states {} as they are: their blocks read them without a norm"
    head = "state 2 as it is: no norm in front of a linear output head"
    cases: tuple[tuple[set[int], list[int], tuple[str, ...]], ...] = (
        (set(), [0, 1, 2], ()),
        ({1}, [0, 1], (blocks.format("1"),)),
        ({0, 1}, [0], (blocks.format("0, 1"),)),
        ({2}, [1, 2], (head,)),
        ({0, 1, 2}, [], (blocks.format("0, 1"), head)),
    )
    for bare, rows, flags in cases:
        planted = with_methods(
            view,
            attention_norm=lambda s, bare=bare: None if s in bare else first,
            final_norm=lambda bare=bare: none if 2 in bare else last,
        )
        norms, found = stream_pass.state_norms(planted, (2, 0, 1))
        assert (sorted(norms), found) == (rows, flags)
        assert all(norm is (last if row == 0 else first) for row, norm in norms.items())
