"""`bench doctor --site` on a real Slurm."""

from __future__ import annotations

from harness.cli import run
from slurm.client import Client


def test_the_command_asks_the_scheduler_too(lab, tmp_path, capsys) -> None:
    path = tmp_path / "site.yaml"
    good = "partition: short\ngpu_type: h100\ngpus_per_node: 8\ncpus_per_gpu: 2\ntime: {maximum: 30m}\n"
    path.write_text(good)
    # Jobs of tests before stay in the queue for a while after their end.
    before = {job.job_id for job in Client().own_jobs()}
    assert run(["doctor", "--site", str(path)]) == 0
    assert "would take a job of one node for 30m" in capsys.readouterr().out
    # What no description tells: only the scheduler knows the features of nodes.
    path.write_text(f"{good}constraint: infiniband\n")
    assert run(["doctor", "--site", str(path)]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wrong")]
    assert len(wrong) == 1
    assert "Invalid feature specification" in wrong[0]
    assert {job.job_id for job in Client().own_jobs()} <= before


def test_without_a_profile_a_plan_has_the_nodes_of_the_cluster(lab, tmp_path, capsys) -> None:
    call = ["matrix", "--workload", "gpt2-small", "--strategy", "ddp", "--gpus", "8..32", "--device", "cuda"]
    call += ["--launcher", "slurm", "--out", str(tmp_path / "study"), "--dry-run"]
    assert run(call) == 0
    said = capsys.readouterr()
    assert "Slurm says: 4 nodes of 8 h100 and 16 CPUs in partition main" in said.out
    assert "0003-4x8  --nodes=4" in said.out
    assert "--gres=gpu:32" not in said.out


def test_the_profile_that_doctor_writes_is_one_that_it_finds_fine(lab, tmp_path, capsys) -> None:
    path = tmp_path / "mine.yaml"
    call = ["doctor", "--launcher", "slurm", "--write", str(path)]
    assert run(call) == 0
    assert "4 nodes of 8 h100" in path.read_text()
    capsys.readouterr()
    assert run(["doctor", "--site", str(path)]) == 0
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("wrong")]
    assert run(call) == 2
    assert "it is there already" in capsys.readouterr().err
