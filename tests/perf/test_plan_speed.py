"""How fast a matrix is planned: at most a second for 10,000 cells (figures: docs/evidence.md)."""

from __future__ import annotations

import cProfile
import pstats

import pytest
from builders import a_request

from harness.plan.expand import expand
from harness.plan.schedule import schedule
from harness.plan.study_file import StudyFile
from results.plan import Plan, Request

STRATEGIES = ("ddp,ddp:bucket_mb=50", "zero1,fsdp")
CALLS_PER_CELL = {"ddp,ddp:bucket_mb=50": 585, "zero1,fsdp": 880}
"""Half as much again as a cell costs today (390 and 590, of which 220 and 420 predict its memory): work of a
workload that is done for each cell is over it."""


def request_of(cells: int, strategy: str = STRATEGIES[0]) -> Request:
    """A matrix of about `cells` cells over the largest model there is and a small one."""
    options = StudyFile(
        workload="resnet101,gpt-nano", strategy=strategy, gpus=f"2..{cells // 8 + 1}:1", batch_size="8,16"
    )
    return a_request(options)


def planned(request: Request) -> Plan:
    return expand(request, study="s", created_at="2026-01-01T00:00:00Z")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_expand_10_000_cells(benchmark, amount, strategy) -> None:
    rounds = amount(3, brief=1)
    plan = benchmark.pedantic(planned, args=(request_of(10_000, strategy),), rounds=rounds)
    assert len(plan.cells) == 10_000
    assert len({cell.id for cell in plan.cells}) == 10_000


def test_schedule_three_repeats_of_10_000_cells(benchmark, amount) -> None:
    cells = planned(request_of(10_000)).cells
    rounds = amount(3, brief=1)
    launches = benchmark.pedantic(schedule, args=(cells,), kwargs={"repeats": 3}, rounds=rounds)
    assert sum(len(launch.cells) for launch in launches) == 30_000


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cell_more_is_a_bounded_number_of_calls(strategy) -> None:
    """Counted, not timed: the same on every machine, however busy it is."""
    small, large = (_calls(request_of(cells, strategy)) for cells in (200, 600))
    assert (large - small) / 400 < CALLS_PER_CELL[strategy]


def _calls(request: Request) -> int:
    profile = cProfile.Profile()
    profile.runcall(planned, request)
    stats = pstats.Stats(profile)
    calls: int = stats.total_calls
    return calls
