"""Checks along a curve: throughput over the number of devices of one configuration.

With x(n) the throughput a device on n devices, and n0 < n1 < n2 sizes of one curve:

- scaling: x(n) <= x(n0), x(n2) <= 1.1 x(n1), x(n2) >= 0.6^(log2 (n2 / n1)) x(n1); E(n) / E(n0) = x(n) /
  x(n0).
- neighbours: x(n1) against the median of x(n0), x(n1), x(n2) (a running median of three: Tukey, Exploratory
  Data Analysis, 1977, ch. 7).
- digits: n1 x(n1) is not exactly n1 / n0 times n0 x(n0).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

from reports.analysis.scaling import SINGLE_RUN_NOISE
from reports.audit.account import Account
from reports.audit.findings import Check, Disagreement, difference, ends
from reports.audit.groups import SPEEDS, Size, TableCurve, shown_size, speed_names
from reports.audit.intervals import Interval, hull, significant

NOISE_WHY = "a size measured once may be 5 % off, as in this program's own reports"
LEAST_DOUBLING = 0.6
FEW_DIGITS, MANY_DIGITS = 4, 5
"""Digits in which a whole curve, or two sizes, are in proportion by chance in less than 1 of 100 cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRule:
    """What holds along a curve, how exactly, and what it likely is where it does not."""

    check: Check
    formula: str
    tolerance: float
    why: str
    reading: str


ABOVE = CurveRule(
    check="scaling",
    formula="throughput a GPU over that at the smallest size <= 1",
    tolerance=SINGLE_RUN_NOISE,
    why=NOISE_WHY,
    reading="a slow smallest size, or more memory a GPU for the larger ones",
)
ROSE = CurveRule(
    check="scaling",
    formula="throughput a GPU is at most that of the size before",
    tolerance=2 * SINGLE_RUN_NOISE,
    why="two sizes measured once may each be 5 % off, in opposite directions",
    reading="a slow size before, or another configuration from here on",
)
FELL = CurveRule(
    check="scaling",
    formula="throughput a GPU is at least 0.6 of that of the size before, for each doubling",
    tolerance=0.0,
    why="by a ring a device sends 2 (n - 1) / n of the gradients: from 2 to 4 devices 1.5 times as much, "
    "which leaves 2/3; 0.6 allows 10 % of noise",
    reading="a slower link or an input limit from this size on, or a mistyped number",
)
TOTAL_FELL = CurveRule(
    check="scaling",
    formula="more GPUs do not do less of the same work",
    tolerance=SINGLE_RUN_NOISE,
    why=NOISE_WHY,
    reading="a slower link or an input limit from this size on, or a mistyped number",
)
BETWEEN = CurveRule(
    check="neighbours",
    formula="throughput a GPU lies between those of the sizes before and after",
    tolerance=SINGLE_RUN_NOISE,
    why=NOISE_WHY,
    reading="a disturbed or mistyped size, or a change of what runs at it",
)
FOLLOWS = CurveRule(
    check="scaling",
    formula="printed efficiencies are in proportion to throughput a GPU",
    tolerance=0.02,
    why="an efficiency may come from other repeats than the throughput beside it: 2 %",
    reading="an efficiency of other numbers than those printed, or against another size",
)
MEASURED = CurveRule(
    check="digits",
    formula="measured throughput is not exactly in proportion to the number of GPUs",
    tolerance=0.0,
    why="equal to the last of 5 digits, or at every size in 4, has a chance below 1 in 100",
    reading="computed from one size, or copied, not measured",
)


def curve_findings(curves: Iterable[TableCurve], account: Account) -> Iterator[Disagreement]:
    """All checks of all curves; a size that one check found is left out by those after it."""
    for curve in curves:
        told: set[int] = set()
        for check in (_above_the_first, _between_neighbours, _rises, _falls):
            found = list(check(curve, account, told))
            yield from found
            told |= {line for finding in found for line in finding.lines}
        yield from _printed_efficiencies(curve, account)
        yield from _computed(curve, account)


def _above_the_first(curve: TableCurve, account: Account, told: Collection[int]) -> Iterator[Disagreement]:
    """x(n) <= 1.05 x(n0); where all of several sizes exceed it, the smallest size is in question."""
    first, *others = curve.sizes
    account.saw("scaling", ABOVE.formula, *(size.entry.line for size in curve.sizes))
    above = [size for size in others if curve.gain(size, first).low > 1 + ABOVE.tolerance]
    if len(above) == len(others) > 1:
        yield _finding(curve, ABOVE, (first, *above), (0.0, 1.0), curve.gain(above[0], first))
        return
    for size in above:
        yield _finding(curve, ABOVE, (size, first), (0.0, 1.0), curve.gain(size, first))


def _between_neighbours(curve: TableCurve, account: Account, told: Collection[int]) -> Iterator[Disagreement]:
    """min(x(n0), x(n2)) / 1.05 <= x(n1) <= 1.05 max(x(n0), x(n2))."""
    for before, size, after in zip(curve.sizes, curve.sizes[1:], curve.sizes[2:], strict=False):
        lines = [one.entry.line for one in (before, size, after)]
        account.saw("neighbours", BETWEEN.formula, lines[1])
        around = hull((before.speed, after.speed))
        if any(line in told for line in lines) or around.widened(BETWEEN.tolerance).meets(size.speed):
            continue
        nearest = min((before.speed, after.speed), key=lambda one: abs(one.middle - size.speed.middle))
        finding = _finding(curve, BETWEEN, (size, before, after), ends(around), size.speed)
        yield replace(finding, difference=difference(size.speed, nearest))


