"""Names of the terms of an attention score, the group of each, and how they are shown. Every table
and figure that names terms takes them from here.

A term is a pair (query part, key part). With *constant* parts (``bias``, ``mean``), *position*
(``pos``, ALiBi) and *context* (``cvec``, or ``ctx`` and ``resid``) its group is

    position   no context part on either side
    content    context on both sides
    token      context on one side, a constant on the other: what a token attracts or seeks
    mixed      context on one side, position on the other
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from tl_geometry.base.guarded import Guarded
from tl_geometry.base.results import Result

ALIBI = "alibi"
"""Part name of a bias that is added to the scores and depends on positions only."""
BIAS = "bias"
"""Part of the constants of norm and projection, and of the mean unless that is a part by itself."""
CONTEXT_PARTS = ("cvec", "ctx", "resid")
"""Parts of the stream that depend on the context."""
CONSTANT_PARTS = (BIAS, "mean")
"""Parts that are the same for every token and position."""
GROUPS = ("position", "content", "token", "mixed")
"""Groups of terms."""
BIAS_BIAS = "bias-bias"
"""The term of mean and constants on both sides."""
BIAS_LABELS = (BIAS_BIAS, "mean-mean", "relative position")
"""Names under which (bias, bias) is shown, the most cautious first."""
SHARE_PREFIXES = ("", "cs_", "gs_")
"""What stands before the name of a term in columns about it."""


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
    other = [part for part in (query, key) if part not in CONTEXT_PARTS]
    if len(other) != 1:
        return "position" if other else "content"
    return "token" if other[0] in CONSTANT_PARTS else "mixed"


_GROUP_OF = {
    f"{a}-{b}": _group(a, b) for a, b in term_pairs((*CONSTANT_PARTS, "pos", ALIBI, *CONTEXT_PARTS))
}


def group_of(term: str) -> str | None:
    """The group of a term; ``None`` for parts that the user named.

    >>> [group_of(t) for t in ("bias-pos", "cvec-cvec", "ctx-bias", "pos-cvec", "mlp-attn")]
    ['position', 'content', 'token', 'mixed', None]
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
    return BIAS_LABELS[rotary + (rotary and relative)]


def common_label(labels: Iterable[str]) -> str:
    """The name of (bias, bias) that is right for all of several layers."""
    return min(labels, key=BIAS_LABELS.index)


def label(name: str, bias_label: str = BIAS_BIAS) -> str:
    """How a term, a group of terms or a column about one is shown to a reader. In code, files and
    data frames the term stays ``"bias-bias"``; :func:`key_of` takes it back.

    >>> [label(name, "mean-mean") for name in ("bias-bias", "gs_bias-bias", "pos-cvec")]
    ['mean-mean', 'gs_mean-mean', 'pos-cvec']
    """
    about_bias = name in [f"{prefix}{BIAS_BIAS}" for prefix in SHARE_PREFIXES]
    return name.removesuffix(BIAS_BIAS) + bias_label if about_bias else name


def key_of(shown: str) -> str:
    """The term or column behind a name as it is shown; any other name as it is.

    >>> key_of("cs_mean-mean"), key_of("relative position"), key_of("pos-cvec")
    ('cs_bias-bias', 'bias-bias', 'pos-cvec')
    """
    names = {f"{p}{name}": f"{p}{BIAS_BIAS}" for p in SHARE_PREFIXES for name in BIAS_LABELS}
    return names.get(shown, shown)


@dataclass(frozen=True, eq=False, kw_only=True)
class TermResult(Guarded, Result):
    """Base of results that name terms; ``bias_label`` is how they show (bias, bias)
    (:func:`bias_label`)."""

    bias_label: str = BIAS_BIAS

    def label(self, term: str) -> str:
        """How a term, a group or a column about one is shown to a reader."""
        return label(term, self.bias_label)

    def readable(self, value: object) -> object:
        return self.label(value) if isinstance(value, str) else value
