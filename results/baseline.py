"""A baseline: what a gate compares of a study, small enough to be reviewed and tracked beside the code.

A study, a run of pytest-benchmark and a kept file become the same nouns, so that any two can be compared.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from results.value_types import require_times

Fact = str
Exact = int | float | str


def exact_text(values: tuple[Exact, ...]) -> str:
    """`4,096`; several values of one counter beside each other; `none` without one."""
    return ", ".join(v if isinstance(v, str) else f"{v:,.10g}" for v in values) or "none"


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is compared: a cell of a study, or a benchmark."""

    key: str
    """Equal for equal work: the cell's id without how long is measured and without the code under test."""
    label: str
    """What a reader calls it."""
    facts: dict[str, Fact] = {}
    """What must be equal on both sides for figures to be compared: device, versions, placement, data."""
    timed: dict[str, Annotated[tuple[float, ...], msgspec.Meta(min_length=1)]] = {}
    """By metric, one value a run; runs are the independent samples."""
    exact: dict[str, tuple[Exact, ...]] = {}
    """By counter, its different values over the runs: one, where it is what it should be."""
    collectives: tuple[str, ...] = ()
    """What rank 0 handed to the exchange in one step, in order: `allreduce 0-1 4096 B`."""
    runs: int = 0
    run_ids: tuple[str, ...] = ()
    """The runs that its figures are of; empty for files of pytest-benchmark."""
    disturbed: int = 0
    """Of the runs, how many had to share the machine with others."""
    failed: str | None = None
    """Why there is no figure; None where there is one."""


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """A change that was accepted: from it on, the new figures are the right ones."""

    subject: str
    reason: str
    at: str
    commit: str | None = None
    changes: dict[str, str] = {}
    """What differs, by name: `4,096 to 8,192`; facts, counters, and the means of metrics with a margin."""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What was accepted, on which machine, at which commit."""

    name: str
    measured_at: str
    """When its newest run began, as ISO 8601 text in UTC."""
    study: str | None = None
    """The folder's name of the study that it was made from; None for files of pytest-benchmark."""
    commit: str | None = None
    dirty: bool | None = None
    subjects: tuple[Subject, ...] = ()
    fail_above: dict[str, float] = {}
    """Margins of this baseline by metric, as shares: 0.05 is 5 %."""
    accepted: tuple[Acceptance, ...] = ()

    def __post_init__(self) -> None:
        require_times(self.measured_at)