def _rises(curve: TableCurve, account: Account, told: Collection[int]) -> Iterator[Disagreement]:
    """x(n2) <= 1.1 x(n1), for sizes that follow each other."""
    for before, size in pairwise(curve.sizes):
        account.saw("scaling", ROSE.formula, size.entry.line)
        gain = curve.gain(size, before)
        if gain.low > 1 + ROSE.tolerance and not {before.entry.line, size.entry.line} & set(told):
            yield _finding(curve, ROSE, (size, before), (0.0, 1.0), gain)


def _falls(curve: TableCurve, account: Account, told: Collection[int]) -> Iterator[Disagreement]:
    """x(n2) >= 0.6^(log2 (n2 / n1)) x(n1); at one global batch n2 x(n2) >= 0.95 n1 x(n1)."""
    rule = TOTAL_FELL if curve.kind == "strong" else FELL
    for before, size in pairwise(curve.sizes):
        account.saw("scaling", rule.formula, size.entry.line)
        ratio = size.gpus / before.gpus
        least = 1 / ratio if curve.kind == "strong" else LEAST_DOUBLING ** math.log2(ratio)
        left = size.speed / before.speed
        if left.high < least * (1 - rule.tolerance) and not {before.entry.line, size.entry.line} & set(told):
            finding = _finding(curve, rule, (size, before), (least, 1.0), left)
            yield replace(finding, difference=left.middle / least - 1)


def _printed_efficiencies(curve: TableCurve, account: Account) -> Iterator[Disagreement]:
    """E(n) / E(n0) = x(n) / x(n0) to 2 %, with E(n0) = 1 where it is not printed; not of step times alone."""
    first = curve.sizes[0]
    if curve.kind == "step times alone":
        return
    base = first.entry.row.values.get("efficiency")
    for size in curve.sizes[1:]:
        printed = size.entry.row.values.get("efficiency")
        if printed is None or (base is not None and base.rounded.low == 0):
            continue
        account.saw("scaling", FOLLOWS.formula, size.entry.line)
        expected = size.speed / first.speed
        expected = expected * base.rounded if base is not None else expected
        if not expected.widened(FOLLOWS.tolerance).meets(printed.rounded):
            finding = _finding(curve, FOLLOWS, (size, first), ends(expected), printed.rounded)
            yield replace(
                finding,
                inputs=(printed.shown, *finding.inputs),
                difference=difference(printed.rounded, expected),
                quantity="efficiency",
            )


def _computed(curve: TableCurve, account: Account) -> Iterator[Disagreement]:
    """X(n1) / X(n0) is exactly n1 / n0, or 1, in 5 digits or more, or in 4 at all of 3 sizes or more."""
    exact: dict[Size, None] = {}
    digits = []
    for before, size in pairwise(curve.sizes):
        texts = _texts(before, size)
        if texts is None:
            return
        account.saw("digits", MEASURED.formula, size.entry.line)
        fewest = min(map(significant, texts))
        if fewest >= FEW_DIGITS and _is_proportional(before, size, texts):
            exact |= {size: None, before: None}
            digits.append(fewest)
    if exact and (max(digits) >= MANY_DIGITS or len(exact) == len(curve.sizes) > 2):
        rows = tuple(exact)
        yield _finding(curve, MEASURED, rows, (0.0, math.inf), rows[0].speed / rows[1].speed)


def _texts(before: Size, size: Size) -> tuple[str, str] | None:
    """The printed digits of one measured number of both sizes: a throughput, or a step time."""
    one, other = before.entry.row.values, size.entry.row.values
    for name in SPEEDS:
        if name in one and name in other:
            return one[name].text, other[name].text
    return None


def _is_proportional(before: Size, size: Size, texts: tuple[str, str]) -> bool:
    """Whether two printed numbers are exactly equal, or exactly in the ratio of the devices."""
    one, other = (text.replace(",", "") for text in texts)
    ratio, devices = float(other) / float(one), size.gpus / before.gpus
    if not any(abs(ratio / exact - 1) < 1e-9 for exact in (1.0, devices, 1 / devices)):
        return False
    exactly = Fraction(size.gpus) / Fraction(before.gpus)
    return Fraction(other) / Fraction(one) in (Fraction(1), exactly, 1 / exactly)


def _finding(
    curve: TableCurve,
    rule: CurveRule,
    sizes: tuple[Size, ...],
    expected: tuple[float, float],
    found: Interval,
) -> Disagreement:
    """A rule that sizes of a curve break; `found` over 1 is the difference."""
    entry = sizes[0].entry
    return Disagreement(
        check=rule.check,
        lines=tuple(size.entry.line for size in sizes),
        formula=rule.formula,
        inputs=tuple(shown_size(size.entry) for size in sizes),
        expected=expected,
        found=ends(found),
        difference=found.middle - 1,
        tolerance=rule.tolerance,
        why=rule.why,
        reading=rule.reading,
        quantities=speed_names(entry),
        scope=curve.scope,
    )
