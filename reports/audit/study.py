"""The table of a study: a row a run that ended well, from its records, with the names of `runs.csv`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from reports.audit.rows import AuditedTable, table
from results.cell import Cell
from results.outcome import Outcome
from results.run import RunResult
from results.store import Study

_CELL: Mapping[str, Callable[[Cell], object]] = {
    "workload": lambda cell: cell.workload,
    "dataset": lambda cell: cell.dataset,
    "strategy": lambda cell: cell.strategy,
    "compression": lambda cell: cell.compression,
    "collective": lambda cell: cell.collective,
    "node_size": lambda cell: cell.node_size,
    "link_mbit_per_s": lambda cell: cell.link_mbit_per_s,
    "device": lambda cell: cell.device,
    "backend": lambda cell: cell.backend,
    "gpus": lambda cell: cell.gpus,
    "precision": lambda cell: cell.precision,
    "optimizer": lambda cell: cell.optimizer,
    "micro_batch": lambda cell: cell.micro_batch,
    "accumulation": lambda cell: cell.accumulation,
    "batch_per_replica": lambda cell: cell.batch_per_replica,
    "global_batch": lambda cell: cell.global_batch,
    "cell_id": lambda cell: cell.id,
}
_RUN: Mapping[str, Callable[[RunResult], object]] = {
    "run_id": lambda run: run.run_id,
    "fingerprint": lambda run: run.fingerprint,
    "device_name": lambda run: run.environment.device_name if run.environment else None,
    "step_ns": lambda run: run.step_ns.value if run.step_ns else None,
    "samples_per_s": lambda run: run.samples_per_s,
    "units_per_s": lambda run: run.units_per_s,
    "unit": lambda run: run.unit,
    "flops_per_s": lambda run: run.flops_per_s,
    "mfu": lambda run: run.mfu,
    "parameters": lambda run: run.parameters,
    "flops_per_step": lambda run: run.flops_per_step,
}


def read_study(study: Study) -> AuditedTable:
    """The runs of a study that ended well; a run's number stands in the place of a line's. Writes nothing."""
    runs = [run for run in study.results() if run.outcome == Outcome.OK]
    lines = [(number, _cells(study.cell(run.cell_id), run)) for number, run in enumerate(runs, start=2)]
    return table([*_CELL, *_RUN], lines, {})


def _cells(cell: Cell, run: RunResult) -> list[str]:
    facts = [show(cell) for show in _CELL.values()] + [show(run) for show in _RUN.values()]
    # repr of a float: the fewest digits that give it back.
    return ["" if fact is None else str(fact) for fact in facts]
