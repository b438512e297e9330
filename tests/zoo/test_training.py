"""Models of the zoo are trained as their modules say: the rows of each mixture, the optimiser by
hand, the numbers of the card, and what is written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tl_geometry import zoo
from tl_geometry.base.errors import GeometryError
from tl_geometry.zoo import corpus, train_embedded, trained, trainer
from tl_geometry.zoo.trainer import IGNORE, TrainSettings, new_gpt2, sequence_loss, train


def period_of(row: Tensor) -> int:
    return next(p for p in range(1, len(row) + 1) if torch.equal(row[p:], row[:-p]))


def whole_rows(batch: tuple[Tensor, Tensor]) -> Tensor:
    """The rows that were shifted to inputs and targets, without BOS."""
    inputs, targets = batch
    assert bool((inputs[:, 0] == 0).all())
    return torch.cat([inputs[:, 1:], targets[:, -1:]], 1)


@pytest.mark.parametrize(
    ("steps", "random", "symbols", "shape", "periods"),
    [
        (range(390, 400), slice(0, 64), 64, (64, 64), (6, 32)),
        (range(400, 412), slice(0, 64), 2047, (64, 64), (6, 32)),
        (range(699, 700), slice(0, 64), None, (64, 64), None),
        (range(700, 750), slice(20, 26), None, (32, 128), (8, 60)),
    ],
)
def test_rows_of_the_mixture_are_those_that_the_module_names(
    steps: range,
    random: slice,
    symbols: int | None,
    shape: tuple[int, int],
    periods: tuple[int, int] | None,
) -> None:
    """Random rows hide exactly their first copy; the other rows are of the stream."""
    stream = torch.arange(1, 131)
    make, found, starts = train_embedded.batches(stream), Counter[int](), set[int]()
    drawn = set[int]()
    for step in steps:
        batch = make(step)
        rows, targets = whole_rows(batch), batch[1]
        assert rows.shape == shape
        assert rows.numel() == zoo.card()["tokens_seen"] // zoo.card()["steps"]
        if symbols is not None:
            assert symbols // 2 < int(rows[random].max()) <= symbols
        for row, target in zip(rows[random], targets[random], strict=True):
            period = period_of(row)
            found[period] += 1
            drawn |= set(row.tolist())
            shown = [IGNORE if at < period else int(t) for at, t in enumerate(row)]
            assert target.tolist() == shown
        for number in [*range(random.start), *range(random.stop, len(rows))]:
            assert torch.equal(targets[number], rows[number])
            start = int(rows[number, 0]) - 1
            starts.add(start)
            period = period_of(rows[number]) if number >= random.stop else shape[1]
            assert torch.equal(rows[number, :period], stream[start : start + period])
            found[period] += number >= random.stop
    if symbols is not None:
        assert (min(drawn), max(drawn)) == (1, symbols)
    if periods is not None:
        seen = sorted(period for period, count in found.items() if count)
        assert (seen[0], seen[-1]) == periods
    if shape[1] == 128:
        assert starts == {0, 1}


def test_losses_of_the_ngram_models_by_counting() -> None:
    g = torch.Generator().manual_seed(0)
    training = torch.randint(0, 30, (400,), generator=g)
    held_out = torch.cat([torch.randint(0, 33, (60,), generator=g), torch.tensor([2047, 3])])
    ones = Counter(training.tolist())
    twos = Counter(zip(training[:-1].tolist(), training[1:].tolist(), strict=True))
    before = Counter(training[:-1].tolist())
    single = {t: (ones[t] + 1) / (400 + 2048) for t in range(2048)}
    pairs = list(zip(held_out[:-1].tolist(), held_out[1:].tolist(), strict=True))
    mixed = [0.9 * twos[a, b] / max(before[a], 1) + 0.1 * single[b] for a, b in pairs]
    found = train_embedded.ngram_losses(training, held_out)
    unigram = -sum(math.log(single[t]) for t in held_out.tolist()) / len(held_out)
    bigram = -sum(map(math.log, mixed)) / len(mixed)
    assert found == pytest.approx({"unigram": unigram, "bigram": bigram})


def test_the_loss_on_a_stream_is_that_of_whole_windows_behind_bos() -> None:
    """67 windows, so that the last part is smaller; what does not fill a window is left out."""
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    stream = torch.randint(1, 9, (67 * 127 + 126,), generator=torch.Generator().manual_seed(1))
    model: Any = lambda ids: SimpleNamespace(logits=table[ids])
    total = 0.0
    for row in stream[: 67 * 127].view(67, 127).tolist():
        total -= sum(float(table[a, b]) for a, b in zip([0, *row], row, strict=False))
    found = train_embedded.natural_loss(model, stream)
    assert found == pytest.approx(total / (67 * 127), rel=1e-5)


def test_head_scores_are_those_of_the_card() -> None:
    found, wanted = train_embedded.head_scores(zoo.hugging_face()), zoo.card()
    for name, value in wanted["repeated_random_tokens"].items():
        assert found[name] == pytest.approx(value, rel=2e-3), name
    assert set(found) == set(wanted["repeated_random_tokens"])


def test_the_tokenizer_learns_what_occurs_twice_and_has_bos_first(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = tmp_path / "tokenizer.json"
    train_embedded.train_tokenizer(["qw zx", "qw"], path)
    found = Tokenizer.from_file(str(path)).get_vocab()
    assert found["<|endoftext|>"] == 0
    assert "qw" in found
    assert "zx" not in found
    alone = [found[c] for c in "zx"]
    expected = [found["qw"], 0, *alone, 0]
    assert train_embedded.encode(["qw", "zx"], path).tolist() == expected
    text = " ".join(f"{n:04d}" for n in range(4000))
    train_embedded.train_tokenizer([text, text], path)
    assert Tokenizer.from_file(str(path)).get_vocab_size() == 2048


def test_the_card_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    model: Any = object()
    monkeypatch.setattr(train_embedded, "natural_loss", lambda m, ids: 2.0 if m is model else 7.0)
    monkeypatch.setattr(train_embedded, "head_scores", lambda m: {"of": m is model})
    losses = [50.0] * 20 + [1.0] * 40 + [2.0] * 60
    stream, held_out = torch.tensor([1, 2, 3, 1]), torch.tensor([2, 3])
    card = train_embedded.model_card(tmp_path, model, losses, stream, held_out)
    assert card["model_sha256"] == hashlib.sha256(b"weights").hexdigest()
    assert (card["steps"], card["final_training_loss"]) == (120, pytest.approx(1.6))
    assert card["tokens_seen"] / card["steps"] == zoo.card()["tokens_seen"] / 3600
    assert (card["held_out_loss"], card["untrained_loss"]) == (2.0, 7.0)
    assert card["bigram_loss"] < card["unigram_loss"]
    assert card["repeated_random_tokens"] == {"of": True}
    documents = corpus.HeldOut(("a.py", "b.py"), ("x", "y"), (), ())
    data = train_embedded.data_card(["x", "y", "z"], stream, documents, held_out)["data"]
    assert (data["training_files"], data["training_tokens_available"]) == (3, 4)
    assert (data["held_out_modules"], data["held_out_tokens"]) == (["a.py", "b.py"], 2)
    assert data["sha256"] == hashlib.sha256(stream.numpy().tobytes()).hexdigest()
    assert set(zoo.card()) >= set(card)


def test_the_model_before_training_has_the_settings_that_are_stored(tmp_path: Path) -> None:
    stored = json.loads((zoo.directory() / "config.json").read_text())
    fresh = train_embedded.new_model()
    settings = fresh.config.to_dict()
    for name in (*train_embedded.SHAPE, *train_embedded.INITIAL, "bos_token_id", "eos_token_id"):
        assert settings[name] == stored[name], name
    assert float(fresh.transformer.wte.weight.detach().std()) == pytest.approx(0.06, rel=0.01)
    train_embedded.write_tokenizer_config(tmp_path)
    name = "tokenizer_config.json"
    written, shipped = ((folder / name).read_text() for folder in (tmp_path, zoo.directory()))
    assert json.loads(written) == json.loads(shipped)


def test_training_writes_a_directory_of_rounded_weights_and_keeps_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[Any] = []

    def steps(model: Any, batch_at: Any, settings: Any, *, on_step: Any, **options: Any) -> Any:
        for step in range(450):
            on_step(step, None)
        called.append((settings.steps, options))
        return [1.0, 3.0]

    def model_card(out: Path, model: Any, losses: Any, stream: Tensor, held_out: Tensor) -> Any:
        assert (out / "model.safetensors").is_file()
        return {"model": [losses, len(stream), len(held_out)]}

    def encode(texts: list[str], path: Path) -> Tensor:
        return torch.arange(2 if texts == ["a", "b"] else 50_000)

    fakes = {
        "train": steps,
        "train_tokenizer": lambda texts, path: called.append(texts) or path.touch(),
        "encode": encode,
        "natural_loss": lambda model, ids: len(ids) / 16_000,
        "model_card": model_card,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(train_embedded, name, fake)
    monkeypatch.setattr(corpus, "training_texts", lambda: ["a", "b"])
    monkeypatch.setattr(torch, "set_num_threads", called.append)
    out = tmp_path / "made" / "new"
    with caplog.at_level("INFO"):
        assert train_embedded.main(["--out", str(out)]) == 0
    said = [line for line in caplog.messages if line.startswith("step")]
    assert said == [f"step {n}: held-out loss 2.500" for n in (200, 400)]
    card = json.loads((out / "card.json").read_text())
    assert card["model"] == [[1.0, 3.0], 2, 50_000]
    assert card["data"]["held_out_tokens"] == 50_000
    assert json.loads(caplog.messages[-1]) == card
    options = {"checkpoint": out / "training.safetensors", "progress": False}
    assert called == [1, ["a", "b"], (zoo.card()["steps"], options)]
    names = {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} == names | {"card.json"}
    fractions = torch.frexp(load_file(out / "model.safetensors")["transformer.wte.weight"])[0]
    assert bool((fractions * 2**14 % 1 == 0).all())
    assert train_embedded.main(["--out", str(out), "--threads", "3"]) == 0
    assert called[3:] == [3, (zoo.card()["steps"], options)]


# --- The trainer ----------------------------------------------------------------------------------


def gpt2(**settings: Any) -> Any:
    shape: dict[str, Any] = {"n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return new_gpt2(1, vocab_size=17, initializer_range=0.5, **(shape | still | settings))


def some_batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 17, (4, 9), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    targets[1, 2:], targets[2, :3] = IGNORE, IGNORE
    return tokens[:, :-1], targets


def test_a_step_is_clipped_adamw_with_decay_of_matrices_alone() -> None:
    """By hand, without torch.optim, with the settings of nanoGPT, which are the defaults."""
    decay, first, second, clip = 0.1, 0.9, 0.99, 1.0
    settings = TrainSettings(steps=5, learning_rate=0.05, final_learning_rate=0.01, warmup=2)
    ours, theirs = gpt2(), gpt2()
    losses = train(ours, some_batch, settings, progress=False)
    moments: dict[str, tuple[Tensor, Tensor]] = {}
    norms = []
    for step in range(5):
        tokens, targets = some_batch(step)
        logs = theirs(tokens).logits.log_softmax(-1)
        rows = []
        for row, target in zip(logs, targets.tolist(), strict=True):
            kept = [-row[at, t] for at, t in enumerate(target) if t != IGNORE]
            rows.append(torch.stack(kept).mean())
        loss = torch.stack(rows).mean()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-4)
        theirs.zero_grad()
        loss.backward()
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in theirs.parameters())))
        rate, power = settings.rate(step), step + 1
        for name, p in theirs.named_parameters():
            grad = p.grad * min(1.0, clip / norms[-1])
            mean, square = moments.get(name, (torch.zeros_like(p), torch.zeros_like(p)))
            mean = first * mean + (1 - first) * grad
            square = second * square + (1 - second) * grad**2
            moments[name] = mean, square
            size = (square / (1 - second**power)).sqrt() + 1e-8
            p.data *= 1 - rate * decay * (p.dim() >= 2)
            p.data -= rate * mean / (1 - first**power) / size
    assert min(norms) > 2, "clipped"
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        has_gradient = moments[name][1].sqrt() > 1e-5  # biases of keys have none but rounding
        assert torch.allclose(a[has_gradient], b[has_gradient], rtol=1e-3, atol=1e-3), name
    assert not ours.training


def test_dropout_differs_in_every_step_and_seed_and_draws_from_its_own_generator() -> None:
    def losses(seed: int) -> list[float]:
        settings = TrainSettings(
            steps=3, learning_rate=0.0, final_learning_rate=0.0, warmup=1, seed=seed
        )
        model = gpt2(resid_pdrop=0.5)
        return train(model, lambda step: some_batch(0), settings, progress=False)

    before = torch.get_rng_state()
    one, again, other = losses(1), losses(1), losses(2)
    assert one == again
    assert len({*one, *other}) == 6
    assert torch.equal(torch.get_rng_state(), before)


def test_checkpoints_are_written_when_due_and_keep_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TrainSettings(
        steps=7, learning_rate=0.01, final_learning_rate=0.01, warmup=1, checkpoint_every=3
    )
    written: list[int] = []
    write = trainer.write_atomically

    def noting(path: Path, tensors: dict[str, Tensor], header: Any) -> None:
        written.append(len(tensors["losses"]))
        write(path, tensors, header)

    monkeypatch.setattr(trainer, "write_atomically", noting)
    path, records = tmp_path / "training.safetensors", list[Any]()
    modes: list[bool] = []

    def on_step(step: int, model: Any) -> None:
        modes.append(model.training)
        records.append({"step": step})

    options: dict[str, Any] = {"checkpoint": path, "progress": False}
    losses = train(gpt2(), some_batch, settings, on_step=on_step, records=records, **options)
    assert written == [3, 6, 7]
    assert not any(modes)
    kept: list[Any] = ["of before"]
    refuse: Any = lambda step: pytest.fail("nothing is left to do")
    finished = gpt2().train()
    assert train(finished, refuse, settings, records=kept, **options) == losses
    assert not finished.training
    assert kept == [{"step": step} for step in range(7)]
    others: list[tuple[Any, TrainSettings, str]] = [
        (gpt2(), dataclasses.replace(settings, clip=2.0), "other clip"),
        (gpt2(n_layer=2), settings, "parameters of another model"),
        (gpt2(n_positions=9), settings, "parameters of another model"),
    ]
    for model, changed, says in others:
        with pytest.raises(GeometryError, match=says):
            train(model, some_batch, changed, **options)


def test_a_bar_is_shown_unless_it_is_silenced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = TrainSettings(
        steps=3, learning_rate=0.01, final_learning_rate=0.0, warmup=1, checkpoint_every=2
    )
    losses = train(gpt2(), some_batch, settings, progress=False)
    assert capsys.readouterr().err == ""
    train(gpt2(), some_batch, settings)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert f"loss={losses[0]:.3f}" in shown

    def stopped(step: int) -> tuple[Tensor, Tensor]:
        if step == 2:
            raise KeyboardInterrupt
        return some_batch(step)

    path = tmp_path / "training.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train(gpt2(), stopped, settings, checkpoint=path, progress=False)
    train(gpt2(), some_batch, settings, checkpoint=path)
    assert "2/3" in capsys.readouterr().err, "goes on where it stopped"


def test_a_sequence_without_targets_counts_as_zero() -> None:
    logits = torch.zeros(2, 3, 4)
    targets = torch.tensor([[IGNORE] * 3, [0, 1, IGNORE]])
    assert float(sequence_loss(logits, targets)) == pytest.approx(math.log(4) / 2)


def test_new_models_leave_the_generator_alone_and_are_in_evaluation_mode() -> None:
    before = torch.get_rng_state()
    models = [gpt2(), trained.new_model("sum", "learned", 0), trained.new_model("sum", "rotary", 0)]
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(model.training for model in models)


# --- Circuits -------------------------------------------------------------------------------------


def test_rows_of_repeats_by_hand() -> None:
    tokens, counted = trained.repeats(800, torch.Generator().manual_seed(0))
    assert tokens.shape == (800, 49)
    assert not tokens[:, 0].any()
    periods = [period_of(row) for row in tokens[:, 1:]]
    assert (min(periods), max(periods)) == (8, 24)
    for row, period in zip(counted.tolist(), periods, strict=True):
        assert row == [False] * (1 + period) + [True] * (48 - period)
    assert (int(tokens[:, 1:].min()), int(tokens.max())) == (1, 63)


def test_rows_of_sums_by_hand() -> None:
    tokens, counted = trained.sums(300, torch.Generator().manual_seed(0))
    for bos, key, *rest in tokens.tolist():
        assert bos == 0
        digits = [token - 1 for token in rest[:7]]
        assert rest[7:] == [1 + (digit + key - 11) % 10 for digit in digits]
    assert set(tokens[:, 1].tolist()) == set(range(11, 21))
    assert set(tokens[:, 2:].flatten().tolist()) == set(range(1, 11))
    assert counted.tolist() == [[False] * 9 + [True] * 7] * 300
    inputs, targets = trained.TASKS["sum"].batch_at(0, 0)
    assert inputs.shape == targets.shape == (32, 15)
    assert torch.equal(inputs[:, 9:], targets[:, 8:-1])
    assert bool((targets[:, :8] == IGNORE).all())


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_circuit_before_training_has_no_dropout_and_no_mlp_that_is_not_asked_for(
    positions: str,
) -> None:
    for name in trained.TASKS:
        model, other = (trained.new_model(name, positions, seed) for seed in (0, 1))
        ids = trained.TASKS[name].batch_at(0, 0)[0][:2]
        outputs = [model.train(mode)(ids).logits for mode in (True, False)]
        assert torch.equal(*outputs)
        mlps = {k: v for k, v in model.named_parameters() if ".mlp." in k}
        assert mlps
        for value in mlps.values():
            assert value.requires_grad == (name == "sum")
            assert name == "sum" or not value.any()
        # matrices are random with a standard deviation of 0.1
        matrix, its_other = (m.lm_head.weight for m in (model, other))
        assert float(matrix.detach().std()) == pytest.approx(0.1, rel=0.1)
        assert not torch.equal(matrix, its_other)


def test_circuits_are_trained_with_their_seeds_and_stored_in_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[int, int, bool]] = []

    def steps(model: Any, batch_at: Any, settings: Any, *, progress: bool) -> list[float]:
        name = "sum" if model.config.vocab_size == 21 else "induction"
        wanted = trained.TASKS[name].batch_at(settings.seed, 3)
        assert all(torch.equal(a, b) for a, b in zip(batch_at(3), wanted, strict=True))
        seen.append((settings.seed, settings.steps, progress))
        return [9.0] * 50 + [2.0] * 25 + [4.0] * 25

    monkeypatch.setattr(trained, "train", steps)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    out = tmp_path / "made" / "known"
    with caplog.at_level("INFO"):
        assert trained.main(["--out", str(out), "--only", "induction"]) == 0
    assert seen == [(seed, 1500, False) for _ in range(2) for seed in (0, 1, 2)]
    assert caplog.messages[1] == "induction, learned, seed 1: loss 3.000"
    assert threads == [1]
    made = {path.name for path in out.iterdir()}
    shipped = {path.name for path in trained.path("sum", "learned", 0).parent.iterdir()}
    assert made == {name for name in shipped if name.startswith("induction")}
    fresh = dict(trained.new_model("induction", "rotary", 2).named_parameters())
    stored = load_file(out / "induction_rotary_2.safetensors")
    assert set(stored) == {name for name in fresh if ".mlp." not in name}
    assert all(torch.equal(value, fresh[name].half()) for name, value in stored.items())
    assert trained.main(["--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == shipped
    assert len(seen) == 6 + len(shipped)


@pytest.mark.parametrize(
    ("name", "lost"),
    [("induction", "lm_head.weight"), ("sum", "transformer.h.0.mlp.c_fc.weight")],
)
def test_stored_weights_that_lack_some_are_refused(
    name: str, lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(trained.path(name, "learned", 0))
    place = tmp_path / "lost.safetensors"
    save_file({k: v for k, v in weights.items() if k != lost}, place)
    monkeypatch.setattr(trained, "path", lambda *_: place)
    with pytest.raises(GeometryError, match=f"all that were trained, got none of .*{lost}"):
        trained.hugging_face(name, "learned", 0)
