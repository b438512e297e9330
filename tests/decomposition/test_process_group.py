"""What processes tell each other, one step at a time: a second process is what a first one
recorded, and ``torch.distributed`` a stand-in that shows what is asked of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Provenance, row_hashes
from tl_geometry.decomposition import process_group, processes
from tl_geometry.decomposition.accumulator import Accumulation, Plan
from tl_geometry.decomposition.processes import Processes, launched

STATES, LENGTH, D = 2, 6, 3


class Recording(Processes):
    """One of two processes: it records what it gives to sums and copies, and takes what the
    ``other`` one gave."""

    def __init__(self, rank: int, other: Recording | None = None) -> None:
        super().__init__(None)
        self.rank, self.size, self.other = rank, 2, other
        self.totals: list[Tensor] = []
        self.shared: list[Tensor] = []
        self.texts: list[str] = []

    def total(self, tensor: Tensor) -> None:
        self.totals.append(tensor.clone())
        if self.other is not None:
            tensor += self.other.totals[len(self.totals) - 1]

    def share(self, tensor: Tensor) -> None:
        self.shared.append(tensor.clone())
        if self.other is not None:
            tensor.copy_(self.other.shared[len(self.shared) - 1])

    def share_text(self, text: str) -> str:
        self.texts.append(text)
        return text if self.other is None else self.other.texts[len(self.texts) - 1]


def corpus(contexts: int = 8) -> tuple[Tensor, Tensor]:
    """Token ids and states, far from zero in one coordinate."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(STATES, contexts, LENGTH, D, generator=generator, dtype=torch.float64)
    h[..., 1] += 100
    return torch.randint(3, 90, (contexts, LENGTH), generator=generator), h


def begun(contexts: int | None = 8, **plan: Any) -> Accumulation:
    settings: dict[str, Any] = {"groups": 2, "keep": 5, "moments_dtype": torch.float64} | plan
    return Accumulation(
        Plan(states=(0, 3), window=(1, LENGTH), **settings),
        Provenance(),
        length=LENGTH,
        d_model=D,
        contexts=contexts,
        device="cpu",
    )


def take(work: Accumulation, ids: Tensor, h: Tensor) -> None:
    def feed(contexts: slice, on_state: Callable[[int, Tensor], None]) -> None:
        for row in range(STATES):
            on_state(row, h[row, contexts])

    work.update(row_hashes(ids), feed, ids, 0)


def two(contexts: int | None = 8, **plan: Any) -> tuple[Accumulation, Accumulation, Accumulation]:
    """Two accumulations that took in three and five of eight contexts, and one of all."""
    ids, h = corpus()
    whole, first, second = (begun(contexts, **plan) for _ in range(3))
    for part in (slice(0, 3), slice(3, 8)):
        take(whole, ids[part], h[:, part])
    take(first, ids[:3], h[:, :3])
    second.skip(ids[:3], 0)
    there = Recording(0)
    process_group.share_shift(first, there)
    process_group.share_shift(second, Recording(1, there))
    first.skip(ids[3:], 0)
    take(second, ids[3:], h[:, 3:])
    return first, second, whole


def everything(work: Accumulation) -> dict[str, Tensor]:
    sums = {f"moments {n}": v for n, v in work.moments.tensors().items()}
    sums |= {f"largest {n}": v for n, v in work.largest.tensors().items()}
    sums |= {f"reservoir {n}": v for n, v in work.reservoir.filled().tensors().items()}
    return sums | ({"means": torch.cat(work.means, dim=1)} if work.means else {})


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name].double(), value.double(), rtol=1e-10), name


# ---- accumulations


@pytest.mark.parametrize("plan", [{}, {"keep_ctx": False}, {"second_moments": False}, {"keep": 0}])
def test_two_processes_have_the_sums_of_one_together(plan: dict[str, Any]) -> None:
    """Sums, products, histograms, context means, samples in their order and largest tokens."""
    first, second, whole = two(**plan)
    process_group.combine(second, there := Recording(1))
    process_group.combine(first, Recording(0, there))
    process_group.combine(whole, Processes(None))
    assert_equal(everything(first), everything(whole))
    assert first.moments.contexts == 8
    assert (first.done, first.token_hash) == (8, whole.token_hash)


