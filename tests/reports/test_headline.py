"""The headline table, and what has no figure."""

from __future__ import annotations

from reports.analysis.headline import headline_table
from reports.table import TextTable
from results.outcome import Evidence


def column(table: TextTable, title: str) -> list[str]:
    place = [column.title for column in table.columns].index(title)
    return [row[place] for row in table.texts]


def test_the_headline_of_the_small_study_in_full(small) -> None:
    table = headline_table(small.analysed())
    assert [column.title for column in table.columns] == [
        "workload",
        "strategy",
        "ranks (CPU)",
        "scaling",
        "batch per replica / global",
        "step time",
        "interval",
        "throughput",
        "efficiency",
        "against",
        "added by the exchange",
        "proof",
        "runs",
    ]
    # The sums are in test_figures and test_scaling.
    assert column(table, "ranks (CPU)") == ["1", "2", "4", "1", "2", "4"]
    assert column(table, "scaling") == ["weak"] * 3 + ["strong"] * 3
    assert column(table, "step time") == ["10.0 ms", "12.5 ms", "16.0 ms", "40.0 ms", "25.0 ms", "16.0 ms"]
    assert column(table, "efficiency") == [
        "baseline",
        "80.0 % (69.2 to 91.7)",
        "62.5 % (50.0 to 78.6)",
        "baseline",
        "80.0 % (76.9 to 83.3)",
        "62.5 % (55.6 to 71.4)",
    ]
    assert column(table, "against") == ["-", "single on 1", "single on 1"] * 2
    assert column(table, "added by the exchange") == ["-", "20.0 %", "25.0 %"] * 2
    (hint,) = [column.hint for column in table.columns if column.title == "added by the exchange"]
    assert "not the sum of exposed transfer and exposed wait" in hint


def test_runs_say_their_evidence_and_how_many_were_asked_for(planted) -> None:
    planted.points("single", {1: [10.0, 11.0]}, evidence=Evidence.EMULATED, foreign_cpu_cores=1.0)
    planted.plan(repeats=3)
    table = headline_table(planted.analysed())
    assert column(table, "runs") == ["2 of 3 emulated, disturbed"]
    assert column(table, "efficiency") == ["none: emulated"]


def test_without_a_single_device_the_own_smallest_size_is_the_baseline(planted) -> None:
    planted.points("ddp", {2: 10.0, 4: 12.5})
    table = headline_table(planted.analysed())
    # One run a cell: 10 / 12.5 without an interval.
    assert column(table, "efficiency") == ["baseline", "80.0 %"]
    assert column(table, "against") == ["-", "ddp on 2"]
    assert column(table, "interval") == ["1 run", "1 run"]


def test_a_super_linear_point_is_shown_and_called_so(planted) -> None:
    planted.points("single", {1: 10.0})
    planted.points("ddp", {2: 8.0})
    # 10 / 8 = 125 %.
    assert column(headline_table(planted.analysed()), "efficiency") == ["baseline", "125.0 %, super-linear"]


def test_skips_of_one_reason_are_put_together(planted) -> None:
    planted.series("weak", "ddp", [2], batch=8)
    for gpus in (8, 4, 16):
        planted.skip("ddp", gpus, "2 devices here", batch=8)
    planted.plan()
    planted.skip("ddp", 4, "2 devices here", batch=8)
    planted.plan()
    study = planted.analysed()
    assert [one.gpus for one in study.skipped] == [(4, 8, 16)]
