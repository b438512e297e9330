"""The readouts of Traveling Words are those of the library."""

from __future__ import annotations

import pytest

from tests.lib.models import tiny
from tl_geometry import papers, zoo
from tl_geometry.weights import bias_readout, noun_probe, token_readout

pytestmark = pytest.mark.once


def test_traveling_words_are_the_readouts_themselves() -> None:
    model = zoo.embedded()
    found = papers.molina(model, nouns=["file", "list"], k=2)
    rows = {(r[0], r[1], r[2], r[3]): r for r in found.rows()}
    layer, head, name, length, top, bottom = bias_readout(model, k=2).rows()[4]
    mine = rows["bias", layer, str(head), f"{name} bias"]
    assert mine[4:7] == (top, bottom, length)
    for matrix, ends in (("QK", ("queries", "keys")), ("OV", ("reads", "writes"))):
        table = token_readout(model, matrix=matrix, features=1, k=2)
        row = dict(zip(table.columns(), table.rows()[3], strict=True))
        at = (f"head {matrix}", row["layer"], str(row["head"]), f"direction {row['feature']}")
        assert rows[at][4:7] == (row[ends[0]], row[ends[1]], row["value"])
    probe = noun_probe(model, ["file", "list"], k=2, biases=False).rows()[1]
    assert rows["noun", probe[0], str(probe[1]), probe[2]][4:7] == tuple(probe[3:])
    assert all("needs GPT-2's weights" in str(r[-1]) for r in found.rows())
    assert found.provenance.preset == "paper"


def test_traveling_words_say_what_a_model_has_not() -> None:
    found = papers.molina(tiny("bridge", "qwen3"), nouns=["a"], k=2)
    refused = {str(r[0]): str(r[-1]) for r in found.rows() if r[1] == -1}
    assert set(refused) == {"bias", "noun"}
    assert all(v.startswith("refused: ") and "QK-norm" in v for v in refused.values())
