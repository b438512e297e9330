"""Tokens, heads and windows in the forms that users have them: taken, or refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tl_geometry as tlg
from tests.tiny import KIND
from tl_geometry.base import checks
from tl_geometry.base.errors import GeometryError
from tl_geometry.zoo.inputs import Inputs, check_device


@pytest.fixture(scope="module")
def model() -> Any:
    return tlg.zoo.embedded()


@pytest.fixture(scope="module")
def windows(model: Any) -> tlg.TokenWindows:
    return tlg.zoo.default_windows(model, 12, n=8)


@pytest.mark.parametrize(
    "given",
    [
        "L1H0",
        "1.0",
        "l1h0",
        "L1.H0",
        (1, 0),
        [1, 0],
        [[1, 0]],
        [(np.int64(1), np.int64(0))],
        np.array([[1, 0]]),
        ["1.0"],
    ],
)
def test_heads_in_every_spelling(given: Any) -> None:
    assert checks.heads(given, 2, 2) == ((1, 0),)


def test_heads_that_are_none_are_refused() -> None:
    for given in ("10", "head 1", "L1", "L1H0H0", 5, [(1,)], [1.5, 0.5]):
        with pytest.raises(
            GeometryError,
            match=r'heads: expected \(layer, head\) pairs or "L5H1", got .*\. Use \(5, 1\) '
            'or "L5H1"',
        ):
            checks.heads(given, 2, 2)
    with pytest.raises(
        GeometryError, match=r"layer of head '2\.0': expected an index from 0 to 1, got 2"
    ):
        checks.heads("2.0", 2, 2)


def test_indices_of_any_integer_type() -> None:
    rows = torch.tensor([[1, 1], [0, 1]])
    assert checks.heads(rows, 2, 2) == checks.heads(rows.numpy(), 2, 2) == ((1, 1), (0, 1))
    for value in (1, np.int64(1), torch.tensor(1)):
        assert checks.indices(value, 2, "layers") == (1,)
    for bad in (1.5, torch.tensor(1.5), True, torch.tensor(True), np.bool_(True), "1", None, 2, -1):
        with pytest.raises(GeometryError, match="layer: expected an index from 0 to 1"):
            checks.index(bad, 2, "layer")
    with pytest.raises(GeometryError, match="each index once"):
        checks.indices(torch.tensor([0, 0]), 2, "layers")


def test_windows_are_rows_with_their_texts(model: Any, windows: tlg.TokenWindows) -> None:
    assert windows[:2].str_tokens == windows.str_tokens
    one = windows[3]
    assert torch.equal(one.tokens, windows.tokens[3:4])
    assert one.str_tokens == ()
    assert len(list(windows)) == len(windows)  # pyright: ignore[reportArgumentType]
    basis = tlg.decompose(model, windows, progress=False)
    split = tlg.split_scores(model, windows[3:5], basis, heads="L1H0")
    assert (
        split.str_tokens
        == tuple(tlg.view(model).decode(windows.tokens[3].tolist()))
        != windows.str_tokens
    )
    assert torch.equal(split.terms["pos-cvec"], split.terms["pos", "cvec"])
    assert "pos-cvec" in split.terms
    assert "pos-nothing" not in split.terms


def test_a_cache_of_other_tokens_is_refused(model: Any, windows: tlg.TokenWindows) -> None:
    basis = tlg.decompose(model, windows, progress=False)
    _, cache = model.run_with_cache(windows.tokens[:2])
    own = tlg.split_scores(model, windows[:2], basis, heads="L1H0", cache=cache)
    torch.testing.assert_close(
        own.total(), tlg.split_scores(model, windows[:2], basis, heads="L1H0").total()
    )
    other = windows.tokens[:2].clone()
    other[1, 5] += 1
    with pytest.raises(
        GeometryError,
        match=r"cache: expected activations of these tokens, got others at 1 tokens\. Use "
        "cache=None",
    ):
        tlg.split_scores(model, other, basis, heads="L1H0", cache=cache)


def test_items_of_data_sets_and_what_is_none(model: Any, windows: tlg.TokenWindows) -> None:
    whole = tlg.decompose(model, windows.tokens, progress=False)
    rows: Any = [{"input_ids": row} for row in windows.tokens]
    loader = torch.utils.data.DataLoader(rows, batch_size=3)
    torch.testing.assert_close(tlg.decompose(model, loader, progress=False).pos, whole.pos)
    with pytest.raises(
        GeometryError,
        match=r"dataset: expected a column named 'tokens' or 'input_ids', got columns \['text'\]",
    ):
        tlg.decompose(model, [{"text": "a"}], progress=False)
    _, cache = model.run_with_cache(windows.tokens[:2])
    for given in (cache, cache.cache_dict):
        with pytest.raises(
            GeometryError,
            match=r"tokens: expected ids, windows or texts, got .*\. Use "
            r"decompose_activations\(cache\)",
        ):
            tlg.decompose(model, given, progress=False)
        with pytest.raises(GeometryError, match=r"tokens: expected ids, windows or texts, got "):
            tlg.split_scores(model, given, whole)
    encoded = model.tokenizer(["def f", "def g"], return_tensors="pt")
    found = tlg.decompose(model, encoded, window=(0, 2), progress=False)
    torch.testing.assert_close(
        found.pos, tlg.decompose(model, encoded["input_ids"], window=(0, 2), progress=False).pos
    )


def test_a_corpus_that_is_no_text_is_refused(windows: tlg.TokenWindows, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", windows.tokens.numpy())
    (tmp_path / "binary.txt").write_bytes(b"abc\0def" * 200)
    for name in ("tokens.npy", "binary.txt"):
        with pytest.raises(
            GeometryError, match=rf"--corpus: expected text files, got {name}\. Use tl-geometry fit"
        ):
            Inputs(corpus=(tmp_path / name,)).texts()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "code.txt"
    path.write_text("".join(f"def f{i}(x):\n    return x * {i}\n\n" for i in range(120)))
    return path


def test_models_are_loaded_as_the_options_say() -> None:
    plain = Inputs().load()
    assert tlg.view(plain).name == "tl-geometry-embedded"
    assert tlg.view(plain).dtype == torch.float32
    assert not tlg.view(plain).processed
    kind, class_name = KIND
    control = Inputs(dtype="float64", processed=True, model_class=kind).load(trained=False)
    found = tlg.view(control)
    assert found.name == "tl-geometry-embedded-untrained"
    assert (found.dtype, found.processed) == (torch.float64, True)
    assert found.class_name == class_name
    named = tlg.view(Inputs(model=str(tlg.zoo.directory()), dtype="float64").load())
    assert named.dtype == torch.float64
    assert Inputs().load(device="meta").W_E.device.type == "meta"


def test_windows_are_as_many_and_as_long_as_asked_for(model: Any, text: Path) -> None:
    """By default of the model's length, at most 512, with BOS where the tokenizer has one."""
    view, inputs = tlg.view(model), Inputs(corpus=(text,))
    everything = inputs.windows(view, inputs.texts())
    assert everything.tokens.shape[1] == view.n_ctx == 128
    assert everything.has_bos
    assert everything.corpus == "code.txt"
    long = dataclasses.replace(view, n_ctx=1024)
    assert inputs.windows(long, inputs.texts()).tokens.shape[1] == 512
    assert inputs.windows(view, inputs.texts(), 16).tokens.shape[1] == 16
    some = dataclasses.replace(inputs, length=16)
    count = len(some.windows(view, some.texts()))
    for contexts, most, wanted in (
        (3, None, 3),
        (3, 5, 3),
        (None, 5, 5),
        (None, 10 * count, count),
        (count, None, count),
    ):
        asked = dataclasses.replace(some, contexts=contexts)
        assert len(asked.windows(view, asked.texts(), most=most)) == wanted
    too_many = dataclasses.replace(some, contexts=count + 1)
    with pytest.raises(GeometryError, match=f"--contexts: expected at most {count} windows of 16"):
        too_many.tokens(model)
    seeds = [dataclasses.replace(some, contexts=5, seed=seed).tokens(model) for seed in (0, 1)]
    assert not torch.equal(seeds[0].tokens, seeds[1].tokens)  # pyright: ignore
    bare = dataclasses.replace(view, bos_id=None)
    assert not inputs.windows(bare, inputs.texts()).has_bos
    without = dataclasses.replace(inputs, bos=False)
    assert not without.windows(view, without.texts()).has_bos


