"""`--launcher manual`: what it writes, what it prints again, and what it refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import builders

from harness import matrix
from harness.cli import run
from harness.features.manual.launcher import ManualLauncher
from harness.launchers.launcher import MatrixCall
from harness.plan.study_file import StudyFile
from harness.terminal.console import Console
from results.environment import CodeVersion
from results.job import RunOptions
from results.outcome import Evidence
from results.store import Study

CODE = CodeVersion(code_hash="c0de")
BOTH = RunOptions(trace=(0, 3), tensorboard=True)
MLP = ("matrix", "--workload", "mlp", "--gpus", "2", "--device", "cpu", "--strategy", "ddp", "--out", "study")
plan_of = partial(builders.plan_of, workload="mlp", batch_size=8, device="cpu", strategy="ddp", repeats=1)


def test_a_launch_by_hand_with_virtual_nodes_is_emulated_too(tmp_path) -> None:
    study = Study(tmp_path / "study")
    plan = plan_of(gpus=4, gpus_per_node=2, node_size=1)
    study.add_plan(plan)
    call = MatrixCall(options=StudyFile(), run_options=RunOptions(), console=Console())
    ManualLauncher().accept(call).run(study, plan, CODE, lock=-1)
    assert [launch.evidence for launch in study.launches()] == [Evidence.EMULATED]


def test_a_launch_by_hand_is_not_printed_again_for_a_call_that_keeps_something_else(tmp_path) -> None:
    study, plan = Study(tmp_path / "study"), plan_of(gpus=2)
    study.add_plan(plan)
    for options in (RunOptions(), RunOptions(), BOTH, BOTH):
        call = MatrixCall(options=StudyFile(), run_options=options, console=Console())
        ManualLauncher().accept(call).run(study, plan, CODE, lock=-1)
    found = [(launch.trace, launch.tensorboard) for launch in study.launches()]
    assert sorted(found) == [((), False), ((0, 3), True)]


def test_a_link_and_hosts_by_hand_exclude_each_other(capsys, monkeypatch) -> None:
    monkeypatch.setattr(matrix, "link_obstacle", lambda: None)
    assert run(["matrix", "--gpus", "2", "--link", "1gbit", "--launcher", "manual"]) == 2
    assert capsys.readouterr().err == (
        "error: --link makes nodes with separate networks on this host: leave --launcher manual out\n"
    )


def test_without_tensorboard_the_call_is_refused_with_the_command_that_installs_it(
    no_tensorboard, capsys
) -> None:
    assert run([*MLP, "--launcher", "manual", "--tensorboard"]) == 1
    assert "install it with: pip install tensorboard" in capsys.readouterr().err
    assert not Path("study").exists()


def test_a_batch_that_is_found_here_is_refused(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    call = ["matrix", "--gpus", "2", "--batch-size", "auto", "--launcher", "manual", "--device", "cpu"]
    assert run([*call, "--memory-limit-mb", "64"]) == 2
    assert "--launcher manual leaves launches to others" in " ".join(capsys.readouterr().err.split())
