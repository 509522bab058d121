"""What Slurm writes into a job's log before it ends the job: why it does so."""

from __future__ import annotations

import re

from results.outcome import Outcome

_NOTICE = re.compile(r"\*\*\* JOB (?P<job>\d+) ON \S+ CANCELLED AT \S+(?: DUE TO (?P<cause>[^*]+?))? \*\*\*")
_CAUSES = {
    None: Outcome.CANCELLED,
    "TIME LIMIT": Outcome.TIMED_OUT,
    "PREEMPTION": Outcome.PREEMPTED,
    # Somebody has put it back; it goes on later, as a preempted one does.
    "JOB REQUEUE": Outcome.PREEMPTED,
    "NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS": Outcome.NODE_FAILED,
}
"""By the words that slurmstepd has for them (slurmstepd/req.c, up to version 25.05)."""


def read_notice(log: str, job_id: int) -> tuple[Outcome, str] | None:
    """How to read the last notice in a job's log, and its words; None if there is none.

    A cause that is not listed here is `unknown`.
    """
    found = [match for match in _NOTICE.finditer(log) if int(match["job"]) == job_id]
    if not found:
        return None
    cause = found[-1]["cause"]
    words = "it was cancelled" if cause is None else f"Slurm ended it due to {cause.lower()}"
    return _CAUSES.get(cause, Outcome.UNKNOWN), words
