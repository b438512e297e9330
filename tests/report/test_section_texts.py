"""What sections say, draw and list, word for word and in order. The functions of the library are
stand-ins that note their arguments; numbers are the names of their cells."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.modules import copy_of
from tests.report.test_sizes import Allows, stub
from tl_geometry.interventions import surrogates
from tl_geometry.report import flow as flow_section
from tl_geometry.report import measures as measures_section
from tl_geometry.report import weights as weights_section
from tl_geometry.report.section import Draft


class Told(Draft):
    """A section that notes all that it is told, in order; an error is not caught."""

    def __init__(self) -> None:
        super().__init__("title")
        self.told: list[Any] = []

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        self.told.append(("part", what))
        yield

    def say(self, text: str) -> None:
        self.told.append(text)

    def draw(self, figure: Any, key: str = "", **said: str) -> None:
        self.told.append(("draw", figure, key, said))

    def table(self, name: str, table: Any, about: str = "", columns: Any = None) -> None:
        self.told.append(("table", name, table, about, columns))

    def find(self, finding: Any) -> None:
        self.told.append(("find", finding))

    def leave_out(self, what: str, why: str) -> None:
        self.told.append(("left out", what, why))


class Names:
    """Stands in for cells: a number is the name of its table, its row and its column, with "r"
    where it is rounded and "%" where it is a percentage."""

    def __init__(self, name: str, table: Any, *, rounded: bool = False) -> None:
        self.name, self.rounded = name, "r" * rounded

    def __call__(self, row: int, column: str, *, percent: bool = False) -> str:
        return f"<{self.name}{self.rounded} {row} {column}{'%' * percent}>"

    def interval(self, row: int, column: str) -> str:
        return f"<interval {self.name} {row} {column}>"


class Calls:
    """Stands in for modules and functions: a call gives its name and arguments."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **options: (name, *given, *options.items())


def module_of(module: Any, *names: str) -> Any:
    """A copy of the module of a section with stand-ins for all that it calls."""
    copy: Any = copy_of(module)
    copy.Cells, copy.views, copy.findings = Names, Calls(), Calls()
    for name in names:
        setattr(copy, name, getattr(Calls(), name))
    return copy


# --- measures

COLUMNS = ("rank", "stable_rank", "relative_norm", "low_frequency", "smoothness", "fracture")


def test_measures_of_position() -> None:
    """The middle state in words, three figures, a table and a finding."""
    module, draft, of = module_of(measures_section, "positional_report"), Told(), stub()
    of.basis.states = (0, 3, 7, 9)
    module._position(draft, of)
    report = ("positional_report", of.basis, ("seed", 5))
    listed = ("state", *COLUMNS, *(f"{c}_{n}" for c in COLUMNS for n in ("noise", "shuffled")))
    null = "In random order they hold <positionalr 2 low_frequency_shuffled%> in state 7."
    assert draft.told == [
        "Is the positional basis low-dimensional and smooth? Bars are jackknife errors over groups "
        "of contexts; dashed lines are nulls (positions in random order, sampling noise alone, "
        "isotropic noise of the same energy): a measure that lies on its null is not a finding.",
        "At state 7 the rank estimate is <positional 2 rank> (ScreeNOT), the stable rank "
        "<positional 2 stable_rank>, and <positional 2 low_frequency%> of the energy of the unit "
        "positional vectors lies in the ten lowest frequencies. The published relative norm "
        "divides by the uncentred states; both forms are in the table.",
        ("draw", ("measure_curves", report, COLUMNS), "position", {}),
        ("part", "the Fourier transform of the cosines"),
        ("draw", ("fourier", report), "fourier", {"null": null}),
        "The rank grows with the number of contexts, because sampling noise falls: where the "
        "learning curve still rises, a larger corpus would give a larger rank.",
        ("draw", ("learning_curve", report, "rank"), "learning", {}),
        ("table", "positional", report, "Measures of position in each state", listed),
        ("find", ("smooth", report)),
    ]


