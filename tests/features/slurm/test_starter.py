"""Launches in an allocation: the command that starts them, and why Slurm asked the job to end."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import CODE, SLURM_WORDS, a_job, a_launch

from harness.features.slurm import allocation as slurm_starter
from harness.features.slurm.allocation import SlurmStarter
from results.job_store import JobStore
from results.outcome import Outcome

ALLOCATION = {
    **{"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1", "SLURM_GPUS_ON_NODE": "8"},
    **{"JOB_HOSTS": "n1\nn2", "MASTER_ADDR": "10.0.0.1"},
}
EARLIER = "slurmstepd-n1: error: *** JOB 17 ON n1 CANCELLED AT 2026-11-21T10:31:18 DUE TO PREEMPTION ***\n"
LAUNCH = a_launch(2, 8, device="cuda", backend="nccl", slots=())


def starter_of(root: Path, **site: object) -> SlurmStarter:
    """The starter of a job with this profile, in the allocation."""
    return SlurmStarter(a_job(site=site), JobStore(root), ALLOCATION)


@pytest.fixture
def log(tmp_path, monkeypatch) -> Path:
    """The log of a job that has been preempted before, and runs again."""
    monkeypatch.setattr(slurm_starter, "NOTICE_S", 0.1)
    path = JobStore(tmp_path).folder(a_job().job_id) / "job-17.log"
    path.parent.mkdir(parents=True)
    path.write_text(EARLIER)
    return path


def test_each_launch_meets_at_a_port_of_its_own_on_the_first_node(tmp_path) -> None:
    starter = starter_of(tmp_path, cpus_per_gpu=4)
    path = tmp_path / "launches" / "l" / "launch.json"
    first, second = starter.command(LAUNCH, path), starter.command(LAUNCH, path)
    assert first[0] == "srun"
    # 20000 + 17 x 16, and one more for each launch.
    assert (first[-1], second[-1]) == ("10.0.0.1:20272", "10.0.0.1:20273")
    assert first[-4:-1] == ("-m", "harness.features.slurm.agent", str(path))
    # 4 CPUs for each of 8 ranks.
    assert {"--nodes=2", "--ntasks=2", "--cpus-per-task=32", "--kill-on-bad-exit=1"} <= set(first)


def test_supervisors_know_its_words(tmp_path) -> None:
    assert SlurmStarter.log_words == SLURM_WORDS


def test_ranks_in_a_container_have_its_python(tmp_path) -> None:
    inside = starter_of(tmp_path, python="/opt/python", container={"image": "a.sqsh", "python": "python3.12"})
    assert inside.command(LAUNCH, tmp_path / "launch.json")[-5] == "python3.12"
    # Nothing here knows the versions of its packages.
    assert inside.conditions(CODE).torch is None
    outside = starter_of(tmp_path, python="/opt/python")
    assert outside.command(LAUNCH, tmp_path / "launch.json")[-5] == "/opt/python"


def test_ranks_are_bound_where_nobody_else_is_on_the_node(tmp_path) -> None:
    assert starter_of(tmp_path, exclusive=True).pins


@pytest.mark.parametrize(
    ("unkillable", "profile", "limit_s"),
    [
        ("60 sec", {}, 120.0),
        # A minute more than that in which Slurm gives up the processes of an earlier step.
        ("180 sec", {}, 240.0),
        ("180 sec", {"step_creation": "90s"}, 90.0),
        (None, {}, 120.0),
    ],
)
def test_a_step_has_the_time_in_which_slurm_frees_a_node_to_be_created(
    unkillable, profile, limit_s, tmp_path, monkeypatch
) -> None:
    settings = "ClusterName = lab\nSLURM_VERSION = 22.05.8\nAccountingStorageType = accounting_storage/none\n"
    scontrol = tmp_path / "scontrol"
    answer = "exit 1" if unkillable is None else f"echo 'UnkillableStepTimeout   = {unkillable}'"
    scontrol.write_text(f"#!/bin/sh\necho '{settings}'\n{answer}\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert starter_of(tmp_path, **profile).most_delay_s == limit_s


def test_the_notice_of_this_start_says_why_the_job_ends(log, tmp_path) -> None:
    starter = starter_of(tmp_path)
    with log.open("a") as file:
        file.write(EARLIER.replace("PREEMPTION", "TIME LIMIT"))
    assert starter.interruption().outcome is Outcome.TIMED_OUT
    assert starter.notice() == starter.interruption()


def test_the_notice_of_an_earlier_start_does_not_count(log, tmp_path) -> None:
    starter = starter_of(tmp_path)
    assert starter.notice() is None
    stopped = starter.interruption()
    assert (stopped.outcome, stopped.reason) == (
        Outcome.CANCELLED,
        "the job's program got SIGTERM, and Slurm has not said why",
    )
