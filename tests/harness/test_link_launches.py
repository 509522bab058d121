"""Launches on virtual nodes, really run: what they record, and how each of them ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import until

from harness.machine.device import usable_cores
from results import schemas
from results.outcome import Evidence, Outcome

pytestmark = pytest.mark.slow

Bench = Any
MBIT_PER_S = 400
OVER_A_LINK = ("--gpus", "2", "--strategy", "ddp", "--link", f"{MBIT_PER_S}mbit")


@pytest.fixture(scope="module")
def study(links, bench_in, faulty_model, tmp_path_factory) -> Bench:
    """Over a link: gradients that take time, a hang, and a death that the other rank does not notice."""
    bench = bench_in(tmp_path_factory.mktemp("links"))
    faulty_model(bench.folder, "1/2 8 hang", "1/2 16 kill rank", "0/2 16 sleep")
    cells = ("--workload", "mlp,py:faulty:build", "--batch-size", "8,16", "--hang-after", "10s")
    done = bench.run(*OVER_A_LINK, *cells)
    assert done.code == 1, done.stderr
    assert bench.processes() == []
    return bench


def test_a_launch_over_a_link_is_recorded_as_what_it_is(study) -> None:
    (result,) = study.named("mlp-ddp-400mbit-g002-b16-")
    assert (result.outcome, result.evidence) == (Outcome.OK, Evidence.EMULATED)
    assert result.proof.passed
    records = study.study().rank_records(result.cell_id, result.run_id)
    host = os.uname().nodename
    assert [record.environment.host for record in records] == [f"node0.{host}", f"node1.{host}"]
    assert [(record.node_rank, record.local_rank) for record in records] == [(0, 0), (1, 0)]
    pinned = [core for record in records for core in record.environment.pinned_cores]
    assert len(set(pinned)) == len(pinned) == (2 if len(usable_cores()) > 1 else 0)
    # The gradients of 2 ranks go over the link once each way, for every step.
    assert result.step_ns.value / 1e9 > records[0].work.exchange_payload_bytes * 8 / (MBIT_PER_S * 1e6)
    log = study.study().launch_folder(result.launch_id) / "torchrun.log"
    assert log.read_text().startswith(f"2 virtual nodes, {MBIT_PER_S}mbit each way\n")


@pytest.mark.parametrize(
    ("batch", "outcome", "reason"),
    [(16, Outcome.CRASHED, "rank 1 was killed by SIGKILL"), (8, Outcome.HUNG, "no rank said anything for 1")],
)
def test_a_rank_that_is_lost_or_hangs_ends_the_launch_on_all_nodes(study, batch, outcome, reason) -> None:
    (result,) = study.named(f"faulty-build-ddp-400mbit-g002-b{batch}-")
    assert result.outcome is outcome
    assert str(result.reason).startswith(reason)
    folder = study.study().launch_folder(result.launch_id)
    assert schemas.ATTEMPT.read(folder / "attempt.json").exit_code != 0
    stacks = "".join(path.read_text() for path in folder.glob("torchrun/**/0/stderr.log"))
    assert "faulty.py" in stacks or outcome is Outcome.CRASHED


@pytest.fixture
def bench(bench_in, tmp_path) -> Bench:
    return bench_in(tmp_path)


@pytest.fixture
def started(links, bench, faulty_model) -> Iterator[subprocess.Popen[str]]:
    """A study of one launch whose rank 1 stands still."""
    faulty = faulty_model(bench.folder, "1/2 8 wait")
    process = bench.start(*OVER_A_LINK, *faulty, "--batch-size", "8")
    try:
        until((bench.folder / "reached").exists)
        yield process
    finally:
        process.kill()
        process.communicate()
        for left in bench.processes():
            left.kill()


def _programs(process: subprocess.Popen[str]) -> tuple[psutil.Process, list[psutil.Process]]:
    """The program that keeps the nodes, and all that runs on them: two torchruns and two ranks."""
    [guardian] = psutil.Process(process.pid).children()
    [program] = guardian.children()
    assert "harness.launch.nodes" in program.cmdline()
    inhabitants = program.children(recursive=True)
    assert len([one for one in inhabitants if "harness.worker" in one.cmdline()]) == 4
    return program, inhabitants


def _networks() -> set[str]:
    """The network namespaces that some process is in."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(str(path.readlink()))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_nothing_outlives_the_program_that_keeps_the_nodes(started, bench, number) -> None:
    program, inhabitants = _programs(started)
    theirs = {str(Path(f"/proc/{one.pid}/ns/net").readlink()) for one in [program, *inhabitants]}
    assert len(theirs) == 3, "a switch and two nodes"
    assert len({tuple(one.cpu_affinity()) for one in inhabitants}) in (1, 2)
    program.send_signal(number)
    until(lambda: not any(one.is_running() for one in [program, *inhabitants]))
    assert not theirs & _networks()
    started.communicate()
    assert started.returncode == 1
    [result] = bench.results()
    # A program that is asked to end says so through its torchruns; one that is killed says nothing.
    allowed = {signal.SIGTERM: {Outcome.CANCELLED}, signal.SIGKILL: {Outcome.MISSING_RANKS, Outcome.CRASHED}}
    assert result.outcome in allowed[number]


@pytest.mark.long
def test_nothing_outlives_a_killed_bench(started, bench) -> None:
    program, inhabitants = _programs(started)
    started.send_signal(signal.SIGKILL)
    started.wait()
    until(lambda: not any(one.is_running() for one in [program, *inhabitants]))
    [result] = bench.results()
    assert result.outcome is Outcome.UNKNOWN
