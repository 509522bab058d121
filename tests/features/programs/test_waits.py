"""The slow rank of a program is the one that waits least for the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_laws import GoldenLaws

from harness.features.programs.reading import waits_of
from harness.features.programs.records import PROGRAM_RUN, ProgramRun, Traced
from harness.features.programs.worker.trace import traced

MS = 1_000_000


class TestGolden(GoldenLaws):
    golden = Path(__file__).with_name("golden")
    schemas = (PROGRAM_RUN,)


def kept(*rows: list[int] | None) -> list[ProgramRun]:
    """The files of ranks by their waits in ms, one a block; None: the waits are unknown."""
    return [
        ProgramRun(
            rank=rank,
            waits_ns=None if row is None else [wait * MS for wait in row],
            waits_by=None if row is None else "collectives",
            why_no_waits="nobody knows" if row is None else None,
            steps_seen=30,
        )
        for rank, row in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("rows", "slow"),
    [
        # Of steps of 100 ms, rank 1 waits 30 ms less than the other, in each block.
        (([40, 41, 39], [10, 11, 9]), 1),
        # 4 ms of 100 are too few to call a rank slow.
        (([40, 41, 39], [36, 37, 35]), None),
        # On average it is 10 ms, and in one of the blocks the other rank waited less.
        (([40, 10, 40], [20, 20, 20]), None),
        # The slow one has to wait less than each other rank.
        (([40, 41, 39], [10, 11, 9], [11, 12, 10]), None),
        (([40, 41, 39], [10, 11, 9], [30, 31, 29]), 1),
    ],
)
def test_the_slow_rank_waits_less_than_each_other_in_all_blocks(rows, slow) -> None:
    found = waits_of(kept(*rows), ranks=len(rows), step_ns=100.0 * MS)
    assert found.slow == slow


def event(name: str, category: str, start_us: float, end_us: float) -> dict[str, object]:
    return {"ph": "X", "name": name, "cat": category, "ts": start_us, "dur": end_us - start_us}


@pytest.mark.parametrize(
    ("on_gpu", "compute", "exchange"),
    [
        (True, ("gemm", "kernel"), ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel")),
        (False, ("aten::addmm", "cpu_op"), ("gloo:all_reduce", "user_annotation")),
    ],
)
def test_a_trace_is_divided_into_compute_exposed_communication_and_idle(on_gpu, compute, exchange) -> None:
    steps = [
        event("ProfilerStep#1", "user_annotation", 0, 40),
        event("ProfilerStep#2", "user_annotation", 40, 60),
    ]
    other = [
        event("Memcpy HtoD", "gpu_memcpy", 0, 60),
        event("c10d::allreduce_", "cpu_op", 0, 60),
        {"ph": "i"},
    ]
    # Compute takes 20 us in the steps. 8 of the 20 us of the exchange are under compute.
    computing = [event(*compute, 0, 12), event(*compute, 10, 18), event(*compute, 58, 64)]
    found = traced({"traceEvents": [*steps, *other, *computing, event(*exchange, 10, 30)]}, on_gpu=on_gpu)
    assert found == Traced(steps=2, compute_ns=10_000, exposed_ns=6_000, idle_ns=14_000)


def test_a_trace_of_a_gpu_without_kernels_has_no_figure() -> None:
    step = event("ProfilerStep#1", "user_annotation", 0, 40)
    with pytest.raises(ValueError, match="no kernel"):
        traced({"traceEvents": [step, event("aten::addmm", "cpu_op", 0, 30)]}, on_gpu=True)


def test_with_an_unknown_rank_or_a_lost_file_no_rank_is_slow() -> None:
    for files, why in ((kept([40, 40], None), "nobody knows"), (kept([40, 40]), "a rank left no file")):
        found = waits_of(files, ranks=2, step_ns=100.0 * MS)
        assert (found.by_rank_ns, found.slow, found.why_not) == (None, None, why)
