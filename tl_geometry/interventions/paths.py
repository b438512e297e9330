"""Through which inputs does a head act? :func:`head_knockouts` says what a head does;
:func:`head_paths` says which of its readers do it. It is path patching of the edges from heads
(senders) to chosen inputs (receivers): queries of heads, keys and values of groups of heads, MLPs,
the output.

The mixed values z of a sender's heads are replaced by z', as in :func:`remove_heads`, and only the
receivers see it. All other readers read the running stream x. A receiver reads instead

    frozen    ``x + write(z') - write(z)``: the direct edge from the sender alone
    live      the stream of another run, in which the sender is replaced and everything responds

``write`` is what the sender's block adds with these values, after the norm behind attention where
there is one. Everything behind a receiver is live, norms included. Where every reader of a sender
is a receiver, both are the knockout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base import checks
from tl_geometry.base.checks import describe, head_name
from tl_geometry.base.errors import fail, listed, require
from tl_geometry.circuits.edge_layout import EdgeLayout
from tl_geometry.circuits.edge_pass import EdgePass, PathStream
from tl_geometry.corpus.sources import token_rows
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.interventions.effects import BesideControls
from tl_geometry.interventions.head_edits import (
    Heads,
    HeadsLike,
    by_layer,
    mixed_values,
    other_prompts,
    replaced_in_sets,
    require_several,
)
from tl_geometry.interventions.head_removal import REPLACEMENTS
from tl_geometry.interventions.knockouts import (
    control_sets,
    head_sets,
    reference_means,
)
from tl_geometry.interventions.output_metrics import (
    OutputMetric,
    Targets,
    UserMetric,
    output_metric,
)
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.next_token import output_batch, require_output
from tl_geometry.models.reader import as_view

ReceiversLike = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""One receiver, several, or sets of receivers by name."""
BETWEEN = ("frozen", "live")
"""Whether what lies between senders and receivers keeps its clean output or responds."""
READ_BYTES = 2**29
"""Bytes that the inputs of all readers of a block may take in one pass: each reader has a copy of
the stream, which :func:`output_batch` does not count."""


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadPaths(BesideControls):
    """What edges from heads to some of their readers do to a metric of the output: one row for each
    sender (a head, or a set of heads) and receiver (an input, or a set of inputs), beside random
    senders (:class:`~tl_geometry.interventions.BesideControls`). ``sets`` are the heads of
    each sender, ``inputs`` the readers of each receiver.
    """

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    inputs: tuple[tuple[str, ...], ...]
    between: str
    table_axes = ("sender", "receiver")


