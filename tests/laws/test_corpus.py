"""Laws of ``tl_geometry.corpus``: windows are those of a slow loop, tokens come in as they are
meant or are refused, prompts of any length keep their answers and positions, and nulls keep what
they say."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tl_geometry as tlg
from tests.lib.data import refused
from tests.lib.models import VOCAB, tiny
from tl_geometry.corpus import TokenWindows, prompts, repeated_random_tokens, splice
from tl_geometry.corpus.sources import as_tokens

pytestmark = pytest.mark.once

BOS, EOS, PAD, UNKNOWN = range(4)
"""Special tokens of the tiny tokenizer; its words are ``w4`` to ``w60``."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("bridge", "gpt2", text=True)


@pytest.fixture(scope="module")
def embedded() -> Any:
    return tlg.zoo.embedded()


def text(ids: list[int]) -> str:
    """A text of the tiny tokenizer."""
    names = {BOS: "<bos>", EOS: "<eos>", PAD: "<pad>"}
    return " ".join(names.get(i, f"w{i}") for i in ids)


WORDS = st.lists(st.integers(4, VOCAB - 1), max_size=40)


def cut_slowly(
    documents: list[list[int]], length: int, bos: bool
) -> tuple[list[list[int]], list[int]]:
    """Windows and their documents, token by token."""
    rows, owners = [], []
    for owner, ids in enumerate(documents):
        window: list[int] = []
        for token in ids:
            window.append(token)
            if len(window) == length - bos:
                rows.append([BOS] * bos + window)
                owners.append(owner)
                window = []
    return rows, owners


@given(
    documents=st.lists(WORDS, min_size=1, max_size=6), length=st.integers(2, 9), bos=st.booleans()
)
def test_windows_are_those_of_a_slow_loop(
    documents: list[list[int]], length: int, bos: bool
) -> None:
    model = tiny("bridge", "gpt2", text=True)
    rows, owners = cut_slowly(documents, length, bos)
    call = lambda **o: tlg.windows(
        model, [text(ids) for ids in documents], length, prepend_bos=bos, **o
    )
    if not rows:
        assert refused(call).what == "texts"
        return
    found = call()
    assert found.tokens.tolist() == rows
    assert found.labels is not None
    assert found.labels.tolist() == owners
    assert found.has_bos is bos
    named = call(labels=[f"d{i % 2}" for i in range(len(documents))])
    assert named.labels is not None
    assert [named.label_names[i] for i in named.labels] == [f"d{i % 2}" for i in owners]


@given(seed=st.integers(0, 99), n=st.integers(1, 12))
def test_a_choice_of_windows_is_in_order_and_without_repeats(seed: int, n: int) -> None:
    model = tiny("bridge", "gpt2", text=True)
    ids = torch.randint(4, VOCAB, (48,), generator=torch.Generator().manual_seed(seed)).tolist()
    call = lambda **o: tlg.windows(model, text(ids), 4, prepend_bos=False, **o)
    whole, some = call().tokens.tolist(), call(n=n, seed=seed).tokens.tolist()
    places = [whole.index(row) for row in some]
    assert len(some) == n
    assert places == sorted(set(places))
    assert call(n=n, seed=seed).tokens.tolist() == some
    assert refused(lambda: call(n=13)).what == "n"


