"""How a campaign carries out the plans of a kind of study."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from harness.launch.follow import LaunchState
from harness.launch.pace import Deadline, Pace
from harness.plan.estimate import LaunchTime
from harness.plan.schedule import PlannedLaunch
from harness.terminal.console import Console, ProgressLine
from results.plan import Plan
from results.registry import load
from results.run import RunResult
from results.store import Study


class Progress(Protocol):
    """Shows how far a campaign is."""

    def report(self, state: LaunchState) -> None:
        """Show the progress of the current launch."""

    def done(self, results: Sequence[RunResult], closed: Container[str]) -> None:
        """Count runs of the current launch that have ended, and all that are left of the `closed` cells."""

    def launch_over(self) -> None:
        """Go on to the next launch."""


class Conduct:
    """The conduct of one campaign. This class measures; a kind of study derives what differs."""

    one_cell = False
    """Whether each launch has one cell, in which case the launch after it may continue the cell."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def header(self, study: Study, left: int) -> list[str] | None:
        """The lines that state the study, of which `left` runs are left; None for the lines of a matrix."""
        return None

    def summary(self) -> list[str]:
        """The lines about the work of each cell; used where the plan has an order."""
        return []

    def done(self, study: Study) -> frozenset[str] | None:
        """Ids of the cells that need no run. None: the runs of each cell are counted."""
        return None

    def forget(self, study: Study, cell_id: str) -> None:
        """Remove what runs of a cell have left of which only the memory that they took is of use."""

    def times(self, launches: Sequence[PlannedLaunch], likely: Sequence[LaunchTime]) -> Sequence[LaunchTime]:
        """The time of each launch, of which `likely` is the one of a measurement of steps."""
        return likely

    def names(self, names: Mapping[str, str]) -> Mapping[str, str]:
        """The displayed names of the cells, by id, of which `names` are the complete ones."""
        return names

    def progress(
        self,
        line: ProgressLine,
        study: Study,
        launches: Sequence[PlannedLaunch],
        *,
        times: Sequence[LaunchTime],
        names: Mapping[str, str],
        deadline: Deadline,
    ) -> Progress:
        """Show on `line` how far the campaign is."""
        return Pace(line, self.times(launches, times), deadline=deadline, names=self.names(names))

    def adapted(self, planned: PlannedLaunch, console: Console) -> PlannedLaunch:
        """The launch as it can be started now."""
        return planned

    def continues_s(self, study: Study, result: RunResult, console: Console) -> float | None:
        """Seconds until another launch continues the cell of a run that failed; None if none does."""
        return None


def conduct_of(plan: Plan) -> Conduct:
    """Return the conduct of a plan. Raises UsageError if this installation lacks its kind."""
    made = load(plan.kind.conduct)(plan)
    assert isinstance(made, Conduct)
    return made
