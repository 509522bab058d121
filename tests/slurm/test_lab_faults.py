"""Actions of a real cluster on its jobs: limits, signals, requeues, lost nodes."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from results.outcome import Ending, Outcome
from results.plan import Placement
from slurm.client import Client
from slurm.job_view import JobPhase
from slurm.notices import read_notice
from slurm.script import ScriptJob, job_script, log_path
from slurm.site import SiteProfile

# Ends at a signal, and tells which it was, and of how often it was started; the second time it ends at once.
PROGRAM = """
    import os, signal, sys, time
    def told(number, frame):
        print(signal.Signals(number).name, flush=True)
        sys.exit(0 if number == signal.SIGUSR1 else 1)
    signal.signal(signal.SIGUSR1, told)
    signal.signal(signal.SIGTERM, told)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    print("start", restarts, os.environ["SLURM_JOB_NODELIST"], flush=True)
    if not restarts:
        time.sleep(600)
"""
Started = Callable[..., tuple[int, Path]]


@pytest.fixture
def started(lab, tmp_path) -> Started:
    """Submits a program, and gives the job's id and its log once it runs."""

    def start(program: str = PROGRAM, nodes: int = 1, requeue: bool = True) -> tuple[int, Path]:
        job = ScriptJob(
            name="test",
            placement=Placement(nodes=nodes, gpus_per_node=8),
            time_limit_s=600,
            folder=tmp_path,
            log_folder=tmp_path,
            command=(sys.executable, "-c", textwrap.dedent(program)),
            requeue=requeue,
        )
        job_id = Client().submit(job_script(SiteProfile(), job))
        log = log_path(tmp_path, job_id)
        lab.wait(lambda: log.exists() and "start" in log.read_text(), f"job {job_id} has started")
        return job_id, log

    return start


def lines(log: Path) -> list[str]:
    """The lines of the program, without the lines of Slurm between them."""
    return [line for line in log.read_text().splitlines() if line.startswith(("start", "SIG"))]


def test_the_program_gets_the_signals_of_a_cancelled_job(lab, started) -> None:
    job_id, log = started()
    Client().cancel([job_id])
    assert lab.wait_for(job_id, "CANCELLED").outcome is Outcome.CANCELLED
    assert lines(log) == ["start 0 n1", "SIGTERM"]


@pytest.mark.slow
def test_jobs_at_their_time_limit_and_one_that_is_put_back(lab, started) -> None:
    told, told_log = started()
    ended, ended_log = started("print('start', flush=True); import time; time.sleep(600)")
    requeued, log = started()
    # Told 120 s before the end: now. The controller looks every 30 seconds.
    lab.command("scontrol", "update", f"JobId={told}", "EndTime=now+110")
    lab.command("scontrol", "update", f"JobId={ended}", "EndTime=now+1")
    lab.command("scontrol", "requeue", str(requeued))
    view = lab.wait_for(requeued, "PENDING", "COMPLETED")
    assert view.phase is JobPhase.WAITING
    view = lab.wait_for(requeued, "COMPLETED")
    assert (view.restarts, view.outcome) == (1, Outcome.OK)
    node = lines(log)[0].split()[-1]
    assert lines(log)[:2] == [f"start 0 {node}", "SIGTERM"]
    assert [line.split()[:2] for line in lines(log)[2:]] == [["start", "1"]]
    assert lab.wait_for(told, "COMPLETED").outcome is Outcome.OK
    assert lines(told_log) == ["start 0 n1", "SIGUSR1"]
    assert lab.wait_for(ended, "TIMEOUT").outcome is Outcome.TIMED_OUT
    said = [read_notice(one.read_text(), job_id) for one, job_id in ((ended_log, ended), (log, requeued))]
    assert said == [
        Ending(Outcome.TIMED_OUT, "Slurm ended it due to time limit"),
        Ending(Outcome.PREEMPTED, "Slurm ended it due to job requeue"),
    ]


def test_a_held_job_is_seen_to_wait_for_somebody(lab, started) -> None:
    job_id, _ = started()
    lab.command("scontrol", "requeuehold", str(job_id))
    view = lab.wait_for(job_id, "PENDING")
    assert (view.phase, view.is_held, view.restarts) == (JobPhase.WAITING, True, 1)


@pytest.mark.slow
def test_lost_nodes_send_their_jobs_to_others(lab, started) -> None:
    stays, _ = started(nodes=1, requeue=False)
    moves, log = started()
    loses_power, dark_log = started()
    lost = [lab.hosts(job_id)[0] for job_id in (stays, moves)]
    lab.command("scontrol", "update", f"NodeName={','.join(lost)}", "State=DOWN", "Reason=test")
    (dark,) = lab.hosts(loses_power)
    lab.kill_node(dark)
    lab.set_down(dark)
    view = lab.wait_for(stays, "NODE_FAIL")
    assert (view.outcome, view.restarts) == (Outcome.NODE_FAILED, 0)
    for job_id, its_log in ((moves, log), (loses_power, dark_log)):
        view = lab.wait_for(job_id, "COMPLETED")
        assert (view.restarts, view.outcome) == (1, Outcome.OK)
        assert lines(its_log)[-1].startswith("start 1 ")
        (host,) = lab.hosts(job_id)
        assert host not in lost
    assert host != dark


@pytest.mark.parametrize("requeue", [pytest.param(True, marks=pytest.mark.slow), False])
def test_preemption(lab, started, requeue) -> None:
    job_id, log = started(nodes=4, requeue=requeue)
    urgent = (
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--gres=gpu:8",
        "--output=/dev/null",
        "--wrap=true",
    )
    urgent_id = int(lab.command(*urgent))
    view = lab.wait_for(job_id, "COMPLETED" if requeue else "PREEMPTED")
    assert lab.wait_for(urgent_id, "COMPLETED").outcome is Outcome.OK
    assert (view.outcome, view.restarts) == ((Outcome.OK, 1) if requeue else (Outcome.PREEMPTED, 0))
    assert lines(log) == ["start 0 n[1-4]", "SIGTERM", *(["start 1 n[1-4]"] if requeue else [])]
    notice = read_notice(log.read_text(), job_id)
    # slurmstepd prints one message, of the signal that it gets first: preemption's, or the SIGTERM after it.
    assert notice in (
        Ending(Outcome.PREEMPTED, "Slurm ended it due to preemption"),
        Ending(Outcome.CANCELLED, "it was cancelled"),
    )
