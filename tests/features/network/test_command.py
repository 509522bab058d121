"""`bench network`: the calls that it refuses, its measurements on this machine, and outputs of nccl-tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import plan_of

from harness.features.network.call import Network, collectives_of
from harness.features.network.order import NetworkOrder
from harness.machine.code import checkout
from harness.plan.study_file import StudyFile
from results import schemas
from results.errors import UsageError
from results.network import COLLECTIVES, NETWORK_FILE
from results.outcome import Evidence
from results.plan import read_values
from results.store import Study

Bench = Any
QUICK = ("--collectives", "all-reduce,broadcast", "--max-mib", "1", "--budget", "0s", "--oversubscribe")
BENCH_PATH = {"PYTHONPATH": str(checkout())}
NCCL = """\
# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid 1 on node-a device  0 [0x07] NVIDIA A100-SXM4-80GB
#  Rank  1 Group  0 Pid 1 on node-a device  1 [0x0f] NVIDIA A100-SXM4-80GB
#  size  count  type redop root  time algbw busbw #wrong  time algbw busbw #wrong
1048576 262144 float   sum   -1  20.0 52.43 52.43      0  20.1 52.17 52.17      0
"""


@pytest.fixture
def bench(bench_in, tmp_path) -> Bench:
    return bench_in(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", "1"), "--gpus 2"),
        (("--gpus", "1..8"), "largest"),
        (("--gpus", "2", "--link", "100mbit,1gbit"), "one rate"),
        (("--gpus", "2", "--collectives", "all-scatter"), "all-reduce"),
        (("--gpus", "2", "--collectives", ","), "all-reduce"),
        (("--gpus", "2", "--strategy", "ddp"), "--strategy"),
        pytest.param(("--launcher", "manual"), "--gpus", marks=pytest.mark.needs("manual")),
        (("--read", "missing.txt", "--out", "found"), "missing.txt"),
        (("--read", "missing.txt"), "--out"),
        (("nowhere",), "nowhere"),
    ],
)
def test_a_call_that_cannot_be_followed_is_refused_and_writes_nothing(bench, words, said) -> None:
    done = bench("network", *words)
    assert done.code in (1, 2)
    assert said in done.stderr
    assert list(bench.folder.iterdir()) == []


def test_a_dry_run_shows_the_launch_and_writes_nothing(bench) -> None:
    done = bench("network", "--gpus", "2", "--dry-run")
    assert done.code == 0, done.stderr
    assert "all-reduce" in done.stdout
    assert list(bench.folder.iterdir()) == []


@pytest.mark.needs("slurm")
def test_a_job_has_time_for_the_budget_of_each_repeat_and_for_its_start(bench) -> None:
    cluster = ("--launcher", "slurm", "--device", "cpu", "--gpus", "4", "--gpus-per-node", "2")
    done = bench("network", *cluster, "--budget", "2m", "--repeats", "3", "--dry-run")
    assert done.code == 0, done.stderr
    # 15 min + 3 x 2 min.
    assert "#SBATCH --time=0-00:21:00" in done.stdout
    assert "#SBATCH --nodes=2" in done.stdout
    given = bench("network", *cluster, "--time", "1h", "--dry-run")
    assert "#SBATCH --time=0-01:00:00" in given.stdout


def test_the_output_of_nccl_tests_becomes_the_table_of_a_study(bench, study_of) -> None:
    (bench.folder / "log").write_text(NCCL)
    study = study_of(bench.folder / "study")
    done = bench("network", "study", "--read", "log", "--out", "elsewhere")
    assert done.code == 0, done.stderr
    for folder in (study.root, bench.folder / "elsewhere"):
        (row,) = schemas.NETWORK.read(folder / NETWORK_FILE).measurements
        assert (row.collective, row.ranks, row.median_s) == ("all-reduce", 2, pytest.approx(20e-6))


@pytest.fixture
def study_of() -> Callable[..., Study]:
    """Make a study with plans, without running anything."""

    def make(folder: Path, **options: Any) -> Study:
        study = Study(folder)
        study.add_plan(plan_of(**{"workload": "mlp", "strategy": "ddp", "gpus": "2"} | options))
        return study

    return make


def test_a_study_says_which_collectives_it_needs(tmp_path, study_of) -> None:
    assert collectives_of(None, None) == NetworkOrder().collectives
    assert collectives_of(None, "send,all-reduce") == ("all-reduce", "send")
    pipeline = study_of(tmp_path / "p", workload="gpt-nano", strategy="pipeline:gpipe", gpus="2")
    assert "send" in collectives_of(pipeline, None)
    sharded = study_of(tmp_path / "s", workload="gpt-nano", strategy="scratch-fsdp", gpus="2")
    assert "all-to-all" in collectives_of(sharded, None)
    assert set(collectives_of(pipeline, None)) <= set(COLLECTIVES)
    with pytest.raises(UsageError):
        collectives_of(None, "everything")


@pytest.mark.slow
def test_two_ranks_are_measured_once_and_the_table_is_in_the_page(bench) -> None:
    done = bench("network", "--gpus", "2", *QUICK, "--name", "net")
    assert done.code == 0, done.stderr
    root = bench.folder / "runs" / "net"
    table = schemas.NETWORK.read(root / NETWORK_FILE)
    assert {row.collective for row in table.measurements} == {"all-reduce", "broadcast"}
    assert {(row.ranks, row.nodes) for row in table.measurements} == {(2, 1)}
    assert all(row.low_s <= row.median_s <= row.high_s for row in table.measurements)
    assert table.facts.backend == "gloo"
    assert 'id="network"' in (root / "report.html").read_text()
    # The same call measures nothing again, and writes the table again.
    launches = len(list((root / "launches").iterdir()))
    (root / NETWORK_FILE).unlink()
    again = bench("network", "--gpus", "2", *QUICK, "--name", "net", "--no-report")
    assert again.code == 0, again.stderr
    assert len(list((root / "launches").iterdir())) == launches
    assert schemas.NETWORK.read(root / NETWORK_FILE) == table
    # A study of steps is not mixed with it.
    mixed = bench("matrix", "--gpus", "2", "--workload", "mlp", "--out", root, "--name", "net")
    assert mixed.code == 2


@pytest.mark.slow
def test_an_interrupted_measurement_leaves_no_rank_and_continues(bench) -> None:
    words = ("--collectives", "all-reduce", "--max-mib", "1", "--budget", "120s", "--oversubscribe")
    root = bench.folder / "runs" / "net"
    call = (sys.executable, "-P", "-m", "harness.cli", "network", "--gpus", "2", *words, "--out", str(root))
    process = subprocess.Popen(
        call, cwd=bench.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | BENCH_PATH
    )
    while not any('"measure"' in log.read_text() for log in root.glob("launches/*/rank-00000.jsonl")):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert bench.processes() == []
    assert not (root / NETWORK_FILE).exists()
    status = bench("status", root)
    assert "to do" in status.stdout


def test_the_same_call_plans_its_measurement_once(tmp_path) -> None:
    for _ in range(2):
        network = Network(StudyFile(gpus="2", out=str(tmp_path / "net"), oversubscribe=True), NetworkOrder())
        network._kept_plans(Study(network._root))
    assert len(Study(tmp_path / "net").plan_paths()) == 1


def test_a_measurement_that_failed_is_planned_again(tmp_path) -> None:
    network = Network(StudyFile(gpus="2", out=str(tmp_path / "net")), NetworkOrder())
    assert network._run_options.rerun_failed


@pytest.mark.slow
def test_virtual_nodes_over_links_are_a_level_of_their_own(links, bench) -> None:
    done = bench("network", "--gpus", "4", "--link", "200mbit", "--node-size", "2", *QUICK, "--name", "net")
    assert done.code == 0, done.stderr
    table = schemas.NETWORK.read(bench.folder / "runs" / "net" / NETWORK_FILE)
    assert {(row.ranks, row.nodes) for row in table.measurements} == {(2, 1), (2, 2), (4, 2)}
    assert (table.facts.link_mbit_per_s, table.evidence) == (200.0, Evidence.EMULATED)
    # No rank sends over a link faster than the kernel lets it: 25 MB/s, and a bucket of its tokens.
    large = [row for row in table.measurements if row.nodes == 2 and row.array_bytes >= 2**20]
    assert large
    assert all(row.busbw < 1.3 * 25e6 for row in large if row.collective == "all-reduce")


def test_a_stored_order_reads_to_the_same_for_ever() -> None:
    """Plans of version 3 and later store these values."""
    stored = {"collectives": ["all-reduce", "send"], "largest_bytes": 1048576}
    order = NetworkOrder(collectives=("all-reduce", "send"), largest_bytes=2**20)
    assert read_values(stored, NetworkOrder) == order
    assert order.stored.values == stored
