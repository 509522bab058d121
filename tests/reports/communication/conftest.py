"""Results of runs made by hand: the budget of a step, what a recorder saw, and the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from builders import a_cell, an_environment
from launching import a_result

from reports.analysis.figures import CellFigures, cell_figures
from reports.analysis.pooling import pool
from reports.analysis.study import StudyFigures, analyse
from results.cell import Cell
from results.run import Communication, OperationSummary, RankColumns, RunResult, StepBudget
from results.statistics import Metric

MS = 1e6
ENVIRONMENT = an_environment()


def exact(ms: float) -> Metric:
    """A time without an interval."""
    return Metric(value=ms * MS, unit="ns", low=None, high=None, samples=1, interval=None)


@pytest.fixture
def new_cell() -> Callable[..., Cell]:
    """A cell of ddp on some ranks; fields replace its own."""

    def made(gpus: int = 4, **fields: object) -> Cell:
        return a_cell(**{"workload": "gpt-nano", "gpus": gpus, "optimizer": "sgd:0.1"} | fields)

    return made


@pytest.fixture
def new_run() -> Callable[..., RunResult]:
    """One run of a cell, its step time and exposed communication in ms; fields replace its own."""
    made = 0

    def run(
        cell: Cell, step_ms: float = 10.0, exposed_ms: float | None = None, **fields: object
    ) -> RunResult:
        nonlocal made
        made += 1
        plain = a_result(
            cell_id=cell.id,
            run_id=f"20260102T030405Z-{made:06x}",
            repeat=made,
            started_at=f"2026-01-02T03:{made // 60:02d}:{made % 60:02d}.000Z",
            ranks_expected=cell.gpus,
            ranks_present=cell.gpus,
            environment=msgspec.structs.replace(ENVIRONMENT, gpus_per_node=cell.gpus),
            fingerprint="same",
            steps=10,
            step_ns=exact(step_ms),
            exposed_ns=None if exposed_ms is None else exact(exposed_ms),
            samples_per_s=cell.global_batch / step_ms * 1e3,
            units_per_s=cell.global_batch / step_ms * 1e3,
            unit="images",
            exchange_payload_bytes=4_000_000,
            exchange_operations=4,
            exchange_buckets=4,
            exchange_buckets_early=3,
            parameters=1_000_000,
        )
        return msgspec.structs.replace(plain, **fields)

    return run


@pytest.fixture
def figures_of() -> Callable[[Cell, Sequence[RunResult]], CellFigures]:
    def made(cell: Cell, runs: Sequence[RunResult]) -> CellFigures:
        found = cell_figures(pool(cell, list(runs), planned=len(runs)))
        assert found is not None
        return found

    return made


@pytest.fixture
def study_of(planted) -> Callable[[dict[Cell, Sequence[RunResult]]], StudyFigures]:
    """A study of weak series, by strategy and exchange, of cells of 8 samples a replica."""

    def made(runs: dict[Cell, Sequence[RunResult]]) -> StudyFigures:
        series: dict[tuple[str, ...], list[Cell]] = {}
        for cell in runs:
            series.setdefault((cell.strategy, cell.compression, cell.collective, cell.link), []).append(cell)
        for cells in series.values():
            first = cells[0]
            axes = {
                "compression": first.compression,
                "collective": first.collective,
                "link_mbit_per_s": first.link_mbit_per_s,
            }
            sizes = [cell.gpus for cell in cells]
            assert planted.series("weak", first.strategy, sizes, batch=8, **axes) == cells
        planted.plan()
        return analyse("study", planted.study.plans(), [run for some in runs.values() for run in some])

    return made


@pytest.fixture
def new_budget() -> Callable[..., StepBudget]:
    """Make a budget of parts in ms."""

    def made(
        compute: float, transfer: float = 0.0, wait: float = 0.0, *, method: str = "on-off"
    ) -> StepBudget:
        return StepBudget(
            method=method,
            input_ns=0.0,
            compute_ns=compute * MS,
            transfer_ns=exact(transfer),
            wait_ns=exact(wait),
            other_ns=0.0,
        )

    return made


@pytest.fixture
def new_communication() -> Callable[..., Communication]:
    """Nothing but what is given."""

    def made(operations: Sequence[OperationSummary] = (), **fields: object) -> Communication:
        plain = Communication(
            steps=20,
            step_ns=10 * MS,
            total_ns=0.0,
            blocked_ns=None,
            transfer_ns=None,
            wait_ns=None,
            exchange_cpu_ns=None,
            dispatch_ns=None,
            bubble_ns=None,
            operations=tuple(operations),
            bus_bytes_per_s=None,
            peak_bus_bytes_per_s=None,
        )
        bus = fields.get("bus_bytes_per_s")
        if bus and not operations:
            # Between two ranks the factor of an all-reduce is 1: as many bytes as a ms carries.
            operation = OperationSummary(
                name="allreduce",
                group_size=2,
                count=1.0,
                payload_bytes=bus / 1e3,
                duration_ns=1 * MS,
                transfer_ns=1 * MS,
                wait_ns=0.0,
            )
            fields["operations"] = (operation,)
        return msgspec.structs.replace(plain, **fields)

    return made


@pytest.fixture
def new_operation() -> Callable[..., OperationSummary]:
    def made(name: str, group_size: int, payload_bytes: float, **fields: object) -> OperationSummary:
        plain = OperationSummary(
            name=name,
            group_size=group_size,
            count=1.0,
            payload_bytes=payload_bytes,
            duration_ns=2 * MS,
            transfer_ns=1 * MS,
            wait_ns=1 * MS,
        )
        return msgspec.structs.replace(plain, **fields)

    return made


@pytest.fixture
def new_ranks() -> Callable[..., RankColumns]:
    """Ranks from means of compute and standard deviations in ms, on one node by default."""

    def made(
        compute: Sequence[float],
        sd: float | Sequence[float] = 0.1,
        *,
        steps: int = 50,
        node: Sequence[int] | None = None,
        slowest_share: Sequence[float] | None = None,
        **others: object,
    ) -> RankColumns:
        ranks = len(compute)
        return RankColumns(
            node=list(node or [0] * ranks),
            compute_ns=[round(one * MS) for one in compute],
            compute_sd_ns=[round(one * MS) for one in np.broadcast_to(sd, (ranks,))],
            slowest_share=list(slowest_share or [1 / ranks] * ranks),
            steps=steps,
            **others,
        )

    return made


@pytest.fixture
def ranks_of() -> Callable[..., RankColumns]:
    """The derived columns of ranks, from their single steps: an array (ranks, steps) in ns."""

    def made(steps: np.ndarray, node: Sequence[int] | None = None) -> RankColumns:
        ranks, count = steps.shape
        slowest = np.bincount(steps.argmax(axis=0), minlength=ranks) / count
        return RankColumns(
            node=list(node or [0] * ranks),
            compute_ns=[round(one) for one in steps.mean(axis=1)],
            compute_sd_ns=[round(one) for one in steps.std(axis=1, ddof=1)],
            slowest_share=slowest.tolist(),
            steps=count,
        )

    return made
