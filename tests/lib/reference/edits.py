"""What becomes of a run when something in it is replaced (SPEC L to P): edge scores, pruned runs,
path patching, knockouts of heads, and terms, planes or edges taken out of the scores of heads. All
by hooks of the explicit decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.lib.reference.decoder import Decoder, Hooks, Key, Run
from tests.lib.reference.scores import BIAS, Term, normed, plane_terms, position_parts, terms

Metric = Callable[[Tensor], Tensor]
"""One number for each prompt, from logits ``[b i v]``."""
Change = Callable[[Tensor, Mapping[Term, Tensor]], Tensor]
"""New scores ``[b h i j]`` from the scores and their terms."""


def logit_difference(targets: Sequence[tuple[int, int]], position: int = -1) -> Metric:
    """The difference of two logits for each prompt."""
    ids = torch.tensor(targets)

    def metric(logits: Tensor) -> Tensor:
        chosen = logits[:, position].gather(1, ids)
        return chosen[:, 0] - chosen[:, 1]

    return metric


class Layout(NamedTuple):
    """Writers in the order of writing; readers with the input that each reads (name and layer, and
    its number there); how many writers each reader sees."""

    writers: tuple[str, ...]
    readers: tuple[str, ...]
    inputs: tuple[tuple[Key, int], ...]
    seen: tuple[int, ...]

    @staticmethod
    def of(decoder: Decoder) -> Layout:
        writers, readers, inputs, seen = ["embed"], [], [], []
        for l, block in enumerate(decoder.blocks):
            size = block.group_size
            for which in "qkv":
                for r in range(len(block.weights(which)[0])):
                    first, last = (r, r) if which == "q" else (r * size, (r + 1) * size - 1)
                    name = f"{first}" if first == last else f"{first}-{last}"
                    readers.append(f"L{l}H{name}<{which}>")
                    inputs.append(((f"{which}_in", l), r))
                    seen.append(len(writers))
            writers += [f"L{l}H{h}" for h in range(decoder.n_heads)]
            readers.append(f"mlp{l}")
            inputs.append((("mlp_in", l), 0))
            seen.append(len(writers))
            writers.append(f"mlp{l}")
        inputs.append((("output_in", 0), 0))
        seen.append(len(writers))
        return Layout(tuple(writers), (*readers, "output"), tuple(inputs), tuple(seen))

    @property
    def allowed(self) -> Tensor:
        """Which pairs are edges, ``[reader writer]``."""
        return torch.arange(len(self.writers)) < torch.tensor(self.seen)[:, None]


def written(decoder: Decoder, run: Run) -> Tensor:
    """What every writer has written so far, ``[writer b i d]``."""
    writes = [run["state", 0][None]]
    for l in range(decoder.n_layers):
        writes += [run["writes", l]] if ("writes", l) in run else []
        writes += [run["mlp", l][None]] if ("mlp", l) in run else []
    return torch.cat(writes)


def edge_scores(
    decoder: Decoder, prompts: Tensor, others: Tensor, metric: Metric, *, steps: int | None = None
) -> Tensor:
    """``(u_counterfactual - u_clean) . d metric / d input`` by pair and position,
    ``[b i reader writer]``. The gradient is that of the clean run, or (``steps``) the mean over
    runs on first states ``counterfactual + a (clean - counterfactual)``, a = (m + 1/2) / steps."""
    layout = Layout.of(decoder)
    clean, other = decoder.run(prompts), decoder.run(others)
    first, last = other["state", 0], clean["state", 0]
    total = torch.zeros(*last.shape[:2], len(layout.readers), last.shape[2], dtype=last.dtype)
    points = [1.0] if steps is None else [(m + 0.5) / steps for m in range(steps)]
    for a in points:
        start = (first + a * (last - first)).requires_grad_()
        with torch.enable_grad():
            run = decoder.run(None, first=start)
            keys = list(dict.fromkeys(key for key, _ in layout.inputs))
            grads = torch.autograd.grad(metric(run["logits", 0]).sum(), [run[key] for key in keys])
        total += torch.cat(grads, 2) / len(points)
    change = written(decoder, other) - written(decoder, clean)
    return torch.einsum("wbid,bird->birw", change, total) * layout.allowed


def pruned(decoder: Decoder, prompts: Tensor, others: Tensor, kept: Tensor) -> Run:
    """The run in which every reader gets the counterfactual's stream, plus (running -
    counterfactual) of the writers that are kept for it, ``kept [reader writer]``."""
    layout, there = Layout.of(decoder), written(decoder, decoder.run(others))

    def reading(key: Key) -> Callable[[Tensor, Run], Tensor]:
        rows = [r for r, (of, _) in enumerate(layout.inputs) if of == key]

        def read(value: Tensor, run: Run) -> Tensor:
            now = written(decoder, run)
            change, base = now - there[: len(now)], there[: len(now)].sum(0)
            mask = kept[rows][:, : len(now)].to(now)
            return base.unsqueeze(2) + torch.einsum("rw,wbid->bird", mask, change)

        return read

    return decoder.run(prompts, {key: reading(key) for key, _ in layout.inputs})


def faithfulness(kept: Tensor, clean: Tensor, other: Tensor) -> Tensor:
    """``f = (m(C) - m(nothing)) / (m(all) - m(nothing))``, m the means of metrics ``[level b]``."""
    return (kept - other).mean(-1) / (clean - other).mean()


def areas(fractions: Sequence[float], f: Sequence[float]) -> tuple[float, float]:
    """CPR, the area under f, and CMD, that of |1 - f|, by trapezoids over the share of edges kept
    from 0, where f is 0, to 1, where it is 1."""
    x, y = np.array([0.0, *fractions, 1.0]), np.array([0.0, *f, 1.0])
    return float(np.trapezoid(y, x)), float(np.trapezoid(np.abs(1 - y), x))


NewValues = Mapping[tuple[int, int], Tensor]
"""Mixed values ``[b i e]`` or ``[i e]`` that replace those of a head."""


def knockout(decoder: Decoder, new: NewValues) -> Hooks:
    """Hooks that replace the mixed values of heads."""

    def replacing(layer: int) -> Callable[[Tensor, Run], Tensor]:
        def replace(z: Tensor, run: Run) -> Tensor:
            z = z.clone()
            for (l, head), value in new.items():
                if l == layer:
                    z[:, :, head] = value
            return z

        return replace

    return {("z", layer): replacing(layer) for layer in sorted({l for l, _ in new})}


def path_patch(
    decoder: Decoder,
    tokens: Tensor,
    new: NewValues,
    receivers: Sequence[str],
    *,
    position: int | None = None,
) -> Run:
    """The run in which receivers (readers, at one position or at all) read what heads with new
    values would have written, the stream plus ``write(z') - write(z)``; all else is as it is."""
    layout, hooks = Layout.of(decoder), knockout(decoder, new)
    clean = decoder.run(tokens)
    change = torch.zeros_like(clean["state", 0])
    for layer in sorted({l for l, _ in new}):
        # one layer at a time: a later sender's own inputs stay those of the clean run
        alone = decoder.run(tokens, {("z", layer): hooks["z", layer]})
        change = change + (alone["writes", layer] - clean["writes", layer]).sum(0)

    def reading(key: Key) -> Callable[[Tensor, Run], Tensor]:
        rows = [layout.inputs[layout.readers.index(name)] for name in receivers]
        chosen = [r for of, r in rows if of == key]
        at = slice(None) if position is None else slice(position, position + 1)

        def read(value: Tensor, run: Run) -> Tensor:
            new_value = value.clone()
            for r in chosen:
                new_value[:, at, r] = value[:, at, r] + change[:, at]
            return new_value

        return read

    keys = {layout.inputs[layout.readers.index(name)][0] for name in receivers}
    return decoder.run(tokens, {key: reading(key) for key in keys})


def edit_terms(
    decoder: Decoder,
    layer: int,
    heads: Sequence[int],
    basis: tuple[Tensor, Tensor],
    change: Change,
    *,
    normalized: bool = False,
) -> Hooks:
    """Hooks that change the scores of heads of one layer; terms are those of the running pass about
    a basis (mean, pos) of the layer's input."""

    def edit(scores: Tensor, run: Run) -> Tensor:
        stream = normed(decoder, run, layer) if normalized else run["state", layer]
        parts = position_parts(stream, *basis)
        found = terms(decoder, run, layer, parts, normalized=normalized)
        new = scores.clone()
        new[:, list(heads)] = change(scores, found)[:, list(heads)]
        return new

    return {("scores", layer): edit}


def removing(*names: Term) -> Change:
    """``S - X``."""
    return lambda scores, found: scores - sum(found[name] for name in names)


def keeping(*names: Term) -> Change:
    """``X`` and every term with bias on either side."""

    def change(scores: Tensor, found: Mapping[Term, Tensor]) -> Tensor:
        kept = {*names, *(term for term in found if BIAS in term)}
        return torch.stack([found[term] for term in sorted(kept)]).sum(0)

    return change


def moving(by: Callable[[Tensor], Tensor], *names: Term) -> Change:
    """``S - X + by(X)``: the mean over the batch, or the terms of other prompts."""

    def change(scores: Tensor, found: Mapping[Term, Tensor]) -> Tensor:
        term = torch.stack([found[name] for name in names]).sum(0)
        return scores - term + by(term)

    return change


def edit_planes(
    decoder: Decoder, layer: int, heads: Sequence[int], planes: Sequence[int], *, keep: bool = False
) -> Hooks:
    """Hooks that remove rotary planes from the scores of heads, or ``keep`` these (and ALiBi)
    alone (SPEC L)."""

    def edit(scores: Tensor, run: Run) -> Tensor:
        part = plane_terms(decoder, layer, run["q", layer], run["k", layer])[list(planes)].sum(0)
        alibi = decoder.alibi(scores.shape[-1])
        part = part + alibi if keep and alibi is not None else part
        new = scores.clone()
        new[:, list(heads)] = (part if keep else scores - part)[:, list(heads)]
        return new

    return {("scores", layer): edit}


def edit_edge(
    decoder: Decoder, clean: Run, layer: int, heads: Sequence[int], which: str, change: Tensor
) -> Hooks:
    """Hooks by which queries, keys or values ("q", "k", "v") of heads are those of the running
    stream plus ``change`` ``[b i d]`` at the clean run's norm scale (SPEC M, edges as
    interventions): minus a writer removes it, plus its output elsewhere swaps it."""

    def edit(value: Tensor, run: Run) -> Tensor:
        readers = run[f"{which}_in", layer].shape[2]
        read = (run["state", layer] + change).unsqueeze(2).expand(-1, -1, readers, -1)
        other = decoder.project(layer, which, read, clean[f"{which}_scale", layer])
        new = value.clone()
        new[:, :, list(heads)] = other[:, :, list(heads)]
        return new

    return {(which, layer): edit}