def test_a_process_alone_adds_nothing() -> None:
    """All stays as it was, but that samples are in order and means in one piece."""
    *_, whole = two()
    whole.settle()
    before = {name: value.clone() for name, value in everything(whole).items()}
    process_group.combine(whole, Processes(None))
    after = everything(whole)
    assert len(whole.means) == 1
    order = before["reservoir priorities"].argsort()
    for name, value in before.items():
        expected = value[order] if name.startswith("reservoir") else value
        assert torch.equal(after[name], expected), name


def test_a_cleared_process_keeps_what_it_must_know() -> None:
    """The shift, the number and hashes of the contexts, and which are sampled; what is summed is
    zero or empty, and adding it changes nothing."""
    _, second, whole = two()
    second.settle()
    known = {name: value.clone() for name, value in everything(second).items()}
    process_group.clear(second)
    for name, value in everything(second).items():
        if name in ("moments shift", "reservoir priorities", "reservoir contexts"):
            assert torch.equal(value, known[name]), name
        elif name.startswith("largest"):
            assert bool((value == -1).all()), name
        elif name != "reservoir tokens":
            assert not value.any(), name
    assert second.means[0].shape == (STATES, 8, D)
    assert (second.done, len(torch.cat(second.hashes))) == (8, 8)
    # the first now has the sums of both, and adds nothing of the second again
    process_group.combine(second, there := Recording(1))
    before = {name: value.clone() for name, value in everything(whole).items()}
    whole.settle()
    process_group.combine(whole, Recording(0, there))
    assert torch.equal(whole.moments.sums, before["moments sums"])
    assert torch.equal(whole.largest.norm, before["largest norm"])


@pytest.mark.parametrize("contexts", [8, None])
def test_all_go_on_from_where_the_first_one_is(contexts: int | None) -> None:
    """The others get its numbers, hashes, flags, shift and samples, and zeros for its sums."""
    ids, h = corpus()
    first, other = begun(contexts), begun(contexts)
    take(first, ids, h)
    first.settle()
    first.provenance = first.provenance.flagged("a flag")
    first.has_bos = True
    sums = {name: value.clone() for name, value in everything(first).items()}
    process_group.share(first, there := Recording(0))
    assert_equal(everything(first), sums)
    process_group.share(other, Recording(1, there))
    for name in ("done", "token_hash", "has_bos", "keep_ctx", "block"):
        assert getattr(other, name) == getattr(first, name), name
    assert other.has_bos is True
    assert other.provenance.flags[-1] == "a flag"
    assert torch.equal(torch.cat(other.hashes), row_hashes(ids))
    for name, value in everything(other).items():
        if name in ("moments shift", "reservoir priorities", "reservoir contexts"):
            assert torch.equal(value, sums[name]), name
        if name == "reservoir tokens":
            assert torch.equal(value, sums[name])
    assert not other.reservoir.states.any()
    assert not other.moments.sums.any()
    assert other.moments.fixed == {0, 1}
    assert [m.shape for m in other.means] == [(STATES, 8, D)]
    assert len(other.moments.counts) == len(first.moments.counts)


def test_without_context_means_none_are_shared() -> None:
    """The first one's choice holds for all."""
    ids, h = corpus()
    first, other = begun(keep_ctx=False), begun()
    take(first, ids, h)
    first.settle()
    process_group.share(first, there := Recording(0))
    process_group.share(other, Recording(1, there))
    assert other.keep_ctx is False
    assert other.means == []


def test_without_a_checkpoint_nothing_is_shared() -> None:
    """Nor where there is one process."""
    first, other = begun(), begun()
    process_group.share(first, there := Recording(0))
    process_group.share(other, again := Recording(1, there))
    assert there.shared == again.shared == []
    assert len(there.texts) == 1
    alone = Recording(0)
    alone.size = 1
    process_group.share(first, alone)
    process_group.share_shift(first, alone)
    assert alone.texts == alone.shared == []


# ---- torch.distributed


