"""All checks over one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from reports.audit.comparisons import (
    DerivedRow,
    neighbours,
    printed_efficiency,
    proportions,
    repeats,
    scaling,
    series,
    units,
)
from reports.audit.derived import derived
from reports.audit.findings import CHECKS, Check, Disagreement
from reports.audit.relations import row_findings
from reports.audit.rows import AuditedTable

_THROUGHPUT: frozenset[Check] = frozenset({"value", "work", "batch", "repeats", "units"})
"""Checks whose findings leave open what a row's throughput is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The findings of a table."""

    rows: int
    findings: tuple[Disagreement, ...]
    """Numbers that do not agree as printed; by check, then by line."""
    notes: tuple[Disagreement, ...]
    """What does not make a table wrong: digits cut off, rows that stand twice."""
    not_checked: tuple[str, ...]
    unreadable: Mapping[str, int]
    read: Mapping[str, int]
    """How many rows hold each quantity."""


def audit(table: AuditedTable) -> Audit:
    """Every check over every row.

    A row whose throughput is in doubt takes no part in comparisons with other rows: one mistake is to be
    told once.
    """
    entries = [DerivedRow(row=row, values=derived(row)) for row in table.rows]
    said = list(table.findings)
    for entry in entries:
        said += row_findings(entry.row, entry.values)
    doubtful = [*repeats(entries), *units(_without(entries, said))]
    sound = _without(entries, [*said, *doubtful])
    curves = series(sound)
    above = [*scaling(curves), *printed_efficiency(sound)]
    said += [*doubtful, *proportions(sound), *above]
    said += neighbours(curves, {finding.lines[0] for finding in above})
    said.sort(key=lambda finding: (CHECKS.index(finding.check), finding.lines))
    return Audit(
        rows=len(table.rows),
        findings=tuple(finding for finding in said if not finding.is_note),
        notes=tuple(finding for finding in said if finding.is_note),
        not_checked=table.not_checked,
        unreadable=table.unreadable,
        read=dict(Counter(name for row in table.rows for name in row.values)),
    )


def _without(entries: Sequence[DerivedRow], findings: Iterable[Disagreement]) -> list[DerivedRow]:
    """The entries whose throughput no finding casts doubt on."""
    doubtful = {
        line
        for finding in findings
        if finding.check in _THROUGHPUT and not finding.is_note
        for line in finding.lines
    }
    return [entry for entry in entries if entry.line not in doubtful]
