"""The numbers as CSV."""

from __future__ import annotations

import csv
import io

import pytest

from reports.page.render import cells_as_csv, runs_as_csv
from results.outcome import Outcome


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_one_row_a_cell_with_units_in_the_names(small) -> None:
    rows = rows_of(cells_as_csv(small.study, small.study.collect()))
    by_size = {(row["strategy"], row["gpus"], row["micro_batch"]): row for row in rows}
    # Weak 1, 2, 4, 8 and strong 1, 2; strong 4 is the weak cell of 4.
    assert len(rows) == len(by_size) == 6
    both = by_size["ddp", "4", "8"]
    assert both["scaling"] == "weak strong"
    assert float(both["step_ns"]) == pytest.approx(16e6)
    assert float(both["units_per_s"]) == pytest.approx(2000)
    assert float(both["efficiency_weak_single"]) == pytest.approx(0.625)
    assert float(both["efficiency_weak_own"]) == pytest.approx(0.78125)
    assert float(both["efficiency_strong_single"]) == pytest.approx(0.625)
    assert float(both["exposed_share"]) == pytest.approx(0.25)
    assert both["exchange_payload_bytes"] == "4000000"


def test_a_cell_without_figures_is_a_row_with_its_reason(small) -> None:
    rows = rows_of(cells_as_csv(small.study, small.study.collect()))
    failed = [row for row in rows if row["outcome"] != "ok"]
    assert [(row["gpus"], row["outcome"], row["reason"], row["step_ns"]) for row in failed] == [
        ("8", "out_of_memory", "rank 0: allocating 2 GiB", "")
    ]


def test_one_row_a_run_those_left_out_and_failed_too(planted, new_timing, new_environment) -> None:
    cell = planted.series("weak", "single", [1], batch=8)[0]
    planted.plan()
    planted.run(cell, new_timing(step_ms=30, environment=new_environment(torch="2.12.0")))
    planted.run(cell, new_timing(step_ms=20))
    planted.run(cell, new_timing(step_ms=1, outcome=Outcome.CRASHED, reason="a, comma"))
    rows = rows_of(runs_as_csv(planted.study, planted.study.collect()))
    assert [(row["counted"], row["outcome"], row["step_ns"], row["reason"]) for row in rows] == [
        ("False", "ok", "30000000.0", ""),
        ("True", "ok", "20000000.0", ""),
        ("False", "crashed", "", "rank 0: a, comma"),
    ]


def test_nothing_is_nan(small) -> None:
    results = small.study.collect()
    for text in (cells_as_csv(small.study, results), runs_as_csv(small.study, results)):
        values = {value for row in rows_of(text) for value in row.values()}
        assert values.isdisjoint({"nan", "NaN", "None", "inf"})
