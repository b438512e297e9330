"""How many additions does a model answer correctly, as a whole and digit by digit?
:mod:`benchmarks.training.arithmetic` calls :func:`score` at each measured step, and :func:`guess`
for what an answer scores without the operands."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.training.formats import ALPHABET, Problem, encode


class Score(NamedTuple):
    """Share of problems answered without a mistake, and share of right digits over all problems."""

    exact: float
    digits: float


def answers(model: nn.Module, lines: Sequence[Problem], positions: int) -> list[str]:
    """What the model writes after each prompt, greedily: as many characters as the sum has.

    ``positions`` is the longest input that the model takes.
    """
    device = next(model.parameters()).device
    starts = torch.tensor([len(line.prompt) for line in lines], device=device)
    answer_lengths = [len(line.answer) for line in lines]
    longest_line = int(starts.max()) + max(answer_lengths)
    tokens = torch.zeros(len(lines), longest_line, dtype=torch.int64, device=device)
    for row, line in enumerate(lines):
        tokens[row, : len(line.prompt)] = torch.tensor(encode(line.prompt), device=device)
    row_indices = torch.arange(len(lines), device=device)
    with torch.inference_mode():
        for k in range(max(answer_lengths)):
            # Prompts differ in length. Attention is causal, so the zeros after a row's last
            # character do not change what the model writes there.
            read_tokens = tokens[:, : min(positions, int(starts.max()) + k)]
            # rows whose sum is complete keep writing; `return` cuts answers to their length
            last_read = (starts + k - 1).clamp(max=read_tokens.shape[1] - 1)
            tokens[row_indices, starts + k] = (
                model(read_tokens).logits[row_indices, last_read].argmax(-1)
            )
    return [
        "".join(ALPHABET[int(i)] for i in tokens[row, s : s + n])
        for row, (s, n) in enumerate(zip(starts.tolist(), answer_lengths, strict=True))
    ]


def score(model: nn.Module, lines: Sequence[Problem], positions: int, *, batch: int = 256) -> Score:
    """Greedy answers compared with the reversed sums, in batches of ``batch`` problems."""
    batches = [lines[start : start + batch] for start in range(0, len(lines), batch)]
    written = [answer for problems in batches for answer in answers(model, problems, positions)]
    return _score(lines, written)


def guess(lines: Sequence[Problem]) -> Score:
    """The score of a guess that knows only how long each sum is. It is the baseline for
    :func:`score`.

    The guess at each place is the most frequent digit there among the sums of that length.

    >>> sums = ("1", "2", "3"), ("2", "1", "3"), ("1", "1", "2"), ("10", "10", "20")
    >>> guess([Problem(*parts) for parts in sums])
    Score(exact=0.75, digits=0.8)
    """
    counts: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    for line in lines:
        for place, digit in enumerate(line.answer):
            counts[len(line.answer), place][digit] += 1
    guesses = [
        [counts[len(line.answer), place].most_common(1)[0][0] for place in range(len(line.answer))]
        for line in lines
    ]
    return _score(lines, guesses)


def _score(lines: Sequence[Problem], answers: Sequence[Sequence[str]]) -> Score:
    """Shares of right problems and digits; an answer has as many characters as its sum."""
    right_digits = [
        [digit == guessed for digit, guessed in zip(line.answer, answer, strict=True)]
        for line, answer in zip(lines, answers, strict=True)
    ]
    return Score(
        sum(map(all, right_digits)) / len(lines),
        sum(map(sum, right_digits)) / sum(map(len, right_digits)),
    )
