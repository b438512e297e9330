"""Where does each token travel on the sphere of the norm, layer by layer, and how near does it come
to the token that follows? :func:`token_paths` measures the paths of Molina 2023: angles, updates,
ranks, coordinates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks, html
from tl_geometry.base.errors import BudgetError, UnsupportedModelError, fail
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.base.results import Result, hash_tokens
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.batches import batch_of
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import remove_mean
from tl_geometry.models.reader import as_view
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.sphere import projection
from tl_geometry.weights.vocabulary import embeddings, output_rows

UPDATES = ("attention", "mlp")
"""The two updates of a block, in the order of the axis ``update``."""
SPLIT = ("radial", "tangential", "turn")
"""Fields ``[update layer batch position]``; all other tensors have the contexts first."""
HELD = 16
"""Number of tensors of the size of all states that exist at once in float64: states, outputs of
attention and MLP, and what is computed from them. Enters the estimate of memory."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenPaths(Result):
    """Paths of every token of a prompt set through the residual stream states, as angles in radians
    seen from the centre of the sphere.

    ``steps[..., l]`` is the angle between states l and l + 1; ``length`` their sum, ``net`` the
    angle from first to last state, ``tortuosity`` the ratio of the two. ``radial``, ``tangential``
    (lengths in units of the stream) and ``turn`` (an angle) split the updates of attention and MLP,
    each relative to the stream it is added to; NaN where the model's updates do not add up to its
    states, as in post-norm models. ``angle`` is the angle between each state and the next token's
    unembedding row, ``rank`` that token's rank among all tokens by angle (1: the nearest). The last
    token has no next: its angle is NaN, its rank 0. ``coordinates`` are on three axes that were
    fitted on ``fitted_on`` and hold the share ``shown`` of its variance.
    """

    tokens: Int[Tensor, "batch position"]
    str_tokens: tuple[tuple[str, ...], ...]
    steps: Float[Tensor, "batch position layer"]
    length: Float[Tensor, "batch position"]
    net: Float[Tensor, "batch position"]
    tortuosity: Float[Tensor, "batch position"]
    radial: Float[Tensor, "2 layer batch position"]
    tangential: Float[Tensor, "2 layer batch position"]
    turn: Float[Tensor, "2 layer batch position"]
    angle: Float[Tensor, "batch position state"]
    rank: Int[Tensor, "batch position state"]
    coordinates: Float[Tensor, "batch position state 3"]
    shown: float
    method: str
    fitted_on: str

    def columns(self) -> Sequence[str]:
        places = ("context", "position", "token", "state")
        approach = ("next_angle", "next_rank")
        update_columns = [f"{name}_{update}" for update in UPDATES for name in SPLIT]
        return [*places, *approach, "step", *update_columns, "length", "net", "tortuosity"]

    def rows(self) -> Sequence[Sequence[object]]:
        table_rows: list[list[object]] = []
        batch, position, states = self.angle.shape
        fields = [getattr(self, name) for name in SPLIT]
        for b in range(batch):
            for t in range(position):
                path_values = [v[b, t].item() for v in (self.length, self.net, self.tortuosity)]
                for s in range(states):
                    is_last = s == states - 1
                    split_values = [
                        torch.nan if is_last else f[u, s, b, t].item()
                        for u in range(len(UPDATES))
                        for f in fields
                    ]
                    step = torch.nan if is_last else self.steps[b, t, s].item()
                    approach = [self.angle[b, t, s].item(), int(self.rank[b, t, s])]
                    values = [*approach, step, *split_values, *path_values]
                    table_rows.append([b, t, self.str_tokens[b][t], s, *values])
        return table_rows


