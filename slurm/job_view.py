"""The scheduler's view of a job: the meaning of states, and lines of squeue and sacct.

Only listed states have a meaning: a state that is not listed never counts as an end. Source: Slurm's page on
job state codes and job_state_string() in slurm_protocol_defs.c, up to version 26.11.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Literal

from results.outcome import Outcome
from slurm.runner import SlurmError


class JobPhase(StrEnum):
    """The phase of a job between its submission and its end."""

    WAITING = "waiting"
    """It waits for nodes, for its first or a later start."""
    RUNNING = "running"
    """It has nodes, including the time in which Slurm cleans up after its end."""
    ENDED_WELL = "ended well"
    ENDED_BADLY = "ended badly"
    UNKNOWN = "unknown"
    """Its state is not listed here. This never counts as an end."""

    @property
    def ended(self) -> bool:
        return self in (JobPhase.ENDED_WELL, JobPhase.ENDED_BADLY)


_WAITING = {
    *("PENDING", "CONFIGURING", "POWER_UP_NODE", "EXPEDITING"),
    *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
    # Flags of a job that goes back to the queue because it could not be started.
    *("LAUNCH_FAILED", "RECONFIG_FAIL"),
}
_RUNNING = {
    *("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "COMPLETING", "STAGE_OUT", "UPDATE_DB"),
}
_OUTCOMES = {
    "COMPLETED": Outcome.OK,
    "FAILED": Outcome.CRASHED,
    "OUT_OF_MEMORY": Outcome.OUT_OF_MEMORY,
    "TIMEOUT": Outcome.TIMED_OUT,
    "DEADLINE": Outcome.TIMED_OUT,
    "CANCELLED": Outcome.CANCELLED,
    "PREEMPTED": Outcome.PREEMPTED,
    "NODE_FAIL": Outcome.NODE_FAILED,
    "BOOT_FAIL": Outcome.NODE_FAILED,
    # Another cluster of the federation took the job: its end is not known here.
    "REVOKED": Outcome.UNKNOWN,
}
"""The outcome of each final state."""

_REASONS = {
    "OutOfMemory": Outcome.OUT_OF_MEMORY,
    "TimeLimit": Outcome.TIMED_OUT,
    "NodeDown": Outcome.NODE_FAILED,
    "SystemFailure": Outcome.NODE_FAILED,
}
"""Reasons that are more specific than FAILED. JobLaunchFailure is not: Slurm before 23.02 has it for any
signal."""

_HELD = {
    *("JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "job requeued in held state"),
    *("launch failed requeued held", "launch failure limit exceeded requeued held"),
    *("user env retrieval failed requeued held", "DependencyNeverSatisfied", "ReservationDeleted"),
    *("BadConstraints", "InvalidAccount", "InvalidQOS"),
}


def phase_of(state: str) -> JobPhase:
    """Return the phase of a job in `state`, one word as squeue and sacct print it."""
    if state in _WAITING:
        return JobPhase.WAITING
    if state in _RUNNING:
        return JobPhase.RUNNING
    if state in _OUTCOMES:
        return JobPhase.ENDED_WELL if state == "COMPLETED" else JobPhase.ENDED_BADLY
    return JobPhase.UNKNOWN


def outcome_of(state: str, reason: str | None = None, exit_code: int | None = None) -> Outcome:
    """Return how a job ended, as far as the scheduler knows: it sees one exit code of one script.

    The outcome of a state that is not final, or not listed, is `unknown`.
    """
    ended = _OUTCOMES.get(state, Outcome.UNKNOWN)
    if state == "FAILED":
        return _REASONS.get(reason or "", ended)
    # State and exit code contradict each other: a job is done only if both agree.
    if state == "COMPLETED" and exit_code:
        return Outcome.UNKNOWN
    return ended


def waits_for_somebody(reason: str | None) -> bool:
    """Return whether a waiting job with this reason will not start until a user or administrator acts."""
    return reason in _HELD


_SQUEUE = {
    "job_id": "JobID",
    "state": "State",
    "exit": "exit_code",
    "restarts": "RestartCnt",
    "end": "EndTime",
    "reason": "Reason",
    "name": "Name",
}
_SACCT = {
    "job_id": "JobIDRaw",
    "state": "State",
    "exit": "ExitCode",
    "end": "End",
    "reason": "Reason",
    "name": "JobName",
}
SQUEUE_FORMAT = ",".join(f"{field}:|" for field in _SQUEUE.values())
"""The argument of --Format: each field in full, with a separator instead of a width."""
SACCT_FORMAT = ",".join(_SACCT.values())
_NOTHING = {"", "None", "N/A", "Unknown", "None assigned", "(null)"}

Source = Literal["squeue", "sacct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job at the time of a query."""

    job_id: int
    name: str
    state: str
    """The state in Slurm's words, such as `RUNNING`; `phase` is its meaning."""
    reason: str | None
    """Why it waits, or why it ended, in Slurm's words."""
    exit_code: int | None
    """The exit code of the script, once it has ended; 0 also if a signal ended it."""
    signal: int | None
    """The signal that ended the script; None if it ended by itself."""
    restarts: int | None
    """The number of times that it was requeued; None from sacct, which does not report it."""
    end: str | None
    """The time at which it ended or must end: the cluster's local time, as Slurm wrote it."""
    source: Source

    @property
    def phase(self) -> JobPhase:
        known = phase_of(self.state)
        # If the queue no longer has the job and accounting shows no end, its end was lost.
        return known if self.source == "squeue" or known.ended else JobPhase.UNKNOWN

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None until its end. The job's own records are more specific."""
        if self.phase in (JobPhase.WAITING, JobPhase.RUNNING):
            return None
        return outcome_of(self.state, self.reason, self.exit_code)

    def left_s(self, now: float) -> float | None:
        """Return the seconds from `now` (as of `time.time`) to the end that Slurm reports; None if it reports
        none.

        Slurm's commands write local times, in the time zone of this process.
        """
        try:
            return None if self.end is None else datetime.fromisoformat(self.end).timestamp() - now
        except ValueError:
            return None

    @property
    def is_held(self) -> bool:
        """Whether it waits for a user or administrator, or for a condition that can no longer be met."""
        return self.phase is JobPhase.WAITING and waits_for_somebody(self.reason)

    @property
    def words(self) -> str:
        """Its state in one line: `FAILED, exit code 3, NonZeroExitCode`."""
        parts = [self.state]
        if self.phase.ended and self.signal:
            try:
                parts.append(signal.Signals(self.signal).name)
            except ValueError:
                # Slurm has its own signal numbers: 53 means that the log could not be opened.
                parts.append(f"signal {self.signal}")
        elif self.phase.ended and self.exit_code:
            parts.append(f"exit code {self.exit_code}")
        return ", ".join([*parts, *([self.reason] if self.reason else [])])


