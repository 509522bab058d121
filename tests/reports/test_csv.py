"""The numbers as frames of pandas and as CSV."""

from __future__ import annotations

import csv
import io

import msgspec
import pandas as pd
import pytest

from reports.analysis.study import StudyFigures
from reports.page.columns import CELLS, PRESETS, SHOWN, cell_columns
from reports.page.tables import TABLES, csv_text, frame_of
from results.outcome import Outcome
from results.run import Communication, RankColumns, StepBudget
from results.statistics import Metric


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def csv_rows(figures: StudyFigures, name: str) -> list[dict[str, str]]:
    """The table called `name` of one study, as CSV has it."""
    return rows_of(csv_text(frame_of([figures], name)))


def ns(value: float, low: float | None = None, high: float | None = None) -> Metric:
    return Metric(value=value, unit="ns", low=low, high=high, samples=5, interval=None)


BUDGET = StepBudget(
    method="on-off",
    input_ns=1.0,
    compute_ns=2.0,
    transfer_ns=ns(3.0, 2.5, 3.5),
    wait_ns=ns(4.0, 3.0, 5.0),
    bubble_ns=None,
    other_ns=0.5,
)
COMMUNICATION = Communication(
    steps=20,
    step_ns=11.0,
    total_ns=7.0,
    blocked_ns=6.0,
    transfer_ns=5.0,
    wait_ns=4.0,
    exchange_cpu_ns=None,
    dispatch_ns=None,
    bubble_ns=None,
    operations=(),
    bus_bytes_per_s=8e9,
    peak_bus_bytes_per_s=9e9,
)
RANKS = RankColumns(
    node=[0, 1],
    compute_ns=[10, 30],
    compute_sd_ns=[1, 2],
    slowest_share=[0.25, 0.75],
    wait_ns=[20, 0],
    steps=40,
)


@pytest.fixture
def pair(planted):
    """One cell of two ranks with two successful runs of 10 and 30 ms, and one that crashed."""
    cell = planted.series("weak", "ddp", [2], batch=8)[0]
    planted.plan(repeats=3)
    planted.runs(cell, [10.0, 30.0])
    planted.runs(cell, [1.0], outcome=Outcome.CRASHED, reason="broken")
    return planted


def test_one_row_a_cell_with_units_in_the_names(small) -> None:
    rows = csv_rows(small.analysed(), "cells")
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
    rows = csv_rows(small.analysed(), "cells")
    failed = [row for row in rows if row["outcome"] != "ok"]
    assert [(row["gpus"], row["outcome"], row["reason"], row["step_ns"]) for row in failed] == [
        ("8", "out_of_memory", "rank 0: allocating 2 GiB", "")
    ]


def test_one_row_a_run_those_left_out_and_failed_too(planted, new_timing, new_environment) -> None:
    cell = planted.series("weak", "single", [1], batch=8)[0]
    planted.run(cell, new_timing(step_ms=30, environment=new_environment(torch="2.12.0")))
    planted.run(cell, new_timing(step_ms=20))
    planted.run(cell, new_timing(step_ms=1, outcome=Outcome.CRASHED, reason="a, comma"))
    rows = csv_rows(planted.analysed(), "runs")
    assert [(row["counted"], row["outcome"], row["step_ns"], row["reason"]) for row in rows] == [
        ("False", "ok", "30000000.0", ""),
        ("True", "ok", "20000000.0", ""),
        ("False", "crashed", "", "rank 0: a, comma"),
    ]


def test_nothing_is_nan(small) -> None:
    for name in ("cells", "runs"):
        values = {value for row in csv_rows(small.analysed(), name) for value in row.values()}
        assert values.isdisjoint({"nan", "NaN", "None", "inf", "<NA>"})


def test_columns_and_their_types_are_the_same_whatever_a_study_holds(small, tmp_path, new_study) -> None:
    empty = new_study(tmp_path / "empty")
    empty.series("weak", "ddp", [2], batch=8)
    full, nothing = small.analysed(), empty.analysed()
    for name in TABLES:
        assert frame_of([full], name).dtypes.to_dict() == frame_of([nothing], name).dtypes.to_dict(), name
    types = frame_of([nothing], "cells").dtypes
    named = ["strategy", "gpus", "step_ns", "disturbed"]
    assert [str(types[name]) for name in named] == ["string", "Int64", "Float64", "boolean"]


def test_the_budget_of_a_run_and_the_mean_over_a_cells_runs(pair) -> None:
    results = pair.study.collect()
    budgets = iter([BUDGET, msgspec.structs.replace(BUDGET, compute_ns=4.0, transfer_ns=ns(5.0))])
    planted = [
        msgspec.structs.replace(run, budget=next(budgets)) if run.outcome is Outcome.OK else run
        for run in results
    ]
    study = pair.analysed(planted)
    runs = frame_of([study], "runs")
    assert runs["budget_method"].tolist() == ["on-off", "on-off", pd.NA]
    assert runs["budget_compute_ns"].tolist() == [2.0, 4.0, pd.NA]
    first = runs.iloc[0]
    names = ["input_ns", "transfer_ns", "transfer_ns_low", "transfer_ns_high", "wait_ns", "wait_ns_low"]
    assert [first[f"budget_{name}"] for name in names] == [1.0, 3.0, 2.5, 3.5, 4.0, 3.0]
    assert first["budget_other_ns"] == 0.5
    assert first["budget_bubble_ns"] is pd.NA
    cell = frame_of([study], "cells").iloc[0]
    # Two runs: the mean, and the range of the runs.
    assert (cell["budget_compute_ns"], cell["budget_transfer_ns"]) == (3.0, 4.0)
    assert (cell["budget_transfer_ns_low"], cell["budget_transfer_ns_high"]) == (3.0, 5.0)
    # 20 ms less 1 + 3 + 4 + 4 ns.
    assert cell["budget_other_ns"] == 20e6 - 12.0