@pytest.mark.parametrize("exchanged", [False, True])
def test_measures_of_context(exchanged: bool) -> None:
    """The middle state in words, with windows of exchanged positions where they were measured."""
    module, draft, of = module_of(measures_section), Told(), stub()
    nulls = {("incoherence_avg", "exchanged"): 1} if exchanged else {("overlap", "exchanged"): 1}
    names = ["a", "a_sd", "b_se"]
    report = SimpleNamespace(nulls=nulls, columns=lambda: names)
    asked: list[Any] = []
    module.contextual_report = lambda basis, seed: asked.append((basis, seed)) or report
    of.basis.states, of.basis.ctx = (0, 3, 7, 9), "kept"
    module._context(draft, of)
    assert asked == [(of.basis, 5)]
    and_null = (
        " and windows whose positions were exchanged <contextual 2 incoherence_avg_exchanged>"
    )
    assert draft.told == [
        "Positional and context vectors of state 7 have a mean |cos| of "
        "<contextual 2 incoherence_avg>, where random directions have "
        f"<contextual 2 incoherence_avg_random>{and_null * exchanged}. The paper defines "
        "incoherence as a maximum and tabulates an average; both are here.",
        ("draw", ("incoherence", report), "incoherence", {}),
        ("table", "contextual", report, "Measures of context in each state", ["a", "b_se"]),
        ("find", ("incoherence", report)),
    ]


def test_measures_without_context_vectors() -> None:
    """Both kinds of measures are parts of the section; vectors that were not kept are a card."""
    module, draft, of = module_of(measures_section), Told(), stub()
    of.basis.ctx = None
    module._position = lambda draft, analysis: draft.say("of position")
    module.section(draft, of)
    why = "context vectors would take more than 1 GiB and were not kept"
    assert draft.told == [
        ("part", "measures of position"),
        "of position",
        ("part", "measures of context"),
        ("left out", "measures of context", why),
    ]


# --- weights


def test_sections_of_weights() -> None:
    """Geometry, readouts, paths of the first window's tokens, and surrogates."""
    module = module_of(weights_section, "token_readout")
    draft, of = Told(), stub(length=30, states=[0, 1, 2])
    paths, asked = SimpleNamespace(tokens=torch.zeros(1, 24)), []
    module.token_paths = lambda model, ids: asked.append((model, ids.tolist())) or paths
    module._geometry = lambda draft, analysis: draft.say("geometry")
    module._surrogates = lambda draft, analysis: draft.say("surrogates")
    module.section(draft, of)
    assert asked == [("model", [[0] * 24])]
    readout = ("token_readout", "model", ("matrix", "OV"))
    assert draft.told == [
        ("part", "weights in the geometry of the basis"),
        "geometry",
        ("part", "what heads write, in tokens"),
        "A head writes along the singular directions of its W_OV. If few directions hold most of "
        "it, what the head writes is simple. The table says which tokens each direction reads and "
        "writes.",
        ("draw", ("coverage_curves", readout), "coverage", {}),
        ("table", "readout_ov", readout, "What heads read and write, in tokens", None),
        ("part", "paths on the sphere"),
        "A norm layer puts every state on a sphere. From layer to layer each token of this text "
        "moves along a path on it, towards the unembedding of the token that follows.",
        ("draw", ("sphere_paths", paths, ("positions", None)), "sphere", {}),
        ("table", "paths", paths, "Steps of each token on the sphere", None),
        ("part", "surrogates of W_QK in the live model"),
        "surrogates",
    ]


@pytest.mark.parametrize(
    ("excess", "value", "layer"),
    [
        ([1.0, 3.0, 2.0], "excess", 1),
        ([float("nan")] * 3, "lift", 0),
        ([-2.0, float("nan"), 0.5], "excess", 2),
    ],
)
def test_weights_beside_the_positional_directions(
    excess: list[float], value: str, layer: int
) -> None:
    """The heads of the layer with the largest excess are drawn, at most eight of them."""
    for n_heads in (4, 9):
        module, draft, of = module_of(weights_section, "heads"), Told(), stub(n_heads=n_heads)
        pairs = [(0, 3), (1, 2), (2, 1)]
        tables = {
            name: SimpleNamespace(excess=torch.tensor(excess), heads=pairs) for name in ("QK", "OV")
        }
        asked: list[Any] = []
        module.weight_geometry = lambda model, basis, name, *, seed, asked=asked, tables=tables: (
            asked.append((model, basis, seed)) or tables[name]
        )
        module._geometry(draft, of)
        assert asked == [("model", of.basis, 5)] * 2
        columns = (
            *("layer", "head", "k", "rank", "concentration", "null", "lift", "noise_null"),
            *("noise_high", "excess", "p", "reliability", "r2_low_rank", "r2_diagonal", "null_r2"),
            "symmetric",
        )
        qk, title = tables["QK"], "W_QK of each head against the positional directions"
        drawn = [(layer, head) for head in range(min(n_heads, 8))]
        assert draft.told == [
            "How much of each head's W_QK (canonical: norm gain folded in, centred for LayerNorm) "
            "lies in the leading positional directions? Lift compares that share with its exact "
            "expectation for a random subspace. Excess compares it with its mean in the leading "
            "directions of differences between random halves of the corpus: there position "
            "cancels, and what is left are directions in which averages of states vary most "
            "anyway.",
            ("draw", ("heads", qk, value, ("title", title)), "lift", {}),
            ("draw", ("weight_blocks", qk, drawn), "blocks", {}),
            (
                *("table", "weights_qk", qk),
                *("W_QK of each head in the positional directions", columns),
            ),
            (
                *("table", "weights_ov", tables["OV"]),
                *("W_OV of each head in the positional directions", columns),
            ),
            ("find", ("lift", qk)),
        ]