class Distributed:
    """A stand-in for ``torch.distributed``: process ``rank`` of two, of which the first is number 5
    of all; sums are multiplied by ten, and copies come from ``sent``."""

    def __init__(self, patch: pytest.MonkeyPatch, rank: int, backend: str = "gloo") -> None:
        self.sent: list[Tensor] = []
        self.sizes: list[int] = []
        self.sources: list[int] = []
        answers: dict[str, Any] = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "get_rank": lambda group: rank,
            "get_world_size": lambda group: 2,
            "get_backend": lambda group: backend,
            "get_global_rank": lambda group, at: 5 + at,
            "all_reduce": self.all_reduce,
            "broadcast": self.broadcast,
        }
        for name, answer in answers.items():
            patch.setattr(torch.distributed, name, answer)

    def all_reduce(self, part: Tensor, group: str) -> None:
        assert group == "group"
        self.sizes.append(part.numel())
        part *= 10

    def broadcast(self, part: Tensor, src: int, group: str) -> None:
        assert group == "group"
        self.sources.append(src)
        self.sizes.append(part.numel())
        if self.sent:
            part.copy_(self.sent.pop(0))


def test_tensors_are_exchanged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number once, in place, in pieces of a bounded size; copies come from the group's first
    process, by its number among all."""
    fake = Distributed(monkeypatch, rank=1)
    monkeypatch.setattr(processes, "PIECE", 4)
    of_two = Processes("group")
    assert (of_two.rank, of_two.size, of_two.device.type) == (1, 2, "cpu")
    assert [of_two.takes(batch) for batch in range(4)] == [False, True, False, True]
    tensor = torch.arange(6.0).view(2, 3)
    of_two.total(tensor)
    assert tensor.tolist() == [[0, 10, 20], [30, 40, 50]]
    fake.sent = [torch.full((4,), 7.0), torch.full((2,), 8.0)]
    of_two.share(tensor)
    assert tensor.tolist() == [[7, 7, 7], [7, 8, 8]]
    assert fake.sizes == [4, 2, 4, 2]
    assert fake.sources == [5, 5]
    alone = Processes(None)
    alone.total(tensor)
    alone.share(tensor)
    assert tensor.tolist() == [[7, 7, 7], [7, 8, 8]]


def test_a_piece_is_a_quarter_of_a_gibibyte() -> None:
    """Of float64 numbers, as its documentation says."""
    assert processes.PIECE * 8 == 256 * 2**20


@pytest.mark.parametrize("text", ["", "a", "été 🧠"])
def test_texts_of_the_first_process_reach_the_others(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they are in bytes, also none, and whatever the other has."""
    data = text.encode()
    Distributed(monkeypatch, rank=0)
    assert Processes("group").share_text(text) == text
    fake = Distributed(monkeypatch, rank=1)
    fake.sent = [torch.tensor([len(data)]), torch.tensor(list(data), dtype=torch.uint8)]
    assert Processes("group").share_text("another") == text


def test_a_group_must_be_ready_and_hold_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parts of being ready are asked, and the process's own number."""
    expected = "group: expected an initialised process group, got group. Use "
    for name in ("is_available", "is_initialized"):
        Distributed(monkeypatch, rank=0)
        monkeypatch.setattr(torch.distributed, name, lambda: False)
        with pytest.raises(GeometryError) as error:
            Processes("group")
        assert str(error.value) == f"{expected}torch.distributed.init_process_group()."
    Distributed(monkeypatch, rank=-1)
    with pytest.raises(GeometryError) as error:
        Processes("group")
    assert str(error.value) == (
        "group: expected a group that this process belongs to, got one without this process."
    )
    Distributed(monkeypatch, rank=0)
    assert Processes("group").rank == 0


