"""What public bug reports and fresh inputs found, by kind: 1 to 14, what is wrong without a word or
hangs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

import tl_geometry as tlg
from tests.lib.worlds import world
from tests.tables.refusals.changed_models import altered, made, with_bos, with_text
from tests.tables.refusals.row import Row, Scene
from tl_geometry import corpus, interventions

QUIET: dict[str, Any] = {"progress": False}


def flags(result: Any) -> str:
    return " ".join(result.provenance.flags)


# ---- 1. padding whose token is BOS and EOS too


def padded(s: Scene, left: int = 0, right: int = 0, rows: int = 2) -> torch.Tensor:
    """The prompts, some rows of which begin or end with padding tokens."""
    ids = s.ids.clone()
    ids[:rows, : left + 1 if left else 0] = s.model.tokenizer.pad_token_id
    ids[:rows, ids.shape[1] - right :] = s.model.tokenizer.pad_token_id
    return ids


USES: dict[str, Callable[[Scene, torch.Tensor], Any]] = {
    "decompose": lambda s, ids: tlg.decompose(s.model, ids, **QUIET),
    "split_scores": lambda s, ids: tlg.split_scores(s.model, ids, s.w.basis, heads="L1H0"),
    "sweep_heads": lambda s, ids: tlg.sweep_heads(s.model, ids, s.w.basis, layers=0, **QUIET),
    "trajectories": lambda s, ids: tlg.trajectories(s.model, ids, **QUIET),
    "edge_scores": lambda s, ids: tlg.edge_scores(
        s.model, ids, counterfactual=s.w.other, answer=(5, 9), method="gradient"
    ),
}


def _padding() -> Iterator[Row]:
    for name, use in USES.items():
        sides = {"the right": {"right": 3}, "the left": {"left": 3}, "one at the end": {"right": 1}}
        for side, how in sides.items():
            yield Row(
                f"1 padding that is EOS, {side}: {name}",
                lambda s, use=use, how=how: use(s, padded(s, **how)),
                # text may end with one EOS
                None if side == "one at the end" else "tokens",
                holds=lambda s, found: "pad" in flags(found).lower(),
            )
        yield Row(
            f"1 no padding: {name}",
            lambda s, use=use: use(s, s.ids),
            holds=lambda s, found: "pad" not in flags(found).lower(),
        )


# ---- 2. training mode of a module that is no dropout


PARTS = "Attention$|MLP$|DecoderLayer$|Block$"
DROPOUTS = {
    "llama": {"attention_dropout": 0.3},
    "qwen2": {"attention_dropout": 0.3},
    "opt": {"dropout": 0.3},
    "bloom": {"hidden_dropout": 0.3},
}


def trained(architecture: str, training: bool) -> Any:
    """A model whose attention layers or blocks, which drop out by their own flag, are in training
    mode, and no dropout module is."""
    model = made(architecture, **DROPOUTS[architecture])
    for module in model.modules():
        name = type(module).__name__
        if type(module).__module__.startswith("transformers") and re.search(PARTS, name):
            module.training = training
    return tlg.decompose(model, torch.arange(3, 43).view(4, 10), **QUIET)


# ---- 3. products of lower precision on a CPU


def lowered(call: Callable[[Scene], Any]) -> Callable[[Scene], Any]:
    def inside(s: Scene) -> Any:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            return call(s)
        finally:
            torch.set_float32_matmul_precision(before)

    return inside


PASSES: dict[str, Callable[[Scene], Any]] = {
    "decompose": lambda s: tlg.decompose(s.model, s.ids, **QUIET),
    "split_scores": lambda s: tlg.split_scores(s.model, s.ids, s.w.basis, heads="L1H0"),
    "trajectories": lambda s: tlg.trajectories(s.model, s.w.pilots, **QUIET),
    "knockouts": lambda s: interventions.effects(
        s.model, s.ids, interventions.each(s.model, "L1H0", by="zero")
    ),
    "trace_logit": lambda s: tlg.trace_logit(s.model, s.ids[:1, :6], 5),
}


# ---- 4. and 23. a model that changed after its basis


SAME = ("nothing", "longer prompts")
"""What leaves a model as it was."""


def changed(how: str) -> Callable[[Scene], Any]:
    def call(s: Scene) -> Any:
        model, change = altered(how)
        ids = torch.arange(3, 43).view(4, 10)
        basis = tlg.decompose(model, ids, **QUIET)
        tlg.split_scores(model, ids, basis, heads="L1H0")
        with torch.no_grad():
            before = model(ids, return_type="logits")
            change()
            same = torch.equal(before, model(ids, return_type="logits"))
        assert same == (how in SAME), how
        return tlg.split_scores(model, ids, basis, heads="L1H0")

    return call


def seen_before(s: Scene) -> bool:
    """Whether windows of a view begin with the BOS token that the model has by now."""
    model = with_text()
    view = tlg.view(model)
    model.tokenizer.bos_token = "w7"
    found = tlg.windows(view, " ".join(f"w{i}" for i in range(10, 50)), 6, prepend_bos=True)
    return bool((found.tokens[:, 0] == 7).all())


# ---- 5. to 14.


def generated(s: Scene, cached: bool) -> Any:
    edit = interventions.heads(s.model, "L1H0", reference=s.w.corpus)
    with edit, torch.no_grad():
        return s.model.generate(
            s.ids[:1, :6],
            max_new_tokens=3,
            do_sample=False,
            use_past_kv_cache=cached,
            verbose=False,
        )


def templated(s: Scene, begin: str) -> Any:
    texts = [f"{begin}def f({x}):" for x in ("value", "name")]
    places = {"x": ["value", "name"]}
    prompts = corpus.prompts(s.model, texts, positions=places, prepend_bos=False)
    return prompts, int(prompts.ids[0][prompts.at("x")[0]])


def begins_with_bos(s: Scene, found: Any) -> bool:
    """The rows say that they begin with BOS, and the slot is where its word is."""
    prompts, token = found
    return bool(prompts.has_bos) and s.model.tokenizer.decode([token]).strip() == "value"


def capped(s: Scene) -> Any:
    with torch.random.fork_rng():
        return world("gemma2").graph


def collated(s: Scene) -> Any:
    """A loader over lists of ids: the default of torch puts positions first."""
    rows: Any = [{"input_ids": row.tolist()} for row in s.w.corpus]
    return torch.utils.data.DataLoader(rows, 8, generator=torch.Generator())


def labels_differ(s: Scene, found: Any) -> bool:
    """Different ids have different labels."""
    ids, labels = found
    return len(set(labels)) == len(set(ids))


def labels(s: Scene) -> Any:
    ids = s.model.to_tokens("x = '🎉🦊é'", prepend_bos=True)
    split = tlg.split_scores(s.model, ids, parts="blocks", heads="L1H0")
    return ids[0].tolist(), list(split.str_tokens)


def wide(s: Scene) -> Any:
    """A model with a larger vocabulary than its tokenizer's."""
    return with_text(vocab_size=80)