def test_bos_is_the_models_own_default_and_is_never_doubled(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = list(range(4, 24))
    assert tlg.windows(model, text(body), 5).has_bos
    begun = tlg.windows(model, text([BOS, BOS, *body]), 5, prepend_bos=True)
    assert torch.equal(begun.tokens, tlg.windows(model, text(body), 5, prepend_bos=True).tokens)
    # a window of the text that would begin with BOS is left out, the others stay
    inside = tlg.windows(model, text([*body[:4], BOS, *body[:3], *body[4:8]]), 5, prepend_bos=True)
    assert inside.tokens[:, 1:].tolist() == [body[:4], body[4:8]]
    bare = tlg.windows(model, text([BOS, *body]), 21, prepend_bos=False)
    assert bare.has_bos  # what the rows really begin with
    without = tiny("bridge", "gpt2")
    assert refused(lambda: as_tokens(without, "w4", prepend_bos=True)).what == "prepend_bos"
    monkeypatch.setattr(model.cfg, "default_prepend_bos", False)  # as of Pythia and Qwen
    assert not tlg.windows(model, text(body), 5).has_bos


def test_functions_read_text_as_the_ids_that_it_is(model: Any) -> None:
    """Without BOS, which the model would add by itself (the twin)."""
    ids = torch.randint(4, VOCAB, (2, 12, 7), generator=torch.Generator().manual_seed(0))
    texts = [[text(row) for row in half] for half in ids.tolist()]
    quiet: dict[str, Any] = {"progress": False}
    basis, edits = tlg.decompose(model, ids[0], **quiet), tlg.interventions
    head, pair = {"heads": "L1H0"}, {"circuit": "L1H0", "answer": (5, 9)}
    known = tlg.circuits.dictionary((torch.ones(12, 7, 3), torch.eye(3, 32), torch.zeros(32)), 1)

    def edited(edit: Any) -> Any:
        with edit, torch.no_grad():
            return pd.DataFrame(model(ids[0], return_type="logits")[:, -1])

    calls: tuple[Callable[..., Any], ...] = (
        lambda x, y, **o: tlg.decompose(model, x, **quiet, **o).anova().to_dataframe(),
        lambda x, y, **o: tlg.split_scores(model, x, basis, **head, **o).to_dataframe(),
        lambda x, y, **o: tlg.split_values(model, x, basis, **head, **o).to_dataframe(),
        lambda x, y, **o: tlg.sweep_heads(model, x, basis, **quiet, **o).to_dataframe(),
        lambda x, y, **o: tlg.sweep_heads(model, x, parts="blocks", **quiet, **o).to_dataframe(),
        lambda x, y, **o: tlg.trace_logit(model, x[:1], 5, **o).nodes,
        lambda x, y, **o: tlg.composition(model, x, draws=2, **head, **quiet, **o).to_dataframe(),
        lambda x, y, **o: tlg.circuits.feature_shares(model, x, known, **head, **o).to_dataframe(),
        lambda x, y, **o: tlg.faithfulness(model, x, counterfactual=y, **pair, **o).to_dataframe(),
        lambda x, y, **o: tlg.trajectories(model, x, **quiet, **o).to_dataframe(),
        lambda x, y, **o: tlg.token_paths(model, x, **o).to_dataframe(),
        lambda x, y, **o: edits.effects(model, x, edits.each(model, by="zero"), **o).to_dataframe(),
        lambda x, y, **o: edited(edits.heads(model, "L1H0", reference=x, **o)),
        lambda x, y, **o: edited(edits.edge(model, x, "mlp0", "L1H0", **o)),
    )
    for number, call in enumerate(calls):
        meant = call(*ids)
        assert meant.equals(call(*texts, prepend_bos=False)), number
        with suppress(tlg.GeometryError):
            assert not meant.equals(call(*texts)), number


@pytest.mark.parametrize(
    "encoded",
    [
        lambda s: s.encode(),
        lambda s: b"\xef\xbb\xbf" + s.encode(),
        lambda s: s.replace("\n", "\r\n").encode(),
        lambda s: s.replace("\n", "\r").encode(),
    ],
)
def test_a_file_is_its_text(embedded: Any, tmp_path: Path, encoded: Callable[[str], bytes]) -> None:
    source = tlg.zoo.corpus.held_out_documents().texts[0][:20_000] + "é\n"
    path = tmp_path / "a.txt"
    path.write_bytes(encoded(source))
    of_text = tlg.windows(embedded, [source, source[:900]], 32, n=40)
    of_file = tlg.windows(embedded, [path, source[:900]], 32, n=40)
    assert torch.equal(of_file.tokens, of_text.tokens)
    assert of_file.labels is not None
    assert of_text.labels is not None
    assert torch.equal(of_file.labels, of_text.labels)


def test_windows_of_files_say_their_files(embedded: Any, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    paths = [tmp_path / name for name in ("a.txt", "b/a.txt", "b/c.txt")]
    for i, path in enumerate(paths):
        path.write_text(f"def f{i}(x): return x\n" * 40)
    found = tlg.windows(embedded, paths[1:], 16)
    assert (found.label_names, found.corpus) == (tuple(map(str, paths[1:])), "a.txt, c.txt")
    assert refused(lambda: tlg.windows(embedded, str(paths[0]), 16)).what == "texts"
    assert tlg.windows(embedded, [*paths, "x = 1\n" * 80], 16).label_names == ()
    parts = [tlg.decompose(embedded, tlg.windows(embedded, path, 16)) for path in paths[1:]]
    joined = tlg.PositionContext.merge(parts)
    assert (joined.label_names, joined.provenance.corpus) == (found.label_names, found.corpus)


def large_text(first: int = 0, last: int = 140_000) -> str:
    """Seven million characters, every line another."""
    lines = (
        f"line {i:07d} of café text, {i * 7919 % 1000003} and so on" for i in range(first, last)
    )
    return "\n" * (first > 0) + "\n".join(lines)


def line_of(view: Any, ids: list[int]) -> int:
    """The number of the first whole line in a window."""
    found = re.search(r"line (\d{7})", "".join(view.decode(ids)))
    assert found is not None
    return int(found[1])


def test_a_large_file_is_read_in_pieces(embedded: Any, tmp_path: Path) -> None:
    """Each window is a run of tokens of the whole text; different seeds read different pieces; and
    no more memory is used than a few pieces take (the twin reads the file)."""
    whole, path, view = large_text(), tmp_path / "large.txt", tlg.view(embedded)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(3):
            file.write(whole)
    call = lambda seed: tlg.windows(view, path, 32, n=12, prepend_bos=True, seed=seed)
    tracemalloc.start()
    found = call(0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3e6 < path.stat().st_size / 5
    assert any("pieces" in note for note in found.notes)
    assert torch.equal(found.tokens, call(0).tokens)
    assert not torch.equal(found.tokens, call(1).tokens)
    in_memory = tlg.windows(view, [whole], 32, n=12, prepend_bos=True)
    assert in_memory.notes == found.notes
    lines = [line_of(view, row[1:]) for row in in_memory.tokens.tolist()]
    assert lines == sorted(lines)
    for row in (*found.tokens.tolist(), *in_memory.tokens.tolist()):
        line = line_of(view, row[1:])
        around = view.encode("".join(large_text(max(0, line - 2), line + 3)))
        assert any(around[i : i + 31] == row[1:] for i in range(len(around)))


ROWS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]])


