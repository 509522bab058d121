"""Launches in an allocation: the command that starts them, and why Slurm asked the job to end."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import SLURM_WORDS, a_launch

from harness.features.slurm import allocation as slurm_starter
from harness.features.slurm.allocation import Allocation, SlurmStarter
from results.outcome import Outcome
from slurm.site import Container, SiteProfile

ALLOCATION = Allocation(slurm_id=17, start=1, nodes=("n1", "n2"), gpus_per_node=8, address="10.0.0.1")
EARLIER = "slurmstepd-n1: error: *** JOB 17 ON n1 CANCELLED AT 2026-11-21T10:31:18 DUE TO PREEMPTION ***\n"
LAUNCH = a_launch(2, 8, device="cuda", backend="nccl", slots=())


@pytest.fixture
def log(tmp_path, monkeypatch) -> Path:
    """The log of a job that has been preempted before, and runs again."""
    monkeypatch.setattr(slurm_starter, "NOTICE_S", 0.1)
    path = tmp_path / "job-17.log"
    path.write_text(EARLIER)
    return path


def test_each_launch_meets_at_a_port_of_its_own_on_the_first_node(tmp_path) -> None:
    starter = SlurmStarter(SiteProfile(cpus_per_gpu=4), ALLOCATION, tmp_path)
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
    site = SiteProfile(python="/opt/python", container=Container(image="a.sqsh", python="python3.12"))
    command = SlurmStarter(site, ALLOCATION, tmp_path).command(LAUNCH, tmp_path / "launch.json")
    assert command[-5] == "python3.12"
    outside = SlurmStarter(SiteProfile(python="/opt/python"), ALLOCATION, tmp_path)
    assert outside.command(LAUNCH, tmp_path / "launch.json")[-5] == "/opt/python"


def test_ranks_are_bound_where_nobody_else_is_on_the_node(tmp_path) -> None:
    assert SlurmStarter(SiteProfile(exclusive=True), ALLOCATION, tmp_path).pins


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
    assert SlurmStarter(SiteProfile(**profile), ALLOCATION, tmp_path).most_delay_s == limit_s


def test_the_notice_of_this_start_says_why_the_job_ends(log) -> None:
    starter = SlurmStarter(SiteProfile(), ALLOCATION, log.parent)
    with log.open("a") as file:
        file.write(EARLIER.replace("PREEMPTION", "TIME LIMIT"))
    assert starter.interruption().outcome is Outcome.TIMED_OUT
    assert starter.notice() == starter.interruption()


def test_the_notice_of_an_earlier_start_does_not_count(log) -> None:
    starter = SlurmStarter(SiteProfile(), ALLOCATION, log.parent)
    assert starter.notice() is None
    stopped = starter.interruption()
    assert (stopped.outcome, stopped.reason) == (
        Outcome.CANCELLED,
        "the job's program got SIGTERM, and Slurm has not said why",
    )
