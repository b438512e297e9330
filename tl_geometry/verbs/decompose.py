"""The main job: windows of a corpus, and the mean decomposition of every state of a model over them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry import _check, capture
from tl_geometry import tokens as token_math
from tl_geometry._check import describe, require
from tl_geometry.accumulation import Plan, run_tensor
from tl_geometry.capture import TokenSource, as_view, default_batch, run_corpus
from tl_geometry.decomposition import PositionContext
from tl_geometry.errors import GeometryError
from tl_geometry.records import TokenWindows
from tl_geometry.results import Provenance


def windows(
    model: Any,
    texts: str | Sequence[str],
    length: int,
    *,
    n: int | None = None,
    prepend_bos: bool,
    labels: Sequence[int] | Sequence[str] | None = None,
    seed: int = 0,
    replace: bool = False,
    corpus: str = "text",
) -> TokenWindows:
    """Cut texts into windows of ``length`` tokens, non-overlapping and each used once.

    Every text is tokenised whole, then cut; its last, shorter piece is left out. With ``prepend_bos`` each window is the BOS
    id and ``length - 1`` tokens. ``n`` draws that many windows without replacement (seeded, in corpus order); ``None`` takes
    all. ``labels`` names the document of each text (by default its index). ``replace=True`` draws ``n`` places where a window can
    start instead, each of all texts as likely as another, with replacement, so that windows overlap: the published sampling
    (Song & Zhong 2023), whose windows are not independent. A text shorter than a window is left out.

    Raises ``GeometryError`` when no text is long enough, or when ``n`` exceeds the windows there are.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> cut = tlg.windows(model, "def f(x): return x " * 20, 16, prepend_bos=True)
    >>> cut.tokens.shape[1], cut.has_bos
    (16, True)
    """
    view = as_view(model)
    documents = [texts] if isinstance(texts, str) else list(texts)
    ok = documents and all(isinstance(t, str) for t in documents)
    require(ok, "texts", expected="a string or a list of strings", got=describe(texts), instead="decompose(model, tokens) for token ids")
    require(length >= 2, "length", expected="at least 2 tokens", got=length)
    require(
        not prepend_bos or view.bos_id is not None,
        "prepend_bos",
        expected="a tokenizer with a BOS token",
        got="none",
        instead="prepend_bos=False",
    )
    named = [str(i) for i in range(len(documents))] if labels is None else [str(v) for v in labels]
    require(len(named) == len(documents), "labels", expected=f"one for each of {len(documents)} texts", got=len(named))
    names = tuple(dict.fromkeys(named))
    body = length - int(prepend_bos)
    ids = [view.encode(text) for text in documents]
    longest = max(len(row) for row in ids)
    require(longest >= body, "texts", expected=f"a text of at least {body} tokens", got=f"at most {longest}", instead="a shorter length=")
    if replace:
        require(n is not None and n >= 1, "n", expected="a number of windows with replace=True", got=n)
        cut = _anywhere(ids, body, n or 1, seed)
    else:
        cut = [token_math.cut(row, body) for row in ids]
    rows = torch.cat(cut)
    which = torch.cat([torch.full((len(c),), names.index(named[i])) for i, c in enumerate(cut)])
    if n is not None:
        require(1 <= n <= len(rows), "n", expected=f"1 to {len(rows)} windows", got=n, instead="n=None for all, or more text")
        kept = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:n].sort().values
        rows, which = rows[kept], which[kept]
    if prepend_bos and view.bos_id is not None:
        rows = torch.cat([torch.full((len(rows), 1), view.bos_id), rows], dim=1)
    shown = tuple(view.decode(rows[0].tolist()))
    return TokenWindows(tokens=rows, has_bos=prepend_bos, labels=which, names=names, corpus=corpus, str_tokens=shown)


def _anywhere(ids: Sequence[Sequence[int]], length: int, n: int, seed: int) -> list[Int[Tensor, "context position"]]:
    """``n`` windows, by text: their starts are drawn with replacement from all places of all texts where one fits."""
    starts = torch.tensor([max(0, len(row) - length + 1) for row in ids])
    ends = starts.cumsum(0)
    drawn = torch.randint(int(ends[-1]), (n,), generator=torch.Generator().manual_seed(seed)).sort().values
    sizes = torch.bincount(torch.bucketize(drawn, ends, right=True), minlength=len(ids)).tolist()
    places = zip(ids, drawn.split(sizes), (ends - starts).tolist(), strict=True)
    return [torch.as_tensor(row, dtype=torch.int64)[(at - first)[:, None] + torch.arange(length)] for row, at, first in places]


def glue(source: TokenWindows, *, piece: int | None = None, seed: int = 0) -> TokenWindows:
    """Windows glued from pieces of random windows of the same corpus: the null for the context share.

    ``piece`` tokens (by default an eighth of the window) come from one place; a BOS column stays. Whatever context share the
    glued windows show comes from slow variation within a piece, not from a common context.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> tlg.glue(windows).tokens.shape
    torch.Size([8, 16])
    """
    length = source.tokens.shape[1]
    rows = token_math.glue(source.tokens, piece or max(1, length // 8), seed=seed, keep_first=source.has_bos)
    return TokenWindows(tokens=rows, has_bos=source.has_bos, corpus=f"{source.corpus}, glued")


def decompose(
    source: Any,
    tokens: Any = None,
    *,
    states: Sequence[int] | None = None,
    window: tuple[int, int] | None = None,
    batch_size: int | None = None,
    second_moments: bool | str = "auto",
    keep_ctx: bool | str = "auto",
    groups: int = 8,
    keep: int = 32,
    labels: Any = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    device: torch.device | str | None = None,
    seed: int = 0,
    prepend_bos: bool | None = None,
    moments_dtype: torch.dtype = torch.float32,
    group: Any = None,
) -> PositionContext:
    """Positional and context basis of every residual stream state over a corpus: h = mean + pos + ctx + resid.

    Song & Zhong 2023, Eq. 2 and 3, streamed: one forward pass per batch, and only sums are kept, whatever the corpus size.

    Args:
        source: a TransformerLens model (with ``tokens``), a tensor of activations ``[context position d_model]`` or
            ``[state context position d_model]``, or an ``ActivationCache``.
        tokens: ids ``[context position]``, :class:`TokenWindows`, an iterable of batches, a ``.npy`` file or memory map, a
            ``datasets.Dataset`` (or ``IterableDataset``) with a ``tokens`` column, or strings of equal token length (then
            ``prepend_bos`` is needed). Ids are never edited.
        states: which states, 0 (embedding output) to n_layers (before the final norm); ``None`` for all.
        window: half-open columns of the statistics; by default ``(1, T)`` for tokens, because position 0 is an attention sink
            (its sums are kept all the same), and all columns for activations.
        batch_size: contexts of one forward pass; by default about 4,096 tokens on a CPU, 16,384 on a GPU. Halved, as often as
            needed, when memory runs out: the result is the same.
        second_moments, keep_ctx: keep ``[state d_model d_model]`` products and ``[state context d_model]`` context vectors;
            ``"auto"`` while each is under 1 GiB (the result says when it is not).
        groups: disjoint groups of contexts whose sums are kept apart, for split halves, learning curves and jackknife errors.
        keep: contexts whose states are kept whole, a seeded uniform sample (fewer where they would exceed 1 GiB).
        labels: a document label for each context.
        checkpoint: file that holds the finished batches at every moment; a run that finds it goes on from there. Writing
            takes at most 5% of the time, so that on big models it holds all but the last minute.
        device: where the sums live, by default the model's device.
        moments_dtype: dtype of the products in second moments (``torch.float64``: partitions agree to 1e-10).
        group: a ``torch.distributed`` process group (``torch.distributed.group.WORLD``), all of whose processes make this same
            call with the same tokens. Each reads all of them and runs its share of the batches; all return the whole basis, equal
            to that of one process. The first one writes the checkpoint, from which any number of processes goes on.

    Raises ``GeometryError`` for ragged or foreign tokens, training mode, NaN or infinite activations, windows beyond the
    columns, and checkpoints of another run.

    >>> basis = decompose(torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0)), progress=False)
    >>> basis.pos.shape, basis.ctx.shape, basis.window
    (torch.Size([1, 5, 4]), torch.Size([1, 6, 4]), (0, 5))
    """
    shared: dict[str, Any] = {"groups": groups, "keep": keep, "second_moments": second_moments, "keep_ctx": keep_ctx}
    shared |= {"moments_dtype": moments_dtype, "seed": seed}
    if isinstance(source, Tensor) or hasattr(source, "cache_dict"):
        require(
            tokens is None, "tokens", expected="none with activations or a cache", got=describe(tokens), instead="decompose(model, tokens)"
        )
        h, provenance = _activations(source)
        chosen = _check.indices(states, len(h), "states")
        plan = Plan(states=chosen, window=_check.window(window, h.shape[2], 0), **shared)
        given = None if labels is None else torch.as_tensor(labels)
        size = batch_size or default_batch(h.shape[2], h.device)
        return run_tensor(h[list(chosen)], plan, given, provenance, size)
    view = as_view(source)
    require(
        tokens is not None,
        "tokens",
        expected="tokens to run the model on",
        got=None,
        instead="decompose(model, windows(model, texts, length, ...))",
    )
    corpus = TokenSource.of(view, tokens, labels, prepend_bos)
    chosen = _check.indices(states, view.n_layers + 1, "states")
    plan = Plan(states=chosen, window=_check.window(window, corpus.columns, 1), **shared)
    return run_corpus(corpus, plan, batch_size=batch_size, checkpoint=checkpoint, progress=progress, device=device, group=group)


def _activations(source: Any) -> tuple[Tensor, Provenance]:
    if isinstance(source, Tensor):
        h = source.unsqueeze(0) if source.dim() == 3 else source
        ok = h.dim() == 4 and h.is_floating_point() and h.numel() > 0
        shape = "floating [context position d_model] or [state context position d_model]"
        require(ok, "activations", expected=shape, got=describe(source), instead="decompose(model, tokens) for token ids")
        return h, Provenance(corpus="activations", dtype=str(h.dtype).removeprefix("torch."))
    h = capture.cached_states(source)
    return h, Provenance(corpus="ActivationCache", dtype=str(h.dtype).removeprefix("torch."), **_origin(getattr(source, "model", None)))


def _origin(model: Any) -> dict[str, Any]:
    """Provenance of the model that a cache holds on to; its class alone where no view of it can be had."""
    try:
        view = as_view(model)
    except GeometryError:
        return {"model": type(model).__name__}
    about = view.provenance()
    return {name: getattr(about, name) for name in ("model", "fingerprint", "library", "processed")}
