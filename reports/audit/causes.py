"""One cause, told once: formulas of a row that share a number, and rows that break a formula in the same way.

The most telling cause comes first: what cannot be (an impossible number, a row that contradicts itself,
counts), then equations of a row, then what compares rows; among these what is further from what was expected.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from reports.audit.columns import MEASURED
from reports.audit.findings import Check, Disagreement, Quantity

_WEIGHT: Mapping[Check, int] = {
    **dict.fromkeys(("value", "contradiction", "batch"), 0),
    **dict.fromkeys(("work", "bandwidth", "utilisation", "units"), 1),
    **dict.fromkeys(("scaling", "digits", "repeats"), 2),
    **dict.fromkeys(("neighbours", "order"), 3),
}
_ONE_ROW: frozenset[Check] = frozenset(
    {"value", "contradiction", "work", "batch", "utilisation", "bandwidth", "units"}
)
_ALIKE = 0.01
_ALIKE_FLOPS = 0.10
"""Ratios of found to expected that are this near are one cause; of FLOPs, the tolerance of conventions."""


def causes(
    findings: Iterable[Disagreement],
    values: Mapping[int, Mapping[str, Quantity]],
    agreeing: Mapping[int, Sequence[tuple[str, ...]]],
) -> list[Disagreement]:
    """The causes behind findings, most telling first.

    `values`: the numbers of each line; `agreeing`: of the lines with findings, the quantities of each
    equation that holds.
    """
    by_line: dict[int, list[Disagreement]] = defaultdict(list)
    compared: list[Disagreement] = []
    told: list[Disagreement] = []
    for finding in findings:
        # A note is told beside a finding of its row, never in its place.
        if finding.is_note:
            told.append(finding)
        elif finding.check in _ONE_ROW or (finding.check == "digits" and len(finding.lines) == 1):
            by_line[finding.lines[0]].append(finding)
        else:
            compared.append(finding)
    for finding in compared:
        line = next((line for line in finding.lines[:2] if _shares(finding, by_line.get(line, ()))), None)
        if line is None:
            told.append(finding)
        else:
            by_line[line].append(finding)
    for line, several in by_line.items():
        told += _of_one_row(several, values.get(line, {}), agreeing.get(line, ()))
    return sorted(_over_rows(told), key=_telling)


def _shares(finding: Disagreement, others: Sequence[Disagreement]) -> bool:
    """Whether a comparison of rows is about a number that an equation of the row is about."""
    return any(set(finding.quantities) & set(other.quantities) for other in others)


def _of_one_row(
    findings: Sequence[Disagreement], values: Mapping[str, Quantity], agreeing: Sequence[tuple[str, ...]]
) -> list[Disagreement]:
    """Findings of one row by the number that they share: that of most broken and fewest kept equations."""
    left = list(findings)
    told: list[Disagreement] = []
    kept = Counter(name for names in agreeing for name in names)
    while left:
        broken = Counter(name for finding in left for name in finding.quantities)
        if not broken:
            return told + left
        # Of several, a measured number: counts are seldom mistyped.
        suspect = max(broken, key=lambda name: (broken[name], -kept[name], name in MEASURED, name))
        shared = [finding for finding in left if suspect in finding.quantities]
        left = [finding for finding in left if suspect not in finding.quantities]
        main = min(
            shared, key=lambda finding: (_WEIGHT[finding.check], bool(finding.scope), -_distance(finding))
        )
        others = tuple(
            dict.fromkeys(finding.formula for finding in shared if finding.formula != main.formula)
        )
        number = values[suspect].shown if suspect in values and len(shared) > 1 else ""
        told.append(replace(main, also=others, suspect=number))
    return told


def _over_rows(findings: Sequence[Disagreement]) -> list[Disagreement]:
    """Findings of one formula that are off in one way, with all their rows."""
    alike: dict[tuple[object, ...], list[Disagreement]] = defaultdict(list)
    for finding in findings:
        alike[finding.check, finding.formula, finding.scope, finding.is_note].append(finding)
    told: list[Disagreement] = []
    for same in alike.values():
        for group in [same] if same[0].scope else _by_ratio(same):
            main = max(group, key=_distance)
            rows = sorted({line for finding in group for line in _in_question(finding)})
            also = tuple(dict.fromkeys(formula for finding in group for formula in finding.also))
            told.append(replace(main, rows=tuple(rows), also=also))
    return told


def _in_question(finding: Disagreement) -> tuple[int, ...]:
    """The rows that may be wrong: all that share digits, otherwise the first."""
    return finding.lines if finding.check == "digits" else finding.lines[:1]


def _by_ratio(findings: Sequence[Disagreement]) -> list[list[Disagreement]]:
    """Findings in groups whose ratios of found to expected follow each other within 1 % (FLOPs: 10 %)."""
    ordered = sorted(findings, key=_ratio)
    near = _ALIKE_FLOPS if "6 N" in ordered[0].formula else _ALIKE
    grouped = [[ordered[0]]]
    for finding in ordered[1:]:
        before = grouped[-1][-1]
        is_near = _ratio(finding) - _ratio(before) <= near and finding.reading == before.reading
        if is_near or (_ratio(finding) == _ratio(before) == 0):
            grouped[-1].append(finding)
        else:
            grouped.append([finding])
    return grouped


def _ratio(finding: Disagreement) -> float:
    """The logarithm of found over expected; 0 where there is none."""
    if finding.difference is None or not -1 < finding.difference < math.inf:
        return 0.0
    return math.log1p(finding.difference)


def _distance(finding: Disagreement) -> float:
    return abs(_ratio(finding)) if finding.difference is not None and finding.difference > -1 else math.inf


def _telling(cause: Disagreement) -> tuple[int, float, tuple[int, ...]]:
    return _WEIGHT[cause.check], -_distance(cause), cause.lines
