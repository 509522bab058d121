"""Files of pytest-benchmark (`--benchmark-json`) as a baseline: each file is one run of its benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from reports.analysis.pooling import differing
from results.baseline import Baseline, Subject
from results.errors import SchemaError, StoreError, UsageError
from results.store import utc_text


class _Stats(msgspec.Struct):
    median: float
    """In seconds."""


class _Options(msgspec.Struct):
    timer: str | None = None
    """The name of the function, such as `perf_counter`."""


class _Benchmark(msgspec.Struct):
    fullname: str
    stats: _Stats
    options: _Options = msgspec.field(default_factory=_Options)


class _Cpu(msgspec.Struct):
    brand_raw: str | None = None
    """Of a virtual machine often no more than `AMD EPYC`."""
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


def read_pytest_benchmark(name: str, paths: Sequence[Path]) -> Baseline:
    """The medians of each benchmark, one a file, in ns.

    The rounds of one file are of one process and so no independent samples: several files make a sample.
    Raises SchemaError for a file of another kind, UsageError for files of several machines.
    """
    read = {path: _read(path) for path in paths}
    _require_one_machine(name, {path: _facts(file) for path, file in read.items()})
    moments = {path: _moment(file, path) for path, file in read.items()}
    files = [read[path] for path in sorted(read, key=lambda path: moments[path])]
    times: dict[str, list[float]] = {}
    for file in files:
        for benchmark in file.benchmarks:
            times.setdefault(benchmark.fullname, []).append(benchmark.stats.median * 1e9)
    newest = files[-1]
    known = _facts(newest)
    return Baseline(
        name=name,
        measured_at=max(moments.values()),
        commit=newest.commit_info.id,
        dirty=newest.commit_info.dirty,
        subjects=tuple(
            Subject(key=key, label=key, facts=known, timed={"time": tuple(values)}, runs=len(values))
            for key, values in times.items()
        ),
    )


def _require_one_machine(name: str, facts: Mapping[Path, Mapping[str, str]]) -> None:
    (first, expected), *others = facts.items()
    for path, found in others:
        unlike = [
            f"{fact} is {before} in {first.name}, {after} in {path.name}"
            for fact, (before, after) in differing(expected, found).items()
        ]
        if unlike:
            raise UsageError(
                f"{name} holds runs of several machines ({'; '.join(unlike)}): give each a folder of its own"
            )


def _facts(file: _File) -> dict[str, str]:
    """The fingerprint of the machine, and what was counted as time."""
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


def _moment(file: _File, path: Path) -> str:
    """When it was measured, as `utc_now` has it."""
    try:
        return utc_text(datetime.fromisoformat(file.datetime))
    except ValueError as error:
        raise SchemaError(
            f"{path} has the datetime {file.datetime!r}, which is no ISO 8601 time: write it anew with "
            f"--benchmark-json"
        ) from error


def _read(path: Path) -> _File:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SchemaError(
            f"{path} is no file of pytest-benchmark ({error}); write one with --benchmark-json"
        ) from error
