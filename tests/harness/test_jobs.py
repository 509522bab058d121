"""Jobs as they are planned and submitted: which there are, what they cost, how their ends are found out."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from builders import a_request
from launching import CODE, a_job, a_job_end, a_launch

from harness.features.kubernetes.pods import PodEnvironment
from harness.features.kubernetes.profile import KubernetesProfile
from harness.features.slurm import launcher as job_status
from harness.features.slurm.allocation import Allocation
from harness.features.slurm.call import run_document
from harness.jobs.closing import close_launches, close_lost_launches, end_of_job, kept_status
from harness.jobs.documents import Document, JobMaker, cost_lines, cost_rows, gpu_hours, require_within_budget
from harness.jobs.job_status import Cancelled, JobStatus, held_by_jobs
from harness.jobs.planned import baseline_of, planned_jobs
from harness.jobs.progress import progress
from harness.jobs.start import JobStart, obstacle, stranger_to
from harness.launch.tally import Conditions
from harness.launchers.jobs import forget, kept_job_statuses
from harness.machine.code import checkout, code_hash
from harness.plan.estimate import estimate
from harness.plan.expand import expand
from harness.plan.schedule import schedule
from harness.plan.study_file import StudyFile
from harness.plan.surroundings import Hardware
from results.environment import CodeVersion
from results.errors import UsageError
from results.job import Job, JobEnd, RunOptions, Submission
from results.job_store import JobStore
from results.launch import Launch, Slot
from results.outcome import Ending, Outcome
from results.plan import Placement, Plan
from results.site import SitePrice, TimeLimits
from results.store import Study
from slurm.job_view import JobView
from slurm.runner import SlurmError
from slurm.site import SiteProfile


def plan_of(**options: object) -> Plan:
    file = StudyFile(**{"workload": "mlp", "batch_size": 8, "device": "cpu"} | options)  # type: ignore[arg-type]
    request = a_request(file)
    return expand(request, study="s", created_at="2026-01-01T00:00:00Z")


def test_a_placement_is_a_job_with_all_its_repeats_and_the_same_baseline_everywhere() -> None:
    plan = plan_of(gpus="1..4", gpus_per_node=2, strategy="single,ddp,scratch-ddp", repeats=2)
    launches = schedule(plan.cells, repeats=2, gpus_per_node=2)
    jobs = planned_jobs(plan, launches, per_cell=False, earlier={}, hardware=Hardware())
    assert [(job.placement.nodes, job.placement.gpus_per_node) for job in jobs] == [(1, 1), (1, 2), (2, 2)]
    assert [(len(job.cells), len(job.launches)) for job in jobs] == [(1, 2), (2, 2), (2, 2)]
    alone = next(cell for cell in plan.cells if cell.strategy == "single")
    # The first job runs it anyhow.
    assert [job.baseline and job.baseline.id for job in jobs] == [None, alone.id, alone.id]
    # Its time is that of its launches, the baseline's among them.
    own = estimate(jobs[1].launches, earlier={}).seconds
    assert jobs[1].estimate_s > own
    assert jobs[0].estimate_s == estimate(jobs[0].launches, earlier={}).seconds


def test_a_job_a_cell_has_all_repeats_of_that_cell() -> None:
    plan = plan_of(gpus="1..2", strategy="single,ddp,scratch-ddp", repeats=3)
    jobs = planned_jobs(plan, schedule(plan.cells, repeats=3), per_cell=True, earlier={}, hardware=Hardware())
    assert sorted(job.cells for job in jobs) == sorted((cell.id,) for cell in plan.cells)
    assert {len(job.launches) for job in jobs} == {3}


def test_a_plan_without_a_single_device_gets_one_as_baseline() -> None:
    plan = plan_of(gpus="2,4", strategy="ddp", compression="bf16", collective="ring")
    baseline = baseline_of(plan.cells)
    assert (baseline.gpus, baseline.strategy, baseline.compression, baseline.collective) == (
        1,
        "single",
        "none",
        "default",
    )
    assert baseline.id == plan_of(gpus="1", strategy="single").cells[0].id
    # One whose replica is on two ranks.
    assert baseline_of([msgspec.structs.replace(plan.cells[0], model_parallel=2)]) == baseline


def test_a_plan_without_cells_has_no_jobs() -> None:
    # Data parallelism on one worker is a skip.
    plan = plan_of(gpus="1", strategy="ddp")
    assert plan.cells == ()
    assert (
        planned_jobs(plan, schedule(plan.cells, repeats=1), per_cell=False, earlier={}, hardware=Hardware())
        == []
    )


SITE = SiteProfile(
    gpus_per_node=8, exclusive=True, price=SitePrice(usd_per_gpu_hour=2.5, source="a list, 2026")
)


def documents_of(tmp_path: Path, site: SiteProfile, **options: object) -> list[Document]:
    plan = plan_of(**options)
    launches = schedule(plan.cells, repeats=plan.request.repeats, gpus_per_node=plan.request.gpus_per_node)
    jobs = planned_jobs(plan, launches, per_cell=False, earlier={}, hardware=Hardware())
    maker = JobMaker(Study(tmp_path / "s"), plan, "slurm", RunOptions(), CODE)
    return [run_document(site, maker, job) for job in jobs]


def test_hours_and_dollars_are_those_of_whole_nodes_where_they_are_the_jobs_alone(tmp_path: Path) -> None:
    documents = documents_of(tmp_path, SITE, gpus="8,16", gpus_per_node=8, strategy="ddp", repeats=1)
    planted = [
        replace(document, job=msgspec.structs.replace(document.job, estimate_s=360.0, time_limit_s=1800.0))
        for document in documents
    ]
    # 8 GPUs for 0.1 h and 16 for 0.1 h; at most half an hour of each.
    assert gpu_hours(planted) == (pytest.approx(2.4), pytest.approx(12.0))
    assert cost_lines(planted, SITE.price, gpus=True) == [
        "2 jobs: 2.40 GPU-hours expected, 12.00 at most (the time limits; a requeue begins anew)",
        "$6.00 expected, $30.00 at most, at $2.50 a GPU-hour (a list, 2026)",
    ]
    assert cost_rows(planted)[1][-2:] == ["1.60", "8.00"]
    # What they may take counts, not what is expected.
    require_within_budget(planted, 12.0)
    with pytest.raises(UsageError, match=r"the jobs may take 12\.00 by their time limits \(2\.40 expected\)"):
        require_within_budget(planted, 11.9)


def test_a_job_that_ran_out_of_time_asks_for_more(tmp_path: Path) -> None:
    options = {"gpus": "8,16", "gpus_per_node": 8, "strategy": "ddp", "repeats": 1}
    store, first = JobStore(tmp_path / "s"), documents_of(tmp_path, SITE, **options)
    assert [document.job.time_limit_s for document in first] == [600, 600]
    for document, outcome in zip(first, (Outcome.TIMED_OUT, Outcome.CRASHED), strict=True):
        store.add(document.job, document="", name="script.sh")
        store.add_end(end_of_job(document.job, None, Ending(outcome, "the job's time limit was near")))
    # Another cell's limit stays; a site may allow no more; a fixed limit is the user's.
    asked = [
        [document.job.time_limit_s for document in documents_of(tmp_path, site, **options)]
        for site in (
            SITE,
            msgspec.structs.replace(SITE, time=TimeLimits(maximum="15m")),
            msgspec.structs.replace(SITE, time=TimeLimits(fixed="12m")),
        )
    ]
    assert asked == [[1200, 600], [900, 600], [720, 720]]
    # It runs out again, by a limit of its user's: that says nothing of the job's.
    [again, _] = documents_of(tmp_path, SITE, **options)
    own = msgspec.structs.replace(again.job, options=RunOptions(max_time_s=60.0))
    store.add(own, document="", name="script.sh")
    store.add_end(end_of_job(own, None, Ending(Outcome.TIMED_OUT, "--max-time was over")))
    assert documents_of(tmp_path, SITE, **options)[0].job.time_limit_s == 1200


def test_a_gpu_that_the_profile_names_is_asked_for_its_steps(tmp_path: Path) -> None:
    plan = plan_of(gpus="8", gpus_per_node=8, strategy="ddp", repeats=1, device="cuda", workload="gpt2-small")
    launches = schedule(plan.cells, repeats=1, gpus_per_node=8)
    unknown, known = (
        planned_jobs(plan, launches, per_cell=False, earlier={}, hardware=Hardware(gpu_name=name))
        for name in (None, "H100-SXM5-80GB")
    )
    # 67 TFLOP/s of fp32 at 40 %: a step of 8 samples takes less than 2/3 s, the longest for the budget.
    assert known[0].estimate_s < unknown[0].estimate_s


def test_a_limit_below_the_estimate_is_told(tmp_path: Path) -> None:
    [document] = documents_of(tmp_path, SITE, gpus="8", gpus_per_node=8, strategy="ddp", repeats=1)
    short = replace(
        document, job=msgspec.structs.replace(document.job, estimate_s=7200.0, time_limit_s=3600.0)
    )
    assert "1 job may not end within the time limit; the same command continues after it" in cost_lines(
        [short], SITE.price, gpus=True
    )


def test_what_exclusive_nodes_cost_is_not_guessed(tmp_path: Path) -> None:
    site = SiteProfile(exclusive=True)
    documents = documents_of(tmp_path, site, gpus="8", gpus_per_node=8, strategy="ddp", repeats=1)
    assert gpu_hours(documents) is None
    assert "GPU-hours are not known" in cost_lines(documents, site.price, gpus=True)[0]


def test_the_same_call_makes_the_same_jobs_and_the_next_ones_go_on_counting(tmp_path: Path) -> None:
    first = documents_of(tmp_path, SITE, gpus="8,16", gpus_per_node=8, strategy="ddp", repeats=1)
    again = documents_of(tmp_path, SITE, gpus="8,16", gpus_per_node=8, strategy="ddp", repeats=1)
    assert first == again
    assert [document.job.job_id for document in first] == ["0001-1x8", "0002-2x8"]
    store = JobStore(tmp_path / "s")
    store.add(first[0].job, document=first[0].text, name="script.sh")
    [third, _] = documents_of(tmp_path, SITE, gpus="8,16", gpus_per_node=8, strategy="ddp", repeats=1)
    assert third.job.job_id == "0002-1x8"
    other = documents_of(tmp_path / "elsewhere", SITE, gpus="8", gpus_per_node=8, strategy="ddp", repeats=1)
    # Two studies of one name, in two folders: the scheduler's names differ.
    assert other[0].job.name != first[0].job.name


# How ends are found out. A queue that answers as told stands for states that are hard to come by in a lab.


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
    kept = job_status.kept(study, JobStore(study.root).jobs())
    return job_status.asked(study, kept, queue)  # type: ignore[arg-type]


def settled(study: Study, queue: Queue) -> list[JobStatus]:
    """The same, with jobs found of which it was not known whether they were submitted."""
    return job_status.settled(study, statuses(study, queue), queue)  # type: ignore[arg-type]


def view_of(state: str, *, job_id: int = 17, name: str = "name-0001-1x1", **facts: object) -> JobView:
    plain = JobView(
        job_id=job_id,
        name=name,
        state=state,
        reason=None,
        exit_code=None,
        signal=None,
        nodes=(),
        restarts=0,
        start=None,
        end=None,
        source="squeue",
    )
    return replace(plain, **facts)  # type: ignore[arg-type]


def submitted(
    tmp_path: Path, job: Job, scheduler_id: str | None = "17", *, cluster: str | None = "lab"
) -> Study:
    store = JobStore(tmp_path)
    store.add(job, document="#!/bin/bash\n", name="script.sh")
    if scheduler_id is not None:
        at = "2026-01-01T00:00:00Z"
        store.add_submission(
            Submission(job_id=job.job_id, scheduler_id=scheduler_id, submitted_at=at, cluster=cluster)
        )
    return Study(tmp_path)


def launch_of(slots: tuple[Slot, ...]) -> Launch:
    return a_launch(gpus_per_node=1, launch_id="l", slots=slots, job_id="0001-1x1")


def end_of(job: Job, outcome: Outcome, *, start: int = 0) -> JobEnd:
    return a_job_end(outcome, job_id=job.job_id, scheduler_id="17", start=start, reason="its own word")


def test_a_call_that_the_scheduler_saw_end_well_has_ended_well(tmp_path: Path) -> None:
    """A job without cells runs a command of bench, which writes no end of a job."""
    study = submitted(tmp_path, a_job(cells=()))
    [status] = statuses(study, Queue(view_of("COMPLETED", exit_code=0)))
    assert status.ended is not None
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
def test_a_job_that_left_no_word_ended_as_the_scheduler_says(
    tmp_path: Path, view: JobView | None, outcome: Outcome
) -> None:
    study = submitted(tmp_path, a_job())
    [status] = statuses(study, Queue(*([view] if view else [])))
    assert status.ended is not None
    assert (status.ended.outcome, status.is_live) == (outcome, False)
    # Written down: the scheduler is not asked again, and will have forgotten.
    silent = Queue()
    assert statuses(study, silent)[0].ended == status.ended
    assert silent.asked == []


def test_a_killed_program_is_told_and_its_runs_are_made_again(tmp_path: Path) -> None:
    plan = plan_of(gpus="1", strategy="single", repeats=1)
    study = submitted(tmp_path, a_job())
    study.add_plan(plan)
    study.add_launch(launch_of((Slot(cell_id=plan.cells[0].id, run_id="begun", repeat=1),)))
    study.start_run(plan.cells[0].id, "begun")
    words = "the job's program was killed: the scheduler says FAILED, SIGKILL"
    [status] = statuses(study, Queue(view_of("FAILED", exit_code=0, signal=9)))
    assert (status.state, status.words) == ("crashed", words)
    [result] = study.results()
    assert (result.outcome, result.reason) == (Outcome.MISSING_RANKS, words)
    assert result.outcome.runs_again


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "MOONLIGHT"])
def test_a_job_that_may_still_run_keeps_its_cells(tmp_path: Path, state: str) -> None:
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
    tmp_path: Path,
    own_word: Outcome | None,
    scheduler_id: str | None,
    view: JobView | None,
    state: str,
    words: str,
) -> None:
    job = a_job()
    study = submitted(tmp_path, job, scheduler_id)
    if own_word is not None:
        JobStore(tmp_path).add_end(end_of(job, own_word))
    [status] = settled(study, Queue(*([view] if view else [])))
    assert (status.state, status.words[: len(words)]) == (state, words)


def test_all_jobs_are_asked_about_at_once(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        study = submitted(tmp_path, a_job(f"000{number}-1x1"), str(number))
    queue = Queue()
    statuses(study, queue)
    assert queue.asked == [[1, 2, 3]]


def test_a_job_whose_submission_was_not_heard_of_is_found_by_its_name(tmp_path: Path) -> None:
    study = submitted(tmp_path, a_job(), None)
    queue = Queue(view_of("RUNNING", job_id=23, name="name-0001-1x1"))
    [lost] = statuses(study, queue)
    assert lost.state == "not submitted"
    [found] = settled(study, queue)
    assert (found.is_live, JobStore(tmp_path).submission("0001-1x1")) == (True, found.submission)
    assert found.submission is not None
    assert found.submission.scheduler_id == "23"


def test_another_clusters_jobs_are_not_taken_for_ours(tmp_path: Path) -> None:
    study = submitted(tmp_path, a_job())
    with pytest.raises(SlurmError, match="job 17 'theirs', but bench submitted it as 'name-0001-1x1'"):
        statuses(study, Queue(view_of("COMPLETED", name="theirs")))
    assert JobStore(tmp_path).ended("0001-1x1") is None
    # Nobody can be asked: they are closed by hand.
    assert forget(study) == 1
    assert [(job.state, job.is_live) for job in kept_job_statuses(study)] == [("cancelled", False)]


def test_jobs_are_asked_about_where_they_were_submitted(tmp_path: Path) -> None:
    study = submitted(tmp_path, a_job(), cluster="other")
    queue = Queue()
    with pytest.raises(SlurmError, match="are on the cluster other, and this is lab"):
        statuses(study, queue)
    assert queue.asked == []


def test_a_job_that_accounting_alone_believes_to_run_can_be_closed(tmp_path: Path) -> None:
    study = submitted(tmp_path, a_job())
    queue = Queue(view_of("RUNNING", source="sacct"))
    assert statuses(study, queue)[0].is_live
    done = job_status.cancel(study, statuses(study, queue), queue)  # type: ignore[arg-type]
    assert done == Cancelled(told=("17",))
    assert queue.cancelled == [17]
    assert [job.state for job in kept_job_statuses(study)] == ["cancelled"]


def test_a_reader_who_may_not_write_sees_what_would_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = submitted(tmp_path, a_job())
    monkeypatch.setattr("os.access", lambda path, mode: False)
    [status] = statuses(study, Queue(view_of("NODE_FAIL")))
    assert status.state == "node_failed"
    assert JobStore(tmp_path).ended("0001-1x1") is None


def test_open_launches_of_a_job_that_is_gone_are_closed_once(tmp_path: Path) -> None:
    plan = plan_of(gpus=1, strategy="single", repeats=1)
    [cell] = plan.cells
    study = Study(tmp_path)
    study.add_plan(plan)
    slots = tuple(Slot(cell_id=cell.id, run_id=run_id, repeat=1) for run_id in ("begun", "not-begun"))
    launch = launch_of(slots)
    study.add_launch(launch)
    study.add_launch(msgspec.structs.replace(launch, launch_id="m", job_id="0002-1x1"))
    study.start_run(cell.id, "begun")
    stopped = Ending(Outcome.NODE_FAILED, "n1 went away")
    assert close_launches(study, "0001-1x1", stopped, scheduler="NODE_FAIL") == 1
    assert close_launches(study, "0001-1x1", stopped) == 0
    [result] = study.results()
    assert (result.run_id, result.outcome, result.reason) == ("begun", Outcome.NODE_FAILED, "n1 went away")
    assert (study.has_attempt("l"), study.has_attempt("m")) == (True, False)


def test_launches_of_a_killed_bench_are_closed_and_those_of_jobs_and_persons_are_not(tmp_path: Path) -> None:
    plan = plan_of(gpus=1, strategy="single", repeats=1)
    [cell] = plan.cells
    study = Study(tmp_path)
    study.add_plan(plan)
    job = launch_of((Slot(cell_id=cell.id, run_id="begun", repeat=1),))
    own = msgspec.structs.replace(job, launch_id="own", job_id=None, supervisor_pid=4711)
    by_hand = msgspec.structs.replace(own, launch_id="by-hand", supervisor_pid=None)
    for launch in (job, own, by_hand):
        study.add_launch(launch)
    study.start_run(cell.id, "begun")
    assert (close_lost_launches(study), close_lost_launches(study)) == (1, 0)
    assert [study.has_attempt(one.launch_id) for one in (job, own, by_hand)] == [False, True, False]
    [result] = study.results()
    assert result.outcome is Outcome.MISSING_RANKS
    assert str(result.reason).startswith("bench (process 4711) is gone")


# What a job looks at before it begins.

HERE = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_GPUS_ON_NODE": "8",
    "MASTER_ADDR": "10.0.0.1",
}
GOOD = a_job(placement=Placement(nodes=2, gpus_per_node=8), code=CodeVersion(code_hash=code_hash(checkout())))


def test_an_allocation_is_read_from_slurms_variables() -> None:
    allocation = Allocation.here({**HERE, "SLURM_RESTART_COUNT": "2"})
    assert allocation == Allocation(
        slurm_id=17, start=2, nodes=("n1", "n2"), gpus_per_node=8, address="10.0.0.1"
    )
    assert Allocation.here({}) is None


@pytest.mark.parametrize(
    ("job", "variables", "submission", "reason"),
    [
        (GOOD, {}, "17", None),
        # The one who submitted it has not written so yet.
        (GOOD, {}, None, None),
        (GOOD, {"SLURM_JOB_NODELIST": "n1"}, "17", "the allocation has 1 node and the job is for 2"),
        (GOOD, {"SLURM_GPUS_ON_NODE": "4"}, "17", "a node has 4 GPUs here and the job needs 8"),
        (GOOD, {}, "16", "it was submitted as job 16, and this is job 17"),
    ],
)
def test_a_job_is_not_run_where_it_does_not_belong(
    job: Job, variables: dict[str, str], submission: str | None, reason: str | None
) -> None:
    allocation = Allocation.here({**HERE, **variables})
    assert allocation is not None
    at = "2026-01-01T00:00:00Z"
    told = None if submission is None else Submission(job_id="j", scheduler_id=submission, submitted_at=at)
    environment = SimpleNamespace(scheduler_id="17")
    found = stranger_to(told, environment) or allocation.obstacle(job)  # type: ignore[arg-type]
    assert found is None if reason is None else str(found).startswith(reason)


@pytest.mark.parametrize(
    ("job", "start", "ended", "reason"),
    [
        (GOOD, 2, None, None),
        (GOOD, 3, None, "it was requeued 3 times (--retries 2)"),
        (msgspec.structs.replace(GOOD, code=CODE), 0, None, "the code of bench was edited after"),
        (GOOD, 0, Outcome.CANCELLED, "it was closed before (cancelled: its own word), and other jobs"),
    ],
)
def test_a_job_is_not_run_again_and_again_nor_with_other_code(
    tmp_path: Path, job: Job, start: int, ended: Outcome | None, reason: str | None
) -> None:
    store = submitted(tmp_path, job, None)
    for number in range(start):
        JobStore(store.root).add_end(end_of(job, Outcome.PREEMPTED, start=number))
    profile = KubernetesProfile(image="bench:1", volume_claim="results")
    pod = PodEnvironment(
        msgspec.structs.replace(job, site=msgspec.to_builtins(profile)), JobStore(store.root)
    )
    found = obstacle(job, pod, None if ended is None else end_of(job, ended))
    assert found is None if reason is None else str(found).startswith(reason)


def test_the_cell_that_a_running_job_is_at_runs_from_the_start_of_its_launch_on(tmp_path: Path) -> None:
    plan = plan_of(gpus="2", strategy="ddp,scratch-ddp", repeats=1)
    first, second = (cell.id for cell in plan.cells)
    job = a_job(cells=(first, second))
    study = submitted(tmp_path, job)
    study.add_plan(plan)
    queued = kept_status(JobStore(tmp_path), job)
    status = replace(queued, is_running=True)

    def found(jobs: list[JobStatus]) -> dict[str, tuple[str, str]]:
        rows = progress(study, [plan], Conditions(code_hash="c0de"), jobs)
        return {row.cell: (row.state, row.others) for row in rows}

    later = ("waiting", "job 0001-1x1 runs and has not reached it")
    assert found([queued]) == dict.fromkeys((first, second), ("waiting", ""))
    assert found([status]) == dict.fromkeys((first, second), later)
    slots = tuple(Slot(cell_id=cell, run_id=f"of-{cell}", repeat=1) for cell in (first, second))
    path = study.add_launch(launch_of(slots))
    # The workers start.
    assert found([status]) == {first: ("running", ""), second: later}
    log = path.parent / "rank-00000.jsonl"
    log.write_text(f'{{"event": "run", "run": "of-{second}", "cell": "{second}"}}\n')
    assert found([status]) == {first: later, second: ("running", "")}


class Near:
    """The environment of a job whose scheduler says after how many seconds it ends."""

    scheduler_id, start, nodes, notice_s = "17", 0, ("n1",), 60.0

    def __init__(self, left_s: float | None) -> None:
        self._left_s = left_s

    def left_s(self) -> float | None:
        return self._left_s


@pytest.mark.parametrize(
    ("left_s", "launches_end_in_s"),
    # Slurm was 55 s early; it was later than asked, because the end was brought forward; it does not answer.
    [(115.0, 95.0), (30.0, 10.0), (None, 40.0)],
)
def test_a_notice_has_the_scheduler_asked_when_the_job_ends(
    tmp_path: Path, left_s: float | None, launches_end_in_s: float
) -> None:
    start = JobStart(Study(tmp_path), a_job(), Near(left_s))  # type: ignore[arg-type]
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    began = time.monotonic()
    try:
        with start._signals():
            os.kill(os.getpid(), signal.SIGUSR1)
            while (found := start._deadline.left_s) is None:
                assert time.monotonic() < began + 60
                time.sleep(0.01)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert launches_end_in_s - (time.monotonic() - began) <= found <= launches_end_in_s


def test_the_time_left_is_that_to_slurms_local_time() -> None:
    view = view_of("RUNNING", end="2026-11-22T10:00:00")
    at = datetime(2026, 11, 22, 9, 58, 30).timestamp()
    assert view.left_s(at) == 90
    assert view_of("PENDING").left_s(at) is None
    assert view_of("RUNNING", end="soon").left_s(at) is None


def test_a_status_says_what_is_held() -> None:
    plain = JobStatus(job=a_job(), submission=None, ended=None)
    held = job_status.seen(plain, view_of("PENDING", reason="JobHeldUser"))
    assert held.words == "held: it will not start by itself; PENDING, JobHeldUser"
