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
from harness.features.gate.records.baseline import Baseline, Subject
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
    kinds = {cell: plan.kind for plan in study.told_plans() for cell in plan.cells}
    if not results:
        raise UsageError(
            f"{study.root} has no run yet: run its matrix first ({bench_call('status', study.root)})"
        )
    groups = grouped((seedless(c) if over_seeds and kinds[c].losses else c, c) for c in kinds)
    settings = setting_labels(_alike(cell) for cell in groups)
    subjects: dict[str, Subject] = {}
    excluded = study.review().excluded
    for cell, seeds in groups.items():
        ids, losses = {seed.id for seed in seeds}, kinds[seeds[0]].losses
        runs = [result for result in results if result.cell_id in ids]
        own = settings[setting_of(_alike(cell))]
        pooled = pool(cell, runs, planned=len(runs), excluded=excluded, need_steps=not losses)
        subject = _subject(study, pooled, own)
        if losses and subject.failed is None:
            subject = msgspec.structs.replace(subject, losses=_losses(study, pooled, losses))
        known = subjects.get(subject.key)
        # If the same work was measured for several lengths, the one with more runs is used.
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


def _subject(study: Study, pooled: Pool, settings: str) -> Subject:
    """A cell as a subject. `settings` are the values in which it differs from other cells of its workload."""
    # A verdict has its own tests of noise, and says which runs were disturbed.
    cell, runs = pooled.cell, pooled.with_disturbed
    name = f"{cell.workload}, {label(cell)}, {cell.gpus} x {cell.batch_per_replica}"
    if settings:
        name += f", {settings}"
    if not runs or pooled.unproven is not None:
        why = pooled.excluded[-1].reason if pooled.excluded else NOT_RUN
        if pooled.lost:
            lost = pooled.lost[-1]
            why = f"{outcome_words(lost.outcome)}: {lost.reason or 'no reason is known'}"
        if pooled.unproven is not None:
            why = f"{NOT_PROVEN}: {pooled.unproven}"
        return Subject(key=subject_key(cell), label=name, failed=why)
    newest = runs[-1]
    # Independent figures: one for each run, or for each launch.
    by_launch = list({run.launch_id: run for run in runs}.values())
    timed = any(run.step_ns is not None for run in runs)
    values = {
        name: tuple(
            value
            for run in (by_launch if metric.of_launch else runs)
            if (value := metric.read(run)) is not None
        )
        for name, metric in (TIMED if timed else {}).items()
    }
    counters = {
        name: tuple(dict.fromkeys(count for run in runs if (count := metric.read(run, cell)) is not None))
        for name, metric in (EXACT if timed else {}).items()
    }
    return Subject(
        key=subject_key(cell),
        label=name,
        facts=_facts(cell, newest),
        timed={name: found for name, found in values.items() if found},
        exact={name: found for name, found in counters.items() if found},
        collectives=_collectives(study.rank_records(newest.cell_id, newest.run_id)),
        runs=len(runs),
        run_ids=tuple(run.run_id for run in runs),
        disturbed=sum(run.disturbed for run in runs),
    )


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
    subjects = []
    for same in grouped((subject.key, subject) for part in parts for subject in part.subjects).values():
        failed = [subject.failed for subject in same if subject.failed is not None]
        newest = next((subject for subject in reversed(same) if subject.failed is None), same[-1])
        exact = _joined([subject.exact for subject in same])
        subjects.append(
            msgspec.structs.replace(
                newest,
                timed=_joined([subject.timed for subject in same]),
                exact={metric: tuple(dict.fromkeys(values)) for metric, values in exact.items()},
                # Not every pair records its exchange.
                collectives=next((one.collectives for one in reversed(same) if one.collectives), ()),
                runs=sum(subject.runs for subject in same),
                run_ids=tuple(run_id for subject in same for run_id in subject.run_ids),
                disturbed=sum(subject.disturbed for subject in same),
                failed=failed[0] if failed and (any_failure or len(failed) == len(same)) else None,
            )
        )
    return msgspec.structs.replace(parts[-1], name=name, study=None, subjects=tuple(subjects))


def without_launch(part: Baseline) -> Baseline:
    """The baseline without the metrics of launches, for runs of a launch that was counted already."""

    def without(subject: Subject) -> Subject:
        timed = {name: values for name, values in subject.timed.items() if not TIMED[name].of_launch}
        return msgspec.structs.replace(subject, timed=timed)

    return msgspec.structs.replace(part, subjects=tuple(map(without, part.subjects)))


def _joined(columns: Sequence[Mapping[str, tuple[V, ...]]]) -> dict[str, tuple[V, ...]]:
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: tuple(value for column in columns for value in column.get(name, ())) for name in names}
