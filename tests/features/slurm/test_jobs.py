"""Jobs of Slurm: how their ends are found out, and what a job looks at before it begins.

Queues with given answers are for states that are hard to bring about in a lab.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial

import builders
import pytest
from launching import a_job, a_launch_of, end_of, submitted

from harness.features.slurm import launcher as slurm_jobs
from harness.features.slurm.allocation import SlurmStarter
from harness.jobs.job_status import Cancelled, JobStatus, held_by_jobs
from harness.jobs.start import JobStart
from harness.launchers.jobs import forget, kept_job_statuses
from harness.machine.code import checkout, code_hash
from results.environment import CodeVersion
from results.errors import MachineError
from results.job_store import JobStore
from results.launch import Slot
from results.outcome import Outcome
from results.plan import Placement
from results.store import Study
from slurm.job_view import JobView
from slurm.runner import SlurmError

plan_of = partial(builders.plan_of, workload="mlp", batch_size=8, device="cpu")
GOOD = a_job(placement=Placement(nodes=2, gpus_per_node=8), code=CodeVersion(code_hash=code_hash(checkout())))


class Queue:
    """A scheduler with recorded answers."""

    cluster_name = "lab"

    def __init__(self, *views: JobView) -> None:
        self._views = views
        self.asked: list[list[int]] = []

    def query(self, job_ids: Collection[int]) -> dict[int, JobView]:
        self.asked.append(sorted(job_ids))
        return {view.job_id: view for view in self._views if view.job_id in job_ids}

    def own_jobs(self) -> Sequence[JobView]:
        return self._views

    def cancel(self, job_ids: Collection[int]) -> None:
        self.cancelled = list(job_ids)


def statuses(study: Study, queue: Queue) -> list[JobStatus]:
    """The statuses of the study's jobs after this queue was asked."""
    kept = slurm_jobs.SlurmLauncher().kept(study, JobStore(study.root).jobs())
    return slurm_jobs.asked(study, kept, queue)


def settled(study: Study, queue: Queue) -> list[JobStatus]:
    """The same, with jobs found of which it was not known whether they were submitted."""
    return slurm_jobs.settled(study, statuses(study, queue), queue)


def view_of(state: str, *, job_id: int = 17, name: str = "name-0001-1x1", **facts: object) -> JobView:
    plain = JobView(
        job_id=job_id,
        name=name,
        state=state,
        reason=None,
        exit_code=None,
        signal=None,
        restarts=0,
        end=None,
        source="squeue",
    )
    return replace(plain, **facts)


def test_a_call_that_the_scheduler_saw_end_well_has_ended_well(tmp_path) -> None:
    """A job without cells runs a command of bench, which writes no end of a job."""
    study = submitted(tmp_path, a_job(cells=()))
    [status] = statuses(study, Queue(view_of("COMPLETED", exit_code=0)))
    assert status.ended.outcome is Outcome.OK


@pytest.mark.parametrize(
    ("view", "outcome"),
    [
        (view_of("NODE_FAIL"), Outcome.NODE_FAILED),
        (view_of("BOOT_FAIL"), Outcome.NODE_FAILED),
        (view_of("PREEMPTED"), Outcome.PREEMPTED),
        (view_of("OUT_OF_MEMORY"), Outcome.OUT_OF_MEMORY),
        (view_of("DEADLINE"), Outcome.TIMED_OUT),
        (view_of("FAILED", exit_code=1), Outcome.CRASHED),
        (view_of("FAILED", exit_code=0, signal=9), Outcome.CRASHED),
        # It ended well, and yet the program in it has not said so.
        (view_of("COMPLETED", exit_code=0), Outcome.UNKNOWN),
        (None, Outcome.UNKNOWN),
    ],
)
def test_a_job_that_left_no_word_ended_as_the_scheduler_says(tmp_path, view, outcome) -> None:
    study = submitted(tmp_path, a_job())
    [status] = statuses(study, Queue(*([view] if view else [])))
    assert (status.ended.outcome, status.is_live) == (outcome, False)
    # Written down: the scheduler is not asked again, and will have forgotten.
    silent = Queue()
    assert statuses(study, silent)[0].ended == status.ended
    assert silent.asked == []


def test_a_killed_program_is_told_and_its_runs_are_made_again(tmp_path) -> None:
    plan = plan_of(gpus="1", strategy="single", repeats=1)
    study = submitted(tmp_path, a_job())
    study.add_plan(plan)
    study.add_launch(a_launch_of((Slot(cell_id=plan.cells[0].id, run_id="begun", repeat=1),)))
    study.start_run(plan.cells[0].id, "begun")
    words = "the job's program was killed: the scheduler says FAILED, SIGKILL"
    [status] = statuses(study, Queue(view_of("FAILED", exit_code=0, signal=9)))
    assert (status.state, status.words) == ("crashed", words)
    [result] = study.results()
    assert (result.outcome, result.reason) == (Outcome.MISSING_RANKS, words)
    assert result.outcome.runs_again


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "MOONLIGHT"])
def test_a_job_that_may_still_run_keeps_its_cells(tmp_path, state) -> None:
    study = submitted(tmp_path, a_job())
    found = statuses(study, Queue(view_of(state)))
    assert (found[0].is_live, held_by_jobs(found)) == (True, {"cell-a"})
    assert JobStore(tmp_path).ended("0001-1x1") is None


