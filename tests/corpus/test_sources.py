"""Tokens as they come in: padding, BOS, files, data sets, selections and labels; taken as a user
means them, or refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tl_geometry as tlg
from tests.tiny import tiny, tokens
from tl_geometry.base import checks
from tl_geometry.base.errors import GeometryError
from tl_geometry.corpus import sources
from tl_geometry.corpus.sources import padded_rows

BOS = "<|endoftext|>"


@pytest.fixture(scope="module")
def model() -> Any:
    return tlg.zoo.embedded()


@pytest.fixture(scope="module")
def view(model: Any) -> Any:
    return tlg.view(model)


@pytest.fixture(scope="module")
def windows(model: Any) -> tlg.TokenWindows:
    return tlg.zoo.default_windows(model, 12, n=8)


# --- Buffers of the caller ---------------------------------------------------------------------


def _refilled(rows: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Rows (or batches of ``size``) in one tensor that is refilled for each."""
    parts = rows if size == 1 else rows.split(size)
    buffer = torch.empty_like(parts[0])
    for part in parts:
        buffer.copy_(part)
        yield buffer


def _refilled_array(rows: torch.Tensor) -> Iterator[np.ndarray]:
    buffer = np.empty(rows.shape[1], dtype=np.int64)
    for row in rows:
        buffer[:] = row.numpy()
        yield buffer


@pytest.mark.parametrize(
    "stream",
    [lambda r: _refilled(r, 1), lambda r: _refilled(r, 2), _refilled_array],
    ids=["rows", "batches", "arrays"],
)
def test_a_buffer_that_is_refilled_gives_the_rows_that_it_held(
    model: Any, windows: tlg.TokenWindows, stream: Any
) -> None:
    given = windows.tokens
    found = tlg.decompose(model, stream(given), batch_size=4, progress=False)
    whole = tlg.decompose(model, given, batch_size=4, progress=False)
    assert torch.allclose(found.pos, whole.pos, atol=1e-9)
    kept = tlg.trajectories(model, stream(given), progress=False).tokens
    assert kept is not None
    assert torch.equal(kept, given)
    # the twin: copies of the last row are not the rows
    last = tlg.decompose(model, given[[3, 3, 3, 3, 7, 7, 7, 7]], progress=False)
    assert not torch.allclose(last.pos, whole.pos, atol=1e-3)


# --- Padding --------------------------------------------------------------------------------------
# -------------------


def test_runs_of_padding_are_seen_and_random_ids_are_left_alone() -> None:
    rows = torch.arange(10, 26).view(2, 8)
    for change, expected in (
        ({}, 0),
        ({(0, 7): 5}, 1),  # two prompts, one of them shorter by one
        ({(0, 0): 5, (0, 1): 5}, 1),
        ({(0, 7): 5, (1, 0): 5}, 2),
        ({(0, 7): 5, (1, 3): 5}, 0),  # inside a row it is no padding
        ({(0, 3): 5}, 0),
        ({(0, 5): 5, (0, 6): 5, (0, 7): 5, (1, 3): 5}, 1),
    ):
        ids = rows.clone()
        for place, value in change.items():
            ids[place] = value
        assert padded_rows(ids, 5) == expected, change
    many = torch.arange(100, 260).view(20, 8)
    many[3, 7] = 5
    assert padded_rows(many, 5) == 0  # one among many may be chance
    many[4, 0] = 5
    assert padded_rows(many, 5) == 2


def test_padded_ids_are_refused_wherever_tokens_come_in(
    view: Any, windows: tlg.TokenWindows
) -> None:
    basis = tlg.decompose(view, windows, progress=False)
    pads = dataclasses.replace(view, pad_id=2047)
    for side in (slice(0, 2), slice(-2, None)):
        ids = windows.tokens.clone()
        ids[:3, side] = 2047
        text = (
            "tokens: expected rows without padding, got 3 of 8 that begin or end with the padding "
            r"token \(id 2047\)\. Use tl_geometry\.win"
        )
        for call in (
            lambda ids=ids: tlg.decompose(pads, ids, progress=False),
            lambda ids=ids: tlg.decompose(pads, iter(ids.split(4)), progress=False),
            lambda ids=ids: tlg.sweep_heads(pads, ids, basis, progress=False),
            lambda ids=ids: tlg.split_scores(pads, ids, basis, heads="L1H0"),
            lambda ids=ids: tlg.trajectories(pads, ids, progress=False),
        ):
            with pytest.raises(GeometryError, match=text.replace("3 of 8", "3 of [48]")):
                call()
        tlg.decompose(
            view, ids, progress=False
        )  # its tokenizer pads with EOS, which cannot be told from a text's own