def test_surrogates_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many windows and heads, and the loss that the bars are measured from."""
    module, draft, of = module_of(weights_section), Told(), stub()
    effect, asked = SimpleNamespace(heads=["a", "b", "c"]), Mock()
    monkeypatch.setattr(surrogates, "surrogate_effect", asked)
    asked.return_value = effect
    module._surrogates(draft, of)
    model, _, basis = asked.call_args.args
    assert (model, basis, asked.call_args.kwargs) == ("model", of.basis, {"seed": 5})
    how = (
        "Each bar shows how far the loss of <surrogates 0 loss> nats rises when W_QK of 3 heads is "
        "replaced by one part of it."
    )
    assert draft.told == [
        "Does that structure carry the computation? W_QK of all heads is replaced by a part of it "
        "in the live model; grey bars are controls of the same rank. Losses are those of 16 "
        "windows of 16 tokens of this corpus.",
        ("draw", ("surrogate_bars", effect), "surrogates", {"how": how}),
        ("table", "surrogates", effect, "Loss with W_QK replaced by its parts", None),
    ]


# --- trajectories


def test_trajectories_in_parts() -> None:
    """Paths, maps, nulls and outputs; without paths nothing of what follows."""
    for ensemble, parts in (("paths", 3), (None, 1)):
        module, draft, of = module_of(flow_section), Told(), stub(d_model=21)
        module._followed = lambda draft, analysis, chunks, found=ensemble: found
        for name in ("_maps", "_nulls", "_outputs"):
            setattr(module, name, lambda draft, *given, name=name: draft.say(name))
        module.section(draft, of)
        names = ("trajectories", "maps between states", "nulls of the trajectories")
        told = [x for name in zip(names, ("", "_maps", "_nulls"), strict=True) for x in name]
        wanted = [x if x[0] == "_" else ("part", x) for x in told[: 2 * parts] if x]
        assert draft.told == [
            "Half of 40 chunks are fewer than the 21 dimensions of a state. So few always lie in a "
            "subspace: it says nothing about the model if few directions are enough for them.",
            *wanted,
            *(["_outputs"] if ensemble else []),
        ]


def test_what_is_said_of_the_paths() -> None:
    """How many tokens are followed, and what counts."""
    module, draft, of = module_of(flow_section), Told(), stub()
    ensemble = SimpleNamespace(position=-1)
    module.trajectories = lambda *given, **options: ensemble
    assert module._followed(draft, of, of.windows) is ensemble
    assert draft.told == [
        "One token of each of 40 chunks of 16 tokens is followed through the blocks (the last). "
        "Rotation and stretch (Sarfati et al. 2025, Eq. 1) carries one state's second moments onto "
        "the next exactly, by construction; what counts is the error on chunks it was not fitted "
        "on, beside the identity and the best linear map.",
        ("draw", ("bundle_figure", ensemble), "bundle", {}),
    ]


@pytest.mark.parametrize("laws", [True, False])
def test_maps_between_states(laws: bool) -> None:
    """The noise is drawn where laws could be fitted, and a card elsewhere."""
    module, draft = module_of(flow_section), Told()
    report = SimpleNamespace(laws=["a law"] * laws)
    module.flow_report = lambda ensemble, *, seed: report
    module._maps(draft, stub(), "paths")
    how = (
        "Each point is the mean log variance of what the map from t to t + \u03c4 leaves, coloured "
        "by t; lines are two laws of noise fitted to them. Their rates are in the table of nulls."
    )
    why = ("the law of the residual variance", "there are too few states for it")
    assert draft.told == [
        ("draw", ("baseline_figure", report), "maps", {}),
        ("draw", ("residual_figure", report), "residuals", {}),
        ("draw", ("noise_figure", report), "noise", {"how": how}) if laws else ("left out", *why),
        ("table", "flow", report, "Maps between every two states", None),
    ]


def test_nulls_of_trajectories() -> None:
    """Gibberish and new weights with the seed of the report, and no bar."""
    module, draft, of = module_of(flow_section, "gibberish", "trajectories"), Told(), stub(bos_id=7)

    @contextmanager
    def reinitialized(model: Any, *, seed: int) -> Iterator[Any]:
        yield ("new", model, seed)

    module.reinitialized, module.compare_ensembles = reinitialized, lambda ensembles: ensembles
    module._nulls(draft, of, of.windows, "own")
    options = (("prepend_bos", False), ("seed", 5))
    nonsense = ("gibberish", "model", 40, 16, *options)
    quiet = ("progress", False)
    nulls = {
        "text": "own",
        "gibberish": ("trajectories", "model", nonsense, quiet),
        "untrained": ("trajectories", ("new", "model", 5), of.windows, quiet),
    }
    about = "Trajectories of text, of gibberish, of an untrained model, and their laws of noise"
    assert draft.told == [("table", "flow_nulls", nulls, about, None)]


def test_outputs_of_at_most_96_chunks() -> None:
    """Evenly spaced; an encoder has none."""
    module, draft, of = module_of(flow_section), Told(), stub(count=120)
    for name in ("_truncated", "_skips"):
        setattr(
            module, name, lambda draft, of, chunks: draft.say(f"{chunks.tokens[:, 0].tolist()}")
        )
    module._outputs(draft, of, of.windows)
    rows = f"{of.pick(96).tokens[:, 0].tolist()}"
    assert len(of.pick(96)) == 96
    assert draft.told == [("part", "truncated states"), rows, ("part", "skipped layers"), rows]
    draft = Told()
    module._outputs(draft, stub(causal=False), of.windows)
    why = "they take a decoder with a trained output head"
    assert draft.told == [("left out", "truncated states and skipped layers", why)]


def test_truncated_states_and_skipped_layers_in_words() -> None:
    """With their figures, tables and findings."""
    module, of = module_of(flow_section, "trajectories", "truncation_kl"), stub(n_layers=13)
    draft = Told()
    module._truncated(draft, of, of.windows)
    curve = draft.told[1][1][1]
    assert curve[:2] == ("truncation_kl", "model")
    assert draft.told == [
        "How many directions does the output need? Every state of the last token is projected on K "
        "directions of other chunks, after every block.",
        ("draw", ("truncation_figure", curve), "truncation", {}),
        ("table", "truncation", curve, "Output of states with K directions", None),
        ("find", ("truncated", curve)),
    ]
    skips, draft = SimpleNamespace(pairs=lambda: [(3, 7), (3, 4), (5, 6)], test=9), Told()
    module.skip_map = lambda *given, **options: skips
    module._skips(draft, of, of.windows)
    assert draft.told == [
        "How many layers can be skipped for how much loss (skips of 1, 4 of 13 blocks)? The blocks "
        "between two states are replaced by a fitted map at the last token of 9 held-out chunks, "
        "where the model's own loss is <skipped_layers 0 own_loss> nats; 'mean' forgets the state "
        "altogether: what a map must beat.",
        ("draw", ("skip_figure", skips), "skips", {}),
        ("table", "skipped_layers", skips, "What it costs to skip blocks", None),
        ("find", ("skipped", skips)),
    ]


def test_a_budget_is_asked_for_each_part_by_its_name() -> None:
    """Lengths, most and fewest windows of paths, truncated states and skipped layers."""
    asked: list[Any] = []

    class Noting(Allows):
        def windows(self, part: str, length: int, most: int, least: int = 1) -> int:
            asked.append((part, length, most, least))
            return 0

    module, of = module_of(flow_section), stub(count=500, length=60, budget=Noting())
    module.section(Told(), of)
    module._truncated(Told(), of, of.pick(41))
    module._skips(Told(), of, of.pick(41))
    module._skips(Told(), of, of.pick(20))
    assert asked == [
        ("trajectories", 50, 384, 32),
        ("truncated states", 60, 21, 8),
        ("skipped layers", 60, 41, 32),
        ("skipped layers", 60, 20, 20),
    ]
