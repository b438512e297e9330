"""Who writes a logit in the prompts of one template? :func:`tl_geometry.circuits.explain_logits`
gives the direct contributions of :func:`tl_geometry.explain_logit` for each prompt and writer, with
the mean over prompts and its interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.checks import head_name
from tl_geometry.base.errors import require
from tl_geometry.base.intervals import paired_interval
from tl_geometry.base.results import Result
from tl_geometry.circuits.logits import Direct, require_sum
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.reader import as_view
from tl_geometry.scores.values import target_ids, trained_head

AT_ONCE = 32
"""Prompts of one pass: what every head takes from every source is held for each of them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LogitMeans(Result):
    """Direct contributions to a logit, or a difference of two, at one position of several prompts.

    ``values`` is what each of ``writers`` (heads, MLPs, embeddings, constants; the largest first)
    contributes in each prompt, ``logits`` the model's own, their sum; the table has means over
    prompts with Student's 95% interval (NaN below 10 prompts). ``sources`` is the mean of what each
    head wrote from each source position.
    """

    position: int
    positions: Mapping[str, int]
    writers: tuple[str, ...]
    values: Float[Tensor, "writer context"]
    logits: Float[Tensor, " context"]
    sources: Float[Tensor, "layer head source"]
    table_axes = ("writer",)

    def table_numbers(self) -> Mapping[str, tuple[Tensor, tuple[str, ...]]]:
        value, low, high, _ = paired_interval(self.values.mT)
        columns = {"contribution": value, "low": low, "high": high}
        return {name: (numbers, ("writer",)) for name, numbers in columns.items()}


def explain_logits(
    model: ModelLike,
    prompts: TokensLike,
    targets: Sequence[int | str | Sequence[int | str]],
    *,
    position: int | str = -1,
    prepend_bos: bool | None = None,
) -> LogitMeans:
    """A logit of each prompt as a sum over writers, averaged over prompts.

    Args:
        prompts: of one length; with :func:`tl_geometry.corpus.prompts` source positions
            mean the same in each.
        targets: one token for each prompt, or a pair for the difference of their logits (first
            minus second), as ids or texts of one token.
        position: where the logits are read, a number (-1 is the last) or a name.

    Raises as :func:`tl_geometry.explain_logit`.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> prompts = tlg.zoo.default_windows(model, 16, n=12)
    >>> means = tlg.circuits.explain_logits(model, prompts, [(5, 9)] * 12)
    >>> bool((means.values.sum(0) - means.logits).abs().max() < 1e-4)
    True
    """
    view = as_view(model)
    rows = as_tokens(view, prompts, prepend_bos=prepend_bos)
    at, head = rows.position(position), trained_head(view)
    ids = [target_ids(view, target) for target in targets]
    sizes = {len(of_prompt) for of_prompt in ids}
    fits = len(ids) == len(rows) and sizes in ({1}, {2})
    expected = f"a token for each of {len(rows)} prompts, or a pair for each"
    require(fits, "targets", expected=expected, got=f"{len(ids)} of {sorted(sizes)} tokens")
    names = [head_name((l, h)) for l in range(view.n_layers) for h in range(view.n_heads)]
    other_names: list[str] = []
    values_of: list[Tensor] = []
    logits_of: list[Tensor] = []
    sources = torch.zeros(view.n_layers, view.n_heads, rows.tokens.shape[1], dtype=torch.float64)
    batches = zip(torch.tensor(ids).split(AT_ONCE), rows.tokens.split(AT_ONCE), strict=True)
    for batch_ids, tokens in batches:
        direct = Direct(view, head, batch_ids, at, tokens.shape[1])
        direct.run(tokens)
        by_source = direct.contributions().cpu()
        sources += by_source.sum(0)
        others = torch.stack(list(direct.others.values())).cpu()
        values_of.append(torch.cat([by_source.sum(-1).flatten(1).mT, others]))
        logits_of.append(direct.logit(tokens).cpu())
        other_names = list(direct.others)
    values, logits = torch.cat(values_of, 1), torch.cat(logits_of)
    require_sum(view, float(((values.sum(0) - logits).abs() / values.abs().sum(0)).max()))
    names += other_names
    order = values.mean(1).abs().argsort(descending=True, stable=True)
    return LogitMeans(
        provenance=view.provenance(rows),
        position=at,
        positions=rows.positions,
        writers=tuple(names[i] for i in order.tolist()),
        values=values[order],
        logits=logits,
        sources=sources / len(rows),
    )