def test_padding_tokens_that_mean_something_else_are_unknown(model: Any, view: Any) -> None:
    from tl_geometry.models.reader import unambiguous_pad_id

    assert view.pad_id is None

    class Tokenizer:
        bos_token_id, eos_token_id, pad_token_id = 0, 1, 2

    class Holder:
        tokenizer = Tokenizer()

    assert unambiguous_pad_id(Holder()) == 2
    Tokenizer.pad_token_id = 1
    assert unambiguous_pad_id(Holder()) is None
    assert unambiguous_pad_id(object()) is None


def test_an_attention_mask_counts(model: Any, windows: tlg.TokenWindows) -> None:
    datasets = pytest.importorskip("datasets", reason="comes with TransformerLens")
    ids = windows.tokens
    whole = tlg.decompose(model, ids, progress=False)
    ones, zeros = torch.ones_like(ids), torch.ones_like(ids)
    zeros[2, :3] = 0
    makers: list[Any] = [
        lambda mask: {"input_ids": ids, "attention_mask": mask},
        lambda mask: datasets.Dataset.from_dict(
            {"input_ids": ids.tolist(), "attention_mask": mask.tolist()}
        ),
        lambda mask: (
            {"input_ids": i, "attention_mask": m} for i, m in zip(ids, mask, strict=True)
        ),
    ]
    for make in makers:
        found = tlg.decompose(model, make(ones), progress=False)
        torch.testing.assert_close(found.pos, whole.pos)
        with pytest.raises(
            GeometryError,
            match=r"attention_mask: expected ones everywhere \(no padding\), got 3 zeros\. "
            r"Use tl_geometry\.w",
        ):
            tlg.decompose(model, make(zeros), progress=False)


# --- BOS ------------------------------------------------------------------------------------------
# -------------------


def test_windows_never_begin_with_bos_twice(model: Any, view: Any) -> None:
    text = "def f(x):\n    return x + 1\n" * 12
    plain = tlg.windows(model, text, 8, prepend_bos=True)
    begun = tlg.windows(model, BOS + text, 8, prepend_bos=True)
    assert torch.equal(begun.tokens, plain.tokens)
    assert begun.notes == ("1 of 1 texts begin with the BOS string: not doubled",)
    assert plain.notes == ()
    middle = tlg.windows(model, [text + BOS + text, BOS + text], 8, prepend_bos=True)
    for found in (
        begun,
        middle,
        tlg.windows(model, (text[:40] + BOS) * 9, 4, n=60, prepend_bos=True, replace=True),
    ):
        assert not (found.tokens[:, 1] == view.bos_id).any()
    assert (
        tlg.windows(model, BOS + text, 8, prepend_bos=False).tokens[0, 0] == view.bos_id
    ).all()  # what the text has, stays
    note = "1 of 1 texts begin with the BOS string: not doubled"
    basis = tlg.decompose(model, begun, progress=False)
    assert note in basis.provenance.flags
    split = tlg.split_scores(model, BOS + "def f(x)", basis, heads="L1H0", prepend_bos=True)
    assert note in split.provenance.flags
    assert split.str_tokens.count(BOS) == 1


def test_ids_with_bos_twice_are_flagged_everywhere(
    model: Any, view: Any, windows: tlg.TokenWindows
) -> None:
    basis = tlg.decompose(model, windows, progress=False)
    ids = windows.tokens.clone()
    ids[:3, 1] = view.bos_id
    flag = "3 of 8 contexts begin with BOS twice"
    results = [
        tlg.decompose(model, ids, progress=False),
        tlg.decompose(model, iter(ids.split(3)), progress=False),
        tlg.sweep_heads(model, ids, basis, progress=False),
        tlg.split_scores(model, ids, basis, heads="L1H0"),
    ]
    assert all(flag in r.provenance.flags for r in results)
    assert not any("twice" in f for f in basis.provenance.flags)


# --- Forms ----------------------------------------------------------------------------------------
# -------------------


