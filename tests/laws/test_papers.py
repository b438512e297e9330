"""The three works: tables against a numpy route from Hugging Face's states, quirks, verdicts, both
theorems by brute force, published splits."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from screenot.ScreeNOT import adaptiveHardThresholding
from torch import Tensor

import tl_geometry as tlg
from tests.lib.models import hf_model, tiny
from tl_geometry import flow, papers, zoo

pytestmark = pytest.mark.once
cases = settings(deadline=None, max_examples=20)
VOCAB, D, LAYERS, LENGTH, CONTEXTS, FRESH, SEED = 90, 24, 2, 24, 40, 6, 1234
SMALL: dict[str, Any] = {"length": LENGTH, "contexts": CONTEXTS, "fresh": FRESH, "k": 4}
SMALL |= {"topic_windows": 5, "topic_length": 12, "progress": False}
PUBLISHED = ("raw_denominator", "overlap", "absolute_with_self")


def drawn(size: tuple[int, ...], seed: int, high: int = VOCAB) -> Tensor:
    return torch.randint(0, high, size, generator=torch.Generator().manual_seed(seed))


IDS = drawn((600,), 1)


@cache
def gpt2() -> Any:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": D}
    sizes |= {"n_layer": LAYERS, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return randomised(transformers.GPT2LMHeadModel(config))


def randomised(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = (1.0 if p.dim() == 1 else 0.0) + 0.3 * torch.randn(p.shape, generator=generator)
    return model.eval()


@cache
def bridge(name: str = "tiny") -> Any:
    return tlg.models.from_hf(copy.deepcopy(gpt2()), name=name)


def states_of(rows: Tensor, final_norm: bool = False) -> np.ndarray:
    """Residual states [state context position d_model] from Hugging Face alone."""
    caught: list[Tensor] = []
    keep = lambda *a: caught.append(a[2] if isinstance(a[2], Tensor) else a[2][0])
    handle = gpt2().transformer.h[-1].register_forward_hook(keep)
    with torch.no_grad():
        out = gpt2()(rows, output_hidden_states=True)
    handle.remove()
    last = out.hidden_states[-1] if final_norm else caught[0]
    return torch.stack([*out.hidden_states[:-1], last]).double().numpy()


def windows(ids: Tensor, quirks: tuple[str, ...]) -> list[Tensor]:
    """Windows of the basis and fresh ones, as the published script draws them; of those that it
    drew twice one."""
    train = ids[: int(0.9 * len(ids))]
    if "overlap" in quirks:
        sizes = enumerate((CONTEXTS, FRESH))
        starts = [drawn((n,), SEED + i, len(train) - LENGTH).unique() for i, n in sizes]
        return [train[s[:, None] + torch.arange(LENGTH)].unique(dim=0) for s in starts]
    rows = train[: len(train) // LENGTH * LENGTH].view(-1, LENGTH)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED))]
    fresh = min(FRESH, len(rows) // 4)
    return [rows[fresh:], rows[:fresh]]


def route(ids: Tensor, quirks: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The published script, shortened."""
    states = lambda rows: states_of(rows, "final_norm" in quirks)[:, :, 1:]
    rows, fresh = map(states, windows(ids, quirks))
    P = rows.mean(1) - rows.mean((1, 2))[:, None]
    s = np.linalg.svd(P, compute_uv=False)
    M = fresh if "raw_denominator" in quirks else rows - rows.mean((1, 2))[:, None, None]
    size = np.array([np.linalg.norm(m.reshape(-1, D), 2) for m in M])
    return {
        "table 3": np.array([adaptiveHardThresholding(p, 4, "i")[2] for p in P]),
        "table 4": (s**2).sum(1) / s[:, 0] ** 2,
        "table 5": math.sqrt(M.shape[1]) * s[:, 0] / size,
    }


def number(table: Any, cell: str, name: str = "table 1", what: str = "ours") -> float:
    (value,) = table.column(what, table=name, cell=cell)
    return value