def head_paths(
    model: ModelLike,
    prompts: TokensLike,
    senders: HeadsLike | Mapping[str, HeadsLike],
    receivers: ReceiversLike,
    metric: str | UserMetric = "difference",
    *,
    targets: Targets | None = None,
    position: int | str = -1,
    between: str = "frozen",
    receiver_position: int | str | None = None,
    by: str = "mean",
    reference: TokensLike | None = None,
    controls: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
    seed: int = 0,
) -> HeadPaths:
    """Effect on the output of what heads write, through chosen inputs alone (path patching).

    Args:
        prompts, metric, targets, position: as in :func:`head_knockouts`.
        senders: a row for each head (``None``: all before the receivers), or a mapping from names
            to sets of heads that are replaced together.
        receivers: a row for each input, ``"L5H1<q>"``, ``"L5H0-2<k>"`` and ``"L5H0-2<v>"`` (heads 0
            to 2 share them), ``"mlp5"``, ``"output"`` (:class:`~tl_geometry.circuits.EdgeLayout`
            lists them), or a mapping from names to sets of inputs.
        between: ``"frozen"``, the edge from sender to receiver alone; ``"live"``, also what the
            sender does to the receiver through heads and MLPs between them.
        receiver_position: the only position at which the receivers read it, a number or a name; all
            by default.
        by: what stands in place of a sender's mixed values: ``"mean"`` over ``reference`` (by
            default the prompts themselves) at the same position, ``"zero"``, or ``"prompt"``, those
            of the same row of ``reference``, counterfactual prompts (by default of another of the
            prompts).
        controls: random sets of as many heads beside each sender, drawn from the heads before the
            receivers that no row has; by default 8, and none where all heads are rows.

    Raises ``GeometryError`` for a sender that does not come before every receiver, for unknown
    inputs, and as :func:`head_knockouts`; ``UnsupportedModelError`` for encoders;
    ``ReconstructionError`` under hooks that change the model.

    Sources: Wang et al. 2022, arXiv:2211.00593; Goldowsky-Dill et al. 2023, arXiv:2304.05969.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> prompts = tlg.zoo.default_windows(model, 16, n=4)
    >>> receivers = ["L1H2<q>", "mlp1", "output"]
    >>> paths = tlg.interventions.head_paths(
    ...     model, prompts, ["L0H0", "L0H3"], receivers, "loss", controls=0, progress=False
    ... )
    >>> paths.effects.shape, paths.columns()[:3]
    (torch.Size([2, 3, 4]), ('sender', 'receiver', 'effect'))
    """
    checks.choice(by, REPLACEMENTS, "by")
    checks.choice(between, BETWEEN, "between")
    view = as_view(model)
    require_output(view, "head_paths")
    layout = EdgeLayout.of(view)
    rows = token_rows(view, prompts, prepend_bos=prepend_bos)
    require_several(len(rows), "prompts")
    columns = _receiver_sets(layout, receivers)
    before = _heads_before(layout, columns)
    chosen = head_sets(view, before if senders is None else senders)
    _require_order(layout, chosen, columns)
    measured = output_metric(view, rows, metric, targets, position)
    drawn = control_sets(list(chosen.values()), before, controls, seed)
    means = others = None
    if by == "prompt":
        others = other_prompts(view, rows, reference, prepend_bos, seed, "reference")
    else:
        means = reference_means(view, rows, by, reference, prepend_bos)
    at = None if receiver_position is None else rows.position(receiver_position)
    receives = _receives(layout, list(columns.values()), rows.tokens.shape[1], at)
    runs = _PathRuns(
        EdgePass.of(view, layout, rows.tokens), measured, receives, between, means, others
    )
    # the rows, then the random sets by size: one call shares the clean run among them
    sets = [*chosen.values(), *(heads for draws in drawn.values() for heads in draws)]
    clean, effects = runs.effects(sets, progress)
    fields: dict[str, Any] = {}
    if drawn:
        draw_effects = effects[len(chosen) :].unflatten(0, (len(drawn), -1))
        by_size = dict(zip(drawn, draw_effects, strict=True))
        # [row draw receiver prompt]: rows of one size share their draws
        by_row = torch.stack([by_size[len(heads)] for heads in chosen.values()])
        fields = {
            "control": by_row.mean(1),
            "control_draws": rearrange(by_row.mean(-1), "s n r -> s r n"),
        }
    sources = ("wang2022", "goldowskydill2023")
    return HeadPaths(
        provenance=view.provenance(rows, sources=sources, seed=seed),
        senders=tuple(chosen),
        receivers=tuple(columns),
        sets=tuple(tuple(heads) for heads in chosen.values()),
        inputs=tuple(tuple(layout.readers[i] for i in readers) for readers in columns.values()),
        metric=measured.name,
        by=by,
        between=between,
        clean=clean,
        effects=effects[: len(chosen)],
        **fields,
    )


def _receiver_sets(layout: EdgeLayout, receivers: Any) -> dict[str, tuple[int, ...]]:
    """Numbers of the readers of each receiver, by the receiver's name."""
    number = {name: i for i, name in enumerate(layout.readers)}

    def numbers(names: Any) -> tuple[int, ...]:
        given = [names] if isinstance(names, str) else names
        try:
            given = list(dict.fromkeys(given))
        except TypeError:
            fail("receivers", expected="names of inputs", got=describe(names))
        require(len(given) > 0, "receivers", expected="at least one input", got="none")
        unknown = [name for name in given if name not in number]
        if unknown:
            # for a head that shares its key with others, the names of its block show the group
            block = str(unknown[0]).split("H")[0] + "H"
            near = [name for name in number if name.startswith(block)] or list(number)
            expected = f"inputs of this model: {listed(near, unknown[0])}"
            fail("receivers", expected=expected, got=unknown[:3])
        return tuple(number[name] for name in given)

    if isinstance(receivers, Mapping):
        require(len(receivers) > 0, "receivers", expected="at least one set of inputs", got="none")
        return {str(name): numbers(inputs) for name, inputs in receivers.items()}
    return {layout.readers[i]: (i,) for i in numbers(receivers)}


def _heads_before(layout: EdgeLayout, columns: Mapping[str, tuple[int, ...]]) -> Heads:
    """All heads that write before every receiver reads."""
    seen = min(layout.seen[i] for readers in columns.values() for i in readers)
    before = (layout.head_writers < seen).nonzero()[:, 0].tolist()
    expected, got = "inputs that read some head", "one that comes before all heads"
    require(len(before) > 0, "receivers", expected=expected, got=got)
    return [divmod(head, layout.n_heads) for head in before]