def test_every_form_of_ids_gives_the_same_basis(model: Any, windows: tlg.TokenWindows) -> None:
    ids = windows.tokens
    whole = tlg.decompose(model, ids, progress=False)
    data = torch.utils.data.TensorDataset(ids)
    forms: dict[str, Any] = {
        "loader of tensors": torch.utils.data.DataLoader(data, batch_size=3),
        "data set of tensors": data,
        "int32": ids.int(),
        "uint16 tensor": ids.to(torch.uint16),
        "uint16 array": ids.numpy().astype(np.uint16),
        "lists": ids.tolist(),
        "tuples": tuple(map(tuple, ids.tolist())),
        "list of tensors": list(ids),
        "list of arrays": list(ids.numpy()),
        "list of lists of one": [[row] for row in ids],
        "list of lists of one array": [[row] for row in ids.numpy()],
    }
    for name, form in forms.items():
        found = tlg.decompose(model, form, progress=False)
        torch.testing.assert_close(found.pos, whole.pos, msg=name)
        assert found.token_hashes is not None
        assert whole.token_hashes is not None
        assert torch.equal(found.token_hashes, whole.token_hashes), name


def test_windows_keep_their_tokens_and_labels_when_the_given_tensors_change() -> None:
    ids, labels = torch.arange(6).view(2, 3), torch.tensor([0, 1])
    rows = tlg.TokenWindows(tokens=ids, has_bos=False, labels=labels)
    ids.fill_(9)
    labels.fill_(9)
    assert rows.tokens.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert rows.labels is not None
    assert rows.labels.tolist() == [0, 1]


def test_windows_are_selected_as_arrays_are(windows: tlg.TokenWindows) -> None:
    mask = torch.zeros(8, dtype=torch.bool)
    mask[[2, 5]] = True
    for chosen in (
        [2, 5],
        torch.tensor([2, 5]),
        np.array([2, 5]),
        mask,
        mask.tolist(),
        mask.numpy(),
        range(2, 8, 3),
    ):
        assert torch.equal(windows[chosen].tokens, windows.tokens[[2, 5]]), chosen
    for chosen in (3, np.int64(3), torch.tensor(3), torch.tensor([3]), [3], slice(3, 4)):
        assert windows[chosen].tokens.shape == (1, 12), chosen
        assert torch.equal(windows[chosen].tokens, windows.tokens[3:4]), chosen
    for bad in (mask[:5], torch.tensor([[1]]), torch.tensor([0.5]), [9], [], "3", None, 1.5):
        with pytest.raises(
            GeometryError, match=r"contexts: expected a slice, numbers from 0 to 7, or a mask of 8"
        ):
            windows[bad]
    with pytest.raises(IndexError):
        windows[8]


def test_a_record_of_windows_fits_on_a_screen_and_shows_no_control_characters(
    windows: tlg.TokenWindows,
) -> None:
    assert len(repr(windows)) < 300
    assert "8 contexts of 12 tokens; with BOS" in repr(windows)
    odd = dataclasses.replace(
        windows, corpus="a\x1b[31m\u202e" * 40, str_tokens=("\x07", "\u2066", "\ud800")
    )
    assert repr(odd).isprintable()
    assert len(repr(odd)) < 600


def test_texts_in_files_and_data_sets(model: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="comes with TransformerLens")
    text = "def f(x):\n    return x + 1\n" * 8
    path = tmp_path / "x.txt"
    path.write_text(text)
    whole = tlg.windows(model, [text, text], 8, prepend_bos=True)
    rows = [{"text": text}, {"text": text}]
    for form in (
        [path, path],
        datasets.Dataset.from_list(rows),
        datasets.Dataset.from_list(rows).to_iterable_dataset(),
        {"text": [text] * 2},
    ):
        assert torch.equal(tlg.windows(model, form, 8, prepend_bos=True).tokens, whole.tokens)
    assert torch.equal(
        tlg.windows(model, path, 8, prepend_bos=True).tokens,
        tlg.windows(model, text, 8, prepend_bos=True).tokens,
    )
    with pytest.raises(
        GeometryError, match=r"texts: expected a column named 'text', got columns \['body'\]"
    ):
        tlg.windows(model, datasets.Dataset.from_list([{"body": text}]), 8, prepend_bos=True)
    with pytest.raises(
        GeometryError,
        match=r"texts: expected text, got the name of a file, '.*x\.txt'\. Use pathlib\.Path",
    ):
        tlg.windows(model, str(path), 8, prepend_bos=True)
    with pytest.raises(GeometryError, match=r"texts: expected text, got the name of a file"):
        tlg.decompose(model, str(path), prepend_bos=True, progress=False)
    with pytest.raises(
        GeometryError,
        match=r"tokens: expected token ids, windows or a \.npy file, got the file .*"
        r"Use tl_geometry\.windows",
    ):
        tlg.decompose(model, path, progress=False)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(
        GeometryError,
        match=r"texts: expected text in utf-8, got latin, where byte 3 \(0xe9\) is none",
    ):
        tlg.windows(model, tmp_path / "latin", 8, prepend_bos=True)


