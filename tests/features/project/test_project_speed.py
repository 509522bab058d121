"""How fast a study is projected: 1,000 cells to 9 sizes, with bands; the target is 5 s of CPU."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from generated_study import GPU, large_study
from packages import module_at

from harness.features.project.call import outside_of
from harness.features.project.project import projected_series
from harness.features.project.refusals import Outside
from reports.analysis.study import StudyFigures, analyse
from results.store import Study

STUDIES, SIZES, TO = 20, (2, 4, 8, 16, 32), 256
CALLS_PER_CELL = {"none": 2100, "table": 10_500}
"""Half as much again as a cell costs today (1,400 by laws and 7,000 by replays)."""
Studies = Callable[[int], StudyFigures]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """The network tables of the projection's own tests."""
    return module_at(Path(__file__).with_name("test_command.py"))


@pytest.fixture(scope="module")
def studies() -> Studies:
    """Make a study of `number` times 57 generated cells, each 57 with a separate seed and optimizer."""

    def made(number: int) -> StudyFigures:
        parts = [
            large_study(seed, sizes=SIZES, optimizer=f"adamw:lr={seed}e-4") for seed in range(1, number + 1)
        ]
        plans = [plan for part in parts for plan in part.plans]
        results = [run for part in parts for run in part.runs]
        return analyse("large", plans, results, parts[0].assumptions)

    return made


def outside(study: StudyFigures, tables: ModuleType, folder: Path, network: str) -> Outside:
    groups = ((2, 1), (4, 1), (8, 1), (16, 2), (32, 4))
    table = tables.a_table(180e9, 20e9, groups, GPU) if network == "table" else None
    return outside_of(Study(folder), study, table)


@pytest.mark.slow
@pytest.mark.parametrize("network", CALLS_PER_CELL)
def test_project_1000_cells(benchmark, amount, studies, tables, tmp_path, network) -> None:
    study = studies(STUDIES)
    by = outside(study, tables, tmp_path, network)
    found = benchmark.pedantic(projected_series, args=(study, TO, by), rounds=amount(3, brief=1))
    assert len(study.cells) >= 1000
    assert all(len(series.sizes) == 9 for series in found)


@pytest.mark.parametrize("network", CALLS_PER_CELL)
def test_a_cell_more_is_a_bounded_number_of_calls(studies, tables, tmp_path, network) -> None:
    """Counted, not timed: the same on every machine, however busy it is."""

    def calls(number: int) -> tuple[int, int]:
        study, profile = studies(number), cProfile.Profile()
        profile.runcall(projected_series, study, TO, outside(study, tables, tmp_path, network))
        return pstats.Stats(profile).total_calls, len(study.cells)

    calls(1)
    (few, small), (many, large) = calls(1), calls(3)
    assert (many - few) / (large - small) < CALLS_PER_CELL[network]
