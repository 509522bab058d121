"""An audit in words, and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from reports.audit.audit import Audit
from reports.audit.columns import QUANTITY_UNITS
from reports.audit.findings import CHECKS, Disagreement
from reports.audit.rows import UnreadCell
from reports.text import count
from results.version import VERSION

TOLD_IN_FULL = 40
"""Findings that are told in full, the most telling ones; each other one has a line."""
LINES_SHOWN = 12
"""Line numbers of one finding or of one kind of cell; --json has all."""
_DIGITS = 6


def lines(audit: Audit) -> Iterator[str]:
    """The whole audit: the account, the findings, the notes."""
    yield from _account(audit)
    yield ""
    for finding in audit.findings[:TOLD_IN_FULL]:
        yield from finding_lines(finding)
    for finding in audit.findings[TOLD_IN_FULL:]:
        yield f"line {_numbers(finding.rows)}: {finding.check}: {finding.formula}{_difference(finding)}"
    yield from _note_lines(audit.notes)
    if audit.findings or audit.notes:
        yield ""
    totals = ((audit.rows, "row"), (len(audit.findings), "finding"), (len(audit.notes), "note"))
    yield ", ".join(count(items, noun) for items, noun in totals)


def audit_json(audit: Audit, file: str) -> str:
    """The same as one JSON object, with file, version and units; ends without a bound are null."""
    head = {"file": file, "version": VERSION, "units": dict(QUANTITY_UNITS)}
    return json.dumps(_finite({**head, **dataclasses.asdict(audit)}), allow_nan=False)


def _account(audit: Audit) -> Iterator[str]:
    """What was read, what each check saw, and what was not read."""
    yield f"{count(audit.rows, 'row')}; read, in so many rows: {_counts(audit.read)}"
    saw = [f"{check} {audit.seen[check]}" for check in CHECKS if audit.seen[check]]
    yield f"rows that each check compared: {', '.join(saw) or 'none'}"
    nothing = [check for check in CHECKS if not audit.seen[check]]
    if nothing:
        yield f"saw no row, for lack of columns or of rows to compare: {', '.join(nothing)}"
    if audit.not_dense:
        words = "not held to 6 N FLOPs a token, a mixture of experts or adapters"
        yield f"{words}: {count(len(audit.not_dense), 'row')} (line {_numbers(audit.not_dense)})"
    if audit.not_checked:
        yield f"not checked, names not known (--map says what they are): {', '.join(audit.not_checked)}"
    yield from _unread_lines(audit.unread)


def _unread_lines(cells: Sequence[UnreadCell]) -> Iterator[str]:
    """A line for each column, text and reason, with its lines."""
    kinds: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for cell in cells:
        kinds[cell.column, cell.text, cell.reason].append(cell.line)
    for (column, text, reason), where in kinds.items():
        shown = text if len(text) <= 40 else text[:37] + "..."
        yield f"not read: {column} {shown!r}: {reason} (line {_numbers(where)})"


def finding_lines(finding: Disagreement) -> Iterator[str]:
    """One finding: where, the formula, the numbers, how far apart they are, and why that is too far."""
    first, *others = finding.lines
    against = f" (with {_numbers(others)})" if others else ""
    yield f"line {first}{against}: {finding.check}: {finding.formula}"
    if finding.scope:
        yield f"    of: {finding.scope}"
    if finding.inputs:
        yield f"    numbers: {'; '.join(finding.inputs)}"
    if finding.expected is not None and finding.found is not None:
        unit = QUANTITY_UNITS.get(finding.quantity, "1")
        unit = "" if unit == "1" else f" {unit}"
        found = f"{_range(finding.found)}{unit}{_difference(finding)}"
        yield f"    expected {_range(finding.expected)}, found {found}"
    yield f"    tolerance {_tolerance(finding.tolerance)}: {finding.why}"
    if finding.also:
        yield f"    also broken: {'; '.join(finding.also)}"
    if finding.suspect:
        yield f"    the number in all of them: {finding.suspect}"
    if len(finding.rows) > len(finding.lines):
        yield f"    the same in {count(len(finding.rows), 'row')}: {_numbers(finding.rows)}"
    if finding.reading:
        yield f"    likeliest reading: {finding.reading}"


def _note_lines(notes: Sequence[Disagreement]) -> Iterator[str]:
    kinds = Counter[tuple[str, str]]()
    for note in notes:
        kinds[note.formula, note.reading] += max(1, len(note.rows))
    first = {(note.formula, note.reading): note for note in reversed(notes)}
    for (formula, reading), rows in kinds.items():
        note = first[formula, reading]
        yield f"note: {formula}: {reading}, in {count(rows, 'row')}; the first is line {note.lines[0]}"
        yield f"    numbers: {'; '.join(note.inputs)}"


def _numbers(several: Sequence[int]) -> str:
    shown = ", ".join(map(str, several[:LINES_SHOWN]))
    return shown if len(several) <= LINES_SHOWN else f"{shown} and {len(several) - LINES_SHOWN} more"


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
