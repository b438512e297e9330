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
from tl_geometry.base.errors import GeometryError

pytestmark = pytest.mark.once

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


@pytest.mark.slow
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
