"""Files of pytest-benchmark (`--benchmark-json`) as a baseline: each file is one run of its benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from results.baseline import Baseline, Subject
from results.errors import SchemaError, StoreError


class _Stats(msgspec.Struct):
    median: float
    """In seconds."""


class _Benchmark(msgspec.Struct):
    fullname: str
    stats: _Stats


class _Cpu(msgspec.Struct):
    brand_raw: str | None = None


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
    """The medians of each benchmark, one a file, in ns. Raises SchemaError for a file of another kind.

    The rounds of one file are of one process and so no independent samples: several files make a sample.
    """
    files = sorted((_read(path) for path in paths), key=lambda file: file.datetime)
    times: dict[str, list[float]] = {}
    for file in files:
        for benchmark in file.benchmarks:
            times.setdefault(benchmark.fullname, []).append(benchmark.stats.median * 1e9)
    newest = files[-1]
    facts = {"cpu_model": newest.machine_info.cpu.brand_raw, "python": newest.machine_info.python_version}
    known = {fact: value for fact, value in facts.items() if value is not None}
    return Baseline(
        name=name,
        measured_at=newest.datetime,
        commit=newest.commit_info.id,
        dirty=newest.commit_info.dirty,
        subjects=tuple(
            Subject(key=key, label=key, facts=known, timed={"time": tuple(values)}, runs=len(values))
            for key, values in times.items()
        ),
    )


def _read(path: Path) -> _File:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SchemaError(
            f"{path} is no file of pytest-benchmark ({error}); write one with --benchmark-json"
        ) from error
