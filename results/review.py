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
    """One entry of a reviewer."""

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
class Approval:
    """The last approval of a study, and what has changed since."""

    entry: ReviewEntry
    since: str
    """`before 3 further runs`; empty while the approval stands."""

    @property
    def sentence(self) -> str:
        """`approved by Ann on 2026-01-02 03:04 UTC, before 3 further runs`."""
        at = self.entry.at
        since = f", {self.since}" if self.since else ""
        return f"approved by {self.entry.author} on {at[:10]} {at[11:16]} UTC{since}"


@dataclass(frozen=True, slots=True)
class Review:
    """All entries of a study, oldest first."""

    entries: tuple[ReviewEntry, ...] = ()
    damaged: tuple[str, ...] = ()
    """A sentence for each line that cannot be read, such as the last line of a killed writer."""

    @property
    def excluded(self) -> dict[str, ReviewEntry]:
        """The entry that excludes each excluded run, by run id."""
        found: dict[str, ReviewEntry] = {}
        for entry in self.entries:
            if entry.what == "excluded":
                found |= dict.fromkeys(entry.run_ids, entry)
            elif entry.what == "included":
                found = {run_id: one for run_id, one in found.items() if run_id not in entry.run_ids}
        return found

    @property
    def reasons(self) -> dict[str, str]:
        """Why each excluded run is left out, by run id."""
        return {run_id: f"{EXCLUDED}: {entry.why}" for run_id, entry in self.excluded.items()}

    def counted(self, results: Sequence[RunResult]) -> list[RunResult]:
        """The runs that are not excluded."""
        excluded = self.excluded
        return [run for run in results if run.run_id not in excluded]

    def state_of(self, results: Sequence[RunResult]) -> str:
        """A digest of all runs with their outcomes and step times, and of the exclusions."""
        runs = sorted(
            (run.run_id, str(run.outcome), run.step_ns.value if run.step_ns else None) for run in results
        )
        return hashlib.sha256(msgspec.json.encode([runs, sorted(self.excluded)])).hexdigest()[:16]

    def approval(self, results: Sequence[RunResult]) -> Approval | None:
        """The last approval, compared with all runs that the study has now."""
        entry = next((one for one in reversed(self.entries) if one.what == "approved"), None)
        if entry is None:
            return None
        further = len(results) - entry.runs
        since = "before a change of its records or exclusions"
        if entry.state == self.state_of(results):
            since = ""
        elif further > 0:
            since = f"before {further:,} further run{'s' * (further > 1)}"
        return Approval(entry, since)
