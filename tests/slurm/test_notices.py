"""Why Slurm ended a job, from the lines that Slurm 22.05 wrote into the logs of jobs that it ended."""

from __future__ import annotations

import pytest

from results.outcome import Outcome
from slurm.notices import ALLOCATION_OVER, NODE_FAILED, STEP_PENDING, read_notice

START = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T10:31:18"


@pytest.mark.parametrize(
    ("end", "outcome", "words"),
    [
        ("", Outcome.CANCELLED, "it was cancelled"),
        (" DUE TO TIME LIMIT", Outcome.TIMED_OUT, "Slurm ended it due to time limit"),
        (" DUE TO PREEMPTION", Outcome.PREEMPTED, "Slurm ended it due to preemption"),
        (" DUE TO JOB REQUEUE", Outcome.PREEMPTED, "Slurm ended it due to job requeue"),
        (
            " DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS",
            Outcome.NODE_FAILED,
            "Slurm ended it due to node failure, see slurmctld log for details",
        ),
        # Not one that Slurm is known to write.
        (" DUE TO MOONLIGHT", Outcome.UNKNOWN, "Slurm ended it due to moonlight"),
        (" DUE to SIGNAL Terminated", Outcome.UNKNOWN, "Slurm ended it due to signal terminated"),
    ],
)
def test_each_notice_has_its_outcome(end, outcome, words) -> None:
    assert read_notice(f"training\n{START}{end} ***\nmore\n", 7) == (outcome, words)


def test_the_last_notice_of_the_job_itself_counts() -> None:
    other = START.replace("JOB 7", "JOB 71")
    log = f"{START} DUE TO PREEMPTION ***\n{START} DUE TO TIME LIMIT ***\n{other} ***\n"
    assert read_notice(log, 7) == (Outcome.TIMED_OUT, "Slurm ended it due to time limit")
    assert read_notice(log, 1) is None
    assert read_notice("*** all is well ***", 7) is None


def test_a_step_that_is_cancelled_is_not_the_job() -> None:
    step = "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T10:31:18 ***"
    assert read_notice(step, 7) is None


def test_srun_names_a_node_that_failed() -> None:
    log = (
        "srun: error: n1: task 0: Exited with exit code 1\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=1.1\n"
        "srun: error: Node failure on n2\n"
    )
    assert [match["node"] for match in NODE_FAILED.finditer(log)] == ["n2"]
    assert NODE_FAILED.search("rank 0: srun: error: Node failure on n2\n") is None


@pytest.mark.parametrize(
    "words",
    [
        "Unable to create step for job 8: Job/step already completing or completed",
        # As Slurm 22.05 said it after `scontrol requeue`.
        "Unable to confirm allocation for job 1: Job is pending execution",
        "Unable to create step for job 8: Duplicate job id",
        "Slurm job 8 has expired.",
    ],
)
def test_srun_says_that_the_job_is_over(words) -> None:
    match = ALLOCATION_OVER.search(f"srun: lacks support for cpu binding\nsrun: error: {words}\nmore\n")
    assert match["words"] == words


def test_a_launch_that_is_refused_otherwise_is_no_end_of_the_job() -> None:
    busy = "srun: error: Unable to create step for job 8: Requested nodes are busy\n"
    assert ALLOCATION_OVER.search(busy) is None


def test_srun_says_that_another_step_holds_the_nodes() -> None:
    words = "Job 3 step creation temporarily disabled, retrying (Requested nodes are busy)"
    log = f"srun: cluster configuration lacks support for cpu binding\nsrun: {words}\n"
    match = STEP_PENDING.search(log)
    assert match["words"] == words
    # What comes then, such as an image that is fetched, is not the creation of the step.
    assert STEP_PENDING.search(f"{log}srun: Step created for job 3\n") is None
