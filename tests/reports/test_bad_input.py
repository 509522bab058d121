"""Studies that are empty, broken, huge or half written: every face says so in a sentence, and none fails."""

from __future__ import annotations

import json
import time

import pytest

import reports
from harness.cli import run
from reports.analysis.next_run import next_run
from reports.analysis.study import analyse
from reports.analysis.verdict.verdict import NOTHING, verdict
from results.outcome import Outcome

NO_FIGURE = "no cell has a figure"
LONG = 190


def nothing_planned(planted, new_timing) -> None:
    planted.skip("ddp", 1, "ddp needs at least 2", batch=8)
    planted.plan()


def one_cell(planted, new_timing) -> None:
    planted.points("single", {1: 10.0})
    planted.plan()


def failures_alone(planted, new_timing) -> None:
    cells = planted.series("weak", "ddp", [2, 4], batch=8)
    planted.plan()
    for cell in cells:
        planted.run(cell, new_timing(step_ms=1, outcome=Outcome.CRASHED, reason="it fell over"))


def long_names(planted, new_timing) -> None:
    workload = f"py:{'m' * LONG}:build"
    cells = planted.series("weak", "single", [1], batch=8, workload=workload)
    cells += planted.series("weak", f"ddp:{'x' * LONG}", [2, 4], batch=8, workload=workload)
    planted.plan()
    for cell in cells:
        planted.runs(cell, [10.0, 11.0, 12.0])


def half_written(planted, new_timing) -> None:
    """While it is read: a cut record, a rank that has not written yet, a temporary file, a cut plan."""
    cells = planted.series("weak", "single", [1], batch=8)
    cells += planted.series("weak", "ddp", [2, 4], batch=8)
    planted.plan()
    planted.runs(cells[0], [10.0, 10.1])
    cut, lacking = (planted.run(cell, new_timing(step_ms=10)) for cell in cells[1:])
    path = planted.study.rank_path(cells[1].id, cut, 1)
    path.write_bytes(path.read_bytes()[:200])
    last = planted.study.rank_path(cells[2].id, lacking, 3)
    last.unlink()
    last.with_name(f".{last.name}.tmp").write_bytes(b"{")
    (planted.study.root / "plan-0002.json").write_bytes(b'{"schema":"bench/plan"')


CASES = [
    (nothing_planned, NO_FIGURE),
    (one_cell, "only one size"),
    (failures_alone, NO_FIGURE),
    (long_names, "6 runs each of"),
    (half_written, "unreadable or unfinished record"),
]


@pytest.fixture
def narrow(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("made", "words"), CASES)
def test_every_face_of_a_bad_study_says_what_it_is(
    made, words, planted, new_timing, tmp_path, capsys
) -> None:
    made(planted, new_timing)
    root = planted.study.root
    assert run(["report", str(root), "--figures", "svg"]) == 0
    told = capsys.readouterr().out
    assert words in " ".join(told.split())
    page = (root / "report.html").read_text()
    assert "<h1" in page
    assert "Traceback" not in page
    for form in ("markdown", "json", "latex"):
        assert run(["export", str(root), "--format", form, "-o", str(tmp_path / form)]) == 0
        assert (tmp_path / form).read_text().strip()
    assert json.loads((tmp_path / "json").read_text())["studies"][0]["name"] == "planted"
    loaded = reports.load(root)
    assert len(loaded.cells) == len(planted.study.plans()[0].cells)


def test_a_half_written_run_is_proposed_again(planted, new_timing) -> None:
    half_written(planted, new_timing)
    found = next_run(analyse("planted", planted.study.told_plans(), planted.study.results()))
    assert (found.kind, found.strategy, found.gpus) == ("failed", "ddp", (2,))


def test_a_study_without_a_planned_cell_has_no_next_run(planted, new_timing) -> None:
    nothing_planned(planted, new_timing)
    study = planted.analysed([], name="planted")
    assert (verdict(study).sentences, next_run(study)) == ((NOTHING,), None)


def test_a_thousand_cells_are_analysed_in_seconds(planted, new_timing) -> None:
    cells = planted.series("weak", "single", [1], batch=8)
    for number in range(125):
        strategy = f"ddp:bucket_mb={number + 1}.0"
        cells += planted.series("weak", strategy, [2**size for size in range(1, 9)], batch=8)
    planted.plan()
    for cell in cells:
        if cell.gpus <= 2:
            planted.run(cell, new_timing(step_ms=10 + cell.gpus), sync=False)
    results = planted.study.results()
    began = time.process_time()
    study = planted.analysed(results, name="planted")
    found = verdict(study)
    # About 1 s of CPU; ten times as much on a slow machine.
    assert time.process_time() - began < 10
    assert len(study.pools) == 1001
    assert (found.next_run.kind, found.next_run.gpus) == ("first", (4,))
