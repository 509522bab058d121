"""A study reduced to what a gate compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from reports.analysis.pooling import Pool, machine_facts, pool
from reports.analysis.series import setting_labels, setting_of
from reports.gate.metrics import EXACT, TIMED, TimedMetric
from results.baseline import Baseline, Exact, Subject
from results.cell import Cell, StepPolicy
from results.errors import UsageError, bench_call
from results.label import label
from results.record import RankRecord
from results.run import RunResult
from results.store import Study, utc_now

NOT_RUN = "it was not run"
UNDER_TEST = ("code_hash", "packages")
"""Facts of the code, which is what is compared."""


def reduce_study(study: Study, results: Sequence[RunResult]) -> Baseline:
    """Every planned cell of a study as a subject. Raises UsageError for a study without a run."""
    cells = {cell.id: cell for plan in study.told_plans() for cell in plan.cells}
    if not results:
        raise UsageError(
            f"{study.root} has no run yet: run its matrix first ({bench_call('status', study.root)})"
        )
    settings = setting_labels(_alike(cell) for cell in cells.values())
    subjects: dict[str, Subject] = {}
    for cell in cells.values():
        runs = [result for result in results if result.cell_id == cell.id]
        own = settings[setting_of(_alike(cell))]
        subject = _subject(study, pool(cell, runs, planned=len(runs)), own)
        known = subjects.get(subject.key)
        # The same work measured for other lengths: the one with more runs stands for it.
        if known is None or subject.runs > known.runs:
            subjects[subject.key] = subject
    newest = max(results, key=lambda result: result.started_at or "")
    code = None if newest.environment is None else newest.environment.code
    return Baseline(
        name=study.name,
        study=study.name,
        measured_at=newest.started_at or utc_now(),
        commit=None if code is None else code.measured_commit,
        dirty=None if code is None else code.measured_dirty,
        subjects=tuple(subjects.values()),
    )


def subject_key(cell: Cell) -> str:
    """The cell's id as it would be with default measuring, and whatever the user's model code is."""
    return _alike(cell).id


def _alike(cell: Cell) -> Cell:
    return msgspec.structs.replace(cell, steps=StepPolicy(), source_hash=None, dataset_hash=None)


def _subject(study: Study, pooled: Pool, settings: str) -> Subject:
    """`settings` are those in which the cell differs from others of its workload."""
    cell, runs = pooled.cell, pooled.runs
    name = f"{cell.workload}, {label(cell)}, {cell.gpus} x {cell.batch_per_replica}"
    if settings:
        name += f", {settings}"
    if not runs:
        lost = pooled.lost[-1] if pooled.lost else None
        why = (
            NOT_RUN
            if lost is None
            else f"{lost.outcome.replace('_', ' ')}: {lost.reason or 'no reason is known'}"
        )
        return Subject(key=subject_key(cell), label=name, failed=why)
    newest = runs[-1]
    values = {name: _samples(metric, runs) for name, metric in TIMED.items()}
    counters = {name: _different(metric.read(run, cell) for run in runs) for name, metric in EXACT.items()}
    return Subject(
        key=subject_key(cell),
        label=name,
        facts=_facts(cell, newest),
        timed={name: found for name, found in values.items() if found},
        exact={name: found for name, found in counters.items() if found},
        collectives=_collectives(study.rank_records(cell.id, newest.run_id)),
        runs=len(runs),
        run_ids=tuple(run.run_id for run in runs),
        disturbed=sum(run.disturbed for run in runs),
    )


def _samples(metric: TimedMetric, runs: Sequence[RunResult]) -> tuple[float, ...]:
    """The figures of runs, or of launches, that are independent of each other."""
    chosen = {run.launch_id if metric.of_launch else run.run_id: run for run in runs}
    return tuple(value for run in chosen.values() if (value := metric.read(run)) is not None)


def _different(values: Iterator[Exact | None]) -> tuple[Exact, ...]:
    return tuple(dict.fromkeys(value for value in values if value is not None))


def _facts(cell: Cell, run: RunResult) -> dict[str, str]:
    facts: dict[str, object] = {"evidence": str(run.evidence)}
    if cell.dataset_hash is not None:
        facts["dataset_hash"] = cell.dataset_hash
    if run.environment is not None:
        facts |= machine_facts(run.environment)
        facts["placement"] = f"{run.environment.nodes} x {run.environment.gpus_per_node}"
        facts["network"] = run.environment.network or None
    return {
        name: msgspec.json.encode(value).decode() if isinstance(value, dict) else str(value)
        for name, value in facts.items()
        if value is not None and name not in UNDER_TEST
    }


def _collectives(records: Sequence[RankRecord]) -> tuple[str, ...]:
    """Of the first recorded step of rank 0; empty where nothing was recorded."""
    if not records or records[0].recorded is None:
        return ()
    rows = records[0].recorded.operations
    columns = zip(rows.step, rows.name, rows.group, rows.payload_bytes, strict=True)
    return tuple(
        f"{rows.names[name]} {rows.groups[group]} {payload} B"
        for step, name, group, payload in columns
        if step == 0
    )
