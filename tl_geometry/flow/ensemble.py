"""How does one token of many texts travel through the blocks? :func:`trajectories` records the
ensemble of such paths, one for each chunk (a text of fixed length in tokens). Every function of the
stochastic-flow view (Sarfati et al. 2025) takes such an ensemble; its splits into fitted and
held-out chunks are here too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base.checks import finite, index, indices
from tl_geometry.base.errors import fail, require
from tl_geometry.base.results import Result, hash_tokens
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows, begins_with_bos
from tl_geometry.flow import ensemble_shape, residuals
from tl_geometry.flow.alignment import AlignedBases, fit_aligned_bases
from tl_geometry.flow.langevin import LangevinModel
from tl_geometry.flow.noise import fit_noise_law
from tl_geometry.models.batches import batch_of
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view

SOURCE = ("sarfati2025",)
AFTER_NORM = "last state after the final norm"
"""Flag of an ensemble from :meth:`Trajectories.after_norm`."""
FOLDED = "processed model: the final norm lacks the gain and bias folded into the unembedding"
"""Flag of post-norm states that differ from Hugging Face's last hidden state."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Trajectories(Result):
    """Paths of one token per chunk: ``X [trajectory state d_model]``, by default the outputs of all
    blocks (states 1 to n_layers), before the final norm.

    ``position`` is the position of the token followed: -1 the last ("pilot") token, 0 the [CLS]
    token of an encoder. ``tokens`` are the chunks, ``labels`` their documents. ``post_norm`` is the
    last state after the model's own final norm, where it was asked for. It equals Hugging Face's
    last hidden state, except for processed models (flagged), whose norm has its gain and bias
    folded into the unembedding. The methods are shortcuts to the functions of
    :mod:`tl_geometry.flow.ensemble_shape`, ``residuals``, ``noise`` and ``langevin``, which
    document them.
    """

    X: Float[Tensor, "trajectory state d_model"]
    states: tuple[int, ...]
    position: int
    tokens: Int[Tensor, "trajectory position"] | None = None
    labels: Int[Tensor, " trajectory"] | None = None
    post_norm: Float[Tensor, "trajectory d_model"] | None = None

    def __len__(self) -> int:
        return len(self.X)

    @property
    def times(self) -> Float[Tensor, " state"]:
        """Layers as times of the flow: 1 for the output of the first block."""
        return torch.tensor(self.states, dtype=torch.float64)

    def row(self, state: int) -> int:
        """Index of a state along the state axis of ``X``."""
        require(state in self.states, "state", expected=f"one of {self.states}", got=state)
        return self.states.index(state)

    def pick(self, rows: Int[Tensor, " sample"]) -> Trajectories:
        """Some of the trajectories, in the given order (for instance without the outliers)."""
        optional = {n: getattr(self, n) for n in ("tokens", "labels", "post_norm")}
        chosen = {n: None if v is None else v[rows] for n, v in optional.items()}
        provenance = replace(self.provenance, contexts=len(rows))
        return replace(self, X=self.X[rows], provenance=provenance, **chosen)

    def split(self, share: float = 0.5, *, seed: int = 0) -> tuple[Trajectories, Trajectories]:
        """Two disjoint parts, the first with about ``share`` of the trajectories. Where chunks have
        document labels, each document is in one part only, but for chunks that equal one of the
        first part: these move to it.
        """
        first, second = split_rows(len(self), self.labels, share, seed, self.tokens)
        return self.pick(first), self.pick(second)

    def after_norm(self) -> Trajectories:
        """The same ensemble with the last state after the final norm, as published for Llama and
        Mistral (see ``post_norm``)."""
        if self.post_norm is None:
            instead = "trajectories(..., post_norm=True)"
            fail("post_norm", expected="the last state after the norm", got="none", instead=instead)
        X = torch.cat([self.X[:, :-1], self.post_norm[:, None]], dim=1)
        return replace(self, X=X, provenance=self.provenance.flagged(AFTER_NORM))

    def aligned_bases(self, *, align: str = "greedy", centered: bool = False) -> AlignedBases:
        """Singular directions and values of each state, aligned. Cached: a second call costs
        nothing."""
        if (align, centered) not in self._bases:
            self._bases[align, centered] = fit_aligned_bases(self.X, align=align, centered=centered)
        return self._bases[align, centered]

    @cached_property
    def _bases(self) -> dict[tuple[str, bool], AlignedBases]:
        return {}

    def bundle(self, *, k: int = 10) -> ensemble_shape.Bundle:
        """Straightness, parallelism and neighbour preservation."""
        return ensemble_shape.bundle(self.X, k=k)

    def residuals(self) -> residuals.Maps:
        """Statistics of what rotation and stretch leave of this same ensemble, for all pairs of
        states (held out: :func:`tl_geometry.flow_report`)."""
        return residuals.residual_maps(self.X, partial(residuals.flow_map, self.aligned_bases()))

    def langevin(self, *, noise: tuple[float, float] | str = "asymptotic") -> LangevinModel:
        """The fitted stochastic flow. ``noise="asymptotic"`` or ``"increment"`` takes alpha and
        lambda from that law of the residuals (as published), a pair is taken as given."""
        provenance = replace(self.provenance, dtype="float64")
        if isinstance(noise, str):
            log_variance = self.residuals().log_variance
            law = fit_noise_law(log_variance, law=noise, times=self.times)
            noise = (law.alpha, law.rate)
            # the flow's noise variance is alpha lambda e^{lambda t}; that of the increment law
            # has |lambda|
            if law.rate < 0 and law.law == "increment":
                noise = (-law.alpha, law.rate)
            elif law.rate <= 0:
                noise = (0.0, 0.0)
                none = f"noise law has lambda {law.rate:.3g}, not above 0: no noise"
                provenance = provenance.flagged(none)
        return LangevinModel.fit(self.X, noise=noise, times=self.times, provenance=provenance)


