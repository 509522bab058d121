"""A study with planted times: plans, cells and rank records as the worker writes them, without training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import a_cell, an_environment

from reports.analysis.assumptions import Assumptions
from reports.analysis.study import StudyFigures, analyse
from reports.page.columns import cell_rows
from reports.page.render import render_figures
from reports.page.sections.table import full_table
from results import schemas
from results.cell import Cell, Device
from results.environment import Environment
from results.outcome import Evidence, Outcome
from results.plan import Plan, Request, Scaling, Series, Skip
from results.record import (
    LinkPeak,
    Memory,
    Proof,
    Quads,
    RankRecord,
    Recorded,
    StepColumns,
    Telemetry,
    Training,
    Work,
)
from results.run import RunResult
from results.store import Study

MS = 1_000_000
PROVED = Proof(method="serial-simulation", passed=True, detail="3 steps, all gradients within the bound")


@dataclass(kw_only=True)
class Timing:
    """The planted figures of one run. Times are of a step of the slowest rank, in ms."""

    step_ms: float
    exposed_ms: float | None = None
    """Planted in the quads; None: no quads."""
    copies_ms: float | None = None
    """The copies of a step without exchange take this time; None: older records."""
    steps: int = 6
    outcome: Outcome = Outcome.OK
    reason: str | None = None
    evidence: Evidence = Evidence.MEASURED
    foreign_cpu_cores: float | None = 0.0
    warnings: list[str] = field(default_factory=list)
    training: Training | None = None
    proof: Proof | None = PROVED
    absent: dict[str, str] = field(default_factory=dict)
    environment: Environment = field(default_factory=an_environment)
    units_per_sample: int = 1
    unit: str = "images"
    payload_bytes: int = 4_000_000
    input_ms: float | None = None
    """The data phase, with phases that fill the step; None: 5 % of it, and 5 % are outside of all phases."""
    off_step_ns: Callable[[int], list[int]] | None = None
    """The steps of a rank without exchange, 4 a quad. Blocks with and without it have no data phase then."""
    recorded: Callable[[int], Recorded] | None = None
    """This and the next two map a rank to its figures."""
    link_peak: Callable[[int], LinkPeak] | None = None
    telemetry: Callable[[int], Telemetry] | None = None
    bubble_ideal: float | None = None
    first_step_ms: float | None = None
    launch_id: str = "20260102T030400Z-00000f"
    memory_mib: int = 100
    """The memory of a rank above its idle state."""
    repeat: int = 1

    @property
    def data_ns(self) -> int:
        """The data phase of a step of the slowest rank."""
        step_ns = round(self.step_ms * MS)
        return step_ns * 5 // 100 if self.input_ms is None else round(self.input_ms * MS)


class PlantedStudy:
    """Builds a study's folder: series first, then `plan`, then runs."""

    def __init__(self, root: Path, *, device: Device = "cpu", runs_before: int = 0) -> None:
        """`runs_before` is the number of runs of other studies: ids of runs continue from it."""
        self.study = Study(root)
        self.device: Device = device
        self._series: list[Series] = []
        self._skips: list[Skip] = []
        self._cells: dict[str, Cell] = {}
        self._runs = runs_before
        self._ran: Counter[str] = Counter()

    def series(
        self, kind: Scaling, strategy: str, gpus: list[int], *, batch: int, **fields: object
    ) -> list[Cell]:
        """Add a series: `batch` is per replica under weak scaling, global under strong."""
        cells = [self._cell(kind, strategy, n, batch, fields) for n in gpus]
        self._cells |= {cell.id: cell for cell in cells}
        self._series.append(
            Series(
                kind=kind,
                workload=cells[0].workload,
                strategy=strategy,
                compression=cells[0].compression,
                collective=cells[0].collective,
                link=cells[0].link,
                batch_size=batch,
                global_batch=batch if kind == "strong" else None,
                cells=tuple(cell.id for cell in cells),
            )
        )
        return cells

    def skip(
        self, strategy: str, gpus: int, reason: str, *, batch: int, kind: Scaling = "weak", **axes: str
    ) -> None:
        self._skips.append(
            Skip(
                workload="gpt-nano",
                strategy=strategy,
                gpus=gpus,
                batch_size=batch,
                scaling=kind,
                reason=reason,
                **{"compression": "none", **axes},
            )
        )

    def plan(self, *, repeats: int = 3, **more: Any) -> Plan:
        """Write what was added since the last plan, with `more` of its fields."""
        cells = tuple(self._cells.values())
        plan = Plan(
            study=self.study.name,
            created_at="2026-01-02T03:04:05.000Z",
            request=Request(
                workloads=tuple(sorted({cell.workload for cell in cells})) or ("gpt-nano",),
                gpus=tuple(sorted({cell.gpus for cell in cells})) or (1,),
                strategies=tuple(sorted({cell.strategy for cell in cells})) or ("single",),
                repeats=repeats,
                device=self.device,
            ),
            cells=cells,
            series=tuple(self._series),
            skips=tuple(self._skips),
            **more,
        )
        self.study.add_plan(plan)
        self._series, self._skips, self._cells = [], [], {}
        return plan

    def run(self, cell: Cell, timing: Timing, *, sync: bool = True) -> str:
        """Write one run's rank records; `sync=False` skips the slow, careful way of writing."""
        self._runs += 1
        self._ran[cell.id] += 1
        run_id = f"20260102T030405Z-{self._runs:06x}"
        for rank in range(cell.gpus):
            record = rank_record(cell, rank, run_id, timing)
            if sync:
                self.study.add_rank_record(record)
            else:
                path = self.study.rank_path(cell.id, run_id, rank)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(schemas.RANK_RECORD.encode(record))
        return run_id

    def analysed(
        self,
        results: Sequence[RunResult] | None = None,
        *,
        name: str | None = None,
        assumptions: Assumptions | None = None,
        **changes: object,
    ) -> StudyFigures:
        """The figures of the study, from its own results or from others, with `changes` in the
        results of successful runs. What was not planned yet is, to be run as often as it was."""
        if self._cells or self._skips:
            self.plan(repeats=max((self._ran[cell_id] for cell_id in self._cells), default=0) or 3)
        found = [
            msgspec.structs.replace(run, **changes) if run.outcome is Outcome.OK else run
            for run in (self.study.collect() if results is None else results)
        ]
        return analyse(name or self.study.name, self.study.plans(), found, assumptions, self.study.review())

    def runs(self, cell: Cell, step_ms: list[float], **timing: object) -> None:
        """One run a step time, all else equal."""
        for ms in step_ms:
            self.run(cell, Timing(step_ms=ms, **timing))

    def points(
        self,
        strategy: str,
        step_ms: dict[int, float | list[float]],
        *,
        kind: Scaling = "weak",
        batch: int = 8,
        **more: object,
    ) -> list[Cell]:
        """Add a series with a run for each step time by size.

        `more` are fields of `Timing` or of the cells; `steps` is of the cells.
        """
        known = Timing.__dataclass_fields__.keys() - {"steps"}
        timing = {name: value for name, value in more.items() if name in known}
        fields = {name: value for name, value in more.items() if name not in timing}
        cells = self.series(kind, strategy, list(step_ms), batch=batch, **fields)
        for cell, each in zip(cells, step_ms.values(), strict=True):
            self.runs(cell, each if isinstance(each, list) else [each], **timing)
        return cells

    def page(self) -> str:
        """The page of the study."""
        return render_figures(self.analysed())

    def _cell(self, kind: Scaling, strategy: str, gpus: int, batch: int, fields: dict[str, object]) -> Cell:
        own = {
            "workload": "gpt-nano",
            "strategy": strategy,
            "gpus": gpus,
            "micro_batch": batch // gpus if kind == "strong" else batch,
            "device": self.device,
            "backend": "gloo" if self.device == "cpu" else "nccl",
            "optimizer": "sgd:0.1",
        }
        return a_cell(**own | fields)