def read_squeue(text: str) -> tuple[JobView, ...]:
    """Read the jobs in squeue's output of SQUEUE_FORMAT. Raises SlurmError for other output."""
    # The separator follows each field, also the last.
    records = [{**values, "name": values["name"].removesuffix("|")} for values in _records(text, _SQUEUE)]
    return tuple(_view(values, "squeue") for values in records)


def read_sacct(text: str) -> tuple[JobView, ...]:
    """Read the jobs in sacct's `--parsable2` output of SACCT_FORMAT. Raises SlurmError for other output."""
    return tuple(_view(values, "sacct") for values in _records(text, _SACCT))


def _records(text: str, fields: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the fields of each line. The name is the last field: it may contain the separator and line
    breaks."""
    line = re.compile(rf"^\d+\|(?:[^|\n]*\|){{{len(fields) - 2}}}", re.MULTILINE)
    starts = [match.start() for match in line.finditer(text)]
    if text.strip() and (not starts or starts[0] != 0):
        raise SlurmError(f"a list of jobs is not as Slurm writes it: {text.splitlines()[0]!r}")
    for first, last in itertools.pairwise([*starts, len(text)]):
        values = text[first:last].removesuffix("\n").split("|", len(fields) - 1)
        yield dict(zip(fields, values, strict=True))


def _view(values: Mapping[str, str], source: Source) -> JobView:
    try:
        exit_code, number = _exit(values["exit"])
        return JobView(
            job_id=int(values["job_id"]),
            name=values["name"],
            # sacct: "CANCELLED by 1000", which is the number of the user who did it.
            state=values["state"].partition(" ")[0],
            reason=_known(values["reason"]),
            exit_code=exit_code,
            signal=number,
            restarts=int(values["restarts"]) if "restarts" in values else None,
            end=_known(values["end"]),
            source=source,
        )
    except ValueError as error:
        raise SlurmError(f"a job is not as Slurm writes it ({error}): {dict(values)}") from error


def _known(text: str) -> str | None:
    return None if text in _NOTHING else text


def _exit(text: str) -> tuple[int | None, int | None]:
    """Return (exit code, signal). squeue before 23.02 prints the raw status of wait(), all others
    `code:signal`."""
    if _known(text) is None:
        return None, None
    code, colon, number = text.partition(":")
    if colon:
        return int(code), int(number) or None
    status = int(code)
    ended_by = status & 0x7F
    return (0, ended_by) if ended_by else (status >> 8, None)