def token_paths(
    model: ModelLike,
    tokens: TokensLike,
    basis: PositionContext | None = None,
    *,
    prepend_bos: bool | None = None,
    method: str = "pca",
    seed: int = 0,
    batch_size: int | None = None,
    memory_budget: int = 2**31,
) -> TokenPaths:
    """Where each token travels on the sphere of the norm, layer by layer, and how near it comes to
    the token that follows it.

    States are compared by their angles, after centring where the model's norm centres, so that the
    norm's scale drops out. The next token's direction is its unembedding row (final gain folded
    in); for models without a trained output head it is the embedding row.

    Args:
        tokens: a string, strings of equal token length (then ``prepend_bos`` is needed), ids or
            :class:`TokenWindows`.
        basis: fit the three axes on the sampled states of this basis instead of the token
            embeddings.
        method: ``"pca"`` (deterministic) or ``"umap"`` (the published view; needs umap-learn).
        batch_size: contexts of one forward pass, where the budget allows (UMAP places all of them
            at once).
        memory_budget: bytes held for one batch.

    Raises ``BudgetError`` where one context (with UMAP: all of them) exceeds the budget.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tlg.token_paths(model, [[0, 5, 9, 7]]).coordinates.shape  # context, position, state, axis
    torch.Size([1, 4, 5, 3])
    """
    checks.choice(method, ("pca", "umap"), "method")
    view = as_view(model)
    if basis is not None:
        require_basis(basis)
        basis.check_model(view)
        basis.require_raw("token_paths")
    rows = as_tokens(view, tokens, prepend_bos=prepend_bos)
    batch_contexts = _contexts_per_batch(view, rows, method, memory_budget, batch_size)
    shown, place, fitted_on = _projection(view, basis, method, seed)
    token_directions = output_rows(view)
    batch_tensors = [
        _path_tensors(view, token_batch, token_directions, place)
        for token_batch in rows.tokens.split(batch_contexts)
    ]
    joined = {
        name: torch.cat([tensors[name] for tensors in batch_tensors], dim=2 if name in SPLIT else 0)
        for name in batch_tensors[0]
    }
    no_updates = any(bool(tensors["radial"].isnan().all()) for tensors in batch_tensors)
    flags = (
        ["attention and MLP outputs do not add up to the states: no updates"] if no_updates else []
    )
    if not view.head_trained:
        flags.append("output head not trained: next tokens are sought in the embedding")
    texts = [tuple(html.token_text(s) for s in view.decode(row.tolist())) for row in rows.tokens]
    return TokenPaths(
        provenance=dataclasses.replace(
            view.provenance(sources=("molina2023",), flags=tuple(flags)),
            corpus=rows.corpus,
            token_hash=hash_tokens(rows.tokens),
            has_bos=rows.has_bos,
            contexts=len(rows),
            seed=seed,
        ),
        tokens=rows.tokens.cpu(),
        str_tokens=tuple(texts),
        shown=shown,
        method=method,
        fitted_on=fitted_on,
        **joined,
    )


