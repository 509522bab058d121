"""An audit in words, and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from reports.audit.audit import Audit
from reports.audit.findings import CHECKS, Disagreement
from reports.text import count

MOST_SHOWN = 20
"""Findings of one check that are told in full."""
_DIGITS = 6


def lines(audit: Audit) -> Iterator[str]:
    """The whole audit: findings by check, notes by kind, what was read and what was not."""
    for check in CHECKS:
        yield from _check_lines([finding for finding in audit.findings if finding.check == check])
    yield from _note_lines(audit.notes)
    yield ""
    totals = ((audit.rows, "row"), (len(audit.findings), "finding"), (len(audit.notes), "note"))
    yield ", ".join(count(items, noun) for items, noun in totals)
    yield f"read, in so many rows: {_counts(audit.read)}"
    if audit.not_checked:
        yield f"not checked, names not known: {', '.join(audit.not_checked)}"
    if audit.unreadable:
        yield f"not read, no numbers: {_counts(audit.unreadable)}"


def json_text(audit: Audit) -> str:
    """The same as one JSON object; ends without a bound are null."""
    return json.dumps(_finite(dataclasses.asdict(audit)), allow_nan=False)


def _check_lines(findings: Sequence[Disagreement]) -> Iterator[str]:
    for finding in findings[:MOST_SHOWN]:
        yield from finding_lines(finding)
    if len(findings) > MOST_SHOWN:
        yield f"... and {len(findings) - MOST_SHOWN} more of {findings[0].check}; --json has all"


def finding_lines(finding: Disagreement) -> Iterator[str]:
    """One finding: where, the formula, the numbers, how far apart they are, and why that is too far."""
    first, *others = finding.lines
    against = f" (with {', '.join(map(str, others))})" if others else ""
    yield f"line {first}{against}: {finding.check}: {finding.formula}"
    if finding.inputs:
        yield f"    numbers: {'; '.join(finding.inputs)}"
    if finding.expected is not None and finding.found is not None:
        yield f"    expected {_range(finding.expected)}, found {_range(finding.found)}{_difference(finding)}"
    yield f"    tolerance {_tolerance(finding.tolerance)}: {finding.why}"
    if finding.reading:
        yield f"    likeliest reading: {finding.reading}"


def _note_lines(notes: Sequence[Disagreement]) -> Iterator[str]:
    kinds = Counter((note.formula, note.reading) for note in notes)
    first = {(note.formula, note.reading): note for note in reversed(notes)}
    for (formula, reading), rows in kinds.items():
        note = first[formula, reading]
        yield f"note: {formula}: {reading}, in {count(rows, 'row')}; the first is line {note.lines[0]}"
        yield f"    numbers: {'; '.join(note.inputs)}"


def _counts(items: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({number})" for name, number in items.items()) or "nothing"


def _range(ends: tuple[float, float]) -> str:
    low, high = (f"{end:.{_DIGITS}g}" for end in ends)
    return low if low == high else f"{low} to {high}"


def _difference(finding: Disagreement) -> str:
    if finding.difference is None:
        return ""
    if finding.difference > 10:
        return f": {finding.difference + 1:.4g} times"
    return f": {abs(finding.difference):.3%} {'more' if finding.difference > 0 else 'less'}"


def _tolerance(tolerance: float) -> str:
    return f"a factor of {tolerance:g}" if tolerance > 1 else f"{tolerance * 100:g} %"


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