def test_a_file_of_ids_is_cut_to_the_contexts_asked_for(
    model: Any, windows: tlg.TokenWindows, tmp_path: Path
) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, windows.tokens.numpy())
    for contexts, wanted in ((None, 8), (3, 3), (8, 8)):
        found = Inputs(corpus=(path,), contexts=contexts).tokens(model)
        assert np.array_equal(np.asarray(found), windows.tokens[:wanted].numpy())
    with pytest.raises(GeometryError, match="--contexts: expected at most 8, the rows of the file"):
        Inputs(corpus=(path,), contexts=9).tokens(model)
    Inputs(corpus=(path,)).check_corpus(ids=True)
    for options in ({}, {"ids": False}):
        with pytest.raises(GeometryError, match="--corpus: expected text files"):
            Inputs(corpus=(path,)).check_corpus(**options)
    for given, says in (
        (Inputs(corpus=(path,), field="a", pack=True), "--field --pack: expected text files"),
        (Inputs(corpus=(path,), bos=False), "--length, --bos: expected none with a token file"),
        (Inputs(corpus=(path, path)), "--corpus: expected one existing .npy file"),
    ):
        with pytest.raises(GeometryError, match=says):
            given.check_corpus(ids=True)


def test_only_devices_that_are_there_are_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, available in ((0, True), (2, False), (2, True)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)  # noqa: B023
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)  # noqa: B023
        there = count if available else 0
        if not there:
            with pytest.raises(GeometryError, match="cuda, got 0 CUDA devices"):
                check_device("cuda")
        for number, name in enumerate(("cuda:0", "cuda:1", "cuda:2")):
            if number < there:
                check_device(name)
                check_device("cuda")
                continue
            with pytest.raises(GeometryError, match=f"{name}, got {there} CUDA devices"):
                check_device(name)
    for mps in (True, False):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)  # noqa: B023
        if mps:
            check_device("mps")
        else:
            with pytest.raises(GeometryError, match="a machine with MPS, got none"):
                check_device("mps")