def refilled() -> Iterator[torch.Tensor]:
    """Rows in one buffer that is refilled for each."""
    buffer = torch.empty(4, dtype=torch.int64)
    for row in ROWS:
        buffer.copy_(row)
        yield buffer


def test_ids_are_copied_as_they_come(model: Any) -> None:
    """Whatever their type, also out of a buffer that is filled again."""
    for ids in (refilled(), ROWS.numpy().astype(">i4"), ROWS.tolist(), iter(ROWS.split(2))):
        found = as_tokens(model, ids)
        assert torch.equal(found.tokens, ROWS)
        assert (found.tokens.dtype, found.has_bos, found.flags) == (torch.int64, False, ())
    masked = np.ma.masked_equal(ROWS.numpy(), 6)
    for wrong in (masked, {"input_ids": ROWS}, [ROWS[0], ROWS[1, :2]]):
        assert refused(lambda wrong=wrong: as_tokens(model, wrong)).what == "tokens"


def test_what_is_unusual_about_rows_is_said(model: Any, embedded: Any) -> None:
    behind = torch.cat([torch.zeros(3, 1).long(), ROWS], 1)
    found = as_tokens(model, behind)
    assert found.has_bos
    assert found.flags == ()
    assert not as_tokens(model, torch.cat([behind[:2], torch.roll(behind[2:], 1)])).has_bos
    double = behind.clone()
    double[0, 1] = double[1, 3] = BOS
    assert as_tokens(model, double).flags == ("2 of 3 contexts have BOS after position 0",)
    copies = as_tokens(model, behind[[0, 1, 0, 0, 1]])
    assert copies.flags == ("3 of 5 contexts are copies of others",)
    assert copies[:2].flags == ()  # not of a slice
    assert as_tokens(model, copies[:2]).flags == ()
    stated = TokenWindows(tokens=behind, has_bos=False, notes=("mine",))
    assert as_tokens(model, stated).has_bos
    assert as_tokens(model, stated).flags == ("mine",)
    nameless = tiny("bridge", "gpt2")  # without a tokenizer nothing else is known
    assert as_tokens(nameless, TokenWindows(tokens=ROWS, has_bos=True)).has_bos