@pytest.mark.parametrize(
    ("own_word", "scheduler_id", "view", "state", "words"),
    [
        (Outcome.TIMED_OUT, "17", view_of("COMPLETED", exit_code=0), "timed_out", "its own word"),
        # The word was for an earlier start.
        (
            Outcome.PREEMPTED,
            "17",
            view_of("NODE_FAIL", restarts=1),
            "node_failed",
            "the scheduler says NODE_FAIL;",
        ),
        (None, None, None, "cancelled", "the scheduler never took it"),
        # It ran, and its submission was not heard of.
        (Outcome.OK, None, None, "ok", "its own word"),
    ],
)
def test_a_jobs_own_word_for_its_last_start_counts_more_than_the_schedulers(
    tmp_path, own_word, scheduler_id, view, state, words
) -> None:
    job = a_job()
    study = submitted(tmp_path, job, scheduler_id)
    if own_word is not None:
        JobStore(tmp_path).add_end(end_of(job, own_word))
    [status] = settled(study, Queue(*([view] if view else [])))
    assert (status.state, status.words[: len(words)]) == (state, words)


def test_all_jobs_are_asked_about_at_once(tmp_path) -> None:
    for number in (1, 2, 3):
        study = submitted(tmp_path, a_job(f"000{number}-1x1"), str(number))
    queue = Queue()
    statuses(study, queue)
    assert queue.asked == [[1, 2, 3]]


def test_a_job_whose_submission_was_not_heard_of_is_found_by_its_name(tmp_path) -> None:
    study = submitted(tmp_path, a_job(), None)
    queue = Queue(view_of("RUNNING", job_id=23, name="name-0001-1x1"))
    [lost] = statuses(study, queue)
    assert lost.state == "not submitted"
    [found] = settled(study, queue)
    assert (found.is_live, JobStore(tmp_path).submission("0001-1x1")) == (True, found.submission)
    assert found.submission.scheduler_id == "23"


def test_another_clusters_jobs_are_not_taken_for_ours(tmp_path) -> None:
    study = submitted(tmp_path, a_job())
    with pytest.raises(SlurmError, match="job 17 'theirs', but bench submitted it as 'name-0001-1x1'"):
        statuses(study, Queue(view_of("COMPLETED", name="theirs")))
    assert JobStore(tmp_path).ended("0001-1x1") is None
    # Nobody can be asked: they are closed by hand.
    assert forget(study) == 1
    assert [(job.state, job.is_live) for job in kept_job_statuses(study)] == [("cancelled", False)]


def test_jobs_are_asked_about_where_they_were_submitted(tmp_path) -> None:
    study = submitted(tmp_path, a_job(), cluster="other")
    queue = Queue()
    with pytest.raises(SlurmError, match="are on the cluster other, and this is lab"):
        statuses(study, queue)
    assert queue.asked == []


def test_a_job_that_accounting_alone_believes_to_run_can_be_closed(tmp_path) -> None:
    study = submitted(tmp_path, a_job())
    queue = Queue(view_of("RUNNING", source="sacct"))
    assert statuses(study, queue)[0].is_live
    done = slurm_jobs.cancel(study, statuses(study, queue), queue)
    assert done == Cancelled(told=("17",))
    assert queue.cancelled == [17]
    assert [job.state for job in kept_job_statuses(study)] == ["cancelled"]


def test_a_reader_who_may_not_write_sees_what_would_be_written(tmp_path, monkeypatch) -> None:
    study = submitted(tmp_path, a_job())
    monkeypatch.setattr("os.access", lambda path, mode: False)
    [status] = statuses(study, Queue(view_of("NODE_FAIL")))
    assert status.state == "node_failed"
    assert JobStore(tmp_path).ended("0001-1x1") is None


def test_the_time_left_is_that_to_slurms_local_time() -> None:
    view = view_of("RUNNING", end="2026-11-22T10:00:00")
    at = datetime(2026, 11, 22, 9, 58, 30).timestamp()
    assert view.left_s(at) == 90
    assert view_of("PENDING").left_s(at) is None
    assert view_of("RUNNING", end="soon").left_s(at) is None


def test_a_status_says_what_is_held() -> None:
    plain = JobStatus(job=a_job(), submission=None, ended=None)
    held = slurm_jobs.seen(plain, view_of("PENDING", reason="JobHeldUser"))
    assert held.words == "held: it will not start by itself; PENDING, JobHeldUser"


HERE = {
    **{"SLURM_JOB_ID": "17", "JOB_HOSTS": "n1\nn2", "SLURM_GPUS_ON_NODE": "8"},
    **{"SLURM_RESTART_COUNT": "2", "MASTER_ADDR": "10.0.0.1"},
}


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({}, None),
        ({"JOB_HOSTS": "n1"}, "the allocation has 1 node and the job is for 2"),
        ({"SLURM_GPUS_ON_NODE": "4"}, "a node has 4 GPUs here and the job needs 8"),
    ],
)
def test_a_job_is_not_run_where_it_does_not_belong(variables, reason, tmp_path) -> None:
    starter = SlurmStarter(GOOD, JobStore(tmp_path), HERE | variables)
    assert (starter.scheduler_id, starter.start) == ("17", 2)
    found = starter.obstacle(GOOD)
    assert found is None if reason is None else str(found).startswith(reason)


def test_a_script_that_was_submitted_by_hand_records_no_end(tmp_path, capsys) -> None:
    study = submitted(tmp_path, GOOD, "16")
    assert JobStart(study, GOOD, SlurmStarter(GOOD, JobStore(tmp_path), HERE)).run() == 1
    assert "it was submitted as job 16, and this is job 17" in " ".join(capsys.readouterr().err.split())
    assert JobStore(tmp_path).starts(GOOD.job_id) == []
    with pytest.raises(MachineError, match="outside of one"):
        SlurmStarter(GOOD, JobStore(tmp_path), {})
