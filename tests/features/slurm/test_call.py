"""`--launcher slurm` without a cluster: what a call prints, what it records, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import builders
import pytest
from printed_schema import keep_the_schema

from harness.cli import run
from results.launch import JobVariables
from slurm.client import Client
from slurm.cluster import NodeGroup
from slurm.runner import SlurmError

MLP = ("matrix", "--workload", "mlp", "--gpus", "2", "--device", "cpu", "--strategy", "ddp", "--out", "study")
KILLED = """
import os

from torch import nn
from workloads import Workload


def killed():
    return Workload(module=nn.Linear(4, 1), step=lambda model, batch: os.kill(os.getpid(), 9), data=[0] * 8)
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_examples_of_profiles_keep_the_schema_that_is_printed(capsys) -> None:
    keep_the_schema("slurm", "sites/[!k]*", capsys)


def test_a_launch_names_the_variables_of_jobs() -> None:
    plan = builders.plan_of(workload="mlp", gpus=2, batch_size=8, device="cpu", strategy="ddp", repeats=1)
    names = JobVariables(scheduler="slurm", job="SLURM_JOB_ID", restarts="SLURM_RESTART_COUNT")
    assert names in builders.launch_of(plan).job_variables


def test_without_tensorboard_the_call_is_refused_with_the_command_that_installs_it(
    no_tensorboard, capsys
) -> None:
    assert run([*MLP, "--launcher", "slurm", "--tensorboard"]) == 1
    assert "install it with: pip install tensorboard" in capsys.readouterr().err
    assert not Path("study").exists()


def test_ranks_with_a_python_of_their_own_are_not_judged_by_this_one(no_tensorboard) -> None:
    Path("site.yaml").write_text("python: /opt/venv/bin/python3\ngpu_request: none\n")
    call = [*MLP, "--launcher", "slurm", "--site", "site.yaml"]
    assert run([*call, "--tensorboard", "--dry-run"]) == 0


def test_a_batch_that_is_found_here_is_refused(capsys) -> None:
    call = ["matrix", "--gpus", "2", "--batch-size", "auto", "--launcher", "slurm", "--device", "cpu"]
    assert run([*call, "--memory-limit-mb", "64"]) == 2
    assert "--launcher slurm leaves launches to others" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_check_that_is_cut_off_is_a_failure_and_where_gpus_are_planned_a_warning(tmp_path, capsys) -> None:
    (tmp_path / "own.py").write_text(KILLED)
    (tmp_path / "site.yaml").write_text("gpus_per_node: 8")
    call = ["matrix", "--workload", "py:own:killed", "--dataset", "own", "--gpus", "1", "--device", "cuda"]
    assert run([*call, "--launcher", "slurm", "--site", "site.yaml", "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "py:own:killed was not checked: on this CPU it fails (its check was killed by SIGKILL" in said


def test_what_certainly_does_not_fit_is_left_out_and_what_may_not_is_told(tmp_path, capsys) -> None:
    (tmp_path / "site.yaml").write_text("gpus_per_node: 8\ngpu_model: A100-SXM4-80GB\n")
    call = ["matrix", "--workload", "llama-7b", "--strategy", "ddp,zero1", "--gpus", "16", "--device", "cuda"]
    call += ["--launcher", "slurm", "--site", "site.yaml", "--dry-run"]
    assert run(call) == 0
    said = capsys.readouterr()
    assert "1 cell x 3 repeats; 1 point skipped" in said.out
    assert "llama-7b with zero1 on 16" in " ".join(said.err.split())
    assert run([*call, "--keep-unfit"]) == 0
    assert "2 cells x 3 repeats; 0 points skipped" in capsys.readouterr().out


def test_gpus_of_nodes_that_nobody_knows_are_refused_with_the_flag(monkeypatch, capsys) -> None:
    def silent(self):
        raise SlurmError("sinfo gave no answer")

    monkeypatch.setattr(Client, "groups", silent)
    assert run([*MLP, "--gpus", "16", "--device", "cuda", "--launcher", "slurm"]) == 1
    assert "give --gpus-per-node (sinfo gave no answer)" in capsys.readouterr().err
    assert not Path("study").exists()


def test_a_plan_without_a_profile_keeps_to_the_limits_of_account_and_qos(monkeypatch, capsys) -> None:
    nodes = NodeGroup(
        partition="gpu",
        is_up=True,
        time_limit_s=None,
        nodes=32,
        state="idle",
        cpus=64,
        memory_mb=1,
        gpus={"h100": 8},
    )
    monkeypatch.setattr(Client, "groups", lambda self: (nodes,))
    limits = {"GPUs": 16, "seconds": 900}
    monkeypatch.setattr(Client, "limits", lambda self, account, qos: dict(limits))
    words = ("--workload", "mlp", "--strategy", "ddp", "--device", "cuda", "--launcher", "slurm")
    assert run(["matrix", *words, "--gpus", "8,16,32", "--out", "study", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "partition gpu, jobs of at most 0.25 h, your account and QOS allow 16 GPUs a job" in said.out
    assert "#SBATCH --time=0-00:15:00" in said.out
    warned = " ".join(said.err.split())
    assert "0003-4x8: your account and QOS allow 16 GPUs" in warned
    assert "0002-2x8" not in warned
