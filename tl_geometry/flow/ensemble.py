"""How does one token of many texts travel through the blocks? :func:`trajectories` records the
ensemble of such paths, one for each chunk (a text of fixed length in tokens). Every function of the
stochastic-flow view (Sarfati et al. 2025) takes such an ensemble; its splits into fitted and
held-out chunks and its shape (straight, parallel, outlying) are here too."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base.checks import count, finite, index, indices, seeded, several
from tl_geometry.base.errors import fail, require
from tl_geometry.base.guarded import Guarded
from tl_geometry.base.linalg import normalize_rows, ratio
from tl_geometry.base.results import Result
from tl_geometry.base.tables import Table
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike, begins_with_bos
from tl_geometry.flow import maps
from tl_geometry.flow.maps import AlignedBases, fit_aligned_bases
from tl_geometry.models.batches import batch_of
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view

SOURCE = ("sarfati2025",)
AFTER_NORM = "last state after the final norm"
"""Flag of an ensemble from :meth:`Trajectories.after_norm`."""
FOLDED = "processed model: the final norm lacks the gain and bias folded into the unembedding"
"""Flag of post-norm states that differ from Hugging Face's last hidden state."""
MAD_TO_SD = 1.4826
"""Standard deviation of a Gaussian over its median absolute deviation."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Trajectories(Guarded, Result):
    """Paths of one token per chunk: ``X [trajectory state d_model]``, by default the outputs of all
    blocks (states 1 to n_layers), before the final norm.

    ``position`` is the position of the token followed: -1 the last ("pilot") token, 0 the [CLS]
    token of an encoder. ``tokens`` are the chunks, ``labels`` their documents.
    """

    X: Float[Tensor, "trajectory state d_model"]
    states: tuple[int, ...]
    position: int
    tokens: Int[Tensor, "trajectory position"] | None = None
    labels: Int[Tensor, " trajectory"] | None = None

    def __len__(self) -> int:
        return len(vars(self)["X"])

    def pick(self, rows: Int[Tensor, " sample"] | Sequence[int] | int) -> Trajectories:
        """Some of the trajectories, in the given order (for instance without the outliers)."""
        n = len(self)
        rows = torch.tensor([count(row, "rows", -n, n - 1) for row in several(rows)])
        require(len(rows) > 0, "rows", expected="one trajectory or more", got="none")
        X, provenance = vars(self)["X"][rows], replace(self.provenance, contexts=len(rows))
        tokens, labels = (None if x is None else x[rows] for x in (self.tokens, self.labels))
        return replace(self, X=X, tokens=tokens, labels=labels, provenance=provenance)

    def split(self, share: float = 0.5, *, seed: int = 0) -> tuple[Trajectories, Trajectories]:
        """Two disjoint parts, the first with about ``share`` of the trajectories; with at least two
        document labels each document is in one part only. A chunk of the second part that equals
        one of the first moves to it, so that nothing held out was fitted on.
        """
        n, generator = len(self), seeded(seed)
        expected = "a share between 0 and 1 of at least 2 trajectories"
        require(0 < share < 1 and n >= 2, "split", expected=expected, got=f"{share} of {n}")
        documents = torch.arange(n) if self.labels is None else self.labels
        # one document is no whole that could be kept
        documents = documents if len(documents.unique()) > 1 else torch.arange(n)
        order, counts = documents.unique(return_counts=True)
        shuffled = torch.randperm(len(order), generator=generator)
        order, sizes = order[shuffled], counts[shuffled].cumsum(0)
        # neither part may be empty
        most = min(max(int((sizes <= share * n).sum()), 1), len(order) - 1)
        in_first = torch.isin(documents, order[:most])
        if self.tokens is not None:
            in_first = in_first | shared_rows(self.tokens, self.tokens[in_first])
        expected, got = "chunks that differ, to hold some out", f"{n} that repeat each other"
        require(not bool(in_first.all()), "split", expected=expected, got=got)
        return self.pick(in_first.nonzero()[:, 0]), self.pick((~in_first).nonzero()[:, 0])

    def after_norm(self, model: ModelLike) -> Trajectories:
        """The same ensemble with the last state after the model's final norm, as published for
        Llama and Mistral.

        It equals Hugging Face's last hidden state, except for processed models (flagged), whose
        norm has its gain and bias folded into the unembedding. Raises ``GeometryError`` for another
        model, for one without a final norm, and for an ensemble without the last state before it.
        """
        view = as_view(model)
        norm = view.final_norm() if view.causal else None
        same = view.fingerprint == self.provenance.fingerprint and view.n_layers in self.states
        if norm is None or not same or AFTER_NORM in self.provenance.flags:
            expected = "the last state before the final norm of the same decoder"
            fail("after_norm", expected=expected, got=f"states {self.states} of {view.name}")
        X = self.X  # a copy
        X[:, -1] = norm.apply(X[:, -1].to(norm.gain)).to(X)
        flags = (AFTER_NORM, FOLDED) if view.processed else (AFTER_NORM,)
        return replace(self, X=X, provenance=self.provenance.flagged(*flags))

    @cached_property
    def aligned_bases(self) -> AlignedBases:
        """Singular directions and values of each state, aligned greedily."""
        return fit_aligned_bases(vars(self)["X"])

    def residuals(self) -> Table:
        """What rotation and stretch leave of this same ensemble: a row per pair of states with
        :func:`tl_geometry.flow.maps.residual_statistics` and
        :func:`tl_geometry.flow.maps.score_map` (held out: :func:`tl_geometry.flow_report`)."""
        X, rows = vars(self)["X"].unbind(1), []  # no copy
        for i, j in itertools.combinations(range(len(X)), 2):
            found, _ = maps.measured(maps.flow_map(self.aligned_bases, i, j), X[i], X[j])
            rows.append({"start": self.states[i], "end": self.states[j], **found})
        chance = "In-sample errors: 0 where rotation and stretch explain all."
        return Table.of(rows, self.provenance, chance=chance)


def require_fitting(
    view: ModelView, ensemble: Trajectories, states: Sequence[int], chunks: Tensor
) -> None:
    """Refuse an ensemble of another model, of states after the final norm, without some of
    ``states``, of another token than the last that is read of ``chunks [sample position]``, and
    chunks with BOS for an ensemble without or the other way round."""
    about, has_bos = ensemble.provenance, begins_with_bos(chunks, view.bos_id)
    position, missing = ensemble.position, sorted(set(states) - set(ensemble.states))
    last = -1 if ensemble.tokens is None else ensemble.tokens.shape[1] - 1
    instead = "trajectories(model, chunks, states=...)"
    # an ensemble made from plain tensors has no fingerprint to compare, and may not know of BOS
    same_model, same_bos = (None, view.fingerprint), (None, has_bos)
    for fits, expected, got in (
        (about.fingerprint in same_model, f"trajectories of {view.name}", f"of {about.model}"),
        (not missing, f"states {list(states)}", f"no {missing}"),
        (AFTER_NORM not in about.flags, "states before the final norm", AFTER_NORM),
        (position in (-1, last), "trajectories of the last token read", f"position {position}"),
        (about.has_bos in same_bos, f"has_bos={has_bos}, as tokens", f"has_bos={about.has_bos}"),
    ):
        require(fits, "ensemble", expected=expected, got=got, instead=instead)


def shared_rows(
    rows: Int[Tensor, "row position"], fitted: Int[Tensor, "sample position"]
) -> Bool[Tensor, " row"]:
    """Which of ``rows`` also occur among ``fitted``, compared up to the length of the shorter.

    >>> shared_rows(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[3, 4], [5, 6]])).tolist()
    [False, True]
    """
    length = min(rows.shape[1], fitted.shape[1])
    known = {tuple(row) for row in fitted[:, :length].tolist()}
    return torch.tensor([tuple(row) in known for row in rows[:, :length].tolist()])


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
    position: int | None = None,
    states: Iterable[int] | int | None = None,
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
        position: of the token that is followed, -1 for the last. By default the last ("pilot") of a
            causal model, but the first of an encoder, whose last token summarises the text no more
            than any other.
        states: which states, one or several, in increasing order; by default 1 to n_layers
            (outputs of the blocks before the final norm). State 0 is the embedding.
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
    rows = as_tokens(view, tokens, labels=labels, prepend_bos=prepend_bos)
    position = (-1 if view.causal else 0) if position is None else position
    followed = -1 if position == -1 else index(position, rows.length, "position")
    states = range(1, view.n_layers + 1) if states is None else states
    chosen = indices(states, view.n_layers + 1, "states")
    require(list(chosen) == sorted(chosen), "states", expected="increasing states", got=chosen)
    dtype = torch.promote_types(view.dtype, torch.float32)
    found: list[list[Tensor]] = [[] for _ in chosen]

    def keep(h: Tensor, into: list[Tensor]) -> None:
        # a copy: a view of one position would hold the memory of all
        into.append(h[:, followed].to("cpu", dtype, copy=True))

    hooks = {view.state_hooks[s]: partial(keep, into=x) for s, x in zip(chosen, found, strict=True)}
    batches = rows.tokens.split(batch_of(batch_size, rows.length, view.device))
    for batch in tqdm(batches, unit="batch", disable=not progress, desc=view.name):
        view.run(batch, hooks)
    X = torch.stack([torch.cat(parts) for parts in found], dim=1)
    # summed over states, one check covers them all: a NaN or infinity makes its sum not finite
    finite(X.sum(1), "states of the followed token")
    flags = ["first token followed"] if followed == 0 else []
    if followed and not view.causal:
        flags.append("a token of an encoder does not gather the text before it: no pilot")
    about = view.provenance(rows, window=(0, rows.length), sources=SOURCE, flags=tuple(flags))
    return Trajectories(
        X=X,
        states=chosen,
        position=followed,
        tokens=rows.tokens,
        labels=rows.labels,
        provenance=about,
    )


# ---- the shape of an ensemble


def bundle(X: Float[Tensor, "trajectory state d_model"], *, k: int = 10) -> dict[str, Tensor]:
    """Straightness, parallelism and neighbour preservation of a bundle of N trajectories, to be
    compared with those of a null ensemble.

    ``straightness [trajectory]``: ``|sum of steps| / sum of |step|``, 1 for a straight line, about
    ``1/sqrt(steps)`` for a random walk, NaN for a path that stands still. One number per step:
    ``parallel``, the mean cosine between the steps of two trajectories (0 for unrelated directions;
    steps of length zero are left out), and ``neighbours``, the share of each trajectory's ``k``
    nearest neighbours (at most N - 2) that are still among them after the step;
    ``neighbours_chance`` = ``k / (N - 1)`` if neighbours were drawn at random. Raises
    ``GeometryError`` for a single state or fewer than three trajectories.

    >>> X = torch.randn(5, 1, 2, generator=torch.Generator().manual_seed(0))
    >>> straight = bundle(torch.cat([X, X + 1, X + 2], dim=1), k=2)
    >>> straight["parallel"].round(decimals=4).tolist(), straight["neighbours"].tolist()
    ([1.0, 1.0], [1.0, 1.0])
    """
    n, states, _ = X.shape
    expected, got = "at least three trajectories of two states", f"{n} of {states}"
    require(states >= 2 and n >= 3, "trajectories", expected=expected, got=got)
    # with all n - 1 others as neighbours none could be lost
    k = min(count(k, "k"), n - 2)
    net_length = torch.linalg.vector_norm(X[:, -1].double() - X[:, 0].double(), dim=-1)
    path_length = torch.zeros_like(net_length)
    parallel, kept, before = [], [], _nearest(X[:, 0].double(), k)
    for s in range(states - 1):
        step = X[:, s + 1].double() - X[:, s].double()
        path_length += torch.linalg.vector_norm(step, dim=-1)
        unit, degenerate = normalize_rows(step)
        moving = n - int(degenerate.sum())
        # |sum of unit steps|^2 is the sum of cosines over all ordered pairs, self-pairs included
        cosines, pairs = unit.sum(0).square().sum() - moving, moving * (moving - 1)
        parallel.append(cosines / pairs if pairs > 0 else torch.full_like(cosines, torch.nan))
        after = _nearest(X[:, s + 1].double(), k)
        kept.append((before[:, :, None] == after[:, None]).any(-1).double().mean())
        before = after
    return {
        "straightness": ratio(net_length, path_length),
        "parallel": torch.stack(parallel),
        "neighbours": torch.stack(kept),
        "neighbours_chance": torch.tensor(k / (n - 1), dtype=torch.float64),
    }


def _nearest(rows: Float[Tensor, "trajectory d_model"], k: int) -> Int[Tensor, "trajectory rank"]:
    """The ``k`` nearest other trajectories of each."""
    distances = torch.cdist(rows, rows).fill_diagonal_(torch.inf)
    return distances.topk(k, largest=False).indices


def outliers(X: Float[Tensor, "trajectory state d_model"]) -> tuple[int, ...]:
    """Rows of the trajectories whose norm r is far from the others' at some state:
    ``|r - median(r)| > 10 * 1.4826 * MAD(r)`` (the factor 10 of Sarfati et al. 2025). Nothing is
    dropped.

    Where the median absolute deviation (MAD) is 0, every norm other than the median is an outlier.

    >>> X = torch.ones(5, 1, 1) + torch.arange(5).view(5, 1, 1) / 10
    >>> X[3] = 50.0
    >>> outliers(X)
    (3,)
    """
    norms = [torch.linalg.vector_norm(state.double(), dim=-1) for state in X.unbind(1)]
    r = torch.stack(norms, dim=1)
    # quantile: of an even count, torch.median takes the lower of the two middle values
    deviation = (r - r.quantile(0.5, dim=0)).abs()
    far = (deviation > 10 * MAD_TO_SD * deviation.quantile(0.5, dim=0)).any(1)
    return tuple(far.nonzero()[:, 0].tolist())