def test_labels_may_be_names(model: Any, windows: tlg.TokenWindows) -> None:
    named = tlg.decompose(model, windows, labels=list("abababab"), progress=False)
    plain = tlg.decompose(model, windows, labels=[0, 1] * 4, progress=False)
    assert named.names == ("a", "b")
    assert named.labels is not None
    assert plain.labels is not None
    assert torch.equal(named.labels, plain.labels)
    assert tlg.decompose_activations(torch.randn(2, 3, 4), labels=["x", "y"]).names == ("x", "y")


def test_states_by_the_names_of_their_hooks() -> None:
    model, ids = tiny("bridge", "gpt2"), tokens(6, 8)
    names = ["blocks.1.hook_resid_pre", "blocks.1.hook_resid_post", 0]
    found = tlg.decompose(model, ids, states=names, progress=False)
    assert found.states == (1, 2, 0)
    assert torch.equal(found.pos, tlg.decompose(model, ids, states=[1, 2, 0], progress=False).pos)
    _, cache = model.run_with_cache(ids)
    assert tlg.decompose_activations(cache, states=["blocks.0.hook_resid_post"]).states == (1,)
    encoder = (
        "blocks.0.hook_resid_pre",
        "blocks.1.hook_resid_pre",
        "blocks.1.hook_normalized_resid_post",
    )
    assert sources.state_indices(["blocks.0.hook_normalized_resid_post"], 3, encoder) == (1,)
    for bad, hooks in (
        ("blocks.0.hook_resid_post", encoder),
        ("resid_pre", ()),
        ("blocks.7.hook_resid_pre", ()),
        ("blocks.0.hook_z", ()),
    ):
        with pytest.raises(
            GeometryError,
            match=r"states: expected a number from 0 to 2 or a hook such as "
            r'"blocks\.1\.hook_resid_pre", got',
        ):
            sources.state_indices([bad], 3, hooks)


IDS = torch.arange(3, 15).view(2, 6)
H = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tokens": IDS.bool()}, "tokens: expected integer ids, got bool tensor"),
        ({"tokens": IDS.to("meta")}, "tokens: expected integer ids, got meta int64 tensor"),
        ({"tokens": IDS.float()}, "tokens: expected integer ids"),
        ({"tokens": IDS.to(torch.complex64)}, "tokens: expected integer ids"),
        ({"tokens": np.array([["a", "b"]])}, "tokens: expected integer ids"),
        ({"tokens": IDS[0]}, r"tokens: expected integer ids \[context position\]"),
        ({"tokens": []}, "tokens: expected"),
        ({"tokens": [[]]}, "tokens: expected"),
        ({"tokens": IDS[:0]}, "at least one context"),
        ({"tokens": IDS[:, :0]}, "at least one context"),
        ({"tokens": 5}, "tokens: expected ids, windows or texts, got 5"),
        ({"tokens": iter([1, 2])}, r"tokens: expected rows \[position\] or batches"),
        ({"tokens": iter(["a", "b"])}, "tokens: expected integer ids"),
        ({"tokens": iter([IDS, IDS[None]])}, "tokens: expected 6 positions"),
        (
            {
                "tokens": torch.utils.data.DataLoader(
                    torch.utils.data.TensorDataset(IDS, IDS), batch_size=2
                )
            },
            "tokens: expected rows",
        ),
        ({"tokens": {"a": 1}}, "dataset: expected a column named 'tokens'"),
        ({"batch_size": 0}, "batch_size: expected a whole number, at least 1, got 0"),
        ({"groups": 0}, "groups: expected at least 1, got 0"),
        ({"keep": -1}, "keep: expected at least 0, got -1"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
        ({"device": "nonsense"}, "device: expected a device of this machine, got 'nonsense'"),
        ({"window": (1.5, 4)}, r"window: expected whole numbers \(start, end\), got \(1\.5, 4\)"),
        ({"window": (1, 2, 3)}, r"window: expected \(start, end\)"),
        ({"window": (float("nan"), 4)}, r"window: expected \(start, end\)"),
        ({"window": (1, 9)}, "window: expected 0 <= start < end <= 6"),
        (
            {"labels": [0]},
            r"labels: expected one integer label \(0 or more\) for each of 2 contexts",
        ),
        ({"labels": [0, -1]}, "labels: expected one integer label"),
        ({"labels": [0.5, 1.0]}, "labels: expected one integer label"),
        ({"labels": ["a", "b", "c"]}, "labels: expected one integer label"),
        ({"labels": object()}, "labels: expected one integer label"),
        (
            {"labels": [0, 1], "tokens": iter(IDS)},
            "labels: expected none with an iterable of unknown length",
        ),
        ({"states": []}, "states: expected at least one index"),
        ({"states": [0, 0]}, "states: expected each index once"),
        (
            {"states": ["blocks.9.hook_resid_pre"]},
            "states: expected a number from 0 to 2 or a hook",
        ),
        ({"prepend_bos": True}, "prepend_bos: expected None with token ids"),
        ({"second_moments": "yes"}, "second moments: expected True, False or"),
        ({"checkpoint": "/"}, "checkpoint: expected a file that can be written, got /"),
    ],
)
def test_bad_arguments_of_decompose_are_refused(options: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"tokens": IDS, "progress": False} | options
    with pytest.raises(GeometryError, match=text):
        tlg.decompose(tiny("bridge", "gpt2"), given.pop("tokens"), **given)