ROWS: tuple[Row, ...] = (
    *_padding(),
    *(
        Row(
            f"2 {architecture} in training mode, without a dropout module",
            lambda s, a=architecture: trained(a, True),
            ".",
        )
        for architecture in DROPOUTS
    ),
    *(
        Row(f"2 {architecture} in evaluation mode", lambda s, a=architecture: trained(a, False))
        for architecture in DROPOUTS
    ),
    *(
        Row(f"3 products of medium precision: {name}", lowered(call), ".")
        for name, call in PASSES.items()
    ),
    *(Row(f"3 products of full precision: {n}", call) for n, call in PASSES.items()),
    *(
        Row(f"4, 23 after the basis, other {how}", changed(how), "basis")
        for how in (
            *("rotary frequencies", "activation", "routing"),
            *("scale of embeddings", "parallel blocks"),
        )
    ),
    *(Row(f"4, 23 after the basis, {how}", changed(how)) for how in SAME),
    Row("4 a view made before the BOS token", seen_before, holds=lambda s, found: found),
    Row("5 a mean of heads after cached keys", lambda s: generated(s, True), "."),
    Row("5 a mean of heads in whole passes", lambda s: generated(s, False)),
    Row(
        "6 a template that begins with BOS",
        lambda s: templated(s, s.model.tokenizer.bos_token),
        holds=begins_with_bos,
    ),
    Row(
        "8 a graph of a logit before its cap",
        capped,
        holds=lambda s, graph: "cap" in f"{graph} {flags(graph)}".lower(),
    ),
    Row(
        "9 a metric whose gradient is NaN",
        lambda s: tlg.edge_scores(
            s.model,
            s.ids,
            counterfactual=s.w.other,
            metric=lambda logits: (0 * logits[:, -1, 5]).sqrt(),
            method="gradient",
        ),
        "metric",
    ),
    Row(
        "10 a loader that puts positions first",
        lambda s: tlg.decompose(s.model, collated(s), **QUIET),
        "tokens",
    ),
    Row("12 labels of half characters", labels, holds=labels_differ),
    Row(
        "13 a tokenizer that adds BOS by default",
        lambda s: tlg.windows(with_bos(), "w5 w6 w7 w8 " * 9, 6, prepend_bos=False),
        holds=lambda s, found: found.has_bos == bool((found.tokens[:, 0] == 0).all()),
    ),
    Row(
        "13 gibberish of ids without text",
        lambda s: corpus.gibberish(wide(s), 20, 30),
        holds=lambda s, found: int(found.tokens.max()) < 61,
    ),
    Row("13 the embedded model draws nothing", lambda s: tlg.zoo.embedded()),
)