def require_trajectories(value: object, what: str) -> None:
    """Refuse anything but :class:`Trajectories` where an ensemble is wanted."""
    ok = isinstance(value, Trajectories)
    instead = "tl_geometry.trajectories(model, tokens)"
    require(ok, what, expected="Trajectories", got=type(value).__name__, instead=instead)


def split_rows(
    n: int, labels: Tensor | None, share: float, seed: int, tokens: Tensor | None = None
) -> tuple[Int[Tensor, " trajectory"], Int[Tensor, " sample"]]:
    """Rows of two disjoint parts, the first with about ``share`` of them; with at least two labels
    each document is in one part only.

    A chunk of the second part whose ``tokens`` occur in the first moves to the first, so that
    nothing held out was fitted on.
    """
    expected = "a share between 0 and 1 of at least 2 trajectories"
    require(0 < share < 1 and n >= 2, "split", expected=expected, got=f"{share} of {n}")
    generator = torch.Generator().manual_seed(seed)
    in_first = torch.zeros(n, dtype=torch.bool)
    documents = torch.empty(0) if labels is None else labels.unique()
    if labels is None or len(documents) < 2:
        # neither part may be empty
        n_first = min(max(1, round(share * n)), n - 1)
        in_first[torch.randperm(n, generator=generator)[:n_first]] = True
    else:
        order = documents[torch.randperm(len(documents), generator=generator)]
        cumulated_sizes = torch.stack([(labels == document).sum() for document in order]).cumsum(0)
        n_documents = min(max(int((cumulated_sizes <= share * n).sum()), 1), len(order) - 1)
        in_first = torch.isin(labels, order[:n_documents])
    if tokens is not None:
        in_first = in_first | shared_rows(tokens, tokens[in_first])
        expected, got = "chunks that differ, to hold some out", f"{n} that repeat each other"
        require(not bool(in_first.all()), "split", expected=expected, got=got)
    return in_first.nonzero()[:, 0], (~in_first).nonzero()[:, 0]


def shared_rows(
    rows: Int[Tensor, "row position"], fitted: Int[Tensor, "sample position"]
) -> Bool[Tensor, " row"]:
    """Which of ``rows`` also occur among ``fitted``, compared token by token (none where their
    lengths differ).

    >>> shared_rows(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[3, 4], [5, 6]])).tolist()
    [False, True]
    """
    if rows.shape[1] != fitted.shape[1]:
        return torch.zeros(len(rows), dtype=torch.bool)
    fitted_rows = {tuple(row) for row in fitted.tolist()}
    return torch.tensor([tuple(row) in fitted_rows for row in rows.tolist()], dtype=torch.bool)


def too_few(fitted: int, d_model: int, what: str) -> tuple[str, ...]:
    """A flag where ``what`` was fitted on fewer trajectories than dimensions; else nothing.

    >>> too_few(300, 576, "maps"), too_few(600, 576, "maps")
    (('maps fitted on 300 trajectories, fewer than the 576 dimensions',), ())
    """
    if fitted >= d_model:
        return ()
    return (f"{what} fitted on {fitted} trajectories, fewer than the {d_model} dimensions",)


