"""What became of the faults that :mod:`tests.mutate` planted, as shares, tables and a page."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import NamedTuple

from tests.faults import Fault

OUTCOMES = ("caught", "only by records", "survived", "out of time", "equivalent")
GOALS = {"laws": 0.70, "all tests": 0.85}
"""Shares of the faults that matter which are to be caught, by laws alone and by all tests."""
WORST = 0.75
"""The share that all tests are to catch in each package."""
HEAD = """## Which faults the tests notice

Made by `python -m tests.mutate {settings}` on commit {commit}.
A fault was planted in each of {planted} lines of code of the package, drawn at random, one at a
time: another operator, comparison, constant or order, a negated or missing condition, a missing
argument or statement. Then the tests of `python -m tests` that evaluate the line ran, the quick
ones first, until one failed.

- **caught**: a law or a comparison with an independent reference failed, or the tests hung;
- **only by records**: none of these failed, but a number differs from the one that is stored in
  `tests/records/` or in the example of a docstring, which says that something changed and not
  that it was right;
- **survived**: all tests passed;
- **out of time**: none had failed in time, and the fault counts as not caught;
- **equivalent**: nobody could see a difference. This was judged by hand, with a reason, in
  `tests/equivalent_faults.json`, and such faults do not count.

Of {that_matter} faults that matter, {laws:.0%} were caught by laws and reference
(goal {goal_laws:.0%}) and {all:.0%} with records (goal {goal_all:.0%}, and {worst:.0%} in each
package), each with a sampling error of at most {error:.1%}. Of those that came to an end,
{in_time:.0%} were caught. A package has few of these faults, so its own share says little. Whoever
mends a test leaves this page as it is until a run under a new seed: a known sample measures
nothing.
"""


class Verdict(NamedTuple):
    """What became of a fault (one of :data:`OUTCOMES`), and the test that failed."""

    fault: Fault
    outcome: str
    by: str


class Shares(NamedTuple):
    """Outcomes of some faults, and how many of those that matter were caught."""

    outcomes: Counter[str]
    that_matter: int
    laws: float
    all: float


def shares(verdicts: list[Verdict]) -> dict[str, Shares]:
    """By package, and for all (``"all"``, which comes first)."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        for name in ("all", verdict.fault.package):
            counts[name][verdict.outcome] += 1
    result = {}
    for name, outcomes in sorted(counts.items(), key=lambda item: (item[0] != "all", item[0])):
        that_matter = outcomes.total() - outcomes["equivalent"]
        caught = [outcomes["caught"], outcomes["caught"] + outcomes["only by records"]]
        of_those = [n / that_matter if that_matter else 1.0 for n in caught]
        result[name] = Shares(outcomes, that_matter, *of_those)
    return result


def reached(verdicts: list[Verdict]) -> bool:
    """Whether enough faults are caught: by laws, by all tests, and in every package."""
    found = shares(verdicts)
    whole = found["all"]
    goals = whole.laws >= GOALS["laws"] and whole.all >= GOALS["all tests"]
    return goals and all(share.all >= WORST for share in found.values())


def tables(verdicts: list[Verdict]) -> str:
    """Tables in Markdown: outcomes by package, and the faults that no test noticed, or records
    alone."""
    columns = ["package", *OUTCOMES, "by laws", "with records"]
    rows = [_row(columns), "|---|" + "---:|" * (len(columns) - 1)]
    for name, share in shares(verdicts).items():
        counted = [str(share.outcomes[outcome]) for outcome in OUTCOMES]
        name = "tl_geometry" if name == "." else name  # a module beside the packages
        rows.append(_row([name, *counted, f"{share.laws:.0%}", f"{share.all:.0%}"]))
    columns = ["not noticed by laws", "outcome", "kind", "text", "fault"]
    rows += ["", _row(columns), "|---" * len(columns) + "|"]
    for fault, outcome, _ in verdicts:
        if outcome not in ("caught", "equivalent"):
            code = [f"`{_on_one_line(text)}`" for text in (fault.before, fault.after)]
            rows.append(_row([f"`{fault.path}:{fault.line}`", outcome, fault.kind, *code]))
    return "\n".join(rows) + "\n"


def page(verdicts: list[Verdict], settings: str, commit: str) -> str:
    """The page of the site. The error is that of a share of independent draws."""
    whole = shares(verdicts)["all"]
    variances = [share * (1 - share) / whole.that_matter for share in (whole.laws, whole.all)]
    ended = whole.that_matter - whole.outcomes["out of time"]
    head = HEAD.format(
        settings=settings,
        commit=commit,
        planted=len(verdicts),
        that_matter=whole.that_matter,
        laws=whole.laws,
        all=whole.all,
        goal_laws=GOALS["laws"],
        goal_all=GOALS["all tests"],
        worst=WORST,
        error=math.sqrt(max(variances)),
        in_time=whole.all * whole.that_matter / ended,
    )
    return f"{head}\n{tables(verdicts)}"


def line_of(verdict: Verdict) -> str:
    """A verdict for the terminal."""
    fault, outcome, by = verdict
    before, after = _on_one_line(fault.before), _on_one_line(fault.after)
    place = f"{fault.path}:{fault.line}"
    return f"{outcome}: {place} {fault.kind}: {before} -> {after} {by}".rstrip()


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _on_one_line(code: str) -> str:
    return " ".join(code.split())
