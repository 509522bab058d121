"""Runs of unlike programs are in one row of nothing; records that lack what was built pool as before."""

from __future__ import annotations

import msgspec
import pytest
from builders import a_cell, an_environment
from launching import a_result

from reports.analysis.pooling import pool
from results.environment import Program
from results.run import RunResult
from results.statistics import Metric

NARROW = Program(
    names_hash="aa",
    tensors={"float32 64x16": 1},
    modules={"torch.nn.modules.linear.Linear": 1},
    files={"config.json": "0001"},
)
WIDE = msgspec.structs.replace(
    NARROW, names_hash="bb", tensors={"float32 192x16": 1}, files={"config.json": "0002"}
)


def _run(place: int, program: Program | None) -> RunResult:
    environment = msgspec.structs.replace(an_environment(), program=program)
    return a_result(
        cell_id=a_cell().id,
        run_id=f"run-{place}",
        started_at=f"2026-01-02T03:04:0{place}.000Z",
        environment=environment,
        fingerprint=environment.fingerprint,
        step_ns=Metric(value=1.0, unit="ns", low=None, high=None, samples=1, interval=None),
    )


def test_a_run_of_another_program_is_left_out_with_what_differs() -> None:
    pooled = pool(a_cell(), [_run(1, NARROW), _run(2, WIDE), _run(3, WIDE)], planned=3)
    assert [run.run_id for run in pooled.runs] == ["run-2", "run-3"]
    assert [left.reason for left in pooled.left_out] == [
        "program: file config.json 0001, tensors float32 64x16 1, hash of names aa here, "
        "file config.json 0002, tensors float32 64x16 none, hash of names bb in the runs that count"
    ]


@pytest.mark.parametrize("other", [None, msgspec.structs.replace(NARROW, files={})])
def test_what_one_record_lacks_separates_nothing(other) -> None:
    pooled = pool(a_cell(), [_run(1, other), _run(2, NARROW)], planned=2)
    assert len(pooled.runs) == 2
    assert pooled.runs[0].fingerprint == pooled.runs[1].fingerprint