@pytest.mark.parametrize(
    "quirks",
    [PUBLISHED, (), ("overlap",), ("raw_denominator",), (*PUBLISHED, "final_norm"), None],
    ids=lambda quirks: "+".join(quirks or ()) or str(quirks),
)
def test_tables_three_to_five_equal_a_numpy_route(quirks: tuple[str, ...] | None) -> None:
    found = papers.song_zhong(bridge(), IDS, quirks=quirks, **SMALL)
    expected = route(IDS, PUBLISHED if quirks is None else quirks)
    for table, values in expected.items():
        assert np.allclose(found.column("ours", table=table), values, rtol=2e-4), table
    mean, sd = expected["table 5"].mean(), expected["table 5"].std()
    assert number(found, "relative_norm") == pytest.approx(mean, rel=1e-3)
    assert number(found, "relative_norm sd") == pytest.approx(sd, rel=1e-3)


def test_topics_follow_the_published_protocol() -> None:
    documents = [drawn((n,), n) for n in (40, 61, 50)]
    found = papers.song_zhong(bridge(), IDS, topics=documents, **SMALL)
    means = states_of(windows(IDS, PUBLISHED)[0]).mean(1)[:, 1:12]
    mu = means.mean(1)
    starts = lambda d: np.linspace(0, len(d) - 12, 5, dtype=int)
    rows = np.array([d[s : s + 12].numpy() for d in documents for s in starts(d)])
    ctx = states_of(torch.from_numpy(rows))[:, :, 1:].mean(2) - mu[:, None]
    pos, ctx = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (means - mu[:, None], ctx))
    cosine = np.abs(ctx @ ctx.transpose(0, 2, 1))
    same = np.repeat(np.arange(3), 5)[:, None] == np.repeat(np.arange(3), 5)
    across = np.abs(pos @ ctx.transpose(0, 2, 1)).mean((1, 2))
    for name, values in (
        ("intra", np.array([c[same].mean() for c in cosine])),
        ("inter", np.array([c[~same].mean() for c in cosine])),
        ("incoherence", across),
    ):
        assert number(found, name) == pytest.approx(values.mean(), rel=1e-3)
        assert number(found, f"{name} sd") == pytest.approx(values.std(), rel=1e-2)
    clean = papers.song_zhong(bridge(), IDS, topics=documents, quirks=PUBLISHED[:2], **SMALL)
    off = same & ~np.eye(15, dtype=bool)
    wanted = np.mean([c[off].mean() for c in cosine])
    assert number(clean, "intra") == pytest.approx(wanted, rel=1e-3)
    assert number(found, "intra") > number(clean, "intra") + 0.01


def test_bert_is_run_as_hugging_faces_decoder_and_put_back() -> None:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": D, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 4 * D, "max_position_embeddings": 32}
    config = transformers.BertConfig(**sizes)
    config._attn_implementation = "eager"
    bert = randomised(transformers.BertForMaskedLM(config))
    decoding = transformers.BertConfig(**{**config.to_dict(), "is_decoder": True})
    decoder = transformers.BertModel(decoding, add_pooling_layer=False).eval()
    decoder.load_state_dict(bert.bert.state_dict(), strict=False)
    rows, expected = windows(IDS, PUBLISHED)[0], []
    for net in (decoder, bert):  # before TransformerLens wraps its modules
        with torch.no_grad():
            h = torch.stack(net(rows, output_hidden_states=True).hidden_states)[:, :, 1:].double()
        s = torch.linalg.svdvals(h.mean(1) - h.mean((1, 2))[:, None])
        expected.append((s.square().sum(1) / s[:, 0] ** 2).tolist())
    model = tlg.models.from_hf(bert, name="bert-base-cased")
    found = [papers.song_zhong(model, IDS, quirks=each, **SMALL) for each in (None, PUBLISHED)]
    assert [("causal mask" in table.provenance.flags) for table in found] == [True, False]
    for table, values in zip(found, expected, strict=True):
        assert table.column("ours", table="table 4") == pytest.approx(values, rel=1e-3)
    assert expected[0] != pytest.approx(expected[1], rel=1e-2), "the twin"


