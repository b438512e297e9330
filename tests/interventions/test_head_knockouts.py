"""Effects of knockouts are those of one knockout at a time, attributions are gradients of an
independent frozen model, and the table says where the two disagree."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.circuits.frozen_hf import frozen_run
from tests.lib.models import HEADS, loadable, tiny, tokens
from tl_geometry.base.errors import GeometryError, UnsupportedModelError
from tl_geometry.base.results import Provenance
from tl_geometry.interventions import HeadKnockouts, head_knockouts, knockouts, remove_heads
from tl_geometry.models import view
from tl_geometry.models.model_view import ModelView

PROMPTS = tokens(batch=4, length=12, seed=4)
REFERENCE = tokens(batch=5, length=14, seed=5)
TARGETS = [(5, 9), (7, 3), (11, 20), (4, 6)]
SETS = {"one": "L0H1", "two": ["L0H2", "L1H3"]}
AT = 9


def model_of(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
    return tiny(loadable(architecture)[0][0], architecture, dtype=dtype)


def measured(model: Any, metric: Any) -> Tensor:
    with torch.no_grad():
        logits = model(PROMPTS, return_type="logits").double()
    ids, row = torch.tensor(TARGETS), torch.arange(len(PROMPTS))
    if metric == "difference":
        return logits[row, AT, ids[:, 0]] - logits[row, AT, ids[:, 1]]
    if metric == "probability":
        return logits[:, AT].softmax(-1)[row, ids[:, 0]]
    if metric == "loss":
        log_p = logits[:, :-1].log_softmax(-1)
        return -log_p.gather(-1, PROMPTS[:, 1:, None])[..., 0].mean(1)
    return metric(logits)


def entropy(logits: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=logits[:, 3]).entropy()


@pytest.mark.parametrize("at_once", [1, 3, 64])
@pytest.mark.parametrize(
    ("metric", "by", "architecture"),
    [
        ("difference", "mean", "gpt2"),
        ("probability", "zero", "llama"),
        ("loss", "prompt", "gemma2"),
        (entropy, "mean", "gptj"),
    ],
)
def test_effects_are_those_of_one_knockout_at_a_time(
    metric: Any, by: str, architecture: str, at_once: int
) -> None:
    model = model_of(architecture)
    options: dict[str, Any] = {"reference": REFERENCE} if by == "mean" else {}
    targets = TARGETS if metric in ("difference", "probability") else None
    position = AT if targets else -1
    with mock.patch.object(knockouts, "output_batch", return_value=at_once):
        table = head_knockouts(
            model,
            PROMPTS,
            metric,
            targets=targets,
            position=position,
            heads=SETS,
            by=by,
            seed=3,
            progress=False,
            **options,
        )
    clean = measured(model, metric)
    bound = 2e-5 * float(clean.abs().max())
    assert float((table.clean - clean).abs().max()) < bound
    for row, heads in enumerate(SETS.values()):
        with remove_heads(model, heads, by, seed=3, **options):
            effect = measured(model, metric) - clean
        assert float((table.effects[row] - effect).abs().max()) < bound
        assert float(effect.abs().max()) > 50 * bound
    assert torch.equal(measured(model, metric), clean)


def test_a_pass_takes_the_rows_that_fit_and_shows_no_progress_unasked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows: list[int] = []
    logits = ModelView.logits

    def counted(self: ModelView, tokens: Tensor, *given: Any) -> Tensor:
        rows.append(len(tokens))
        return logits(self, tokens, *given)

    with (
        mock.patch.object(ModelView, "logits", counted),
        mock.patch.object(knockouts, "output_batch", return_value=3),
    ):
        options: dict[str, Any] = {"heads": SETS, "by": "zero", "controls": 0}
        head_knockouts(model_of("gpt2"), PROMPTS, "loss", progress=False, **options)
    assert rows == [3, 1] * 3  # the clean run and two knockouts
    assert capsys.readouterr().err == ""


def test_controls_are_random_sets_of_as_many_other_heads() -> None:
    model = model_of("gpt2")
    table = head_knockouts(
        model, PROMPTS, "loss", heads={"a": "L0H1", "b": "L1H3"}, controls=40, progress=False
    )
    each = head_knockouts(model, PROMPTS, "loss", progress=False)
    assert table.control is not None
    assert table.control_draws is not None
    others = [i for i, name in enumerate(each.conditions) if name not in ("L0H1", "L1H3")]
    singles = each.effects.mean(1)[others]
    gaps = (table.control_draws[0][:, None] - singles).abs()
    assert float(gaps.min(1).values.max()) < 1e-5  # every draw is one of the other heads
    assert set(gaps.argmin(1).tolist()) == set(range(len(others)))  # 40 draws of 6 heads
    assert torch.allclose(table.control[0].mean(), table.control_draws[0].mean())
    assert each.control is None


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "neox", "gemma2", "bloom", "gptj"])
def test_attributions_are_gradients_of_the_frozen_model(architecture: str) -> None:
    """Autograd through the Hugging Face model with its nonlinear parts frozen, softmax frozen or
    live; the direct contribution by hooks on what follows the last block."""
    model = model_of(architecture, torch.float64)
    table = head_knockouts(
        model,
        PROMPTS,
        targets=TARGETS,
        position=AT,
        reference=REFERENCE,
        attributions=True,
        progress=False,
    )
    names = [f"blocks.{l}.attn.hook_z" for l in (0, 1)]
    for row, (right, wrong) in enumerate(TARGETS):
        prompt = PROMPTS[row : row + 1]
        removed = [
            a[row].flatten(1) - b[:, :12].flatten(2).mean(0)
            for a, b in zip(
                view(model).activations(PROMPTS, names).values(),
                view(model).activations(REFERENCE, names).values(),
                strict=True,
            )
        ]
        for name in ("value_paths", "all_paths"):
            run = frozen_run(architecture, prompt, attention=name == "all_paths")
            (run.logits[0, AT, right] - run.logits[0, AT, wrong]).backward()
            wanted = [
                (gone * z.grad[0]).unflatten(1, (HEADS, -1)).sum((0, 2))  # type: ignore[index]
                for gone, z in zip(removed, run.mixed, strict=True)
            ]
            found = getattr(table, name)[:, row].view(2, HEADS)
            scale = float(torch.stack(wanted).abs().max())
            assert torch.allclose(found, torch.stack(wanted), atol=2e-6 * max(1.0, scale)), name
    assert table.direct is not None
    assert table.value_paths is not None
    assert table.all_paths is not None
    assert not torch.allclose(table.value_paths, table.all_paths, atol=1e-2)
    assert not torch.allclose(table.value_paths[:HEADS], table.direct[:HEADS], atol=1e-2)


def test_the_direct_contribution_is_what_the_last_norm_reads() -> None:
    """The final norm's scale held, hooks replace one head's z and nothing else moves."""
    model = model_of("gpt2", torch.float64)
    table = head_knockouts(
        model, PROMPTS, targets=TARGETS, by="zero", heads=["L0H1", "L1H2"], attributions=True
    )
    seen, head = view(model), view(model).output_head()
    assert head is not None
    assert table.direct is not None
    names = [f"blocks.{l}.attn.hook_z" for l in (0, 1)] + [seen.state_hooks[-1]]
    found = seen.activations(PROMPTS, names)
    last = found[names[-1]][:, -1]
    deviation = (last - last.mean(-1, keepdim=True)).square().mean(-1).add(head.norm.eps).sqrt()
    for row, (l, h) in enumerate([(0, 1), (1, 2)]):
        write = found[names[l]][:, -1, h] @ seen.weights(l).W_O[h]
        read = (write - write.mean(-1, keepdim=True)) / deviation[:, None] * head.norm.gain
        wanted = torch.stack(
            [x @ (head.W_U[:, a] - head.W_U[:, b]) for x, (a, b) in zip(read, TARGETS, strict=True)]
        )
        assert torch.allclose(table.direct[row], wanted.double(), atol=1e-9)


def table_of(effects: Tensor, direct: Tensor, **fields: Any) -> HeadKnockouts:
    return HeadKnockouts(
        provenance=Provenance(),
        conditions=tuple("abcd"[: len(effects)]),
        sets=(((0, 0),),) * len(effects),
        metric="difference",
        by="mean",
        clean=torch.zeros(effects.shape[1]),
        effects=effects,
        direct=direct,
        **fields,
    )


def test_rows_are_marked_where_knockout_and_direct_contribution_disagree() -> None:
    noise = torch.randn(2, 12, generator=torch.Generator().manual_seed(0)).double() * 0.01
    direct = torch.tensor([1.0, 0.0, 1.0, 0.02]).double()[:, None] + noise[0]
    effects = torch.tensor([-1.1, -1.0, 0.0, -0.02]).double()[:, None] + noise[1]
    # as it writes; moves others without writing; is made up for; hardly anything
    table = table_of(effects, direct)
    assert table.disagrees is not None
    assert table.disagrees.tolist() == [False, True, True, False]
    few = table_of(effects[:, :9], direct[:, :9])
    assert few.disagrees is not None
    assert not bool(few.disagrees.any())  # no interval below 10 prompts
    assert bool(few.effect.low.isnan().all())


def test_excess_takes_in_what_one_more_draw_would_give() -> None:
    effects = torch.full((1, 12), -1.0).double()
    control, draws = torch.zeros(1, 12).double(), torch.tensor([[-0.1, 0.1, 0.0]]).double()
    table = table_of(effects, effects, control=control, control_draws=draws)
    assert table.excess is not None
    reach = 4.302653 * 0.1 * (1 + 1 / 3) ** 0.5  # t with 2 degrees of freedom
    assert float(table.excess.low) == pytest.approx(-1 - reach, abs=1e-5)
    assert float(table.excess.high) == pytest.approx(-1 + reach, abs=1e-5)
    assert float(table.excess.error) == pytest.approx(reach / 4.302653, abs=1e-5)


def test_the_table_is_stored_and_read_back(tmp_path: Path) -> None:
    table = head_knockouts(
        model_of("gpt2"), PROMPTS, targets=TARGETS, heads=SETS, attributions=True, progress=False
    )
    loaded = HeadKnockouts.load(table.save(tmp_path / "knockouts.safetensors"))
    assert loaded.sets == table.sets == (((0, 1),), ((0, 2), (1, 3)))
    assert loaded.columns() == table.columns()
    assert loaded.columns()[:4] == ("condition", "effect", "effect_low", "effect_high")
    assert torch.equal(loaded.effects, table.effects)
    assert str(loaded.to_dataframe()) == str(table.to_dataframe())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"metric": "accuracy"}, "'difference', 'probability', 'loss'"),
    ({}, r"a pair \(right, wrong\) for each of 4 prompts"),
    ({"targets": TARGETS[:3]}, r"a pair \(right, wrong\) for each of 4 prompts"),
    ({"targets": [5, 6, 7, 8]}, r"a pair \(right, wrong\) for each of 4 prompts"),
    ({"metric": "loss", "targets": TARGETS}, "targets: expected none"),
    ({"metric": "loss", "position": 3}, "position=-1"),
    ({"metric": "loss", "attributions": True}, 'Use metric="difference"'),
    ({"targets": TARGETS, "position": "end"}, "position: expected one of"),
    ({"targets": TARGETS, "position": 99}, "an index from 0 to 11"),
    ({"targets": TARGETS, "by": "median"}, "by: expected one of"),
    ({"targets": TARGETS, "by": "zero", "reference": REFERENCE}, "reference"),
    ({"targets": TARGETS, "reference": PROMPTS[:, :8]}, "prompts of at least 12 tokens"),
    ({"targets": TARGETS, "heads": "L9H0"}, "L9H0"),
    ({"targets": TARGETS, "heads": {}}, "at least one set of heads"),
    ({"targets": TARGETS, "controls": 3}, "at least 1 heads that no row has"),
    ({"targets": TARGETS, "controls": -1}, "a number of random sets"),
    ({"metric": lambda logits: logits.sum()}, "one number for each of 4 prompts"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(GeometryError, match=text):
        head_knockouts(model_of("gpt2"), PROMPTS, progress=False, **options)
    with pytest.raises(GeometryError, match="at least 2 prompts"):
        head_knockouts(model_of("gpt2"), PROMPTS[:1], "loss", progress=False)


def test_an_encoder_is_refused() -> None:
    with pytest.raises(UnsupportedModelError):
        head_knockouts(model_of("bert"), PROMPTS, "loss", progress=False)
