"""The task of docs/clouds for SkyPilot: its schema, and its commands on one host instead of two nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packages import first_on_the_path, install

from results.store import Study

ROOT = Path(__file__).parents[2]
TASK = ROOT / "docs" / "clouds" / "bench.sky.yaml"
SKY = os.environ.get("SKY_PYTHON")
"""The Python of an environment that has skypilot, whose pins exclude the click of bench."""
STUDY = """\
workload: mlp
strategy: ddp
gpus: 2
gpus_per_node: 1
device: cpu
repeats: 1
budget: 0
block_steps: 2
quads: 0
"""
# In the place of ssh: the words after the host are for a shell of this machine.
SSH = """\
#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
echo "$1" >> "$HOME/hosts"
shift
exec sh -c "$*"
"""


@pytest.mark.skipif(SKY is None, reason="SKY_PYTHON names no interpreter that has skypilot")
def test_skypilot_takes_the_task_and_refuses_a_wrong_one(tmp_path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(TASK.read_text().replace("use_spot:", "spot:"))
    codes = [
        subprocess.run(
            [str(SKY), "-c", "import sys, sky; sky.Task.from_yaml(sys.argv[1])", str(path)], cwd=ROOT
        ).returncode
        for path in (TASK, wrong)
    ]
    assert codes == [0, 1]


@pytest.mark.slow
def test_two_nodes_measure_a_study_that_the_next_machines_resume(tmp_path) -> None:
    bucket, home = tmp_path / "results", tmp_path / "home"
    for name in ("results", "home/bench-venv/bin", "bin", "site"):
        (tmp_path / name).mkdir(parents=True)
    (home / "study.yaml").write_text(STUDY)
    (home / "bench-venv/bin/activate").write_text(f"export VIRTUAL_ENV={sys.prefix}\n")
    for name, text in {"ssh": SSH, "sudo": "#!/bin/sh\n"}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    shutil.copy(ROOT / "docs/examples/ssh_launcher.py", tmp_path / "site")
    install(tmp_path / "site", "ssh-launcher", {"bench.launchers": {"ssh": "ssh_launcher:SshLauncher"}})
    run = yaml.safe_load(TASK.read_text())["run"]
    for place in ("shared", "results"):
        run = run.replace(f"/{place}", str(tmp_path / place))
    counts = []
    for _ in range(2):
        # New machines: the folder that the nodes share is empty.
        shutil.rmtree(tmp_path / "shared", ignore_errors=True)
        (tmp_path / "shared").mkdir()
        nodes = [
            subprocess.run(
                ["bash", "-c", run],
                env={
                    **os.environ,
                    "HOME": str(home),
                    "PATH": f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "PYTHONPATH": first_on_the_path(tmp_path / "site"),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "NCCL_NET": "AWS Libfabric",
                    "SKYPILOT_NODE_RANK": rank,
                    "SKYPILOT_NODE_IPS": "127.0.0.1\nlocalhost",
                    "SKYPILOT_NUM_GPUS_PER_NODE": "0",
                },
                capture_output=True,
                text=True,
            )
            for rank in ("1", "0")
        ]
        assert [node.returncode for node in nodes] == [0, 0], nodes[1].stderr
        counts.append(len(Study(bucket / "study").collect()))
    assert counts[0] == counts[1] > 0
    variables = yaml.safe_load((home / "hosts.yaml").read_text())["environment"]
    assert variables["NCCL_NET"] == "AWS Libfabric"
    assert {"127.0.0.1", "localhost"} == set((home / "hosts").read_text().split())
    assert (bucket / "study" / "report.html").exists()
