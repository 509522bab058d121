"""How a campaign carries out the plans of a kind of study."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Protocol

from harness.launch.follow import LaunchState
from harness.plan.estimate import LaunchTime
from harness.plan.schedule import PlannedLaunch
from harness.terminal.console import Console, ProgressLine, Standing
from reports.text import duration
from results.plan import Plan
from results.registry import load
from results.run import RunResult
from results.store import Study


class Deadline:
    """A moment of a monotonic clock that may be brought forward, also from a signal handler."""

    def __init__(
        self, seconds: float | None, reason: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """The deadline is `seconds` from now; None: not known yet."""
        self._clock = clock
        self._at = None if seconds is None else clock() + seconds
        self.reason = reason

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, negative ones after the end; None without an end."""
        return None if self._at is None else self._at - self._clock()

    @property
    def is_over(self) -> bool:
        left = self.left_s
        return left is not None and left < 0

    def bring_forward(self, seconds: float, reason: str) -> None:
        """End `seconds` from now, unless the end is sooner already."""
        at = self._clock() + seconds
        if self._at is None or at < self._at:
            self._at, self.reason = at, reason


class Pace:
    """Shows the progress of a campaign that measures, launch after launch.

    It times the parts of runs as it sees them begin. A part of a cell is taken to last as long as before in
    this campaign, else as long as estimated, times the ratio of this part, or of all, in other cells.
    """

    def __init__(
        self,
        line: ProgressLine,
        launches: Sequence[LaunchTime],
        *,
        deadline: Deadline | None = None,
        names: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`names` are the displayed names of cells, by id."""
        self._line = line
        self._launches = [[("", {"": launch.startup_s}), *launch.runs] for launch in launches]
        """The runs that are left of each launch, after its start."""
        self._total = sum(len(launch.runs) for launch in launches)
        self._clock = clock
        self._began = self._since = clock()
        """`_since` is when the part began that is under way."""
        self._run, self._begun = 0, [""]
        """The number of the run in the launch, and its parts so far; the start is number 0, and one part."""
        self._deadline = deadline
        self._names = names or {}
        self._took: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        """The seconds of each part that has ended, by cell and part."""
        self._ratios: defaultdict[str, list[float]] = defaultdict(list)
        """The seconds of parts over their estimates, by part."""
        self._expected: tuple[float, float] | None = None
        """Seconds of the part under way, and of all after it, kept because ranks need the cores."""

    def report(self, state: LaunchState) -> None:
        """Show the progress of the current launch."""
        self._see(len(state.started), state.part)
        doing = "starting workers"
        if state.cell_id:
            doing = f"{self._names.get(state.cell_id, state.cell_id)}: {state.phase}"
        self._line.show(
            Standing(
                done=self._total - sum(len(runs) - 1 for runs in self._launches) + max(0, self._run - 1),
                total=self._total,
                doing=doing,
                left=seconds_text(self.left_s()),
                elapsed=seconds_text(self._clock() - self._began),
                waits_for=state.waits_for,
            )
        )

    def _see(self, run: int, part: str) -> None:
        """Learn from the begin of a part, in the run with this number."""
        (cell, parts), before = self._launches[0][self._run], self._begun[-1]
        if (run, part) == (self._run, before):
            return
        took, self._since = self._clock() - self._since, self._clock()
        # The last part of a run that failed has no end.
        if run == self._run or self._run == 0:
            self._took[cell, before].append(took)
            if before and (estimated_s := parts.get(before)):
                self._ratios[before].append(took / estimated_s)
        self._begun = [*self._begun, part] if run == self._run else [part]
        self._run, self._expected = run, None

    def done(self, results: Sequence[RunResult], closed: Container[str]) -> None:
        """Count runs of the current launch that have ended, and all that are left of the `closed` cells."""
        del self._launches[0][1 : 1 + len(results)]
        self._launches = [[run for run in runs if run[0] not in closed] for runs in self._launches]
        self._run, self._begun, self._expected = 0, [""], None

    def launch_over(self) -> None:
        del self._launches[0]
        self._expected = None

    def left_s(self) -> float:
        """Seconds of the parts that are left of all runs, and of the starts of launches."""
        self._expected = self._expected or self._expect()
        now_s, rest_s = self._expected
        left = max(0.0, now_s - (self._clock() - self._since)) + rest_s
        most = None if self._deadline is None else self._deadline.left_s
        return left if most is None else max(0.0, min(left, most))

    def _expect(self) -> tuple[float, float]:
        (cell, parts), part = self._launches[0][self._run], self._begun[-1]
        rest = {part: parts[part] for part in parts if part not in self._begun}
        runs = [(cell, rest), *self._launches[0][self._run + 1 :], *chain(*self._launches[1:])]
        rest_s = sum(self._part_s(cell, *item) for cell, rest in runs for item in rest.items())
        return self._part_s(cell, part, parts.get(part, 0.0)), rest_s

    def _part_s(self, cell: str, part: str, estimated_s: float) -> float:
        if own := self._took.get((cell, part)):
            return median(own)
        # The estimate counts like a run, since one run of another cell says little.
        like_it: Iterable[float] = self._ratios.get(part) or chain(*self._ratios.values())
        return estimated_s * median([1.0, *like_it])


def seconds_text(seconds: float) -> str:
    """`9 s`, `2 min 05 s`: parts of a second say nothing about a campaign."""
    return f"{seconds:.0f} s" if seconds < 100 else duration(seconds * 1e9)


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