def test_communication_energy_and_times_of_a_run(pair) -> None:
    study = pair.analysed(
        communication=COMMUNICATION, energy_j=2.5, first_step_ns=70, startup_ns=80, bubble_ideal=0.125
    )
    run = frame_of([study], "runs").iloc[0]
    names = ["steps", "step_ns", "total_ns", "blocked_ns", "transfer_ns", "wait_ns", "bus_bytes_per_s"]
    assert [run[f"communication_{name}"] for name in names] == [20, 11.0, 7.0, 6.0, 5.0, 4.0, 8e9]
    assert run["communication_peak_bus_bytes_per_s"] == 9e9
    assert run["communication_exchange_cpu_ns"] is pd.NA
    assert (run["energy_j"], run["first_step_ns"], run["startup_ns"]) == (2.5, 70, 80)
    assert run["bubble_ideal"] == 0.125
    cell = frame_of([study], "cells").iloc[0]
    assert (cell["communication_total_ns"], cell["energy_j"], cell["bubble_ideal"]) == (7.0, 2.5, 0.125)


def test_a_mean_over_runs_needs_all_of_them(pair) -> None:
    results = pair.study.collect()
    one = msgspec.structs.replace(results[0], energy_j=2.0)
    study = pair.analysed([one, *results[1:]])
    assert frame_of([study], "runs")["energy_j"].tolist() == [2.0, pd.NA, pd.NA]
    assert frame_of([study], "cells")["energy_j"].tolist() == [pd.NA]


def test_telemetry_has_a_column_a_name(pair) -> None:
    frame = frame_of([pair.analysed(telemetry={"power_w": 300.0, "gpu.clock_mhz_max": 1980.0})], "runs")
    told = [name for name in frame if name.startswith("telemetry_")]
    assert told == ["telemetry_gpu.clock_mhz_max", "telemetry_power_w"]
    assert frame["telemetry_power_w"].tolist() == [300.0, 300.0, pd.NA]


def test_one_row_a_rank_of_a_counted_run(pair) -> None:
    frame = frame_of([pair.analysed(ranks=RANKS)], "ranks")
    # Two ranks in each of two runs; the crashed run is not counted.
    assert frame["rank"].tolist() == [0, 1, 0, 1]
    assert frame["run_id"].nunique() == 2
    second = frame.iloc[1]
    names = ["node", "steps", "compute_ns", "compute_sd_ns", "slowest_share", "wait_ns"]
    assert [second[name] for name in names] == [1, 40, 30, 2, 0.75, 0]
    assert second["blocked_ns"] is pd.NA
    assert csv_rows(pair.analysed(ranks=RANKS), "ranks")[1]["compute_ns"] == "30"


HOSTILE = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\r\n=1", "'=1"]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_that_begins_like_a_formula_gets_an_apostrophe_that_can_be_taken_off(text) -> None:
    frame = pd.DataFrame({"reason": pd.Series([text, "a=1", None], dtype="string")})
    first, second, third = rows_of(csv_text(frame))
    assert first["reason"][0] == "'"
    assert first["reason"][1:] == text.replace("\r\n", "\n").replace("\r", "\n")
    assert (second["reason"], third["reason"]) == ("a=1", "")


def test_a_carriage_return_ends_no_row() -> None:
    frame = pd.DataFrame({"reason": pd.Series(["a\rb,c", "d\r\ne"], dtype="string")})
    assert [row["reason"] for row in rows_of(csv_text(frame))] == ["a\nb,c", "d\ne"]


def test_a_negative_number_is_left_alone(planted) -> None:
    planted.points("ddp", {2: 10.0}, exposed_ms=-1.0)
    assert csv_rows(planted.analysed(), "cells")[0]["exposed_ns"] == "-1000000.0"


@pytest.mark.parametrize("table", ["runs", "cells"])
def test_the_figures_of_a_row_agree_with_each_other(small, table) -> None:
    rows = [row for row in csv_rows(small.analysed(), table) if row["outcome"] == "ok"]
    assert rows
    for row in rows:
        figures = {name: float(text) for name, text in row.items() if text and name.endswith(("_ns", "_s"))}
        step_s = figures["step_ns"] / 1e9
        assert figures["samples_per_s"] * step_s == pytest.approx(int(row["global_batch"]))
        phases = ("data_ns", "forward_ns", "backward_ns", "optimizer_ns", "other_ns")
        assert sum(figures[name] for name in phases) == pytest.approx(figures["step_ns"])
        if row["budget_method"]:
            parts = ("input", "compute", "transfer", "wait", "bubble", "other")
            total = sum(figures.get(f"budget_{part}_ns", 0) for part in parts)
            assert total == pytest.approx(figures["step_ns"])
        for name in ("step_ns", "samples_per_s"):
            if low := row.get(f"{name}_low"):
                assert float(low) <= figures[name] <= float(row[f"{name}_high"])


def test_a_column_is_declared_once() -> None:
    names = [column.name for column in (*CELLS, *SHOWN)]
    assert len(names) == len(set(names))
    shown = {column.name for preset in PRESETS for column in cell_columns(preset)}
    assert shown == {column.name for column in (*CELLS, *SHOWN) if column.title}
