"""How a campaign trains: which cells are done, what follows a launch that failed, and how far it is."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import msgspec

from harness.features.train.files import checkpoints_folder, weights_path
from harness.features.train.log import training_log
from harness.features.train.order import TrainOrder, larger_is_better
from harness.features.train.progress import TrainingPace
from harness.launch.conduct import Conduct, Deadline, Progress
from harness.plan.estimate import LaunchTime
from harness.plan.schedule import PlannedLaunch
from harness.terminal.console import Console, ProgressLine
from reports.text import count
from results.errors import SchemaError
from results.outcome import Ending, Outcome
from results.plan import Plan, read_values
from results.run import RunResult
from results.store import Study
from strategies.saving.run_folder import RunFolder

FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0
"""Pauses before launches that follow failed ones; each pause is twice the one before."""


def lost_checkpoints(study: Study, cell_id: str) -> str | None:
    """Why training cannot continue from what it has written, with what to type; None if it can.

    A checkpoint counts as complete here if its files have their sizes; a rank reads all of them.
    """
    log, folder = training_log(study, cell_id), checkpoints_folder(study, cell_id)
    begun = log.ended is not None or any(folder.glob("step-*"))
    if not (begun and log.step):
        return None
    for kept in RunFolder(folder).kept():
        with suppress(OSError):
            sizes = {name: file.bytes for name, file in kept.manifest.files.items()}
            if all((kept.path / name).stat().st_size == size for name, size in sizes.items()):
                return None
    anew = shlex.quote(str(study.kept_folder(cell_id)))
    return (
        f"{folder} has no complete checkpoint of {log.step:,} steps: put a copy back, or train from the "
        f"start by the same command after: rm -r {anew}"
    )


class FailedLaunch(NamedTuple):
    """A launch of a cell that ended before the training did."""

    step: int
    """The last step that its ranks recorded."""
    ending: Ending

    def is_like(self, other: FailedLaunch) -> bool:
        """Whether both failed at one step in the same way; numbers in reasons may differ (ranks, ports)."""
        words, others = (re.sub(r"\d+", "", failure.ending.reason) for failure in (self, other))
        return (self.step, self.ending.outcome, words) == (other.step, other.ending.outcome, others)


def step_reached(study: Study, cell_id: str, run_id: str) -> int:
    """The last step that a rank of a run has recorded, or else that the log has."""
    try:
        found = [record.trained_steps for record in study.rank_records(cell_id, run_id)]
    except SchemaError:
        found = []
    return max((steps for steps in found if steps), default=training_log(study, cell_id).step)


def why_not_again(failures: Sequence[FailedLaunch], restarts: int) -> str | None:
    """Why no launch follows the failed ones of a cell, oldest first; None if one does.

    What a rank refuses it refuses again. A program that fails twice at one step in the same
    way fails there again, and a loss that was not finite is so again after the same steps; where the cluster
    failed, the next launch may fare better.
    """
    last = failures[-1]
    if last.ending.outcome is Outcome.SKIPPED:
        return "what was refused is refused again until it is changed"
    if last.ending.outcome is Outcome.DIVERGED:
        return "it would diverge again from the same checkpoint"
    if not last.ending.outcome.runs_again and failures[:-1] and failures[-2].is_like(last):
        return f"it failed twice in the same way at step {last.step}"
    if len(failures) > restarts:
        return f"no more launches may follow a failed one (--restarts {restarts})"
    return None


def pause_s(failures: int) -> float:
    """Seconds before the launch that follows this number of failed ones."""
    return min(FIRST_PAUSE_S * 2.0 ** (failures - 1), LAST_PAUSE_S)


def nodes_left(elastic: tuple[int, int], nodes: int, failures: Sequence[FailedLaunch]) -> int:
    """Nodes of the next launch: the nodes of the cell, less one for each launch that lost a node."""
    least, most = elastic
    lost = sum(failure.ending.outcome in (Outcome.MISSING_RANKS, Outcome.NODE_FAILED) for failure in failures)
    return max(least, min(most, nodes) - lost)


class TrainConduct(Conduct):
    """Trains each cell in one launch after another, until its log says that it is done."""

    one_cell = True

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        assert plan.order is not None
        self._order = read_values(plan.order.values, TrainOrder)
        self._failures: dict[str, list[FailedLaunch]] = {}
        """The launches that failed while they trained, by cell."""

    def summary(self) -> list[str]:
        return [training_line(self._order)]

    def done(self, study: Study) -> frozenset[str]:
        return frozenset(
            cell.id for cell in self.plan.cells if training_log(study, cell.id).done(self._order)
        )

    def forget(self, study: Study, cell_id: str) -> None:
        """Remove the checkpoints and the weights of a cell that was trained to see what memory it takes."""
        shutil.rmtree(checkpoints_folder(study, cell_id), ignore_errors=True)
        weights_path(study, cell_id).unlink(missing_ok=True)

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
        left = {cell.id: names[cell.id] for launch in launches for cell in launch.cells}
        return TrainingPace(line, study, left, deadline=deadline)

    def adapted(self, planned: PlannedLaunch, console: Console) -> PlannedLaunch:
        """The launch without the nodes that this call has lost, if its training is elastic."""
        if self._order.elastic is None:
            return planned
        placement = planned.placement
        failures = self._failures.get(planned.cells[0].id, ())
        nodes = nodes_left(self._order.elastic, placement.nodes, failures)
        if nodes < placement.nodes:
            console.note(f"{planned.cells[0].id} continues on {nodes} of {placement.nodes} nodes")
        return replace(planned, placement=msgspec.structs.replace(placement, nodes=nodes))

    def continues_s(self, study: Study, result: RunResult, console: Console) -> float | None:
        """Seconds until another launch continues the training of a cell that failed; None if none does."""
        failures = self._failures.setdefault(result.cell_id, [])
        step = step_reached(study, result.cell_id, result.run_id)
        failures.append(FailedLaunch(step, Ending(result.outcome, result.reason or "")))
        why_not = why_not_again(failures, self._order.restarts)
        if why_not is not None:
            console.warn(f"{result.cell_id} is not trained on: {why_not}")
            return None
        seconds = pause_s(len(failures))
        console.note(
            f"{result.cell_id} continues from its last checkpoint in {seconds:.0f} s: "
            f"restart {len(failures)} of {self._order.restarts}"
        )
        return seconds


def training_line(order: TrainOrder) -> str:
    """Describe the training of each cell: its length, its checkpoints, and when it ends early."""
    length = count(order.epochs, "epoch") if order.epochs is not None else count(order.steps or 0, "step")
    told = [
        f"trains {length}",
        f"a checkpoint every {order.checkpoint_every} steps, the last {order.keep} stay",
    ]
    if order.best:
        better = "larger" if larger_is_better(order.best) else "smaller"
        told.append(f"and the best by {order.best} ({better} is better)")
    if order.target:
        told.append(f"ends at {order.target}")
    if order.patience:
        told.append(f"ends after {order.patience} validations without a better {order.watched}")
    return "; ".join(told)
