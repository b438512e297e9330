"""Scores, streams and logits of planted models are those of the formulas that their modules state;
pairs and the names of trained heads are those found by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tl_geometry import zoo
from tl_geometry.base.rows import causal_mask, row_center
from tl_geometry.zoo import known_models, planted, planted_heads, trained
from tl_geometry.zoo.known_models import POSITIONS, KnownModel

BOTH = pytest.mark.parametrize("positions", POSITIONS)
QUERY, KEY = torch.arange(24)[:, None], torch.arange(24)[None]
ALLOWED = causal_mask(24)


def scores(truth: KnownModel, tokens: Tensor, layer: int = 0) -> Tensor:
    """Before the softmax."""
    return truth.model.run_with_cache(tokens)[1][f"blocks.{layer}.attn.hook_attn_scores"]


def waves(offset: float, planes: range) -> Tensor:
    """The mean cosine of the angle from an offset over rotary planes, of base 1e8 and width 64."""
    angles = [(QUERY - KEY - offset) * 1e8 ** (-plane / 32) for plane in planes]
    return torch.stack(angles).cos().mean(0)


def sizes(found: Tensor, *terms: Tensor) -> Tensor:
    """The factors with which these terms make the scores ``[batch query key]``, exactly."""
    rows = [term.float().expand(found.shape)[:, ALLOWED].flatten() for term in terms]
    terms_by_place, given = torch.stack(rows, 1), found[:, ALLOWED].flatten()
    factors = torch.linalg.lstsq(terms_by_place, given[:, None]).solution[:, 0]
    assert float((terms_by_place @ factors - given).abs().max()) < 5e-3
    return factors


def table_of(found: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The table of 24 rows and 16 columns whose entries these scores are, exactly."""
    table = torch.zeros(24, 16)
    rows, columns = (x.expand(found.shape)[:, ALLOWED] for x in (rows, columns))
    table[rows, columns] = found[:, ALLOWED]
    assert float((table[rows, columns] - found[:, ALLOWED]).abs().max()) < 5e-3
    return table


def one_size(values: Tensor) -> float:
    """The size of numbers of one size and both signs."""
    size = float(values.abs().mean())
    assert torch.allclose(values.abs(), torch.full_like(values, size), atol=5e-3)
    assert values.min() < 0 < values.max()
    return size


@BOTH
@pytest.mark.parametrize("seed", [1, 2])
def test_scores_of_planted_heads_are_their_formulas(positions: str, seed: int) -> None:
    truth = zoo.known("heads", seed=seed, positions=positions)
    tokens, learned = truth.random_tokens(16, seed=5), positions == "learned"
    at, offset = scores(truth, tokens), truth.offset
    found = {does: at[:, head] for (_, head), does in truth.does.items()}
    assert offset in (1, 2, 3)
    equal = tokens[:, :, None] == tokens[:, None]
    at_offset = (QUERY - KEY).eq(offset).float() if learned else waves(offset, range(8))
    keys = [KEY.eq(j) for j in range(24)]
    on_key = [(tokens == t)[:, None] for t in range(16)]
    on_query = [(tokens == t)[:, :, None] for t in range(16)]

    one_term = {"offset": at_offset, "identity": equal}
    strengths = {name: float(sizes(found[name], x)[0]) for name, x in one_term.items()}
    strengths["both"], match = sizes(found["both"], at_offset, equal).tolist()
    balance = planted_heads.balance(at_offset)
    assert match == pytest.approx(strengths["both"] * balance, rel=1e-3)
    strengths["token"] = 2 * one_size(sizes(found["token"], *on_key))
    others = keys if learned else [waves(math.pi / 2, range(1))]
    strengths["disputed"], *by_place = sizes(found["disputed"], equal, *others).tolist()
    place = torch.stack([x * size for x, size in zip(others, by_place, strict=True)]).sum(0)
    energies = [
        float(row_center(x.expand(16, 24, 24)[..., 1:, 1:], ALLOWED[1:, 1:]).square().mean())
        for x in (place, strengths["disputed"] * equal)
    ]
    assert energies[0] / sum(energies) == pytest.approx(2 / 3, abs=0.06)
    if learned:
        one_size(torch.tensor(by_place))
        strengths["position"] = 2 * one_size(sizes(found["position"], *keys))
        relation = table_of(found["relation"], QUERY, tokens[:, None])[16:]
        strengths["relation"] = 2 * one_size(relation)
        assert torch.linalg.matrix_rank(relation, atol=0.1) == 1
    else:
        strengths["position"] = float(sizes(found["position"], waves(0, range(4, 8)))[0])
        strengths["query"] = 2 * one_size(sizes(found["query"], *on_query))
    table = table_of(found["table"], tokens[:, :, None], tokens[:, None])[:16]
    assert float(torch.cat([table[0], table[:, 0]]).abs().max()) < 5e-3
    assert float(torch.cat([table.mean(0), table.mean(1)]).abs().max()) < 5e-3
    assert torch.linalg.matrix_rank(table, atol=0.05) == 4
    assert 1.5 < float(table[1:, 1:].std()) < 4.5
    assert not found["uniform"][:, ALLOWED].any()
    assert all(5 <= strength <= 6 for strength in strengths.values()), strengths
    assert len(set(strengths.values())) == len(strengths)


