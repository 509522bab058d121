"""Jobs as they are planned and submitted: which there are, what they cost, how their ends are found out."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from builders import a_request
from launching import CODE, a_job, a_launch_of, end_of, submitted

from harness.jobs.closing import close_launches, close_lost_launches, end_of_job, kept_status
from harness.jobs.documents import Document, JobMaker, cost_lines, cost_rows, gpu_hours, require_within_budget
from harness.jobs.job_status import JobStatus
from harness.jobs.planned import baseline_of, planned_jobs
from harness.jobs.progress import progress
from harness.jobs.start import JobStart, obstacle
from harness.launch.tally import Conditions
from harness.machine.code import checkout, code_hash
from harness.plan.estimate import estimate
from harness.plan.expand import expand
from harness.plan.schedule import schedule
from harness.plan.study_file import StudyFile
from harness.plan.surroundings import Devices
from results.environment import CodeVersion
from results.errors import UsageError
from results.job import RunOptions
from results.job_store import JobStore
from results.launch import Slot
from results.outcome import Ending, Outcome
from results.plan import Placement, Plan
from results.site import SitePrice, TimeLimits
from results.store import Study
from slurm.site import SiteProfile


def plan_of(**options: object) -> Plan:
    file = StudyFile(**{"workload": "mlp", "batch_size": 8, "device": "cpu"} | options)
    request = a_request(file)
    return expand(request, study="s", created_at="2026-01-01T00:00:00Z")


def test_a_placement_is_a_job_with_all_its_repeats_and_the_same_baseline_everywhere() -> None:
    plan = plan_of(gpus="1..4", gpus_per_node=2, strategy="single,ddp,scratch-ddp", repeats=2)
    launches = schedule(plan.cells, repeats=2, gpus_per_node=2)
    jobs = planned_jobs(plan, launches, per_cell=False, earlier={}, hardware=Devices())
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
    jobs = planned_jobs(plan, schedule(plan.cells, repeats=3), per_cell=True, earlier={}, hardware=Devices())
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
        planned_jobs(plan, schedule(plan.cells, repeats=1), per_cell=False, earlier={}, hardware=Devices())
        == []
    )


PRICE = SitePrice(usd_per_gpu_hour=2.5, source="a list, 2026")


def documents_of(
    tmp_path: Path, time: TimeLimits | None = None, *, gpus_of_node: int | None = 8, **options: object
) -> list[Document]:
    """The jobs of a launcher that charges for all GPUs of the nodes; None: it does not know how many."""
    plan = plan_of(**options)
    launches = schedule(plan.cells, repeats=plan.request.repeats, gpus_per_node=plan.request.gpus_per_node)
    jobs = planned_jobs(plan, launches, per_cell=False, earlier={}, hardware=Devices())
    site = SiteProfile(exclusive=True, gpus_per_node=gpus_of_node, time=time or TimeLimits())
    maker = JobMaker(Study(tmp_path / "s"), plan, "elsewhere", RunOptions(), CODE, site)
    return [Document(job=job, text=job.name) for job in map(maker.run, jobs)]


def test_hours_and_dollars_are_those_of_whole_nodes_where_they_are_the_jobs_alone(tmp_path) -> None:
    documents = documents_of(tmp_path, gpus="8,16", gpus_per_node=8, strategy="ddp", repeats=1)
    planted = [
        replace(document, job=msgspec.structs.replace(document.job, estimate_s=360.0, time_limit_s=1800.0))
        for document in documents
    ]
    # 8 GPUs for 0.1 h and 16 for 0.1 h; at most half an hour of each.
    assert gpu_hours(planted) == (pytest.approx(2.4), pytest.approx(12.0))
    assert cost_lines(planted, PRICE, gpus=True) == [
        "2 jobs: 2.40 GPU-hours expected, 12.00 at most (the time limits; a requeue begins anew)",
        "$6.00 expected, $30.00 at most, at $2.50 a GPU-hour (a list, 2026)",
    ]
    assert cost_rows(planted)[1][-2:] == ["1.60", "8.00"]
    # What they may take counts, not what is expected.
    require_within_budget(planted, 12.0)
    with pytest.raises(UsageError, match=r"the jobs may take 12\.00 by their time limits \(2\.40 expected\)"):
        require_within_budget(planted, 11.9)


def test_a_job_that_ran_out_of_time_asks_for_more(tmp_path) -> None:
    options = {"gpus": "8,16", "gpus_per_node": 8, "strategy": "ddp", "repeats": 1}
    store, first = JobStore(tmp_path / "s"), documents_of(tmp_path, **options)
    assert [document.job.time_limit_s for document in first] == [600, 600]
    for document, outcome in zip(first, (Outcome.TIMED_OUT, Outcome.CRASHED), strict=True):
        store.add(document.job, document="", name="script.sh")
        store.add_end(end_of_job(document.job, None, Ending(outcome, "the job's time limit was near")))
    # Another cell's limit stays; a site may allow no more; a fixed limit is the user's.
    asked = [
        [document.job.time_limit_s for document in documents_of(tmp_path, limits, **options)]
        for limits in (TimeLimits(), TimeLimits(maximum="15m"), TimeLimits(fixed="12m"))
    ]
    assert asked == [[1200, 600], [900, 600], [720, 720]]
    # It runs out again, by a limit of its user's: that says nothing of the job's.
    [again, _] = documents_of(tmp_path, **options)
    own = msgspec.structs.replace(again.job, options=RunOptions(max_time_s=60.0))
    store.add(own, document="", name="script.sh")
    store.add_end(end_of_job(own, None, Ending(Outcome.TIMED_OUT, "--max-time was over")))
    assert documents_of(tmp_path, **options)[0].job.time_limit_s == 1200


def test_a_gpu_that_the_profile_names_is_asked_for_its_steps(tmp_path) -> None:
    plan = plan_of(gpus="8", gpus_per_node=8, strategy="ddp", repeats=1, device="cuda", workload="gpt2-small")
    launches = schedule(plan.cells, repeats=1, gpus_per_node=8)
    unknown, known = (
        planned_jobs(plan, launches, per_cell=False, earlier={}, hardware=Devices(gpu_name=name))
        for name in (None, "H100-SXM5-80GB")
    )
    # 67 TFLOP/s of fp32 at 40 %: a step of 8 samples takes less than 2/3 s, the longest for the budget.
    assert known[0].estimate_s < unknown[0].estimate_s


def test_a_limit_below_the_estimate_is_told(tmp_path) -> None:
    [document] = documents_of(tmp_path, gpus="8", gpus_per_node=8, strategy="ddp", repeats=1)
    short = replace(
        document, job=msgspec.structs.replace(document.job, estimate_s=7200.0, time_limit_s=3600.0)
    )
    assert "1 job may not end within the time limit; the same command continues after it" in cost_lines(
        [short], PRICE, gpus=True
    )


def test_what_exclusive_nodes_cost_is_not_guessed(tmp_path) -> None:
    documents = documents_of(
        tmp_path, gpus_of_node=None, gpus="8", gpus_per_node=8, strategy="ddp", repeats=1
    )
    assert gpu_hours(documents) is None
    assert "GPU-hours are not known" in cost_lines(documents, None, gpus=True)[0]


def test_the_same_call_makes_the_same_jobs_and_the_next_ones_go_on_counting(tmp_path) -> None:
    first = documents_of(tmp_path, gpus="8,16", gpus_per_node=8, strategy="ddp", repeats=1)
    again = documents_of(tmp_path, gpus="8,16", gpus_per_node=8, strategy="ddp", repeats=1)
    assert first == again
    assert [document.job.job_id for document in first] == ["0001-1x8", "0002-2x8"]
    store = JobStore(tmp_path / "s")
    store.add(first[0].job, document=first[0].text, name="script.sh")
    [third, _] = documents_of(tmp_path, gpus="8,16", gpus_per_node=8, strategy="ddp", repeats=1)
    assert third.job.job_id == "0002-1x8"
    other = documents_of(tmp_path / "elsewhere", gpus="8", gpus_per_node=8, strategy="ddp", repeats=1)
    # Two studies of one name, in two folders: the scheduler's names differ.
    assert other[0].job.name != first[0].job.name


# How ends are found out.


def test_open_launches_of_a_job_that_is_gone_are_closed_once(tmp_path) -> None:
    plan = plan_of(gpus=1, strategy="single", repeats=1)
    [cell] = plan.cells
    study = Study(tmp_path)
    study.add_plan(plan)
    slots = tuple(Slot(cell_id=cell.id, run_id=run_id, repeat=1) for run_id in ("begun", "not-begun"))
    launch = a_launch_of(slots)
    study.add_launch(launch)
    study.add_launch(msgspec.structs.replace(launch, launch_id="m", job_id="0002-1x1"))
    study.start_run(cell.id, "begun")
    stopped = Ending(Outcome.NODE_FAILED, "n1 went away")
    assert close_launches(study, "0001-1x1", stopped, scheduler="NODE_FAIL") == 1
    assert close_launches(study, "0001-1x1", stopped) == 0
    [result] = study.results()
    assert (result.run_id, result.outcome, result.reason) == ("begun", Outcome.NODE_FAILED, "n1 went away")
    assert (study.has_attempt("l"), study.has_attempt("m")) == (True, False)


def test_launches_of_a_killed_bench_are_closed_and_those_of_jobs_and_persons_are_not(tmp_path) -> None:
    plan = plan_of(gpus=1, strategy="single", repeats=1)
    [cell] = plan.cells
    study = Study(tmp_path)
    study.add_plan(plan)
    job = a_launch_of((Slot(cell_id=cell.id, run_id="begun", repeat=1),))
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

GOOD = a_job(placement=Placement(nodes=2, gpus_per_node=8), code=CodeVersion(code_hash=code_hash(checkout())))


@pytest.mark.parametrize(
    ("job", "start", "ended", "reason"),
    [
        (GOOD, 2, None, None),
        (GOOD, 3, None, "it was requeued 3 times (--retries 2)"),
        (msgspec.structs.replace(GOOD, code=CODE), 0, None, "the code of bench was edited after"),
        (GOOD, 0, Outcome.CANCELLED, "it was closed before (cancelled: its own word), and other jobs"),
    ],
)
def test_a_job_is_not_run_again_and_again_nor_with_other_code(job, start, ended, reason) -> None:
    starter = SimpleNamespace(start=start, obstacle=lambda job: None)
    found = obstacle(job, starter, None if ended is None else end_of(job, ended))
    assert found is None if reason is None else str(found).startswith(reason)


def test_the_cell_that_a_running_job_is_at_runs_from_the_start_of_its_launch_on(tmp_path) -> None:
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
    path = study.add_launch(a_launch_of(slots))
    # The workers start.
    assert found([status]) == {first: ("running", ""), second: later}
    log = path.parent / "rank-00000.jsonl"
    log.write_text(f'{{"event": "run", "run": "of-{second}", "cell": "{second}"}}\n')
    assert found([status]) == {first: later, second: ("running", "")}


class Near:
    """The starter of a job whose scheduler says after how many seconds it ends."""

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
def test_a_notice_has_the_scheduler_asked_when_the_job_ends(tmp_path, left_s, launches_end_in_s) -> None:
    start = JobStart(Study(tmp_path), a_job(), Near(left_s))
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
