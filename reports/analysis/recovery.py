"""How a training run came back after each interruption, from its log and the ends of its launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from results.launch import Attempt
from results.training_log import Ended, Started, Steps, TrainingLog, seconds_between


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One interruption. Times are in seconds after the fault; None where nothing says."""

    fault_at: str
    """As it was told; else when a rank of the launch was last heard of, or the last row before it."""
    noticed_s: float | None
    """Until the interrupted launch had been ended."""
    started_s: float | None
    """Until the next launch was started."""
    ready_s: float
    """Until its ranks had loaded the checkpoint."""
    first_step_s: float | None
    """Until the first step after that had been taken; None: there was none."""
    step: int
    """The last one that the log has of the interrupted launch."""
    steps_lost: int
    """Of those in the log, the ones done again."""
    replicas: int
    """After it."""
    reason: str | None
    """Why the interrupted launch ended."""


def recoveries(
    log: TrainingLog, attempts: Mapping[str, Attempt], faults: Sequence[str] = ()
) -> tuple[Recovery, ...]:
    """The interruptions of a run, oldest first; what follows an end by itself is none.

    `attempts` are by run, as a study gives them. `faults` are the times of faults, if they are known: of
    each interruption the last one before its next start counts.
    """
    return tuple(_recoveries(log, attempts, faults))


def _recoveries(
    log: TrainingLog, attempts: Mapping[str, Attempt], faults: Sequence[str]
) -> Iterator[Recovery]:
    before: Started | None = None
    step = 0
    for place, row in enumerate(log.rows):
        if not isinstance(row, Started):
            step = max(step, row.step)
            continue
        last = log.rows[place - 1] if place else None
        if before is not None and last is not None and not isinstance(last, Ended):
            own = [fault for fault in faults if before.at <= fault <= row.at]
            ended, next_one = attempts.get(before.run_id), attempts.get(row.run_id)
            same = before.launch_id == row.launch_id
            fault = max(own) if own else _last_sign(last.at, None if same else ended)
            first = next((one for one in log.rows[place + 1 :] if isinstance(one, Steps | Started)), None)
            yield Recovery(
                fault_at=fault,
                noticed_s=_since(fault, ended.ended_at if ended and not same else None),
                started_s=_since(fault, next_one.started_at if next_one and not same else None),
                ready_s=seconds_between(fault, row.at),
                first_step_s=_since(fault, first.at if isinstance(first, Steps) else None),
                step=step,
                steps_lost=max(0, step - (row.resumed_step or 0)),
                replicas=row.replicas,
                reason=_reason(before, None if same else ended),
            )
        before, step = row, row.resumed_step or 0


def _last_sign(row_at: str, attempt: Attempt | None) -> str:
    """The last sign of life of a launch: of any rank before its end, or the log's."""
    signs = [] if attempt is None else [at for at in attempt.heartbeats.values() if at <= attempt.ended_at]
    return max([row_at, *signs])


def _since(fault: str, at: str | None) -> float | None:
    """None too for what was before the fault: it is of something else."""
    return None if at is None or at < fault else seconds_between(fault, at)


def _reason(before: Started, attempt: Attempt | None) -> str | None:
    if attempt is None:
        return None
    return attempt.reasons.get(before.run_id) or attempt.stopped_by or attempt.scheduler
