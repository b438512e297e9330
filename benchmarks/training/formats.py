"""What are the small models trained on? The data of Song & Zhong 2023, section 5: partly random
text, and additions written as strings. The three experiments draw their batches here.

Everything here is text and integers, without a model. A batch is inputs and targets
``[batch position]``. Targets are shifted by one, and
:data:`~benchmarks.training.trainer.IGNORE` marks places without a target.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from benchmarks.training.trainer import IGNORE, Batch
from tl_geometry.base.errors import choice, require

FORMATS = ("baseline", "partial", "full")
"""Corpus text; text whose second half is random tokens; random tokens only."""
ALPHABET = "\n+0123456789="
"""The 13 characters of an addition, sorted; a character's index is its id."""
TASKS = ("carry", "no-carry")
"""Additions of any digits, and additions in which no place carries."""


def randomise(
    tokens: Int[Tensor, "context position"], format: str, d_vocab: int, *, half: int, seed: int = 0
) -> Int[Tensor, "context position"]:
    """Rows in one of :data:`FORMATS`: positions from ``half`` on (``"partial"``) or all positions
    (``"full"``) are i.i.d. uniform ids.

    >>> rows = randomise(torch.zeros(1, 8, dtype=torch.long), "partial", 1000, half=4)
    >>> rows[0, :4].tolist(), bool((rows[0, 4:] > 0).all())
    ([0, 0, 0, 0], True)
    """
    choice(format, FORMATS, "format")
    require(0 < half < tokens.shape[1], "half", expected=f"1 to {tokens.shape[1] - 1}", got=half)
    noise = torch.randint(d_vocab, tokens.shape, generator=torch.Generator().manual_seed(seed))
    start = {"baseline": tokens.shape[1], "partial": half, "full": 0}[format]
    return torch.where(torch.arange(tokens.shape[1]) < start, tokens, noise)


def shifted(rows: Int[Tensor, "batch token"]) -> Batch:
    """Inputs (all tokens but the last) and targets (all but the first). Random tokens are targets
    too.

    >>> [x.tolist() for x in shifted(torch.tensor([[5, 6, 7]]))]
    [[[5, 6]], [[6, 7]]]
    """
    return rows[:, :-1], rows[:, 1:]


class Problem(NamedTuple):
    """One addition: operands and sum as decimal digits, most significant first."""

    a: str
    b: str
    c: str

    @property
    def prompt(self) -> str:
        """What the model is given: ``"a+b="``."""
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        """What it must write: the sum, least significant digit first."""
        return self.c[::-1]

    @property
    def text(self) -> str:
        r"""The whole line, newline included.

        >>> Problem("907", "15", "922").text
        '907+15=229\n'
        """
        return f"{self.prompt}{self.answer}\n"


def longest(high: int) -> int:
    """Characters of the longest line with numbers of up to ``high`` digits, newline included.

    >>> longest(10)
    33
    """
    return 3 * high + 3


def carry_problem(source: random.Random, low: int, high: int) -> Problem:
    """An addition of any digits: lengths uniform on low..high, operands uniform on
    10^(length - 1)..10^length - 1, so that none begins with zero.

    If the sum does not have low to high digits, the operands are drawn again and the lengths stay,
    as in the published code.
    """
    lengths = [source.randint(low, high) for _ in range(2)]
    while True:
        a, b = (source.randint(10 ** (n - 1), 10**n - 1) for n in lengths)
        if low <= len(str(a + b)) <= high:
            return Problem(str(a), str(b), str(a + b))


def no_carry_problem(source: random.Random, low: int, high: int) -> Problem:
    """An addition in which no place carries, built as in the published code.

    The shorter length n1 is uniform on low..high, the longer one uniform on n1..high. The digits
    a_i of the shorter number are uniform on 0..9. In the longer number, the digit at the place of
    a_i is uniform on 0..9 - a_i and the leading digits are uniform on 0..9. The operands are
    swapped with probability one half. Leading zeros occur.
    """
    short_length = source.randint(low, high)
    long_length = source.randint(short_length, high)
    a = [source.randint(0, 9) for _ in range(short_length)]
    leading_digits = [source.randint(0, 9) for _ in range(long_length - short_length)]
    aligned_digits = [source.randint(0, 9 - digit) for digit in a]
    texts = ["".join(map(str, digits)) for digits in (a, leading_digits + aligned_digits)]
    sums = [digit_a + digit_b for digit_a, digit_b in zip(a, aligned_digits, strict=True)]
    c = "".join(map(str, leading_digits + sums))
    # either operand may be the longer one
    if source.randint(0, 1):
        texts.reverse()
    return Problem(texts[0], texts[1], c)


def problems(task: str, n: int, *, low: int, high: int, seed: int = 0) -> list[Problem]:
    """``n`` additions with numbers of ``low`` to ``high`` digits, operands and sum (Song & Zhong
    2023, section 5.2 and appendix E).

    ``task`` is ``"carry"`` or ``"no-carry"``: see :func:`carry_problem` and
    :func:`no_carry_problem`. The paper says that examples with a carry "are removed". Its code
    builds examples without a carry instead, which is another distribution. This function follows
    the code.

    >>> p = problems("no-carry", 3, low=2, high=4, seed=1)
    >>> all(len(q.c) == max(len(q.a), len(q.b)) and int(q.a) + int(q.b) == int(q.c) for q in p)
    True
    """
    choice(task, TASKS, "task")
    require(1 <= low <= high, "lengths", expected="1 <= low <= high", got=(low, high))
    source = random.Random(seed)
    draw = carry_problem if task == "carry" else no_carry_problem
    return [draw(source, low, high) for _ in range(n)]


def encode(text: str) -> list[int]:
    r"""Ids of the characters of an addition.

    >>> encode("1+2=3\n")
    [3, 1, 4, 12, 5, 0]
    """
    unknown = sorted(set(text) - set(ALPHABET))
    require(not unknown, "text", expected=f"characters of {ALPHABET!r}", got=unknown)
    return [ALPHABET.index(character) for character in text]


def answer_batch(lines: Sequence[Problem], positions: int) -> Batch:
    """Inputs and targets of additions, padded on the right to ``positions``. Only the digits of the
    sum and the newline are targets.

    The input drops the last character (the newline), and the first target stands at ``=``. Padding
    has the newline's id, 0. It comes after every target of its row, so causal attention never reads
    it.

    >>> inputs, targets = answer_batch([Problem("1", "2", "3")], 6)
    >>> inputs.tolist(), targets.tolist()
    ([[3, 1, 4, 12, 5, 0]], [[-100, -100, -100, 5, 0, -100]])
    """
    inputs = torch.zeros(len(lines), positions, dtype=torch.int64)
    targets = torch.full((len(lines), positions), IGNORE)
    for row, line in enumerate(lines):
        ids, first_target = torch.tensor(encode(line.text)), len(line.prompt) - 1
        require(
            len(ids) - 1 <= positions,
            "positions",
            expected=f"at least {len(ids) - 1}",
            got=positions,
        )
        inputs[row, : len(ids) - 1] = ids[:-1]
        targets[row, first_target : len(ids) - 1] = ids[first_target + 1 :]
    return inputs, targets
