"""Messages of Slurm in the logs of jobs and launches: why it ends a job, and srun's messages about nodes."""

from __future__ import annotations

import re

from results.outcome import Ending, Outcome

_NOTICE = re.compile(r"\*\*\* JOB (?P<job>\d+) ON \S+ CANCELLED AT \S+(?: (?P<tail>[^*]+?))? \*\*\*")
_CAUSES = {
    None: Outcome.CANCELLED,
    "DUE TO TIME LIMIT": Outcome.TIMED_OUT,
    "DUE TO PREEMPTION": Outcome.PREEMPTED,
    # The job was requeued; it continues later, as a preempted job does.
    "DUE TO JOB REQUEUE": Outcome.PREEMPTED,
    "DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS": Outcome.NODE_FAILED,
}
"""The causes by slurmstepd's words for them (slurmstepd/req.c, up to version 25.05)."""

SRUN_KILLED = re.compile(r"^srun: error: (?P<node>\S+): tasks? \S+: Killed$", re.MULTILINE)
"""srun prints this when its task on a node was killed by SIGKILL."""
NODE_FAILED = re.compile(r"^srun: error: Node failure on (?P<node>\S+)$", re.MULTILINE)
"""srun prints this when Slurm has set a node of its step down (_node_fail_handler() in step_launch.c).

Slurm queues this message before it ends the job or puts it back (job_mgr.c): srun may end before the notice.
"""
CONTROLLER_AWAY = re.compile(
    r"^srun: error: (?P<words>Unable to (?:confirm allocation|create step) for job \d+: "
    r"(?:Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted).*)$",
    re.MULTILINE,
)
"""srun prints this when Slurm's controller does not answer for MessageTimeout, as during a restart."""
ALLOCATION_OVER = re.compile(
    r"^srun: error: (?P<words>Unable to (?:confirm allocation|create step) for job \d+: "
    r"(?:Job/step already completing or completed|Invalid job id specified|"
    r"Job is pending execution|Duplicate job id).*|Slurm job \d+ has expired.*)$",
    re.MULTILINE,
)
"""srun prints this when Slurm has ended the job, possibly before the job's program gets a signal.

For a requeued job srun prints that it is pending when it looks the job up, and Duplicate job id when it asks
for a step after that.
"""
STEP_PENDING = re.compile(
    r"^srun: (?P<words>Job (?:\d+ )?step creation (?:temporarily|still) disabled, retrying .*)$"
    r"(?![\s\S]*^srun: Step created for )",
    re.MULTILINE,
)
"""srun has printed this, and not yet that the step is created: another step holds the nodes.

Version 22.05 prints it first after a minute.
"""
OUT_OF_MEMORY_KILLS = re.compile(r"Detected (?P<kills>\d+) oom[-_ ]kill event")
"""slurmstepd prints this if Slurm confines jobs (task/cgroup)."""


def read_notice(log: str, job_id: int) -> Ending | None:
    """Return the ending of a job by the last notice in its log; None without a notice.

    The outcome of a cause that is not listed here is `unknown`.
    """
    found = [match for match in _NOTICE.finditer(log) if int(match["job"]) == job_id]
    if not found:
        return None
    tail = found[-1]["tail"]
    words = "it was cancelled" if tail is None else f"Slurm ended it {tail.lower()}"
    return Ending(_CAUSES.get(tail, Outcome.UNKNOWN), words)