def _require_order(
    layout: EdgeLayout, chosen: Mapping[str, Heads], columns: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse a sender that a receiver does not read."""
    writers = layout.head_writers.view(layout.n_layers, layout.n_heads)
    for layer, head in (head for heads in chosen.values() for head in heads):
        for reader in (reader for readers in columns.values() for reader in readers):
            require(
                int(writers[layer, head]) < layout.seen[reader],
                f"the path from {head_name((layer, head))} to {layout.readers[reader]}",
                expected="a receiver that reads behind the sender",
                got="one that reads before it",
                instead="receivers of later blocks",
            )


def _receives(
    layout: EdgeLayout, columns: Sequence[tuple[int, ...]], length: int, at: int | None
) -> Bool[Tensor, "receiver position row"]:
    """Which readers read what is replaced for each receiver, and where."""
    receives = torch.zeros(len(columns), length, len(layout.readers), dtype=torch.bool)
    for column, readers in enumerate(columns):
        receives[column, slice(None) if at is None else slice(at, at + 1), list(readers)] = True
    return receives


class _Clean(NamedTuple):
    """Some prompts in the clean run: the input ``h`` of every block, the mixed values ``z`` of its
    heads, and the ``new`` ones that replace them."""

    rows: slice
    h: list[Float[Tensor, "batch position d_model"]]
    z: list[Float[Tensor, "batch position head d_head"]]
    new: list[Float[Tensor, "batch position head d_head"]]


@dataclass(frozen=True, eq=False)
class _PathRuns:
    """Runs patched paths, several in one pass, and measures them. A sender's new mixed values are
    ``means``, or those of the prompts ``others``, or zero where both are ``None``."""

    edges: EdgePass
    metric: OutputMetric
    receives: Bool[Tensor, "receiver position row"]
    between: str
    means: Float[Tensor, "layer position head d_head"] | None
    others: Int[Tensor, "batch position"] | None

    @property
    def positions(self) -> slice:
        """Where logits are needed."""
        at = self.metric.position
        return slice(None) if at is None else slice(at, at + 1)

    def rows_at_once(self) -> int:
        """How many rows (a set of senders and a prompt) one pass takes."""
        view, layout, length = self.edges.view, self.edges.layout, self.metric.tokens.shape[1]
        fit = output_batch(view, length, all_positions=self.metric.position is None)
        inputs = layout.n_heads + 2 * max(layout.n_key_heads)
        element = max(4, torch.finfo(view.dtype).bits // 8)  # the pass is at least in float32
        fit = min(fit, READ_BYTES // (inputs * length * layout.d_model * element))
        return max(1, fit // 2 if self.between == "live" else fit)  # live: two streams a row

    @torch.no_grad()
    def effects(
        self, sets: Sequence[Heads], progress: bool
    ) -> tuple[Float[Tensor, " context"], Float[Tensor, "sender receiver context"]]:
        """The metric of the clean run, and how far each set of senders moves it through each
        receiver."""
        count, at_once = len(self.metric.tokens), self.rows_at_once()
        # a user's function sees all prompts
        prompts = count if self.metric.own is not None else min(count, at_once)
        parts = [slice(start, start + prompts) for start in range(0, count, prompts)]
        # senders of neighbouring layers share a pass, which begins at the first of them
        order = torch.tensor(sorted(range(len(sets)), key=lambda i: min(sets[i])))
        chunks = order.split(max(1, at_once // prompts))
        clean = torch.zeros(count, dtype=torch.float64)
        values = torch.zeros(len(sets), len(self.receives), count, dtype=torch.float64)
        total, name = len(parts) * len(chunks) * len(self.receives), self.edges.view.name
        with tqdm(total=total, disable=not progress, desc=name, unit="pass") as bar:
            for rows in parts:
                clean[rows] = self._clean_metric(rows).cpu()
                run = self._clean_run(rows)
                for column, chunk in product(range(len(self.receives)), chunks):
                    senders = [sets[i] for i in chunk.tolist()]
                    values[chunk, column, rows] = self._patched(run, senders, column).cpu()
                    bar.update(1)
        return clean, values - clean

    def _clean_metric(self, rows: slice) -> Float[Tensor, " batch"]:
        """The metric of the ordinary pass, which is compared with the model's own."""
        tokens = self.metric.tokens[rows]
        first, model_logits = self.edges.model_run(tokens, self.positions)
        # no receivers: an ordinary pass
        stream = PathStream(first, torch.zeros_like(self.receives[0]), torch.zeros_like(first))
        logits, last = self.edges.run(stream, self.positions), stream.total[:, self.positions]
        self.edges.require_model_logits(model_logits, last, logits)
        return self.metric.of(logits, rows)

    def _clean_run(self, rows: slice) -> _Clean:
        """What the clean run of some prompts gives, and what replaces it."""
        h, z = self._inputs(self.metric.tokens[rows])
        if self.others is not None:
            return _Clean(rows, h, z, self._inputs(self.others[rows])[1])
        means = [torch.zeros_like(z[0][0])] * len(z) if self.means is None else list(self.means)
        new = [mean.to(z[0]).expand_as(z[0]) for mean in means]
        return _Clean(rows, h, z, new)

    def _inputs(self, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The input of every block and the mixed values of its heads."""
        view = self.edges.view

        def run() -> tuple[list[Tensor], list[Tensor]]:
            # new lists: where float32 fails part of the way, the model's precision is tried
            h: list[Tensor] = []
            z: list[Tensor] = []

            def on_layer(layer: LayerView) -> None:
                h.append(layer.h)
                z.append(mixed_values(view, layer))

            view.run_layers(tokens, range(view.n_layers), on_layer, verify=False)
            return h, z

        return view.in_single(run)[0]

    def _patched(
        self, run: _Clean, sets: Sequence[Heads], column: int
    ) -> Float[Tensor, "sender batch"]:
        """The metric with each set of senders replaced for one receiver."""
        receives = self.receives[column]
        layers = by_layer([head for heads in sets for head in heads])
        if self.between == "frozen":
            # all is clean up to the first receiver; the last block runs even for the output alone
            start = min(self._first_block(receives), len(run.h) - 1)
            first, outputs = run.h[start].repeat(len(sets), 1, 1), {}
            change = self._change(run, sets, list(layers))
        else:
            # two runs in one batch: the first with senders replaced, whose stream receivers of the
            # second read
            start, change = min(layers), None
            first = run.h[start].repeat(2 * len(sets), 1, 1)
            outputs = {layer: partial(self._first_half, run, sets, layer) for layer in layers}
        stream = PathStream(first, receives, change)
        logits = self.edges.run(stream, self.positions, start=start, outputs=outputs)
        # of one run (frozen) or two (live) the last is the patched one
        by_run = rearrange(logits, "(run c b) i v -> run c b i v", c=len(sets), b=len(run.h[0]))
        by_set = by_run[-1]
        return torch.stack([self.metric.of(set_logits, run.rows) for set_logits in by_set])

    def _first_block(self, receives: Bool[Tensor, "position row"]) -> int:
        """The block of the first receiver."""
        first = int(receives.any(0).nonzero()[0])
        # readers are numbered block by block, and those of the MLP are the last of each
        ends = [readers.mlp.stop for readers in self.edges.layout.layer_readers()]
        return sum(first >= end for end in ends)

    def _replaced(
        self, run: _Clean, sets: Sequence[Heads], layer: int, z: Tensor
    ) -> Float[Tensor, "row position head d_head"]:
        """Mixed values of a layer, ``(set prompt)`` by row, with the heads of each set replaced."""
        return replaced_in_sets(z, sets, layer, lambda _: run.new[layer])

    def _first_half(
        self, run: _Clean, sets: Sequence[Heads], layer: int, z: Tensor
    ) -> Float[Tensor, "row position head d_head"]:
        """:meth:`_replaced` in the first half of the rows, the run in which senders are replaced;
        the second half, the patched run, stays."""
        first, second = z.chunk(2)
        return torch.cat([self._replaced(run, sets, layer, first), second])

    def _change(
        self, run: _Clean, sets: Sequence[Heads], layers: Sequence[int]
    ) -> Float[Tensor, "row position d_model"]:
        """``write(z') - write(z)`` for each set: what replacing it adds to the stream."""
        change = torch.zeros_like(run.h[0].repeat(len(sets), 1, 1))
        for layer in layers:
            block, z = self.edges.blocks[layer], run.z[layer]
            rows = repeat(z, "b i h e -> (c b) i h e", c=len(sets))
            new = block.written(self._replaced(run, sets, layer, rows)).sum(0)
            change = change + new - block.written(z).sum(0).repeat(len(sets), 1, 1)
        return change