@BOTH
def test_scores_of_retrieval_are_four_for_each_attribute_that_matches(positions: str) -> None:
    truth = zoo.known("retrieval", seed=3, positions=positions)
    tokens = truth.random_tokens(16, seed=5)
    colour, shape = (
        x[:, :, None] == x[:, None] for x in (tokens.div(4, rounding_mode="floor"), tokens % 4)
    )
    for (_, head), does in truth.does.items():
        wanted = {"colour": (4, 0), "shape": (0, 4), "retrieval": (4, 4), "even": (0, 0)}[does]
        found = sizes(scores(truth, tokens)[:, head], colour, shape)
        assert found.tolist() == pytest.approx(wanted, abs=5e-3)
        reads = {"colour": range(4), "shape": range(4, 8), "retrieval": range(8), "even": ()}[does]
        assert truth.reads.get((0, head), ()) == tuple(reads)
        assert truth.labels[0, head] == ("uniform" if does == "even" else "content")
        assert truth.terms.get((0, head)) == (None if does == "even" else "cvec-cvec")


@BOTH
@pytest.mark.parametrize("name", ["heads", "retrieval"])
def test_streams_of_planted_models_are_sums_of_their_directions(name: str, positions: str) -> None:
    """So are what heads copy, at half size, and the logits."""
    truth = zoo.known(name, seed=4, positions=positions)
    tokens, basis = truth.random_tokens(4, seed=1), truth.directions
    assert basis is not None
    places = 24 if positions == "learned" else 0
    columns = (16 if name == "heads" else 8) + places
    d_model = basis.shape[1]
    assert len(basis) == columns
    torch.testing.assert_close(basis @ basis.T, torch.eye(columns), rtol=0, atol=1e-5)
    assert float(basis.sum(1).abs().max()) < 1e-4
    logits, cache = truth.model.run_with_cache(tokens)
    each = (
        basis[:16]
        if name == "heads"
        else basis[:4].repeat_interleave(4, 0) + basis[4:8].repeat(4, 1)
    )
    own = each[tokens]
    stream = own + basis[columns - places :] if places else own
    near = {"rtol": 0, "atol": 1e-4}
    torch.testing.assert_close(cache["blocks.0.hook_resid_pre"], stream, **near)
    pattern = cache["blocks.0.attn.hook_pattern"].sum(1)
    after = stream + 0.5 * pattern @ own
    torch.testing.assert_close(cache["blocks.0.hook_resid_post"], after, **near)
    expected = math.sqrt(d_model) * F.normalize(after, dim=-1) @ each.T
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
    gains = truth.model.blocks[0].ln1.original_component.weight.detach()
    assert 1 <= float(gains.min()) < 1.05
    assert 1.25 < float(gains.max()) <= 1.3