def rank_record(cell: Cell, rank: int, run_id: str, timing: Timing) -> RankRecord:
    """One rank's record. Rank 0 is the slowest: every other one needs 10 % less for a block or a step."""
    pace = 1.0 if rank == 0 else 0.9
    step_ns = round(timing.step_ms * MS * pace)
    ok = timing.outcome is Outcome.OK
    number = int(run_id.rpartition("-")[2], 16)
    memory = Memory(
        rss_peak_bytes=(200 + timing.memory_mib) * 2**20 + rank,
        rss_idle_bytes=200 * 2**20,
        device_allocated_peak_bytes=None,
        device_reserved_peak_bytes=None,
        device_idle_bytes=None,
    )
    has_quads = timing.exposed_ms is not None or timing.off_step_ns is not None
    return RankRecord(
        cell_id=cell.id,
        run_id=run_id,
        launch_id=timing.launch_id,
        repeat=timing.repeat,
        gpus=cell.gpus,
        rank=rank,
        local_rank=rank,
        node_rank=0,
        outcome=timing.outcome,
        reason=timing.reason,
        evidence=timing.evidence,
        started_at=f"2026-01-02T{number // 3600:02d}:{number // 60 % 60:02d}:{number % 60:02d}.000Z",
        ended_at="2026-01-02T23:59:59.000Z",
        clock="monotonic",
        environment=msgspec.structs.replace(timing.environment, gpus_per_node=cell.gpus),
        setup_ns=500 * MS,
        first_step_ns=None if timing.first_step_ms is None else round(timing.first_step_ms * MS),
        warmup_loss=_columns(step_ns, 4).loss if ok else [],
        warmup_steady=True if ok else None,
        steps=_timed_columns(step_ns, timing) if ok else StepColumns(),
        blocks_ns=[2 * step_ns] * (timing.steps // 2) if ok else [],
        block_steps=2,
        stop="target" if ok else None,
        quads=_quads(timing, rank, pace) if ok else None,
        recorded=timing.recorded(rank) if ok and timing.recorded else None,
        link_peak=timing.link_peak(rank) if ok and timing.link_peak else None,
        telemetry=timing.telemetry(rank) if ok and timing.telemetry else None,
        work=_work(cell, timing) if ok else None,
        memory=memory if ok else None,
        training=timing.training,
        proof=timing.proof if ok and rank == 0 else None,
        parameters_hash="feed",
        foreign_cpu_cores=timing.foreign_cpu_cores,
        warnings=timing.warnings,
        absent=timing.absent | ({} if has_quads else {"quads": "quads were turned off"}),
    )


def _columns(step_ns: int, steps: int) -> StepColumns:
    """Split a step: 5 % data, 30 % forward, 50 % backward, 10 % optimizer; the rest is named `other`."""
    return StepColumns(
        step_ns=[step_ns] * steps,
        data_ns=[step_ns * 5 // 100] * steps,
        forward_ns=[step_ns * 30 // 100] * steps,
        backward_ns=[step_ns * 50 // 100] * steps,
        optimizer_ns=[step_ns * 10 // 100] * steps,
        loss=[2.0 - 0.001 * step for step in range(steps)],
    )


def _timed_columns(step_ns: int, timing: Timing) -> StepColumns:
    columns = _columns(step_ns, timing.steps)
    if timing.input_ms is None:
        return columns
    # The backward pass takes the rest, so that nothing of the step is outside of its phases.
    rest = step_ns - timing.data_ns - columns.forward_ns[0] - columns.optimizer_ns[0]
    return msgspec.structs.replace(
        columns, data_ns=[timing.data_ns] * timing.steps, backward_ns=[rest] * timing.steps
    )


def _quads(timing: Timing, rank: int, pace: float) -> Quads | None:
    if timing.off_step_ns is not None:
        return _quads_with_steps(timing, timing.off_step_ns(rank))
    if timing.exposed_ms is None:
        return None
    on = round(2 * timing.step_ms * MS * pace)
    off = round(2 * (timing.step_ms - timing.exposed_ms) * MS * pace)
    return Quads(
        steps=2,
        on_first_ns=[on],
        off_first_ns=[off],
        off_second_ns=[off],
        on_second_ns=[on],
        off_step_ns=[off // 2] * 4 if timing.copies_ms else [],
        copies_ns=[round(timing.copies_ms * MS)] * 2 if timing.copies_ms else [],
    )


def _quads_with_steps(timing: Timing, off: list[int]) -> Quads:
    """Every rank takes as long as the slowest with the exchange; without it, what its own steps take."""
    on = [2 * (round(timing.step_ms * MS) - timing.data_ns)] * (len(off) // 4)
    first = [off[at] + off[at + 1] for at in range(0, len(off), 4)]
    second = [off[at] + off[at + 1] for at in range(2, len(off), 4)]
    return Quads(
        steps=2,
        on_first_ns=on,
        off_first_ns=first,
        off_second_ns=second,
        on_second_ns=on,
        off_step_ns=off,
    )


def _work(cell: Cell, timing: Timing) -> Work:
    samples = cell.batch_per_replica
    return Work(
        samples=samples,
        units=samples * timing.units_per_sample,
        unit=timing.unit,
        parameters=1_000_000,
        flops=6_000_000 * samples,
        exchange_payload_bytes=timing.payload_bytes if cell.gpus > 1 else 0,
        exchange_operations=3 if cell.gpus > 1 else 0,
        bubble_ideal=timing.bubble_ideal,
    )


@pytest.fixture
def planted(tmp_path) -> PlantedStudy:
    """An empty study on CPU, to be planted."""
    return PlantedStudy(tmp_path / "planted")


@pytest.fixture
def small(planted) -> PlantedStudy:
    """Weak and strong, single and ddp, three runs a cell, one failure and one skip; see the tests' sums."""
    weak_one = planted.series("weak", "single", [1], batch=8)[0]
    weak = planted.series("weak", "ddp", [2, 4, 8], batch=8)
    strong_one = planted.series("strong", "single", [1], batch=32)[0]
    strong = planted.series("strong", "ddp", [2, 4], batch=32)
    planted.skip("ddp", 1, "ddp needs at least 2", batch=8)
    planted.plan()
    planted.runs(weak_one, [9.0, 10.0, 11.0])
    planted.runs(weak[0], [12.0, 12.5, 13.0], exposed_ms=2.5)
    planted.runs(weak[1], [14.0, 16.0, 18.0], exposed_ms=4.0)
    planted.run(weak[2], Timing(step_ms=1, outcome=Outcome.OUT_OF_MEMORY, reason="allocating 2 GiB"))
    planted.runs(strong_one, [40.0, 40.0, 40.0])
    planted.runs(strong[0], [24.0, 25.0, 26.0], exposed_ms=5.0)
    # The cell of 4 x 8 samples is the weak one of size 4 too: strong[1] has its runs already.
    assert strong[1] == weak[1]
    return planted


@pytest.fixture
def full_rows() -> Callable[[StudyFigures], list[dict[str, str]]]:
    """The rows of the full table by the titles of its columns."""

    def rows(study: StudyFigures) -> list[dict[str, str]]:
        data = full_table(study, cell_rows(study)).data
        return [dict(zip(data.titles, row, strict=True)) for row in data.texts]

    return rows


@pytest.fixture
def new_timing() -> type[Timing]:
    return Timing


@pytest.fixture(scope="session")
def new_study() -> type[PlantedStudy]:
    return PlantedStudy


@pytest.fixture
def new_environment() -> Callable[..., Environment]:
    return an_environment
