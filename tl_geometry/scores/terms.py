"""What are the terms of an attention score called, which group does each belong to, and how is it
shown to a reader? Used by every table and figure that names terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tl_geometry.base.results import Result

ALIBI = "alibi"
"""Part name of a bias that is added to the scores and depends on positions only."""
CONTEXT_PARTS = ("cvec", "ctx", "resid")
"""Parts of the stream that depend on the context."""
POSITION_PARTS = ("bias", "mean", "pos", ALIBI)
"""Parts that do not depend on the context."""
GROUPS = ("position", "content", "mixed")
"""Groups of terms: no context part on either side, on both sides, on one side."""
BIAS_BIAS = "bias-bias"
"""The term of mean and constants on both sides."""
# the term itself, and the columns of a sweep about it: shares, and ablation effects (tv, kl)
_ABOUT_BIAS = {f"{about}{BIAS_BIAS}" for about in ("", "cs_", "gs_", "es_", "tv_", "kl_")}


def term_pairs(parts: Sequence[str], *, alibi: bool = False) -> tuple[tuple[str, str], ...]:
    """(query part, key part) of the terms, in the order of every term axis: the flattened table
    ``[query part, key part]``, then ALiBi where there is one.

    >>> term_pairs(("pos", "cvec"))
    (('pos', 'pos'), ('pos', 'cvec'), ('cvec', 'pos'), ('cvec', 'cvec'))
    """
    return (*product(parts, parts), *([(ALIBI, ALIBI)] if alibi else []))


def term_names(parts: Sequence[str], *, alibi: bool = False) -> tuple[str, ...]:
    """Names of the terms, query part first, in the order of :func:`term_pairs`.

    >>> term_names(("pos", "cvec"), alibi=True)
    ('pos-pos', 'pos-cvec', 'cvec-pos', 'cvec-cvec', 'alibi-alibi')
    """
    return tuple(f"{a}-{b}" for a, b in term_pairs(parts, alibi=alibi))


def _group(query: str, key: str) -> str:
    # by the number of sides that are context: none, one (mixed), both (content)
    return GROUPS[{0: 0, 1: 2, 2: 1}[(query in CONTEXT_PARTS) + (key in CONTEXT_PARTS)]]


_GROUP_OF = {f"{a}-{b}": _group(a, b) for a, b in term_pairs(POSITION_PARTS + CONTEXT_PARTS)}


def group_of(term: str) -> str | None:
    """The group of a term: ``position``, ``content`` or ``mixed``; ``None`` for parts that the user
    named.

    >>> [group_of(t) for t in ("bias-pos", "cvec-cvec", "ctx-bias", "alibi-alibi", "mlp-attn")]
    ['position', 'content', 'mixed', 'position', None]
    """
    return _GROUP_OF.get(term)


def bias_label(*, rotary: bool, relative: bool) -> str:
    """The name under which (bias, bias) is shown. ``bias`` is the mean with the constants of norm
    and projection; in a rotary model both are rotated, so that their product depends on position.

    ``relative`` says that no frozen scale varies by token (a normalised basis and no QK-norm): then
    the term is exactly a function of the offset i - j. Otherwise it is the product of two means,
    divided by the norm scales of each prompt's tokens.

    >>> [bias_label(rotary=r, relative=e) for r, e in ((False, False), (True, False), (True, True))]
    ['bias-bias', 'mean-mean', 'relative position']
    """
    return BIAS_BIAS if not rotary else "relative position" if relative else "mean-mean"


def label(name: str, bias_label: str = BIAS_BIAS) -> str:
    """How a term, a group of terms or a column about one is shown to a reader. Only the display
    changes: in code, files and data frames the term stays ``"bias-bias"``.

    >>> [label(name, "mean-mean") for name in ("bias-bias", "gs_bias-bias", "pos-cvec")]
    ['mean-mean', 'gs_mean-mean', 'pos-cvec']
    """
    return name.removesuffix(BIAS_BIAS) + bias_label if name in _ABOUT_BIAS else name


@dataclass(frozen=True, eq=False, kw_only=True)
class TermResult(Result):
    """Base of results that name terms; ``bias_label`` is how they show (bias, bias)
    (:func:`bias_label`)."""

    bias_label: str = BIAS_BIAS

    def label(self, term: str) -> str:
        """How a term, a group or a column about one is shown to a reader."""
        return label(term, self.bias_label)

    def readable(self, value: object) -> object:
        return self.label(value) if isinstance(value, str) else value