def test_what_planted_heads_read_is_what_some_query_can_find() -> None:
    """Not BOS, nor positions that no query reads at the offset."""
    for seed in range(3):
        truth = zoo.known("heads", seed=seed)
        assert truth.offset is not None
        reads = {truth.does[head]: rows for head, rows in truth.reads.items()}
        tokens = tuple(range(1, 16))
        found = tuple(16 + j for j in range(1, 24) if j + truth.offset < 24)
        assert reads == {"identity": tokens, "table": tokens, "offset": found}


@BOTH
@pytest.mark.parametrize("name", ["circuit", "idle"])
def test_heads_of_planted_circuits_score_25_where_they_match(name: str, positions: str) -> None:
    truth = zoo.known(name, seed=1, positions=positions)
    wanted = {"previous": "position", "induction": "content", "match": "content"}
    if name == "circuit":
        wanted |= {"second": "position", "itself": "position", "decoy": "content"}
    assert {truth.does[at]: label for at, label in truth.labels.items()} == wanted
    tokens = truth.random_tokens(16, seed=3)
    first, second = (scores(truth, tokens, layer) for layer in (0, 1))
    patterns = [x.masked_fill(~ALLOWED, -torch.inf).softmax(-1) for x in (first, second)]
    for offset in (0, 1, 2):
        peaks = first.diagonal(-offset, 2, 3).mean((0, 2))
        heads = (peaks - 25).abs() < 0.5
        assert int(heads.sum()) == 1
        (head,) = heads.nonzero().flatten().tolist()
        does = {0: "itself", 1: "previous", 2: "second"}[offset]
        assert truth.does[0, head] == ("idle" if name == "idle" and offset != 1 else does)
        near = patterns[0][:, head].diagonal(-offset, 1, 2).mean()
        assert float(near) > 0.95
    equal = lambda back: (tokens[:, :, None] == tokens.roll(back, 1)[:, None]) & (back <= KEY)
    matches = {"match": equal(0), "induction": equal(1), "decoy": equal(0) | equal(2)}
    for (layer, head), does in truth.does.items():
        if layer == 1 and does in matches and not (name == "idle" and does == "decoy"):
            places = matches[does] & ALLOWED
            own = second[:, head]
            assert float(own[places].mean()) == pytest.approx(25, abs=2.5), does
            assert float(own[~places & ALLOWED].abs().mean()) < 3, does
            rows = places.any(-1)
            mass = (patterns[1][:, head] * places).sum(-1)[rows].mean()
            assert float(mass) > 0.95, does


def test_planes_that_carry_content_turn_by_less_than_three_hundredths() -> None:
    turns = planted.frequencies() * (planted.LENGTH - 1)
    assert len(turns) == planted.D_ROTARY // 2
    assert bool((turns[planted.SLOW :] < 0.03).all())
    assert float(turns[planted.SLOW - 1]) > 0.03
    assert len(turns) - planted.SLOW >= planted.VOCAB