def _contexts_per_batch(
    view: ModelView, rows: TokenWindows, method: str, memory_budget: int, batch_size: int | None
) -> int:
    """How many contexts are followed at once: as many as the budget holds, all of them for UMAP."""
    length = rows.tokens.shape[1]
    # 8 bytes for float64: copies of the states, and their cosines with a chunk of the vocabulary
    per_state = 8 * (HELD * view.d_model + min(view.d_vocab, projection.VOCABULARY_CHUNK))
    per_context = per_state * (view.n_layers + 1) * length
    min_contexts = len(rows) if method == "umap" else 1
    min_bytes = min_contexts * per_context
    if memory_budget < min_bytes:
        expected = f"at least {min_bytes} bytes for {min_contexts} x {length} tokens"
        instead = "shorter or fewer windows, or a larger memory_budget="
        got, error = memory_budget, BudgetError
        fail("memory_budget", expected=expected, got=got, instead=instead, error=error)
    requested = batch_of(batch_size, length, view.device)
    return max(min_contexts, min(memory_budget // per_context, requested))


Place = Callable[[Tensor], Tensor]
"""Coordinates of states on the three axes."""


def _path_tensors(
    view: ModelView, tokens: Tensor, token_directions: Tensor, place: Place
) -> dict[str, Tensor]:
    """The tensors of :class:`TokenPaths` for some contexts."""
    states, updates = _states(view, tokens)
    path = projection.path_geometry(states, view.norm)
    # the last token has no next: token 0 is a placeholder, and is_last masks its numbers
    target = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1).to(states.device)
    approach = projection.token_approach(
        states, token_directions, target.unsqueeze(-1).expand(states.shape[:-1]), view.norm
    )
    is_last = torch.arange(tokens.shape[1], device=states.device) == tokens.shape[1] - 1
    is_last = rearrange(is_last, "position -> position 1")
    unknown = torch.full((2, view.n_layers, *tokens.shape), torch.nan).double()
    update_parts = [unknown] * 3 if updates is None else updates
    measured = {
        "angle": torch.where(is_last, torch.nan, approach.angle),
        "rank": torch.where(is_last, 0, approach.rank),
        "coordinates": place(states).double(),
        **dict(zip(SPLIT, update_parts, strict=True)),
    }
    return {name: value.cpu() for name, value in (measured | path._asdict()).items()}


def _states(view: ModelView, tokens: Tensor) -> tuple[Tensor, list[Tensor] | None]:
    """States ``[batch position state d_model]`` in float64, and the updates of attention and MLP
    split as in :data:`SPLIT` (``None`` where they do not add up to the states)."""
    # one pass for all hooks: states and updates of different runs may not add up
    hooks = (*view.state_hooks, *view.attention_hooks)
    try:
        activations = view.activations(tokens, (*hooks, *view.mlp_hooks))
    except UnsupportedModelError:  # attention-only blocks have no MLP output
        activations = view.activations(tokens, hooks)
    h = torch.stack([activations[hook].double() for hook in view.state_hooks], dim=2)
    attention = torch.stack([activations[hook].double() for hook in view.attention_hooks], dim=2)
    mlp = torch.zeros_like(attention)
    if view.mlp_hooks[0] in activations:
        mlp = torch.stack([activations[hook].double() for hook in view.mlp_hooks], dim=2)
    error = (h[:, :, :-1] + attention + mlp - h[:, :, 1:]).abs().max()
    # a norm after the block gives an error as large as a state, far above the rounding of a sum
    if float(error) > reconstruction_bound(unit_roundoff(view.dtype), float(h.abs().max())):
        return h, None
    # each update is split relative to the stream that it is added to: the MLP's after attention's
    splits = [
        projection.update_split(h[:, :, :-1], attention, view.norm),
        projection.update_split(h[:, :, :-1] + attention, mlp, view.norm),
    ]
    pattern = "update batch position layer -> update layer batch position"
    return h, [rearrange(torch.stack(pair), pattern) for pair in zip(*splits, strict=True)]


def _projection(
    view: ModelView, basis: PositionContext | None, method: str, seed: int
) -> tuple[float, Place, str]:
    """The share of the fitted rows' variance on three axes (NaN for UMAP), a function that places
    states on them, and what the axes were fitted on."""
    if basis is None:
        rows, name = embeddings(view), "token embeddings"
    else:
        if basis.sample_states is None:
            instead = "decompose(..., keep=32)"
            fail("basis", expected="sampled states", got="a basis without", instead=instead)
        rows, name = basis.sample_states.flatten(0, 2), "sampled states"

    def on_sphere(states: Tensor) -> Tensor:
        # unit length: the axes describe directions, whatever the norm of a state
        return torch.nn.functional.normalize(remove_mean(states, view.norm), dim=-1)

    unit = on_sphere(rows.double())
    if method == "umap":
        nan = float("nan")  # UMAP has no share of the variance
        umap = projection.umap_coordinates
        return nan, lambda states: umap(unit, on_sphere(states), seed=seed), name
    pca = projection.principal_projection(unit.to(view.device), 3)
    return float(pca.share.sum()), lambda states: pca(on_sphere(states)), name