def test_tensors_go_to_the_gpu_of_the_process_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """And stay on the CPU for any other backend."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for backend, device in (("nccl", "cuda:3"), ("gloo", "cpu"), ("mpi", "cpu")):
        Distributed(monkeypatch, rank=0, backend=backend)
        assert Processes("group").device == torch.device(device)


class Pair(Recording):
    """A process whose other one reports this many failures, or has this text."""

    def __init__(self, rank: int, failed: int = 0, text: str | None = None) -> None:
        super().__init__(rank)
        self.failed, self.text = failed, text

    def total(self, tensor: Tensor) -> None:
        tensor += self.failed

    def share_text(self, text: str) -> str:
        return text if self.text is None else self.text


def test_what_differs_between_processes_is_counted() -> None:
    """Here, there, or in neither; a process alone agrees with itself."""
    Pair(1, text="a").agree("a", "tokens")
    Processes(None).agree("a", "tokens")
    for pair, count in (
        (Pair(1, text="b"), 1),
        (Pair(1, failed=1, text="a"), 1),
        (Pair(1, 1, "b"), 2),
    ):
        with pytest.raises(GeometryError) as error:
            pair.agree("a", "tokens")
        got = f"another in {count} of 2"
        assert str(error.value) == f"tokens: expected the same in every process, got {got}."


def test_a_refusal_in_one_process_is_raised_in_all() -> None:
    """With the words of this process, else those of the first, else how many refused; what is no
    refusal is raised as it is."""

    def refuse() -> None:
        raise GeometryError("mine")

    def break_down() -> None:
        raise RuntimeError("broken")

    done: list[int] = []
    cases = (
        (Pair(0, text="theirs"), refuse, "mine"),
        (Pair(1, failed=1, text="theirs"), lambda: None, "theirs"),
        (Pair(1, failed=1, text=""), lambda: None, "refused in 1 of 2"),
        (Processes(None), refuse, "mine"),
    )
    for pair, action, text in cases:
        with pytest.raises(GeometryError) as error:
            pair.each(action)
        assert str(error.value) == text
    with pytest.raises(RuntimeError, match="broken"):
        Pair(0).each(break_down)
    for pair in (Pair(0), Pair(1), Processes(None)):
        pair.each(lambda p=pair: done.append(p.rank))
    assert done == [0, 1, 0]
    done.clear()
    for pair in (Pair(0), Pair(1), Processes(None)):
        pair.first(lambda p=pair: done.append(p.size))
    assert done == [2, 1]


# ---- torchrun


NAMES = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


@dataclasses.dataclass
class Launch:
    """What a stand-in for ``torch.distributed`` was asked to begin and to end."""

    begun: list[str]
    ended: int
    devices: list[str]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Launch:
    seen = Launch([], 0, [])

    def end() -> None:
        seen.ended += 1

    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.distributed, "init_process_group", seen.begun.append)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", end)
    monkeypatch.setattr(torch.cuda, "set_device", seen.devices.append)
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD="world"))
    return seen


def test_a_process_alone_joins_no_group(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``torchrun``, or as its only process; it speaks."""
    for size in (None, "1", "01"):
        if size is not None:
            monkeypatch.setenv("WORLD_SIZE", size)
        with launched("cuda") as joined:
            assert joined == (None, "cuda", True)
    assert launch == Launch([], 0, [])


@pytest.mark.parametrize("size", ["", "two", "0", "-1", "1.5"])
def test_a_number_of_processes_is_a_whole_number(
    size: str, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least one."""
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(GeometryError) as error, launched("cpu"):
        pass
    expected = "WORLD_SIZE: expected a number of processes"
    assert str(error.value) == f"{expected}, got {size!r}. Use torchrun."


def test_what_torchrun_sets_is_needed(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is named, empty values too."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "")
    with pytest.raises(GeometryError) as error, launched("cpu"):
        pass
    assert str(error.value) == (
        "WORLD_SIZE=2: expected the environment that torchrun makes, got no RANK, MASTER_PORT. "
        "Use torchrun, or unset WORLD_SIZE for one process."
    )
    assert launch.begun == []


@pytest.mark.parametrize(
    ("device", "local", "joined", "backend"),
    [
        ("cpu", "1", "cpu", "gloo"),
        ("cuda", "1", "cuda:1", "nccl"),
        ("cuda", None, "cuda:0", "nccl"),
        ("cuda:2", "1", "cuda:2", "nccl"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_processes_of_torchrun_join_one_group(
    device: str,
    local: str | None,
    joined: str,
    backend: str,
    rank: int,
    launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On their own GPU or on the CPU; the first speaks, and the group ends with an error too."""
    values = {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in (values | ({} if local is None else {"LOCAL_RANK": local})).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    with launched(device) as found:
        assert found == ("world", joined, rank == 0)
        assert launch.ended == 0
    with pytest.raises(RuntimeError, match="inside"), launched(device):
        raise RuntimeError("inside")
    assert launch.begun == [backend] * 2
    assert launch.ended == 2
    assert launch.devices == ([joined] * 2 if device == "cuda" else [])