def test_verdicts() -> None:
    model = bridge("gpt2")
    found = papers.song_zhong(model, IDS, row="GPT-2 OWT", **SMALL)
    cells = {(row[0], row[1]): row[2:] for row in found.rows()}
    assert cells["table 1", "rank"][3] == "differs"
    assert cells["table 1", "rank sd"][3] == "not judged"
    judged: Any = cells.values()
    for ours, theirs, near, said in judged:
        if said in ("agrees", "differs"):
            assert (said == "agrees") == (abs(ours - theirs) <= near)
    of_table_1 = {x[-1] for (table, _), x in cells.items() if table == "table 1"}
    assert of_table_1 <= {"agrees", "differs", "not judged"}
    assert {x[-1] for (table, _), x in cells.items() if table != "table 1"} == {"no published row"}
    assert {"published row GPT-2 OWT", "overlapping windows"} <= set(found.provenance.flags)
    assert (found.provenance.preset, found.provenance.seed) == ("reference", SEED)
    documents = [IDS[:40], IDS[50:90]]
    notebook = papers.song_zhong(model, IDS, topics=documents, row="GPT-2 GitHub", **SMALL)
    # one from the notebook, one from Table 2, one that nobody printed
    printed = [number(notebook, name, what="published") for name in ("inter", "rank")]
    assert printed == [0.28, 11.54]
    assert math.isnan(number(notebook, "incoherence", what="published"))
    llama = papers.song_zhong(bridge("Llama-2-7b-hf"), IDS, row="Llama-2 GitHub", **SMALL)
    (doubt,) = llama.column("verdict", cell="rank sd")
    assert doubt == "doubtful: Table 3 has a deviation of 1.07"


@pytest.mark.parametrize(("name", "n"), [("gpt2-medium", 44), ("Llama-2-7b", 70)])
def test_lines_of_thought_are_the_flow_of_the_chunks(name: str, n: int) -> None:
    """The second as its published states are: behind the final norm, without outlying chunks."""
    model, text = zoo.embedded(), "\n".join(zoo.corpus.held_out_documents().texts)[:60_000]
    cut = lambda length: tlg.corpus.pseudo_sentences(model, text, length, prepend_bos=True)[:n]
    follow = lambda rows, m=model: flow.trajectories(m, rows, progress=False)
    seen = lambda x: x.after_norm(model) if n == 70 else x
    mean = lambda x: np.mean(x.residuals().column("abs_kurtosis"))
    options: dict[str, Any] = {"published_as": name, "n": n, "length": 8, "K": (4, 1, 999)}
    options |= {"prepend_bos": True, "seed": 3, "progress": False}
    found = papers.sarfati(model, text, **options)
    chunks = cut(8)[[i for i in range(n) if i != 65]]
    before = follow(chunks)
    paths, curve = seen(before), flow.truncation_kl(model, chunks, before, K=(1, 4), progress=False)
    law = flow.fit_noise_law(paths.residuals(), law="asymptotic")
    with tlg.models.reinitialized(model, seed=3) as untrained:
        kurtosis = mean(follow(chunks, untrained))
    (train, test), accuracies = paths.split(seed=3), list[float]()
    moved = flow.flow_map(train.aligned_bases, 1, 2)(test.X[:, 1].double())
    svm = flow.separability(test.X[:, 2].double(), moved, paired=True, seed=3).accuracy
    real, random = cut(10), tlg.corpus.gibberish(model, n, 10, prepend_bos=True, seed=3)
    for state in zip(*(seen(follow(x)).X.unbind(1) for x in (real, random)), strict=True):
        accuracies.append(flow.separability(*state, classifier="perceptron", seed=3).accuracy)
    expected = {
        "alpha": law.alpha,
        "ln alpha": law.log_alpha,
        "lambda": law.rate,
        "mean |kurtosis|": mean(paths),
        "K with 90% of the KL gone": math.nan,  # fewer chunks than dimensions
        "KL at K = 1": curve.column("kl")[0],
        "mean |kurtosis|, untrained": kurtosis,
        "SVM accuracy, tau = 1": svm,
        "perceptron accuracy against gibberish, lowest layer": min(accuracies),
    }
    assert dict(zip(found.column("quantity"), found.column("ours"))) == pytest.approx(
        expected, rel=1e-5, nan_ok=True
    )
    rows: Any = found.rows()
    for _, low, high, ours, near, said, *_ in rows:
        inside = "agrees" if low - near <= ours <= high + near else "differs"
        measured = "not measured" if math.isnan(ours) else inside
        assert said == ("not published" if math.isnan(low) else measured)
    assert found.column("published_low", quantity="lambda") == [0.18 if n == 44 else 0.27]
    about = found.provenance
    assert (about.contexts, about.seed, about.has_bos) == (len(chunks), 3, True)
    assert any("1 of the 7 outlying" in flag for flag in about.flags) == (n == 70)


