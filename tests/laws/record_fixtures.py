"""Shared by the tests of the ground floor: a cell, an environment and a rank record to vary, small disks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from builders import a_cell, a_work, an_environment

from results.cell import Cell
from results.derivation.run_result import derive
from results.environment import Environment
from results.outcome import Evidence, Outcome
from results.record import Memory, Proof, RankRecord, StepColumns
from results.run import RunResult

MS = 1_000_000
CELL, ENVIRONMENT = a_cell(workload="resnet18"), an_environment()


def _columns(steps: int, step_ns: int) -> StepColumns:
    return StepColumns(
        step_ns=[step_ns] * steps,
        data_ns=[step_ns // 10] * steps,
        forward_ns=[step_ns // 5] * steps,
        backward_ns=[step_ns // 2] * steps,
        optimizer_ns=[step_ns // 20] * steps,
        loss=[2.0 - step / 8 for step in range(steps)],
    )


@pytest.fixture(scope="session")
def cell_of() -> Callable[..., Cell]:
    def make(**fields: object) -> Cell:
        return msgspec.structs.replace(CELL, **fields)

    return make


@pytest.fixture(scope="session")
def environment_of() -> Callable[..., Environment]:
    def make(**facts: object) -> Environment:
        return msgspec.structs.replace(ENVIRONMENT, **facts)

    return make


@pytest.fixture(scope="session")
def columns_of() -> Callable[[int, int], StepColumns]:
    """Columns of steps of one length: 1/10 data, 1/5 forward, 1/2 backward, 1/20 optimizer."""
    return _columns


@pytest.fixture(scope="session")
def record_of() -> Callable[..., RankRecord]:
    """A complete record: three blocks of two steps of 50 ms after two of warm-up, with `fields` replaced."""

    def make(cell: Cell, rank: int, **fields: object) -> RankRecord:
        complete = RankRecord(
            cell_id=cell.id,
            run_id="run-1",
            launch_id="launch-1",
            repeat=1,
            gpus=cell.gpus,
            rank=rank,
            local_rank=rank,
            node_rank=0,
            outcome=Outcome.OK,
            reason=None,
            evidence=Evidence.MEASURED,
            started_at="2026-01-02T03:04:05.000Z",
            ended_at="2026-01-02T03:04:15.000Z",
            clock="monotonic",
            environment=ENVIRONMENT,
            setup_ns=700 * MS,
            warmup_loss=[2.0, 1.875],
            warmup_steady=True,
            steps=_columns(6, 50 * MS),
            blocks_ns=[100 * MS] * 3,
            block_steps=2,
            stop="blocks",
            work=a_work(),
            memory=Memory(
                rss_peak_bytes=1000,
                rss_idle_bytes=600,
                device_allocated_peak_bytes=None,
                device_reserved_peak_bytes=None,
                device_idle_bytes=None,
            ),
            proof=Proof(method="serial-simulation", passed=True, detail="3 steps, all within the bound"),
            parameters_hash="aa",
            foreign_cpu_cores=0.0,
        )
        return msgspec.structs.replace(complete, **fields)

    return make


@pytest.fixture
def two(cell_of, record_of) -> Callable[..., RunResult]:
    """Derives the run of two ranks: a field's value is for both, or a list with one a rank."""

    def run(cell: Cell | None = None, **fields: object) -> RunResult:
        cell = cell or cell_of()
        each: list[dict[str, object]] = [
            {name: value[rank] if isinstance(value, tuple) else value for name, value in fields.items()}
            for rank in range(2)
        ]
        return derive(cell, "run-1", [record_of(cell, rank, **each[rank]) for rank in range(2)], None)

    return run


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A separate file system with room for 64 KiB; skips where it cannot be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    mounted = _mount("-t", "tmpfs", "-o", "size=64k", "none", str(folder))
    if mounted.returncode:
        pytest.skip(f"this machine mounts no tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def read_only_disk(small_disk) -> Callable[[], Path]:
    """Makes the small disk read-only, for root too, once the test has put there what it needs."""

    def freeze() -> Path:
        frozen = _mount("-o", "remount,ro", str(small_disk))
        if frozen.returncode:
            pytest.skip(f"this machine remounts no tmpfs: {frozen.stderr.strip()}")
        return small_disk

    return freeze


def _mount(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
