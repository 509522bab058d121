"""How fast a study is projected: 1,000 cells to 9 sizes, with bands, in at most 5 s of CPU."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import ModuleType

import pytest
from generated_study import GPU, large_study
from pytest_benchmark.fixture import BenchmarkFixture

from harness.commands.project import outside_of
from reports.analysis.study import StudyFigures, analyse
from reports.projection.project import projected_series
from results.store import Study

STUDIES, SIZES, TO = 20, (2, 4, 8, 16, 32), 256
MOST_S = 5.0


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """The network tables of the projection's own tests."""
    path = Path(__file__).parents[1] / "reports" / "projection" / "test_command.py"
    spec = importlib.util.spec_from_file_location("network_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def study() -> StudyFigures:
    """More than 1,000 cells of generated studies, each with its own seed and so its own cells."""
    parts = [
        large_study(seed, sizes=SIZES, optimizer=f"adamw:lr={seed}e-4") for seed in range(1, STUDIES + 1)
    ]
    plans = [plan for part in parts for plan in part.plans]
    results = [run for part in parts for run in part.runs]
    return analyse("large", plans, results, parts[0].assumptions)


@pytest.mark.parametrize("network", ["none", "table"])
def test_project_1000_cells(
    benchmark: BenchmarkFixture, study: StudyFigures, tables: ModuleType, tmp_path: Path, network: str
) -> None:
    groups = ((2, 1), (4, 1), (8, 1), (16, 2), (32, 4))
    table = tables.a_table(180e9, 20e9, groups, GPU) if network == "table" else None
    outside = outside_of(Study(tmp_path), study, table)
    spent = []

    def project() -> int:
        begun = time.process_time()
        found = projected_series(study, TO, outside)
        spent.append(time.process_time() - begun)
        return sum(len(series.sizes) for series in found)

    sizes = benchmark.pedantic(project, rounds=3)
    assert len(study.cells) >= 1000
    assert sizes >= 9 * len([curve for curve in study.curves if curve.key.strategy != "single"])
    assert min(spent) < MOST_S
