"""Speed and memory of reading large studies; the figures are kept in the benchmark's record, not asserted.

Collecting and reporting 100 cells x 256 ranks x 200 steps: the target is 30 s and 1 GiB. The first
`bench status` of 2,000 cells x 64 ranks, which are 128,000 files: 10 s of CPU, and the next one 2 s.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packages import module_at

from results.store import Study

CELLS, RANKS, STEPS = 100, 256, 200
REPORT = """
import json, resource, sys, time
from pathlib import Path
from results.store import Study
start = time.monotonic()
study = Study(Path(sys.argv[1]))
results = study.collect()
collected = time.monotonic()
from reports.analysis.study import analyse
from reports.page.tables import export_table
from reports.page.render import render_figures
figures = analyse(study.name, study.plans(), results)
texts = [render_figures(figures), *(export_table([figures], name, "csv") for name in ("cells", "runs"))]
print(json.dumps({
    "collect_s": collected - start,
    "render_s": time.monotonic() - collected,
    "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "html_bytes": len(texts[0].encode()),
    "ok": sum(result.outcome == "ok" for result in results),
}))
"""


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """The planted studies of the report's own tests."""
    return module_at(Path(__file__).parents[1] / "laws" / "study_fixtures.py")


@pytest.fixture(scope="module")
def large(generator, tmp_path_factory) -> Study:
    """Ten strategies by ten batches, one run each."""
    planted = generator.PlantedStudy(tmp_path_factory.mktemp("large") / "study", device="cuda")
    cells = [
        planted.series("weak", f"ddp:bucket_mb={bucket}.0", [RANKS], batch=batch)[0]
        for batch in range(8, 88, 8)
        for bucket in range(1, 11)
    ]
    assert len(cells) == CELLS
    planted.plan(repeats=1)
    for place, cell in enumerate(cells):
        timing = generator.Timing(step_ms=100 + place * 1.234567, exposed_ms=12.345678, steps=STEPS)
        planted.run(cell, timing, sync=False)
    return planted.study


@pytest.mark.slow
@pytest.mark.long
def test_collecting_and_reporting_a_large_study(large, benchmark) -> None:
    def report() -> dict[str, float]:
        done = subprocess.run(
            [sys.executable, "-c", REPORT, str(large.root)], check=True, capture_output=True, text=True
        )
        found: dict[str, float] = json.loads(done.stdout)
        return found

    found = benchmark.pedantic(report, setup=large.forget_derived, rounds=1)
    benchmark.extra_info.update(found)
    assert found["ok"] == CELLS


@pytest.mark.slow
@pytest.mark.parametrize("which", ["first", "again"])
def test_the_status_of_a_study_with_many_files(generator, benchmark, amount, tmp_path, which) -> None:
    cells, ranks = amount(2000, brief=20), amount(64, brief=2)
    planted = generator.PlantedStudy(tmp_path / "study", device="cuda")
    series = [
        planted.series("weak", f"ddp:bucket_mb={1 + place % 20}.0", [ranks], batch=1 + place // 20)[0]
        for place in range(cells)
    ]
    planted.plan(repeats=1)
    for place, cell in enumerate(series):
        planted.run(cell, generator.Timing(step_ms=100 + place, exposed_ms=12.3, steps=20), sync=False)
    used_s = []

    def status() -> subprocess.CompletedProcess[str]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "harness.cli", "status", "--json", str(planted.study.root)],
            capture_output=True,
            text=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return done

    setup = planted.study.forget_derived if which == "first" else status
    done = benchmark.pedantic(status, setup=lambda: [setup(), None][1], rounds=amount(3, brief=1))
    benchmark.extra_info["cpu_s"] = used_s if which == "first" else used_s[1::2]
    assert [cell["others"][:4] for cell in json.loads(done.stdout)["cells"]] == ["1 ok"] * cells