@given(data=st.data())
def test_windows_are_chosen_as_tensors_are(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 7))
    tokens = torch.arange(n * 3).view(n, 3)
    rows = TokenWindows(tokens=tokens, has_bos=False, labels=torch.arange(n))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    mask[data.draw(st.integers(0, n - 1))] = True
    numbers = data.draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=9))
    start = data.draw(st.integers(0, n - 1))
    for chosen in (mask, mask.tolist(), numbers, torch.tensor(numbers), slice(start, None)):
        index = chosen if isinstance(chosen, slice) else torch.as_tensor(chosen)
        found = rows[chosen]
        assert torch.equal(found.tokens, tokens[index])
        assert found.labels is not None
        assert torch.equal(found.labels, torch.arange(n)[index])
    assert torch.equal(rows[numbers[0]].tokens, tokens[[numbers[0]]])
    assert [row.tokens.tolist() for row in rows] == [[row] for row in tokens.tolist()]
    tokens[0, 0] = 99  # the windows keep their own
    assert int(rows.tokens[0, 0]) == 0
    assert rows.token_hash != rows[[0] * n].token_hash or n == 1


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=9))
def test_groups_hold_every_prompt_once_with_all_that_belongs_to_it(lengths: list[int]) -> None:
    model = tiny("bridge", "gpt2", text=True)
    rows = [[4 + i + k for k in range(n)] for i, n in enumerate(lengths)]
    changed = [[30 + i + k for k in range(n)] for i, n in enumerate(lengths)]
    found = prompts(
        model,
        rows,
        counterfactuals=changed,
        answers=[(i, 7) for i in range(10, 10 + len(rows))],
        positions={"first": 0, "mine": [n // 2 for n in lengths]},
    )
    seen: list[int] = []
    for group in found.groups():
        assert len(set(map(len, group.tokens.tolist()))) == 1
        assert group.counterfactuals is not None
        assert group.answers is not None
        assert group.others is not None
        for k, i in enumerate(group.rows.tolist()):
            assert group.tokens[k].tolist() == rows[i]
            assert group.counterfactuals[k].tolist() == changed[i]
            assert (int(group.answers[k]), int(group.others[k])) == (10 + i, 7)
            assert int(group.positions["mine"][k]) == int(group.at("mine")[k]) == lengths[i] // 2
            assert int(group.at(-1)[k]) == lengths[i] - 1
        seen += group.rows.tolist()
    assert sorted(seen) == list(range(len(rows)))
    assert [found.lengths[i] for i in seen] == sorted(lengths)
    if len(set(lengths)) > 1:
        assert refused(lambda: found.tokens).instead is not None
        assert refused(lambda: found.counterfactuals).instead is not None
    else:
        assert found.tokens.tolist() == rows
    subset = found[[0, -1]]
    assert subset.rows.tolist() == [0, len(rows) - 1]
    assert subset[1].ids[0].tolist() == rows[-1]


def test_positions_are_found_by_text(embedded: Any) -> None:
    texts = ["def get(x, y): return x", "def f(value, y): return y + 1"]
    found = prompts(
        embedded,
        texts,
        positions={"name": ["get", "def f"], "last": -1, "brace": "):", "back": [-2, 1]},
    )
    view = tlg.view(embedded)
    for i, row in enumerate(found.ids):
        spoken = view.decode(row.tolist())
        assert spoken[int(found.at("name")[i])].strip() == ["get", "f"][i]
        assert spoken[int(found.at("brace")[i])].endswith("):")
        assert int(found.at("last")[i]) == len(row) - 1
    assert found.at("back").tolist() == [len(found.ids[0]) - 2, 1]
    assert refused(lambda: found.at("nothing")).what == "position"
    assert refused(lambda: found.at(50)).what == "position"
    for value in ("absent", "x", "ge"):  # not there, twice, a part of a token
        error = refused(lambda value=value: prompts(embedded, texts[0], positions={"p": value}))
        assert error.what == "position 'p' of prompt 0"


def test_repeated_tokens_are_copies_of_distinct_ones() -> None:
    published = [6775, 4171, 8806, 7365, 8316, 2564, 7432, 3625]
    assert repeated_random_tokens()[0].tolist() == published * 3
    many = repeated_random_tokens(8, 1, 20_000)
    assert (int(many.min()), int(many.max())) == (1000, 9999)
    for low, high in ((10, 266), (3, 11)):  # a wide range, and one that is used up
        rows = repeated_random_tokens(8, 2, 400, low=low, high=high)
        assert torch.equal(rows[:, :8], rows[:, 8:])
        assert bool((rows[:, :8].sort(1).values.diff(dim=1) > 0).all())
        assert set(rows.flatten().tolist()) == set(range(low, high))
    assert repeated_random_tokens(2, 2, 3, bos_id=7)[:, 0].tolist() == [7] * 3
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        assert refused(lambda sizes=sizes: repeated_random_tokens(*sizes))
    assert refused(lambda: repeated_random_tokens(4, low=3, high=6)).what == "low, high"


@given(length=st.sampled_from([5, 12, 33]), bos=st.booleans(), seed=st.integers(0, 9))
def test_spliced_windows_keep_the_tokens_of_every_position(
    length: int, bos: bool, seed: int
) -> None:
    ids = torch.arange(20)[:, None] * 100 + torch.arange(length)
    ids[:, 0] = ids[:, 0] * (not bos)
    windows = TokenWindows(tokens=ids, has_bos=bos, corpus="code", labels=torch.arange(20))
    cut, piece = splice(windows, seed=seed).tokens, max(1, length // 8)
    assert torch.equal(cut.sort(0).values, ids)
    source = cut[:, int(bos) :] // 100
    for start in range(0, length - bos, piece):  # a piece comes from one window
        assert bool((source[:, start : start + piece] == source[:, start : start + 1]).all())
    borders = source[:, 1:] == source[:, :-1]
    joined = [t for t in range(1, length - bos) if t % piece == 0]
    assert all(borders[:, t - 1].float().mean() < 0.5 for t in joined)
    assert splice(windows, seed=seed).labels is None
