"""Baselines, the input of the gate, from a study, files of pytest-benchmark, or the sides of many pairs.

Each file of pytest-benchmark (`--benchmark-json`) is one run of its benchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from harness.features.gate.metrics import EXACT, TIMED
from harness.features.gate.records.baseline import Baseline, Exact, Subject
from reports.analysis.outcomes import outcome_words
from reports.analysis.pooling import Pool, differing, machine_facts, pool
from reports.analysis.series import setting_labels, setting_of
from results import files
from results.cell import Cell, StepPolicy, label
from results.errors import SchemaError, UsageError, bench_call
from results.grouping import grouped
from results.outcome import Outcome
from results.record import RankRecord
from results.registry import load
from results.run import NOT_PROVEN, RunResult
from results.store import Study, utc_now, utc_text

V = TypeVar("V")

NOT_RUN = "it was not run"
UNDER_TEST = ("code_hash", "packages")
"""Facts of the code under test, which may differ."""


def reduce_study(study: Study, results: Sequence[RunResult], *, over_seeds: bool = True) -> Baseline:
    """Every planned cell of a study as a subject. Raises UsageError for a study without a run.

    With `over_seeds`, cells of a kind with losses that differ in their seed alone are one subject.
    """
    if not results:
        raise UsageError(
            f"{study.root} has no run yet: run its matrix first ({bench_call('status', study.root)})"
        )
    cells = _cells(study, over_seeds=over_seeds)
    settings = setting_labels(_alike(cell) for cell in cells)
    subjects: dict[str, Subject] = {}
    excluded = study.review().excluded
    for cell, (ids, losses) in cells.items():
        runs = [result for result in results if result.cell_id in ids]
        pooled = pool(cell, runs, planned=len(runs), excluded=excluded, need_steps=not losses)
        subject = _subject(study, pooled, settings[setting_of(_alike(cell))], losses)
        # If the same work was measured for several lengths, the one with more runs is used.
        known = subjects.get(subject.key, subject)
        subjects[subject.key] = max(known, subject, key=lambda one: one.runs)
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


def _cells(study: Study, *, over_seeds: bool) -> dict[Cell, tuple[set[str], str | None]]:
    """The planned cells, each with the ids of its seeds and the place of its losses (`Kind.losses`)."""
    kinds = {cell: plan.kind for plan in study.told_plans() for cell in plan.cells}
    groups = grouped((seedless(c) if over_seeds and kinds[c].losses else c, c) for c in kinds)
    return {cell: ({seed.id for seed in seeds}, kinds[seeds[0]].losses) for cell, seeds in groups.items()}


def subject_key(cell: Cell) -> str:
    """The cell's id without its step policy and the hashes of the user's code and data."""
    return _alike(cell).id


def _alike(cell: Cell) -> Cell:
    return msgspec.structs.replace(cell, steps=StepPolicy(), source_hash=None, dataset_hash=None)


def _losses(study: Study, pooled: Pool, place: str) -> dict[int, dict[int, float | None]]:
    """Final losses by seed, for the seeds that have some, by the function at `place` (`Kind.losses`)."""
    diverged = [run for run in pooled.lost if run.outcome is Outcome.DIVERGED]
    runs = sorted((*pooled.with_disturbed, *diverged), key=lambda run: run.run_id)
    cells = grouped((run.cell_id, run) for run in runs)
    found = {study.cell(cell_id).seed: load(place)(study, same) for cell_id, same in cells.items()}
    return {seed: losses for seed, losses in sorted(found.items()) if losses}


def seedless(cell: Cell) -> Cell:
    """Return the cell with seed 0, by which seeds of a cell are grouped."""
    return msgspec.structs.replace(cell, seed=0)


def _subject(study: Study, pooled: Pool, settings: str, losses: str | None) -> Subject:
    """A cell as a subject. `settings` are the values in which it differs from other cells of its workload."""
    # A verdict has its own tests of noise, and says which runs were disturbed.
    cell, runs = pooled.cell, pooled.with_disturbed
    parts = (cell.workload, label(cell), f"{cell.gpus} x {cell.batch_per_replica}", settings)
    key, name, failed = subject_key(cell), ", ".join(filter(None, parts)), _failure(pooled)
    if failed is not None:
        return Subject(key=key, label=name, failed=failed)
    newest = runs[-1]
    timed = any(run.step_ns is not None for run in runs)
    return Subject(
        key=key,
        label=name,
        facts=_facts(cell, newest),
        timed=_figures(runs) if timed else {},
        exact=_counters(cell, runs) if timed else {},
        losses=_losses(study, pooled, losses) if losses else {},
        collectives=_collectives(study.rank_records(newest.cell_id, newest.run_id)),
        runs=len(runs),
        run_ids=tuple(run.run_id for run in runs),
        disturbed=sum(run.disturbed for run in runs),
    )


def _failure(pooled: Pool) -> str | None:
    """Why a cell has no figure to compare; None if it has one."""
    if pooled.unproven is not None:
        return f"{NOT_PROVEN}: {pooled.unproven}"
    if pooled.with_disturbed:
        return None
    if pooled.lost:
        lost = pooled.lost[-1]
        return f"{outcome_words(lost.outcome)}: {lost.reason or 'no reason is known'}"
    return pooled.excluded[-1].reason if pooled.excluded else NOT_RUN


def _figures(runs: Sequence[RunResult]) -> dict[str, tuple[float, ...]]:
    """The independent figures of each metric: one for each run, or for each launch."""
    by_launch = list({run.launch_id: run for run in runs}.values())
    read = {
        name: [metric.read(run) for run in (by_launch if metric.of_launch else runs)]
        for name, metric in TIMED.items()
    }
    known = {name: tuple(value for value in values if value is not None) for name, values in read.items()}
    return {name: values for name, values in known.items() if values}


def _counters(cell: Cell, runs: Sequence[RunResult]) -> dict[str, tuple[Exact, ...]]:
    """The different values of each counter."""
    read = {name: dict.fromkeys(metric.read(run, cell) for run in runs) for name, metric in EXACT.items()}
    known = {name: tuple(count for count in counts if count is not None) for name, counts in read.items()}
    return {name: counts for name, counts in known.items() if counts}


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
    """The collectives of the first recorded step of rank 0; empty if it recorded none."""
    if not records or records[0].recorded is None:
        return ()
    rows = records[0].recorded.operations
    columns = zip(rows.step, rows.name, rows.group, rows.payload_bytes, strict=True)
    return tuple(
        f"{rows.names[name]} {rows.groups[group]} {payload} B"
        for step, name, group, payload in columns
        if step == 0
    )


class _Stats(msgspec.Struct):
    median: float
    """Seconds."""


class _Options(msgspec.Struct):
    timer: str | None = None
    """The name of the function, such as `perf_counter`."""


class _Benchmark(msgspec.Struct):
    fullname: str
    stats: _Stats
    options: _Options = msgspec.field(default_factory=_Options)


class _Cpu(msgspec.Struct):
    brand_raw: str | None = None
    """The brand of the CPU; a virtual machine often reports only `AMD EPYC`."""
    family: int | None = None
    model: int | None = None
    stepping: int | None = None
    count: int | None = None


class _Machine(msgspec.Struct):
    cpu: _Cpu = msgspec.field(default_factory=_Cpu)
    python_version: str | None = None


class _Commit(msgspec.Struct):
    id: str | None = None
    dirty: bool | None = None


class _File(msgspec.Struct):
    benchmarks: list[_Benchmark]
    datetime: str
    machine_info: _Machine = msgspec.field(default_factory=_Machine)
    commit_info: _Commit = msgspec.field(default_factory=_Commit)


_BENCHMARKS = msgspec.json.Decoder(_File)


def read_pytest_benchmark(name: str, paths: Sequence[Path]) -> Baseline:
    """A baseline with the medians of each benchmark in ns, one for each file.

    The rounds of one file come from one process and are not independent, so a sample needs several files.
    Raises SchemaError for a file of another kind, UsageError for files of several machines.
    """
    read = {path: _read(path) for path in paths}
    _require_one_machine(name, read)
    moments = {}
    for path, file in read.items():
        try:
            moments[path] = utc_text(datetime.fromisoformat(file.datetime))
        except ValueError as error:
            raise SchemaError(
                f"{path} has the datetime {file.datetime!r}, which is not an ISO 8601 time: write the file "
                "again with --benchmark-json"
            ) from error
    in_order = [read[path] for path in sorted(read, key=lambda path: moments[path])]
    times = grouped((one.fullname, one.stats.median * 1e9) for file in in_order for one in file.benchmarks)
    newest = in_order[-1]
    facts = _machine_of(newest)
    return Baseline(
        name=name,
        measured_at=max(moments.values()),
        commit=newest.commit_info.id,
        dirty=newest.commit_info.dirty,
        subjects=tuple(
            Subject(key=key, label=key, facts=facts, timed={"time": tuple(values)}, runs=len(values))
            for key, values in times.items()
        ),
    )


def _require_one_machine(name: str, read: Mapping[Path, _File]) -> None:
    (first, expected), *others = ((path, _machine_of(file)) for path, file in read.items())
    for path, found in others:
        unlike = [
            f"{fact} is {before} in {first.name}, {after} in {path.name}"
            for fact, (before, after) in differing(expected, found).items()
        ]
        if unlike:
            raise UsageError(
                f"{name} holds runs of several machines ({'; '.join(unlike)}): give each its own folder"
            )


def _machine_of(file: _File) -> dict[str, str]:
    """The fingerprint of the machine and the timer."""
    cpu = file.machine_info.cpu
    revision = (cpu.family, cpu.model, cpu.stepping)
    timers = sorted({benchmark.options.timer or "unknown" for benchmark in file.benchmarks})
    facts = {
        "cpu_model": cpu.brand_raw,
        "cpu_revision": None if None in revision else ".".join(map(str, revision)),
        "cores": None if cpu.count is None else str(cpu.count),
        "python": file.machine_info.python_version,
        "timer": None if timers in ([], ["unknown"]) else ", ".join(timers),
    }
    return {fact: value for fact, value in facts.items() if value is not None}


def _read(path: Path) -> _File:
    try:
        return files.read_given(path).parsed(_BENCHMARKS)
    except files.DamagedError as error:
        raise SchemaError(
            f"{path} is not a file of pytest-benchmark ({error}); write one with --benchmark-json"
        ) from error


def merged_side(name: str, parts: Sequence[Baseline], *, any_failure: bool) -> Baseline:
    """One side of all pairs as one baseline: figures of all runs, and the different values of each counter.

    With `any_failure`, a subject fails if one of its runs failed; without, only if all failed.
    """
    groups = grouped((subject.key, subject) for part in parts for subject in part.subjects)
    subjects = tuple(_merged(same, any_failure=any_failure) for same in groups.values())
    return msgspec.structs.replace(parts[-1], name=name, study=None, subjects=subjects)


def _merged(same: Sequence[Subject], *, any_failure: bool) -> Subject:
    """One subject of several parts."""
    good = [subject for subject in same if subject.failed is None]
    failed = [subject.failed for subject in same if subject.failed is not None]
    fails = bool(failed) if any_failure else not good
    return msgspec.structs.replace(
        good[-1] if good else same[-1],
        timed=_joined([subject.timed for subject in same]),
        exact=_joined([subject.exact for subject in same], distinct=True),
        # Not every pair records its exchange.
        collectives=next((one.collectives for one in reversed(same) if one.collectives), ()),
        runs=sum(subject.runs for subject in same),
        run_ids=tuple(run_id for subject in same for run_id in subject.run_ids),
        disturbed=sum(subject.disturbed for subject in same),
        failed=failed[0] if fails else None,
    )


def without_launch(part: Baseline) -> Baseline:
    """The baseline without the metrics of launches, for runs of a launch that was counted already."""

    def without(subject: Subject) -> Subject:
        timed = {name: values for name, values in subject.timed.items() if not TIMED[name].of_launch}
        return msgspec.structs.replace(subject, timed=timed)

    return msgspec.structs.replace(part, subjects=tuple(map(without, part.subjects)))


def _joined(
    columns: Sequence[Mapping[str, tuple[V, ...]]], *, distinct: bool = False
) -> dict[str, tuple[V, ...]]:
    names = dict.fromkeys(name for column in columns for name in column)
    every = {name: [value for column in columns for value in column.get(name, ())] for name in names}
    return {name: tuple(dict.fromkeys(values) if distinct else values) for name, values in every.items()}
