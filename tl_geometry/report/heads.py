"""What drives each head: shares of position, content and both; head types; and whether the dominant terms carry the model."""

from __future__ import annotations

import torch

from tl_geometry.render import sweeps as views
from tl_geometry.report import Analysis, Figure, Section
from tl_geometry.results import Result
from tl_geometry.verbs.sweep import sweep_heads

PROMPTS = 64
"""Windows that the sweep looks at."""


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
    figures: list[Figure] = [views.head_shares(table), views.head_types(table)]
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