@pytest.mark.parametrize(
    ("source", "options", "text"),
    [
        (H.to("meta"), {}, "activations: expected floating .* got meta float32 tensor"),
        (H.to(torch.complex64), {}, "activations: expected floating"),
        (H.to_sparse(), {}, "activations: expected floating"),
        (H[:0], {}, "activations: expected floating"),
        (H[0], {}, "activations: expected floating"),
        (IDS, {}, r"Use decompose\(model, tokens\) for token ids"),
        ("text", {}, "activations: expected a tensor or an ActivationCache, got 'text'"),
        ({"a": H}, {}, "activations: expected a tensor or an ActivationCache"),
        (
            H,
            {"labels": [0, 1]},
            r"labels: expected one integer label \(0 or more\) for each of 4 contexts",
        ),
        (H, {"window": (0, 6)}, "window: expected 0 <= start < end <= 5"),
        (H, {"batch_size": 0}, "batch_size: expected a whole number"),
        (H, {"keep": -3}, "keep: expected at least 0"),
        (H, {"states": [1]}, "states: expected an index from 0 to 0"),
        (H * torch.nan, {}, "activations: expected finite numbers"),
    ],
)
def test_bad_arguments_of_decompose_activations_are_refused(
    source: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(GeometryError, match=text):
        tlg.decompose_activations(source, **options)


def test_two_functions_for_models_and_for_activations() -> None:
    model, ids = tiny("bridge", "gpt2"), tokens(6, 8)
    _, cache = model.run_with_cache(ids)
    _, plain = model.run_with_cache(ids, return_cache_object=False)
    for given in (H, cache, plain):
        with pytest.raises(
            GeometryError,
            match=r"model: expected a TransformerLens model, got .* "
            r"Use decompose_activations\(\.\.\.\)",
        ):
            tlg.decompose(given, progress=False)  # type: ignore[arg-type]
    streamed = tlg.decompose(model, ids, progress=False).pos
    rounding = 32 * 2**-24 * float(cache["blocks.1.hook_resid_post"].abs().max())  # of two passes
    for source in (cache, plain):
        kept = tlg.decompose_activations(source, window=(1, 8)).pos
        torch.testing.assert_close(kept, streamed, rtol=0, atol=rounding)
        assert (kept[:-1] - streamed[1:]).abs().max() > 1e3 * rounding
    learned = H.clone().requires_grad_()
    window: Any = (1.0, np.int64(4))
    basis = tlg.decompose_activations(learned, window=window, device="cpu", states=[0])
    assert basis.window == (1, 4)
    assert not basis.pos.requires_grad
    assert tlg.decompose(model, ids, window=(1.0, 8.0), progress=False).window == (1, 8)
    for bad in (3, ("a", "b"), (True, 4), object()):
        with pytest.raises(GeometryError, match="window: expected"):
            checks.window(bad, 8, 1)
    with pytest.raises(TypeError, match="checkpoint"):
        tlg.decompose_activations(H, checkpoint="x")  # type: ignore[call-arg]
