"""All checks over one table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from reports.audit.account import Account
from reports.audit.causes import causes
from reports.audit.comparisons import (
    above_one,
    implied_peaks,
    odd_digits,
    order,
    proportions,
    repeats,
    shared_digits,
    units,
)
from reports.audit.curves import curve_findings
from reports.audit.derived import derived
from reports.audit.findings import CHECKS, Check, Disagreement, Relation, printed_names
from reports.audit.groups import DerivedRow, table_curves, with_settings
from reports.audit.relations import row_findings
from reports.audit.rows import AuditedTable, UnreadCell
from reports.audit.tokens import tokens

_THROUGHPUT: frozenset[Check] = frozenset({"value", "contradiction", "work", "batch", "repeats", "units"})
"""Checks whose findings leave open what a row's throughput is."""
_FROM_ONE_CLOCK: frozenset[Check] = frozenset({"work", "bandwidth"})
"""Checks whose numbers come from one time, so that agreement to the digit tells; FLOPs have conventions."""
_NOTHING: frozenset[Check] = frozenset({"value", "contradiction", "repeats"})
"""Checks that compare nothing: a table that no other check saw was not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The findings of a table."""

    rows: int
    findings: tuple[Disagreement, ...]
    """Numbers that do not agree as printed: a cause each, the most telling first."""
    notes: tuple[Disagreement, ...]
    """What does not make a table wrong: digits cut off, rows that stand twice."""
    not_checked: tuple[str, ...]
    unreadable: Mapping[str, int]
    """Cells that should be numbers and are none, by column."""
    read: Mapping[str, int]
    """How many rows hold each quantity."""
    seen: Mapping[str, int]
    """How many rows each check compared with something."""
    formulas: Mapping[str, Mapping[str, int]]
    """The same by check and formula."""
    unread: tuple[UnreadCell, ...]
    """Every cell that should be a number and is none."""
    not_dense: tuple[int, ...]
    """Lines that are not held to 6 N: a mixture of experts, or adapters."""

    @property
    def is_checked(self) -> bool:
        """Whether any check compared numbers."""
        return any(rows for check, rows in self.seen.items() if check not in _NOTHING)


def audit(table: AuditedTable) -> Audit:
    """Every check over every row.

    A row whose throughput is in doubt takes no part in comparisons with other rows: one mistake is to be
    told once.
    """
    account = Account()
    entries = [DerivedRow(row=row, values=derived(row)) for row in table.rows]
    with_settings(entries)
    said, judged, agreeing = _row_by_row(entries, account)
    said += table.findings
    said += [*repeats(entries, account), *units(_without(entries, said), account)]
    sound = _without(entries, said)
    said += proportions(sound, account)
    said += implied_peaks(sound, account)
    said += tokens(sound, account)
    said += curve_findings(table_curves(sound), account)
    said += above_one(sound, account)
    said += order(sound, account)
    said += odd_digits(judged, account)
    said += shared_digits(sound, account)
    lines = {finding.lines[0] for finding in said}
    told = causes(said, {entry.line: entry.values for entry in entries if entry.line in lines}, agreeing)
    return Audit(
        rows=len(table.rows),
        findings=tuple(cause for cause in told if not cause.is_note),
        notes=tuple(cause for cause in told if cause.is_note),
        not_checked=table.not_checked,
        unreadable=dict(Counter(cell.column for cell in table.unread)),
        read=dict(Counter(name for row in table.rows for name in row.values)),
        seen={check: account.rows(check) for check in CHECKS},
        formulas={check: account.formulas(check) for check in CHECKS},
        unread=table.unread,
        not_dense=tuple(row.line for row in table.rows if not row.is_dense),
    )


def _row_by_row(
    entries: Sequence[DerivedRow], account: Account
) -> tuple[
    list[Disagreement], dict[Relation, list[tuple[DerivedRow, bool]]], dict[int, list[tuple[str, ...]]]
]:
    """The findings of equations; the rows that fulfil each, and if to the digit; what each line fulfils."""
    said: list[Disagreement] = []
    judged: dict[Relation, list[tuple[DerivedRow, bool]]] = defaultdict(list)
    agreeing: dict[int, list[tuple[str, ...]]] = {}
    for entry in entries:
        account.saw("value", "a number from 1e-30 to 1e30", *([entry.line] if entry.row.values else []))
        if entry.row.states_twice:
            account.saw("contradiction", "two numbers of one quantity agree", entry.line)
        holds = []
        broken = len(said)
        for relation, examined in row_findings(entry.row, entry.values):
            account.saw(relation.check, relation.formula, entry.line)
            if examined.finding is not None:
                said.append(examined.finding)
                continue
            holds.append(relation)
            if relation.tolerance and relation.check in _FROM_ONE_CLOCK:
                judged[relation].append((entry, examined.is_exact))
        if len(said) > broken:
            agreeing[entry.line] = [printed_names(relation, entry.values) for relation in holds]
    return said, judged, agreeing


def _without(entries: Sequence[DerivedRow], findings: Iterable[Disagreement]) -> list[DerivedRow]:
    """The entries whose throughput no finding casts doubt on."""
    doubtful = {
        line
        for finding in findings
        if finding.check in _THROUGHPUT and not finding.is_note
        for line in finding.lines
    }
    return [entry for entry in entries if entry.line not in doubtful]