def test_traveling_words_are_the_readouts_themselves() -> None:
    model = zoo.embedded()
    found = papers.molina(model, nouns=["file", "list"], k=2)
    rows = {(r[0], r[1], r[2], r[3]): r for r in found.rows()}
    for matrix, ends in (("QK", ("queries", "keys")), ("OV", ("reads", "writes"))):
        table = tlg.token_readout(model, matrix=matrix, features=1, k=2)
        row = dict(zip(table.columns(), table.rows()[3], strict=True))
        at = (f"head {matrix}", row["layer"], str(row["head"]), f"direction {row['feature']}")
        assert rows[at][4:7] == (row[ends[0]], row[ends[1]], row["value"])
    assert {r[0] for r in found.rows()} == {"bias", "head QK", "head OV", "noun"}
    assert all("needs GPT-2's weights" in str(r[-1]) for r in found.rows())
    refused = papers.molina(tiny("bridge", "qwen3"), nouns=["a"], k=2)
    whys = {str(r[0]): str(r[-1]) for r in refused.rows() if r[1] == -1}
    assert set(whys) == {"bias", "noun"}
    assert all(why.startswith("refused: ") and "QK-norm" in why for why in whys.values())


def test_published_splits_by_hand_and_how_far_they_miss() -> None:
    model, ids = tiny("bridge", "gpt2"), drawn((3, 12), 4, 60)
    basis = tlg.decompose(model, drawn((20, 12), 5, 60), progress=False)
    split = tlg.split_scores(model, ids, basis, layers=1)
    allowed = split.allowed.expand_as(split.total())
    hf = hf_model("gpt2").transformer.h[1]
    with torch.no_grad():
        h = hf_model("gpt2")(ids, output_hidden_states=True).hidden_states[1]
    pos = torch.stack([basis.pos_at(t)[1] for t in range(12)]).float()

    def projected(x: Tensor, which: int, norm: bool = True) -> Tensor:
        x = hf.ln_1(x) if norm else x
        weight, bias = hf.attn.c_attn.weight, hf.attn.c_attn.bias * norm
        return (x @ weight + bias)[..., 32 * which : 32 * which + 32].unflatten(-1, (4, 8)).detach()

    for form, key in (("reference", h - pos), ("paper", h - pos - basis.mean[1].float())):
        found = papers.published_split(model, ids, basis, 1, form=form)
        q, k = projected(pos, 0, form == "reference"), projected(key, 1, form == "reference")
        expected = torch.einsum("ihe,bjhe->bhij", q, k) / math.sqrt(8)
        assert torch.allclose(found["pos", "cvec"], expected, atol=1e-3)
        missed = (torch.stack(list(found.values())).sum(0) - split.total())[allowed].abs().max()
        assert float(missed / split.total()[allowed].abs().max()) > 0.1, "no split of the scores"
    exact = (torch.stack(list(split.terms.values())).sum(0) - split.total())[allowed].abs().max()
    assert float(exact) < 1e-3, "the twin"


def random_parts(seed: int, n: int = 5, d: int = 7) -> tuple[Tensor, Tensor, dict[Any, Tensor]]:
    """Rows of norm at most 1, and random coefficients."""
    made = torch.Generator().manual_seed(seed)
    content, position = torch.randn(2, n, d, generator=made, dtype=torch.float64)
    content, position = (x / x.norm(dim=-1).max() for x in (content, position))
    pairs = [(a, b) for a in ("content", "position") for b in ("content", "position")]
    A = {p: torch.rand(n, n, generator=made, dtype=torch.float64) * 2 - 1 for p in pairs}
    return content, position, A


@cases
@given(st.integers(0, 1000))
def test_theorem_two_by_brute_force(seed: int) -> None:
    """One kernel of the whole W against the product of four, from explicit matrices."""
    content, position, A = random_parts(seed)
    parts = {"content": content, "position": position}
    gap = papers.factorisation_gap(content, position, A)
    W = {(a, b): parts[a].T @ A[a, b] @ parts[b] for a, b in A}
    x, whole = content + position, torch.stack(list(W.values())).sum(0)
    for i in range(len(x)):
        for j in range(len(x)):
            kernel = torch.exp(x[i] @ whole @ x[j])
            product = math.prod(float(torch.exp(parts[a][i] @ W[a, b] @ parts[b][j])) for a, b in W)
            assert float(gap.r[i, j]) == pytest.approx(math.log(float(kernel) / product), abs=1e-9)
    assert float(gap.r.abs().max()) <= gap.bound
    mu = max(abs(float(c @ t)) for c in content for t in position)
    assert gap.incoherence == pytest.approx(mu)
    total = sum(float(a.abs().sum()) for a in A.values())
    assert gap.bound == pytest.approx(total * (2 * mu + mu**2))


