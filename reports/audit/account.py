"""What each check saw: without it, a table that nothing was checked of looks like one that agrees."""

from __future__ import annotations

from collections import Counter, defaultdict

from reports.audit.findings import Check


class Account:
    """Which rows each check compared with something, and by how many equations or neighbours."""

    def __init__(self) -> None:
        self._lines: dict[Check, set[int]] = defaultdict(set)
        self._formulas: dict[Check, Counter[str]] = defaultdict(Counter)

    def saw(self, check: Check, formula: str, *lines: int) -> None:
        self._lines[check].update(lines)
        self._formulas[check][formula] += len(lines)

    def rows(self, check: Check) -> int:
        return len(self._lines[check])

    def formulas(self, check: Check) -> dict[str, int]:
        """How many rows each formula of a check saw."""
        return dict(self._formulas[check])
