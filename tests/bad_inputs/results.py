"""Bases, splits, edits and views."""

from __future__ import annotations

import torch

import tl_geometry as tlg
from tests.bad_inputs.cases import (
    PATH,
    Call,
    entered,
    missing,
    run_edge,
    run_listed,
    run_planes,
    run_removed,
)

BASES = [
    Call(
        "a basis of another model",
        lambda w: tlg.split_scores(w.other, torch.ones(1, 8, dtype=torch.int64), w.basis),
        "model",
    ),
    Call("a basis of one context", lambda w: w.splits(basis=w.decompose(w.ids[:1])), "context"),
    Call(
        "a sweep with a basis of one context",
        lambda w: tlg.sweep_heads(w.model, w.ids, w.decompose(w.ids[:1]), progress=False),
        "context",
    ),
    Call(
        "a basis that is a path", lambda w: w.splits(basis="basis.safetensors"), "PositionContext"
    ),
    Call(
        "no basis", lambda w: tlg.split_scores(w.model, w.windows[:2], None, heads="L1H0"), "basis"
    ),
    Call(
        "a basis of fewer states", lambda w: w.splits(basis=w.decompose(w.ids, states=[0])), "state"
    ),
    Call(
        "a basis of shorter windows",
        lambda w: w.splits(basis=w.decompose(w.ids[:, :6])),
        "positions",
    ),
    Call(
        "a basis with another BOS",
        lambda w: w.splits(basis=w.decompose(w.ids[:, 1:]), tokens=w.windows[:2].tokens[:, :8]),
        "has_bos|bos",
    ),
    Call(
        "merging a basis with itself",
        lambda w: tlg.PositionContext.merge([w.basis, w.basis]),
        "twice|same",
    ),
    Call("merging nothing", lambda w: tlg.PositionContext.merge([]), "at least one"),
    Call(
        "merging other states",
        lambda w: tlg.PositionContext.merge([w.basis, w.decompose(w.ids, states=[0])]),
        "states",
    ),
    Call(
        "a file that is not there",
        lambda w: tlg.PositionContext.load(w.folder / "none.safetensors"),
        "existing",
    ),
    Call(
        "a file that is text",
        lambda w: tlg.PositionContext.load(w.path("t.safetensors", "text")),
        "written by",
    ),
    Call("a folder as a file", lambda w: tlg.PositionContext.load(w.folder), "file"),
    Call(
        "saving into a file as a folder",
        lambda w: w.basis.save(w.path("plain") / "basis.safetensors"),
        "write|director|folder",
    ),
    Call(
        "a table as a basis file",
        lambda w: tlg.PositionContext.load(w.table.save(w.folder / "table.safetensors")),
        "schema|written",
    ),
    Call(
        "a second moment that was not kept",
        lambda w: w.decompose(w.ids, second_moments=False).second_moment(0),
        "second_moments=True",
    ),
    Call("a position that was not seen", lambda w: w.basis.pos_at(99), "position"),
    Call(
        "transform of other states",
        lambda w: w.basis.transform(torch.randn(2, 3, 12, 128)),
        "state",
    ),
    Call(
        "transform of NaN",
        lambda w: w.basis.transform(torch.full((5, 3, 12, 128), torch.nan)),
        "finite",
    ),
]
SPLITS = [
    Call("a head beyond the last", lambda w: w.splits(heads="L1H9"), "head"),
    Call("a layer beyond the last", lambda w: w.splits(heads="L9H0"), "layer"),
    Call("a head by words", lambda w: w.splits(heads="induction"), "heads"),
    Call("heads of other layers", lambda w: w.splits(heads="L1H0", layers=[0]), "layers"),
    Call("no heads", lambda w: w.splits(heads=[]), "at least one"),
    Call("unknown parts", lambda w: w.splits(parts=("pos", "content")), "parts"),
    Call("parts that do not sum", lambda w: w.splits(parts={"a": torch.zeros(2, 12, 128)}), "sum"),
    Call(
        "parts of another shape", lambda w: w.splits(parts={"a": torch.zeros(2, 3)}), "shape|part"
    ),
    Call(
        "a part called alibi", lambda w: w.splits(parts={"alibi": torch.zeros(2, 12, 128)}), "alibi"
    ),
    Call("an unknown preset", lambda w: w.splits(preset="papers"), "preset"),
    Call("a memory budget of 1 byte", lambda w: w.splits(memory_budget=1), "memory_budget"),
    Call("an unknown term", lambda w: w.split.terms["pos-nothing"], "terms"),
    Call(
        "a cache of other tokens",
        lambda w: w.splits(cache=w.model.run_with_cache(w.ids[2:4])[1]),
        "cache",
    ),
    Call("a cache of something else", lambda w: w.splits(cache=42), "cache"),
    Call(
        "tokens that are None without a cache",
        lambda w: tlg.split_scores(w.model, None, w.basis, heads="L1H0"),  # type: ignore[arg-type]
        "tokens",
    ),
    Call("text without prepend_bos", lambda w: w.splits(tokens="def f(x)"), "prepend_bos"),
    Call(
        "text with prepend_bos",
        lambda w: w.splits(tokens="def f(x)", prepend_bos=True),
        check=lambda w, v: len(v.str_tokens) > 2,
    ),
    Call(
        "prompts beyond the basis", lambda w: w.splits(tokens=w.ids[:2].repeat(1, 3)), "positions"
    ),
    Call("drop beyond the prompt", lambda w: w.split.shares(drop=99), "drop|positions|queries"),
    Call("drop -1", lambda w: w.split.shares(drop=-1), "drop"),
    Call(
        "an unknown detail",
        lambda w: tlg.sweep_heads(w.model, w.ids, w.basis, detail="everything", progress=False),
        "detail",
    ),
    Call(
        "a sweep within 1 byte",
        lambda w: tlg.sweep_heads(w.model, w.ids, w.basis, memory_budget=1, progress=False),
        "memory_budget",
    ),
    Call(
        "writers without a basis",
        lambda w: tlg.sweep_heads(w.model, w.ids, parts="writers", progress=False),
    ),
    Call(
        "parts of no name",
        lambda w: tlg.sweep_heads(w.model, w.ids, parts="heads", progress=False),  # type: ignore[call-overload]
        "'writers', 'blocks'",
    ),
    Call(
        "details of writers",
        lambda w: tlg.sweep_heads(w.model, w.ids, parts="writers", detail="nulls", progress=False),
        "no detail with writers",
    ),
    Call(
        "composition of one prompt",
        lambda w: tlg.composition(w.model, w.ids[:1], progress=False),
        "at least 2 prompts",
    ),
    Call("a logit of two prompts", lambda w: tlg.explain_logit(w.model, w.ids, 3, 5), "one prompt"),
    Call(
        "a logit beyond the prompt",
        lambda w: tlg.explain_logit(w.model, w.ids[:1], 99, 5),
        "position",
    ),
    Call(
        "a difference of three logits",
        lambda w: tlg.explain_logit(w.model, w.ids[:1], 3, [1, 2, 3]),
        "target",
    ),
    Call("a graph of two prompts", lambda w: tlg.trace_logit(w.model, w.ids, 5), "one prompt"),
    Call(
        "a graph beyond the prompt",
        lambda w: tlg.trace_logit(w.model, w.ids[:1], 5, position=99),
        "position",
    ),
    Call(
        "a graph that keeps nothing",
        lambda w: tlg.trace_logit(w.model, w.ids[:1], 5, keep=0.0),
        "a share above 0",
    ),
    Call(
        "a graph through MLPs of no kind",
        lambda w: tlg.trace_logit(w.model, w.ids[:1], 5, mlp="relu"),
        "frozen",
    ),
    Call(
        "a graph of two readings",
        lambda w: tlg.trace_logit(w.model, w.ids[:1], 5, against=6, log_probability=True),
        "one of them",
    ),
    Call(
        "a token against itself",
        lambda w: tlg.trace_logit(w.model, w.ids[:1], 5, against=5),
        "two different tokens",
    ),
    Call(
        "a logit without pairs",
        lambda w: tlg.explain_logit(w.model, w.ids[:1], 3, 5, top=0),
        "top: expected at least 1",
    ),
    Call(
        "a logit beyond the budget",
        lambda w: tlg.explain_logit(w.model, w.ids[:1], 3, 5, memory_budget=100),
        "a shorter prompt",
    ),
    Call(
        "an average of one graph",
        lambda w: tlg.circuits.average_graphs([w.graph()]),
        "two or more graphs",
    ),
    Call(
        "an average of a graph and a split",
        lambda w: tlg.circuits.average_graphs([w.graph(), w.split]),
        "two or more graphs",
    ),
    Call("a graph beside a split", lambda w: w.graph().compare(w.split), "a graph of trace_logit"),
    Call(
        "a graph beside that of a longer prompt",
        lambda w: w.graph().compare(w.graph(w.ids[:1, :5])),
        "prompts of as many tokens",
    ),
    Call(
        "a mean of no prompts",
        lambda w: tlg.interventions.remove_heads(w.model, "L0H0"),
        "prompts to take the mean over",
    ),
    Call(
        "a mean of prompts that are too short",
        lambda w: entered(
            tlg.interventions.remove_heads(w.model, "L0H0", reference=w.ids[:, :3]),
            w.model,
            w.ids[:2],
        ),
        "at most 3 tokens, as in the reference",
    ),
    Call(
        "another prompt of one",
        lambda w: entered(
            tlg.interventions.remove_heads(w.model, "L0H0", "prompt"), w.model, w.ids[:1]
        ),
        "at least 2 prompts",
    ),
    Call(
        "a knockout of no head of the model",
        lambda w: tlg.interventions.remove_heads(w.model, "L9H0", "zero"),
        "layer of head 'L9H0'",
    ),
    Call(
        "a knockout by a name of nothing",
        lambda w: tlg.interventions.remove_heads(w.model, "L0H0", "median"),
        "'mean', 'zero', 'prompt'",
    ),
    Call(
        "a knockout of a head twice",
        lambda w: entered(
            tlg.interventions.remove_heads(w.model, ["L0H0", (0, 0)], "zero"), w.model, w.ids[:2]
        ),
    ),
    Call(
        "knockouts beside attributions of a loss",
        lambda w: tlg.interventions.head_knockouts(w.model, w.ids, "loss", attributions=True),
        'metric="difference"',
    ),
    Call(
        "knockouts without targets",
        lambda w: tlg.interventions.head_knockouts(w.model, w.ids[:2]),
        r"a pair \(right, wrong\) for each of 2 prompts",
    ),
    Call(
        "knockouts measured by a number",
        lambda w: tlg.interventions.head_knockouts(w.model, w.ids[:2], 5),  # type: ignore[arg-type]
        "a function of logits",
    ),
    Call(
        "knockouts of one prompt",
        lambda w: tlg.interventions.head_knockouts(w.model, w.ids[:1], "loss"),
        "at least 2 prompts",
    ),
    Call(
        "a position of no name",
        lambda w: tlg.explain_logit(w.model, w.ids[:1], "end", 5),
        "position",
    ),
    Call(
        "queries beyond the prompt",
        lambda w: tlg.composition(w.model, w.ids[:2], queries=[3, 99], progress=False),
        "position",
    ),
    Call(
        "logits of fewer targets than prompts",
        lambda w: tlg.circuits.explain_logits(w.model, w.ids[:3], [5, 6]),
        "a token for each of 3 prompts",
    ),
    Call(
        "a template with a slot that nobody fills",
        lambda w: tlg.corpus.aligned_prompts(
            w.model, "def {f}({x})", [{"f": "get"}], prepend_bos=True
        ),
        "texts of the slots",
    ),
    Call(
        "a template of prompts that do not align",
        lambda w: tlg.corpus.aligned_prompts(
            w.model, "def f({x})", [{"x": "y"}, {"x": "y, z"}], prepend_bos=True
        ),
        "equal token lengths",
    ),
    Call("an edge", lambda w: run_edge(w, "L0H0", w.ids[:2])),
    Call("an edge from a later head", lambda w: run_edge(w, "L2H0", w.ids[:2]), "L2H0"),
    Call(
        "an edge of other tokens",
        lambda w: run_edge(w, "L0H0", w.ids[2:4]),
        "tokens of the clean run",
    ),
    Call(
        "a dictionary of another width",
        lambda w: tlg.circuits.feature_shares(
            w.model,
            w.ids[:1],
            tlg.circuits.dictionary((torch.ones(1, 12, 3), torch.eye(3), torch.zeros(3)), 1),
        ),
        "d_model",
    ),
    Call(
        "a dictionary that is none",
        lambda w: tlg.circuits.dictionary(torch.nn.Linear(2, 2), 1),
        "encode, W_dec",
    ),
    Call("planes that were not asked for", lambda w: w.table.planes(), 'detail="planes"'),
    Call("a plane beyond the last", lambda w: w.split.on_planes(1), "planes 0 to 0"),
    Call("a band that has no name", lambda w: w.split.on_planes("fast"), "near.*far"),
    Call(
        "a profile of no term",
        lambda w: tlg.scores.offset_profile(w.split, "pos-nothing"),
        "terms: expected",
    ),
    Call(
        "a kernel of a model without rotation",
        lambda w: tlg.scores.relative_kernel(w.model, w.decompose(w.ids, normalize=True)),
        "a rotary model",
    ),
    Call(
        "a kernel on a raw basis",
        lambda w: tlg.scores.relative_kernel(w.model, w.basis),
        "normalize=True",
    ),
    Call("a column that is not there", lambda w: w.table.top("nothing"), "column"),
    Call("a number of rows below zero", lambda w: w.table.top("induction", -1), "n|rows"),
]
EDITS = [
    Call(
        "near planes of a model without rotation",
        lambda w: run_planes(w, "near"),
        "planes that the heads have",
    ),
    Call("the plane of all coordinates", lambda w: run_planes(w, "pass")),
    Call("an unknown term", lambda w: run_removed(w, w.ids[:2], term="pos-nothing"), "term"),
    Call("an unknown head", lambda w: run_removed(w, w.ids[:2], heads="L9H9"), "head"),
    Call("prompts without BOS", lambda w: run_removed(w, w.ids[:2, 1:]), "has_bos|BOS"),
    Call("prompts beyond the basis", lambda w: run_removed(w, w.ids[:2].repeat(1, 3)), "positions"),
    Call(
        "a basis of another model",
        lambda w: tlg.interventions.remove_term(w.other, w.basis, "pos-pos").__enter__(),
        "model",
    ),
    Call(
        "an unknown subspace",
        lambda w: tlg.interventions.project_stream(w.model, w.basis, 1, "context").__enter__(),
        "subspace",
    ),
    Call(
        "a state that is not there",
        lambda w: tlg.interventions.project_stream(w.model, w.basis, 9).__enter__(),
        "state",
    ),
    Call(
        "a rank beyond",
        lambda w: tlg.interventions.project_stream(w.model, w.basis, 1, rank=999).__enter__(),
        "rank",
    ),
    Call(
        "the mean of one prompt",
        lambda w: entered(
            tlg.interventions.mean_term(w.model, w.basis, "cvec-cvec", "L1H0"), w.model, w.ids[:1]
        ),
        "at least 2 prompts",
    ),
    Call("one head in two lists of hooks", lambda w: run_listed(w, w.ids[:2], 2), "edited already"),
    Call("hooks for prompts without BOS", lambda w: run_listed(w, w.ids[:2, 1:]), "has_bos|BOS"),
    Call(
        "a state that no hook holds",
        lambda w: tlg.interventions.project_stream(w.model, w.basis, "blocks.1.hook_z").hooks(),
        "states",
    ),
]
VIEWS = [
    Call("a basis as a split", lambda w: tlg.render.split(w.basis), "ScoreSplit"),  # pyright: ignore[reportArgumentType]
    Call(
        "a split as a logit",
        lambda w: tlg.render.circuitsvis.induction(w.split),
        r"ScoreSplit\. Use explain_logit",
    ),
    Call("a basis as heads", lambda w: tlg.render.heads(w.basis, "induction"), "table|heads"),  # pyright: ignore[reportArgumentType]
    Call("a value that is not there", lambda w: tlg.render.heads(w.table, "nothing"), "nothing"),
    Call(
        "a basis as knockouts",
        lambda w: tlg.interventions.beside_knockouts(w.graph(), w.basis),  # pyright: ignore[reportArgumentType]
        "knockouts of heads.*head_knockouts",
    ),
    Call(
        "a number as a table of attributions",
        lambda w: tlg.interventions.beside_knockouts(3, w.knockouts()),  # pyright: ignore[reportArgumentType]
        "table: expected a column 'writer'",
    ),
    Call(
        "knockouts without attributions on a page",
        lambda w: tlg.render.logit_page(
            tlg.explain_logit(w.model, w.ids[:1], -1, 5), knockouts=w.knockouts()
        ),
        "attributions=True",
    ),
    Call(
        "a basis as knockouts on a page",
        lambda w: tlg.render.logit_page(
            tlg.explain_logit(w.model, w.ids[:1], -1, 5),
            knockouts=w.basis,  # pyright: ignore[reportArgumentType]
        ),
        "got PositionContext. Use head_knockouts",
    ),
    Call("a split as a graph", lambda w: tlg.render.graph_page(w.split), "a graph of trace_logit"),  # pyright: ignore[reportArgumentType]
    Call("a matrix that is not there", lambda w: tlg.weight_geometry(w.model, w.basis, "QV"), "QK"),
    Call("a readout of nothing", lambda w: tlg.token_readout(w.model, matrix="VO"), "OV"),
    Call(
        "few positions for spectra",
        lambda w: tlg.positional_report(w.decompose(w.ids, window=(1, 3))),
    ),
    Call("a path as a positional basis", lambda w: tlg.positional_report(PATH), "PositionContext"),
    Call("a path as a context basis", lambda w: tlg.contextual_report(PATH), "PositionContext"),
    Call(
        "a path to compare", lambda w: tlg.measures.compare_bases(w.basis, PATH), "PositionContext"
    ),
    Call("axes from a path", lambda w: tlg.token_paths(w.model, w.ids, PATH), "PositionContext"),
    Call(
        "topics without labels",
        lambda w: tlg.contextual_report(w.decompose(w.ids, keep_ctx=False)),
        "ctx",
    ),
    Call("LaTeX of unknown columns", lambda w: w.table.to_latex(["nothing"]), "columns"),
    Call("an attribute that is not there", lambda w: missing(tlg), None),
]
CALLS = [*BASES, *SPLITS, *EDITS, *VIEWS]