def test_theorem_two_is_sharp_and_exact_without_incoherence() -> None:
    content, position, A = random_parts(0)
    apart = [torch.cat(x, 1) for x in ((content, 0 * content), (0 * position, position))]
    gap = papers.factorisation_gap(apart[0], apart[1], A)
    assert gap.bound == 0
    assert float(gap.r.abs().max()) < 1e-12 < float(gap.log_lhs.abs().max())
    for mu in (0.1, 0.6):
        c, t = torch.tensor([[1.0, 0.0]]), torch.tensor([[mu, math.sqrt(1 - mu**2)]])
        met = papers.factorisation_gap(c, t, {("content", "content"): torch.ones(1, 1)})
        assert float(met.r) == pytest.approx(met.bound, rel=1e-6)
        assert float(met.r) > 4 * mu**2 / 2, "a bound of the second order alone fails"


def centred(seed: int, *shape: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, dtype=torch.float64, generator=made)
    return rows - rows.mean(-2, keepdim=True)


def stencil(G: np.ndarray, m: int) -> np.ndarray:
    """The two-dimensional definition of Delta^(m,m) on the reflected Gram matrix, iterated."""
    T, G = len(G), np.block([[G, G[:, ::-1]], [G[::-1], G[::-1, ::-1]]])
    for _ in range(m):
        rolled = np.roll(G, 1, 0) + np.roll(G, 1, 1) - np.roll(G, (1, 1), (0, 1))
        G = T**2 * (G - rolled)
    return G


@cases
@given(st.integers(0, 10_000), st.integers(2, 24), st.integers(1, 5), st.integers(1, 6), st.data())
def test_theorem_one_as_corrected(seed: int, T: int, d: int, m: int, data: st.DataObject) -> None:
    k, P = data.draw(st.integers(1, T)), centred(seed, T, d)
    r, G = papers.theorem1(P, k, m), P @ P.T
    size = float(G.abs().max())
    assert r.lhs <= r.bound_operator * (1 + 1e-9) + 1e-12
    assert r.bound_operator <= r.bound_tight * (1 + 1e-9)
    assert r.bound_tight <= r.bound_safe * (1 + 1e-9)
    W = torch.diag(torch.tensor([1.0] + [2.0] * (k - 1), dtype=torch.float64))
    assert torch.allclose(r.B @ r.B.T, W @ r.F.T @ G @ r.F @ W / T**2, atol=1e-12 * size)
    Q = torch.linalg.qr(r.F).Q
    projected = Q @ Q.T @ G @ Q @ Q.T
    assert torch.allclose(r.F @ r.B @ r.B.T @ r.F.T, projected, atol=1e-11 * size)
    left = float(torch.linalg.matrix_norm(G - projected, 2)) / T
    assert r.lhs == pytest.approx(left, abs=1e-12 * size)


def test_the_bounds_of_theorem_one_by_dense_matrices() -> None:
    T, k, m = 9, 3, 2
    P = centred(7, T, 4)
    r, G = papers.theorem1(P, k, m), (P @ P.T).numpy()
    delta = stencil(G, m)
    largest, operator = np.abs(delta).max(), np.linalg.norm(delta, 2)
    g = {j: 1 / (2 * T * math.sin(math.pi * j / (2 * T))) for j in (1, k)}
    bracket = (g[k] * g[1]) ** m + g[k] ** (2 * m)
    assert r.delta_max == pytest.approx(largest)
    assert r.bound_tight == pytest.approx(bracket * largest)
    assert r.bound_operator == pytest.approx(bracket * operator / (2 * T))
    assert r.bound_safe == pytest.approx(6 / (4 * k) ** m * largest)
    assert r.bound_paper == pytest.approx(6 / (8 * k) ** m * largest)
    t, j = np.arange(1, T + 1)[:, None], np.arange(1, k + 1)
    Q = np.linalg.qr(np.cos((j - 0.5) * (t - 1) * math.pi / T))[0]
    rest = np.eye(T) - Q @ Q.T
    assert r.lhs_paper == pytest.approx(np.linalg.norm(rest @ G @ rest, 2) / T)