def trajectories(
    model: ModelLike,
    tokens: TokensLike,
    *,
    position: str | int | None = None,
    states: Iterable[int | str] | int | str | None = None,
    post_norm: bool = False,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    labels: Any = None,
    progress: bool = True,
) -> Trajectories:
    """Follow one token of every chunk through all blocks: the ensemble that Sarfati et al. 2025
    call lines of thought.

    Runs one forward pass per batch of chunks and keeps only the followed position of each state:
    memory is chunks x states x d_model.

    Args:
        tokens: chunks as :func:`tl_geometry.decompose` takes them; see
            :func:`tl_geometry.corpus.pseudo_sentences` for those of the paper.
        position: ``"pilot"`` (last token), ``"cls"`` (first) or a number. By default the pilot of
            a causal model, but the first token of an encoder, whose last token summarises the text
            no more than any other.
        states: which states, one or several, in increasing order; by default 1 to n_layers
            (outputs of the blocks, as published). State 0 is the embedding. Names of hooks that
            hold states are taken too (``"blocks.1.hook_resid_pre"``).
        post_norm: also keep the last state after the final norm (see
            :meth:`Trajectories.after_norm`).
        batch_size: chunks of one forward pass, by default about 4,096 tokens on a CPU, 16,384 on a
            GPU.

    Raises ``GeometryError`` for ragged or foreign tokens, a model in training mode and non-finite
    states.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> tlg.trajectories(model, windows, progress=False).X.shape  # chunk, state, d_model
    torch.Size([8, 4, 128])
    """
    view = as_view(model)
    source = as_tokens(view, tokens, labels=labels, prepend_bos=prepend_bos)
    followed = _position(view, position, source.length)
    requested = range(1, view.n_layers + 1) if states is None else states
    chosen = indices(requested, view.n_layers + 1, "states")
    require(list(chosen) == sorted(chosen), "states", expected="increasing states", got=chosen)
    expected = f"states that include the last one, {view.n_layers}"
    require(not post_norm or view.n_layers in chosen, "post_norm", expected=expected, got=chosen)
    X, ids = _follow(view, source, followed, chosen, batch_size, progress)
    # summed over states, one check covers them all: a NaN or infinity makes its sum not finite
    finite(X.sum(1), "states of the followed token")
    flags: list[str] = []
    if followed == 0:
        flags.append("first token followed")
    elif not view.causal:
        summary = "it does not gather the text before it"
        flags.append(f"a token of an encoder is not a pilot: {summary}")
    provenance = view.provenance(
        corpus=source.corpus,
        token_hash=hash_tokens(ids),
        has_bos=begins_with_bos(ids, view.bos_id),
        window=(0, source.length),
        contexts=len(X),
        sources=SOURCE,
        flags=tuple(flags),
    )
    normed = _normed(view, X[:, -1]) if post_norm else None
    provenance = provenance.flagged(FOLDED) if normed is not None and view.processed else provenance
    return Trajectories(
        X=X,
        states=chosen,
        position=followed,
        tokens=ids,
        labels=source.labels,
        post_norm=normed,
        provenance=provenance,
    )


def _normed(view: ModelView, states: Tensor) -> Float[Tensor, "trajectory d_model"]:
    """Last states after the final norm (without gain and bias where those were folded into the
    unembedding)."""
    norm = view.final_norm() if view.causal else None
    if norm is None:
        expected, got = "a decoder with a final norm", f"{view.class_name} {view.name}"
        fail("post_norm", expected=expected, got=got, instead="post_norm=False")
    return norm.apply(states.to(norm.gain)).to(states)


def _position(view: ModelView, position: str | int | None, length: int) -> int:
    """The followed position as a number; -1 stands for the last."""
    if position is None:
        return -1 if view.causal else 0
    if isinstance(position, str):
        expected = '"pilot", "cls" or a position'
        require(position in ("pilot", "cls"), "position", expected=expected, got=repr(position))
        return -1 if position == "pilot" else 0
    return position if position == -1 else index(position, length, "position")


def _follow(
    view: ModelView,
    source: TokenWindows,
    position: int,
    states: tuple[int, ...],
    batch: int | None,
    progress: bool,
) -> tuple[Float[Tensor, "trajectory state d_model"], Int[Tensor, "trajectory position"]]:
    """States of the followed position, one row per chunk, and the tokens of the chunks."""
    ids, parts = [], []
    with tqdm(total=len(source), unit="chunk", disable=not progress, desc=view.name) as bar:
        for rows in source.tokens.split(batch_of(batch, source.length, view.device)):
            parts.append(states_at(view, rows, position, states))
            ids.append(rows)
            bar.update(len(rows))
    return torch.cat(parts), torch.cat(ids)


def states_at(
    view: ModelView, tokens: Int[Tensor, "batch position"], position: int, states: Sequence[int]
) -> Float[Tensor, "batch state d_model"]:
    """Some states at one position of every row, on the CPU, at least in float32."""
    dtype = torch.promote_types(view.dtype, torch.float32)
    found = torch.empty(len(tokens), len(states), view.d_model, dtype=dtype, device=view.device)

    def keep(h: Tensor, row: int) -> None:
        found[:, row] = h[:, position]

    view.run(tokens, {view.state_hooks[s]: partial(keep, row=i) for i, s in enumerate(states)})
    return found.cpu()
