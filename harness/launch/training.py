"""Rules of a campaign that trains: which cells are done, and what follows a launch that failed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from results.errors import SchemaError
from results.outcome import Ending, Outcome
from results.plan import Plan
from results.store import Study
from strategies.saving.run_folder import RunFolder

FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0
"""Pauses before launches that follow failed ones; each pause is twice the one before."""


def trained_cells(study: Study, plan: Plan) -> frozenset[str] | None:
    """Ids of the cells whose training has ended as the plan orders it; None where the plan measures."""
    if plan.training is None:
        return None
    return frozenset(cell.id for cell in plan.cells if study.training_log(cell.id).done(plan.training))


def lost_checkpoints(study: Study, cell_id: str) -> str | None:
    """Why training cannot continue from what it has written, with what to type; None if it can.

    A checkpoint counts as complete here if its files have their sizes; a rank reads all of them.
    """
    log, folder = study.training_log(cell_id), study.checkpoints_folder(cell_id)
    begun = log.ended is not None or any(folder.glob("step-*"))
    if not (begun and log.step):
        return None
    for kept in RunFolder(folder).kept():
        with suppress(OSError):
            sizes = {name: file.bytes for name, file in kept.manifest.files.items()}
            if all((kept.path / name).stat().st_size == size for name, size in sizes.items()):
                return None
    anew = shlex.quote(str(study.training_log_path(cell_id).parent))
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
    return max((steps for steps in found if steps), default=study.training_log(cell_id).step)


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