@pytest.mark.parametrize(("name", "copies", "most"), [("circuit", 3, 15), ("induction", 6, 63)])
def test_pairs_repeat_seven_distinct_tokens(name: str, copies: int, most: int) -> None:
    truth, drawn = zoo.known(name), set[int]()
    prompts, others, targets = truth.pairs(150, seed=2)
    for prompt, other, (target, wrong) in zip(prompts, others, targets.tolist(), strict=True):
        first, second = prompt[1:8].tolist(), other[1:8].tolist()
        assert prompt.tolist() == [0, *first * copies]
        assert other.tolist() == [0, *second * copies]
        assert len({*first, *second}) == 14
        assert (target, wrong) == (first[0], second[0])
        drawn |= {*first, *second}
    assert (min(drawn), max(drawn)) == (1, most)
    again, last, targets = truth.pairs(150, changed="last", seed=2)
    assert torch.equal(again, prompts)
    assert torch.equal(last[:, :-1], prompts[:, :-1])
    assert torch.equal(last[:, -1], prompts[:, 3])
    assert torch.equal(targets, prompts[:, [1, 4]])
    rows = truth.random_tokens(200, seed=1)
    assert rows.shape == (200, truth.length)
    assert set(rows[:, 1:].flatten().tolist()) == set(range(1, truth.vocab))
    assert not rows[:, 0].any()
    assert truth.vocab == most + 1


@BOTH
@pytest.mark.parametrize("seed", trained.SEEDS)
def test_trained_heads_have_the_names_that_their_attention_earns(positions: str, seed: int) -> None:
    truth = zoo.known("induction", seed=seed, positions=positions)
    hf = trained.hugging_face("induction", positions, seed)
    least: dict[str, Tensor] = {}
    for period in (15, 20):
        tokens, _ = trained.repeats(32, torch.Generator().manual_seed(0), (period, period))
        with torch.inference_mode():
            pattern = torch.stack(hf(tokens, output_attentions=True).attentions).mean(1)
        offset, repeat = torch.zeros(2, 4, 7), torch.zeros(2, 4, 7)
        for shift in range(1, 8):
            for i in range(7, 49):
                offset[..., shift - 1] += pattern[..., i, i - shift] / 42
            for i in range(21, 49):
                after = [j for j in range(i - period + shift, -1, -period) if j <= i]
                repeat[..., shift - 1] += pattern[..., i, after].sum(-1) / 28
        for name, share in (("offset", offset), ("induction", repeat)):
            least[name] = torch.minimum(least[name], share) if name in least else share
    best = {name: share.amax(-1) for name, share in least.items()}
    for (layer, head), does in truth.does.items():
        shares = {name: float(share[layer, head]) for name, share in best.items()}
        name = max(shares, key=lambda what: shares[what])
        assert does == (name if shares[name] > 0.5 else ""), shares
        label = {"offset": "position", "induction": "content"}.get(does)
        assert truth.labels.get((layer, head)) == label
    assert set(truth.does) == {(layer, head) for layer in range(2) for head in range(4)}
    assert (truth.vocab, truth.length) == (64, 49)


@BOTH
@pytest.mark.parametrize("seed", trained.SEEDS)
def test_heads_of_trained_sums_attend_to_what_they_say(positions: str, seed: int) -> None:
    truth = zoo.known("sum", seed=seed, positions=positions)
    tokens, _ = trained.sums(64, torch.Generator().manual_seed(0))
    pattern = truth.model.run_with_cache(tokens)[1]["pattern", 0].mean(0)
    for (_, head), does in truth.does.items():
        # digit n stands at 2 + n, and its sum is predicted at 8 + n
        summand = sum(float(pattern[head, 8 + n, 2 + n]) for n in range(7)) / 7
        key = float(pattern[head, 8:15, 1].mean())
        name = "summand" if summand > key else "key"
        assert does == (name if max(summand, key) > 0.5 else ""), (summand, key)
        assert truth.labels.get((0, head)) == ("position" if does == "summand" else None)
    assert (truth.vocab, truth.length) == (21, 16)


def test_attention_by_offset_by_hand() -> None:
    """A mean over queries; a query that has no such offset counts as zero."""
    pattern = torch.rand(2, 3, 4, 9)
    found = known_models._attention_by_offset(pattern)
    wanted = torch.zeros(2, 3, 9)
    for query in range(4):
        for key in range(5 + query + 1):
            wanted[..., 5 + query - key] += pattern[..., query, key] / 4
    torch.testing.assert_close(found, wanted)
