"""The review of a study: excluded runs, notes and approvals, which people add and nobody changes.

`review.jsonl` has one entry a line, each with its schema. A later entry takes an earlier one back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from results.run import RunResult
from results.value_types import require_times

EXCLUDED = "excluded by review"


class ReviewEntry(msgspec.Struct, frozen=True, kw_only=True):
    at: str
    """UTC, as ISO 8601."""
    author: str
    what: Literal["excluded", "included", "noted", "approved"]
    run_ids: tuple[str, ...] = ()
    """The runs that it excludes from all figures, or includes again."""
    why: str = ""
    """The reason, or the text of a note."""
    state: str | None = None
    """The state of the records that an approval is about, as `state_of` gives it."""
    runs: int = 0
    """The number of runs at an approval."""

    def __post_init__(self) -> None:
        require_times(self.at)


@dataclass(frozen=True, slots=True)
class Review:
    """All entries of a study, oldest first."""

    entries: tuple[ReviewEntry, ...] = ()
    damaged: tuple[str, ...] = ()
    """A sentence for each line that cannot be read, such as the last line of a killed writer."""

    @property
    def excluded(self) -> dict[str, str]:
        """Why each excluded run is left out, by run id."""
        found: dict[str, str] = {}
        for entry in self.entries:
            if entry.what == "excluded":
                found |= dict.fromkeys(entry.run_ids, f"{EXCLUDED}: {entry.why}")
            elif entry.what == "included":
                found = {run_id: why for run_id, why in found.items() if run_id not in entry.run_ids}
        return found

    def counted(self, results: Sequence[RunResult]) -> list[RunResult]:
        """The runs that are not excluded."""
        excluded = self.excluded
        return [run for run in results if run.run_id not in excluded]

    def state_of(self, results: Sequence[RunResult]) -> str:
        """A digest of all runs with their outcomes and step times, and of the exclusions."""
        runs = sorted((run.run_id, run.outcome, run.step_ns and run.step_ns.value) for run in results)
        return hashlib.sha256(msgspec.json.encode([runs, sorted(self.excluded)])).hexdigest()[:16]

    def approval(self, results: Sequence[RunResult]) -> tuple[str, bool]:
        """The last approval in words, and whether it is of exactly these runs and the present exclusions.

        `approved by Ann on 2026-01-02 03:04 UTC, before 3 further runs`; empty words without an approval.
        """
        entry = next((one for one in reversed(self.entries) if one.what == "approved"), None)
        if entry is None:
            return "", False
        words = f"approved by {entry.author} on {entry.at[:10]} {entry.at[11:16]} UTC"
        if entry.state == self.state_of(results):
            return words, True
        further = len(results) - entry.runs
        change = (
            f"{further:,} further run{'s' * (further > 1)}"
            if further > 0
            else "a change of its runs or exclusions"
        )
        return f"{words}, before {change}", False
