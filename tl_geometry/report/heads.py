"""What drives each head: shares of position, content and both; head types; and whether the dominant terms carry the model."""

from __future__ import annotations

import torch

from tl_geometry.render import sweeps as views
from tl_geometry.render.head_view import heads
from tl_geometry.render.split_view import split
from tl_geometry.report import Analysis, Figure, Section
from tl_geometry.results import Result
from tl_geometry.verbs.split import ScoreSplit, split_scores
from tl_geometry.verbs.sweep import SweepTable, sweep_heads

PROMPTS, PERIOD = 64, 20
"""Windows that the sweep looks at; tokens of text that the example repeats."""


def section(analysis: Analysis) -> Section | None:
    """The sweep over all heads, and the causal question."""
    few = analysis.windows[torch.linspace(0, len(analysis.windows) - 1, min(PROMPTS, len(analysis.windows))).long()]
    table = sweep_heads(analysis.model, few, analysis.basis, progress=analysis.progress, seed=analysis.seed)
    order = [table.top(name, 3) for name in ("previous", "induction")]
    named = [
        "; ".join(f"L{layer}H{head} {float(t.types[k][i]):.2f}" for i, (layer, head) in enumerate(t.heads))
        for k, t in zip(("previous", "induction"), order, strict=True)
    ]
    text = [
        "Attention scores before the softmax are split exactly, with the norm scale of the actual forward pass frozen: score = sum over pairs of parts "
        "{bias, pos, cvec} of query and key. Shares are covariances with the whole score over allowed keys; they add up to one and can be negative. "
        "'position' gathers the terms without a context part, 'content' is cvec-cvec, 'mixed' the rest.",
        f"On repeated random tokens the strongest previous-token heads are {named[0]} (uniform attention: {table.baselines['previous']:.3f}), the strongest induction heads "
        f"{named[1]} (uniform: {table.baselines['induction']:.3f}).",
    ]
    figures: list[Figure] = [views.head_shares(table), views.head_types(table), heads(table, "induction")]
    example = repeated(analysis, table)
    if example is not None:
        shown = [f"L{layer}H{head}" for layer, head in example.heads]
        figures.append(
            split(example, center=True, title=f"The strongest previous-token and induction heads, {' and '.join(shown)}, on repeated text")
        )
        text.append(
            f"One prompt in full: a piece of text, written twice. For {shown[0]} (previous token) and {shown[-1]} (induction) every cell can be read, and a click on a "
            "token colours its sources in the text by any group of terms. Rows are centred, which the softmax does not see."
        )
    tables: dict[str, Result] = {"heads": table}
    if analysis.view.head_trained and analysis.view.causal:
        from tl_geometry.interventions import dominant_only

        effect = dominant_only(analysis.model, few[:16], analysis.basis)
        tables["dominant_only"] = effect
        loss = {str(row[0]): float(str(row[1])) for row in effect.rows()}
        text.append(
            f"If every head kept only its dominant term, how much of the model would survive? Its loss goes from {loss['clean']:.2f} to {loss['dominant term']:.2f} nats per token; "
            f"with a random term in place of the dominant one it is {loss['random term']:.2f}, with uniform attention {loss['uniform attention']:.2f}. Edits act in the live model."
        )
    return Section(title="What drives each head", text=text, figures=figures, tables=tables)


def repeated(analysis: Analysis, table: SweepTable) -> ScoreSplit | None:
    """The split of the strongest previous-token and induction heads on a piece of the first window written twice (causal models only)."""
    window, start = analysis.windows.tokens[0], int(bool(analysis.windows.has_bos))
    period = min(PERIOD, (analysis.basis.pos_columns.shape[1] - start) // 2, len(window) - start)
    if not analysis.view.causal or period < 4:
        return None
    prompt = torch.cat([window[:start], window[start : start + period], window[start : start + period]])
    chosen = dict.fromkeys(table.top(name, 1).heads[0] for name in ("previous", "induction"))
    return split_scores(analysis.model, prompt, analysis.basis, heads=list(chosen))
