"""What the section on heads says, draws and lists, word for word and in order; numbers are the
names of their cells."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.report.test_section_texts import Calls, Told, module_of
from tests.report.test_sizes import Allows, stub
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.interventions import causal
from tl_geometry.report import heads as heads_section

INTRODUCTION = (
    "Attention scores before the softmax are split exactly, with the norm scale of the actual "
    "forward pass frozen: score = sum over pairs of parts {bias, pos, cvec} of query and key. "
    "Shares are covariances with the whole score over allowed keys; they add up to one and can be "
    "negative. 'position' gathers the terms without a context part, 'content' is cvec-cvec, "
    "'mixed' the rest. Gain shares weight a cell by the attention paid to it; they say how much "
    "each term adds to where attention goes. A head is labelled by a group that comes first twice: "
    "by covariance, with more than half of the score, and by gain. Each time it has a margin of "
    "0.1 over the second, whose 95% interval (groups of contexts left out of sweep and basis) "
    "excludes zero. Other heads are 'unclear'; the table still names the first by each."
)
COLUMNS = (
    *("layer", "head", "dominant_group", "group_by_cs", "group_share", "group_by_gs"),
    *("group_gain", "dropped_mass"),
    *("previous", "induction", "duplicate", "cs_position_corrected", "cs_content_corrected"),
    *("cs_mixed_corrected", "cs_position_null", "p_position", "p_position_bh"),
)


@pytest.mark.parametrize(
    ("position", "planes", "resampled"),
    [("rotary", True, True), ("standard", True, False), ("standard", False, True)],
)
def test_the_parts_of_the_section_on_heads(position: str, planes: bool, resampled: bool) -> None:
    """Planes where the model is rotary, and a card where they were asked for in vain."""
    module, draft, of = module_of(heads_section), Told(), stub(position=position)
    of.planes = planes
    sizes = SimpleNamespace(sizes=[[3, 3, 3, 3]]) if resampled else None
    table = SimpleNamespace(resampled=sizes)
    module.findings.TYPES = ("a", "b")
    module._sweep = lambda draft, analysis: table
    for name in ("_maps", "_planes", "_example", "_dominant"):
        setattr(module, name, lambda draft, *given, name=name: draft.say(name))
    module.section(draft, of)
    rotary, groups = position == "rotary", 4 if resampled else 0
    card = ("left out", "rotary planes", "the model has no rotary embedding")
    assert draft.told == [
        INTRODUCTION,
        ("part", "the sweep over all heads"),
        ("part", "maps of shares and head types"),
        "_maps",
        ("find", ("driver", table, ("groups", groups), ("rotary", rotary))),
        ("find", ("head_type", table, "a")),
        ("find", ("head_type", table, "b")),
        *([("part", "rotary planes"), "_planes"] if rotary else [card] if planes else []),
        ("part", "the example on repeated text"),
        "_example",
        ("part", "the model with dominant terms only"),
        "_dominant",
    ]
    module._sweep, draft = lambda draft, analysis: None, Told()
    module.section(draft, of)
    assert draft.told[1:] == [("part", "the sweep over all heads")]


@pytest.mark.parametrize(
    ("null", "said"),
    [
        ([0.1, float("nan"), 0.3, 0.2], "<headsr 2 cs_position_null>"),
        ([-0.3, float("nan"), -0.2], "<headsr 2 cs_position_null>"),
        ([float("nan")] * 3, ""),
        (None, ""),
    ],
)
def test_maps_of_shares_and_types(null: list[float] | None, said: str) -> None:
    """The largest share of position where position is destroyed; the three strongest heads of each
    type; every number of every head."""
    module, draft = module_of(heads_section, "heads"), Told()
    details = {} if null is None else {"cs_position_null": torch.tensor(null)}
    table = SimpleNamespace(details=details, top=lambda name, n: f"{n} of {name}")
    module._named = lambda table, top, name: [f"first {top}", f"second {name}"]
    module._maps(draft, table)
    sentence = f"With position destroyed, the share of position is at most {said}." if said else ""
    title = "Every number of every head"
    lines = [
        line
        for name, words in (("previous", "previous-token"), ("induction", "induction"))
        for line in (
            f"On repeated random tokens these are the strongest {words} heads (uniform attention "
            f"would score <heads 0 {name}_uniform>):",
            f"first 3 of {name}",
            f"second {name}",
        )
    ]
    assert draft.told == [
        ("draw", ("head_shares", table), "shares", {"null": sentence}),
        "A cell that gets no attention counts for little. Weighted by where attention goes, the "
        "same terms have these shares:",
        ("draw", ("head_shares", table, ("share", "gs")), "gain", {}),
        *lines,
        ("draw", ("head_types", table), "types", {}),
        ("draw", ("heads", table, "induction", ("title", title)), "heads", {}),
        ("table", "heads", table, "Shares, types and labels of every head", COLUMNS),
    ]


@pytest.mark.parametrize("measured", [True, False])
def test_a_head_in_words(measured: bool) -> None:
    """Its score, what its label rests on, and its flag and lost attention where there are any."""
    module, nan = module_of(heads_section), float("nan")
    ends = torch.tensor([[0.1, 0.2], [0.1, nan]])
    table = SimpleNamespace(
        heads=[(0, 1), (3, 2)],
        group_intervals=SimpleNamespace(low=ends) if measured else None,
        details={"cs_position_null": 1} if measured else {},
    )
    top = SimpleNamespace(
        heads=[(3, 2), (0, 1)],
        groups=("position", "content"),
        group_cs=torch.tensor([[nan, -2.0], [0.7, 0.3]]),
        by_group=SimpleNamespace(labels=("unclear", "position"), flags=("odd", "")),
        dropped_mass="some" if measured else None,
    )
    corrected = "_corrected" if measured else ""
    lost = ", <heads {} dropped_mass%> of its attention on what is left out" * measured
    evidence = (
        " (<interval heads 0 cs_position_corrected>, <headsr 0 cs_position_null> with position "
        "destroyed)"
    )
    assert module._named(table, top, "induction") == [
        f"L3H2 <heads 1 induction> (unclear on this corpus: position <heads 1 cs_position"
        f"{corrected}>{' (<headsr 1 cs_position_null> with position destroyed)' * measured} of the "
        f"score and <heads 1 gs_position{corrected}> of the gain, flagged: odd{lost.format(1)})",
        f"L0H1 <heads 0 induction> (position on this corpus: position <heads 0 cs_position"
        f"{corrected}>{evidence * measured} of the score and <heads 0 gs_position{corrected}> of "
        f"the gain{lost.format(0)})",
    ]
    content = " (<interval heads 0 cs_content_corrected>)" if measured else ""
    assert module._evidence(table, 0, "content") == content


@pytest.mark.parametrize(("allowed", "planes"), [(9, True), (1, False), (99, False)])
def test_rotary_planes_in_words(allowed: int, planes: bool) -> None:
    """Bands of wavelengths of all heads and of the strongest ones; profiles of at most 16 windows
    where the budget allows two."""
    names = ("head_planes", "bands_page", "split_scores", "offset_profile")
    module, draft = module_of(heads_section, *names), Told()
    of = stub(budget=Allows(allowed))
    of.planes = planes
    of.pick = lambda count: f"{count} windows"
    by_head = "by head"
    bands = SimpleNamespace(by_head=lambda: by_head)
    shares = SimpleNamespace(by_band=lambda: bands, length=128)
    strongest = {"previous": (0, 1), "induction": (3, 2)}
    table = SimpleNamespace(
        heads=[(0, 1), (3, 2), (3, 3)],
        planes=lambda: shares,
        top=lambda name, n: SimpleNamespace(heads=[strongest[name], (9, 9)][:n]),
    )
    module._counts_in_words = lambda given: "near planes lead" if given is bands else ""
    module._shares = lambda given, head: f"{given} {head}"
    module._planes(draft, of, table)
    chosen, count = [(0, 1), (3, 2)], min(allowed, 16)
    scores = ("split_scores", "model", f"{count} windows", of.basis, ("heads", chosen))
    profile = ("offset_profile", scores) if allowed > 1 else None
    last = ("table", "planes", shares, "Shares of every rotary plane in every head", None)
    assert draft.told == [
        "A rotary embedding turns pairs of coordinates, planes, by an angle that grows with the "
        "position, each at its own frequency: a plane of wavelength L sees the offset of two "
        "tokens modulo L. Of 3 heads, near planes lead. Near planes have wavelengths of up to 16 "
        "tokens. Far ones are longer than the 128 tokens of a window, and hardly see the offset at "
        "all.",
        "The strongest previous-token head, L0H1: by head 0.",
        "The strongest induction head, L3H2: by head 1.",
        ("draw", ("head_planes", shares, profile, ("heads", chosen)), "planes", {}),
        ("draw", ("bands_page", shares, profile), "bands", {}),
        ("table", "head_bands", by_head, "Shares of bands of wavelengths in every head", None),
        ("table", "bands", bands, "The same by term", None),
        *[last] * planes,
    ]
    assert of.budget.asked == ["rotary planes"]


def test_bands_in_words() -> None:
    """Bands that lead in no head are not named; coordinates without rotation only where some have
    a share."""
    module = module_of(heads_section)
    bands = SimpleNamespace(
        bands=("near", "far", "pass"), dominant=("far", "unclear", "far", "near", "unclear")
    )
    assert module._counts_in_words(bands) == (
        "near planes lead in 1, far planes lead in 2, no band leads clearly by covariance and by "
        "gain in 2"
    )
    nan = float("nan")
    shares = torch.tensor([[0.5, 0.5, 0.0], [0.0, nan, -0.1], [1.0, 0.0, nan]])
    head_bands = SimpleNamespace(bands=("near", "far", "pass"), cs=shares)
    two = "near <head_bandsr {0} cs_near>, far <head_bandsr {0} cs_far>"
    for head, also in ((0, ""), (1, ", pass <head_bandsr 1 cs_pass>"), (2, "")):
        assert module._shares(head_bands, head) == two.format(head) + also


def test_the_example_in_words() -> None:
    """The first and the last of its heads; a card for an encoder and for short windows."""
    module, what = module_of(heads_section, "split"), "the example on repeated text"
    example = SimpleNamespace(heads=[(0, 1), (3, 2)])
    module.repeated = lambda analysis, table: example
    draft = Told()
    module._example(draft, stub(), "table")
    title = "The strongest previous-token and induction heads, L0H1 and L3H2, on repeated text"
    assert draft.told == [
        "One prompt in full: a piece of text, written twice. For L0H1 (previous token) and L3H2 "
        "(induction) every cell can be read, and a click on a token colours its sources in the "
        "text by any group of terms. Rows are centred, which the softmax does not see.",
        ("draw", ("split", example, ("centered", True), ("title", title)), "example", {}),
    ]
    module.repeated = lambda analysis, table: None
    for is_causal, why in (
        (True, "windows of fewer than 9 tokens hold no piece of text written twice"),
        (False, "an encoder has no previous-token or induction heads to show"),
    ):
        draft = Told()
        module._example(draft, stub(causal=is_causal), "table")
        assert draft.told == [("left out", what, why)]


@pytest.mark.parametrize(
    ("length", "known", "has_bos", "period"),
    [
        (64, 64, False, 20),
        (64, 38, False, 19),
        (64, 39, True, 19),
        (9, 64, True, 8),
        (5, 64, True, 4),
    ],
)
def test_a_piece_is_as_long_as_the_basis_and_the_window_allow(
    length: int, known: int, has_bos: bool, period: int
) -> None:
    """At most 20 tokens, twice; a BOS stands once, at the front. The same head is shown once."""
    module = module_of(heads_section, "split_scores")
    tokens = torch.arange(100, 100 + length)[None].repeat(2, 1)
    of = stub()
    of.windows = TokenWindows(tokens=tokens, has_bos=has_bos)
    of.basis.pos_seen = torch.zeros(3, known, 8)
    table = SimpleNamespace(top=lambda name, n: SimpleNamespace(heads=[(3, 2), (0, 0)]))
    name, model, prompt, basis, heads = module.repeated(of, table)
    first = 100 + has_bos
    piece = list(range(first, first + period))
    assert prompt.tolist() == [100] * has_bos + piece * 2
    assert (name, model, basis, heads) == ("split_scores", "model", of.basis, ("heads", [(3, 2)]))


@pytest.mark.parametrize("finding", ["clear", "unclear", "none"])
def test_dominant_terms_in_words(finding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four losses, and a remark where dominance is not shown."""
    module, draft, of = module_of(heads_section, "effect_bars"), Told(), stub()
    names = ("random term", "clean", "bias", "uniform attention", "dominant term")
    effect = SimpleNamespace(rows=lambda: [(name,) for name in names])
    monkeypatch.setattr(causal, "dominant_only", lambda *given, **options: effect)
    found = None if finding == "none" else SimpleNamespace(clear=finding == "clear")
    module.findings = SimpleNamespace(dominance=lambda given: found)
    module._dominant(draft, of, "table")
    remark = (
        "The dominant terms are not shown to be better than a random term of each head: dominance "
        "describes single heads and is no summary of this model."
    )
    assert draft.told == [
        "If every head kept only its dominant term, how much of the model would survive? On 16 "
        "windows of this corpus its loss goes from <dominant_only 1 loss> to "
        "<dominant_only 4 loss> nats per token; with a random term in place of the dominant one it "
        "is <dominant_only 0 loss>, with uniform attention <dominant_only 3 loss>. Edits act in "
        "the live model.",
        *[remark] * (finding != "clear"),
        ("draw", ("effect_bars", effect), "dominance", {}),
        ("table", "dominant_only", effect, "Loss with only some of the terms", None),
        ("find", found),
    ]


def test_stand_ins_note_what_they_are_given() -> None:
    """A call that is given something else is another one."""
    assert Calls().name(1, a=2) == ("name", 1, ("a", 2)) != Calls().name(1, a=3)
