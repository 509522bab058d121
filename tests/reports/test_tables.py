"""The page's tables: no column that says nothing, and skipped points in few rows that are exact."""

from __future__ import annotations

import pytest

from reports.analysis.outcomes import skipped_sizes
from reports.fields import Field
from reports.page.section import Table
from reports.page.sections.outcomes import SkippedPoints, skipped_points
from reports.table import Column, TextTable
from results.plan import Skip


def made(titles: list[str], *rows: tuple[str, ...]) -> Table:
    columns = tuple(Column(title=title, value=str) for title in titles)
    fields = tuple(tuple(Field(text) for text in row) for row in rows)
    return Table(TextTable(columns=columns, rows=fields), "made")


def test_a_column_without_a_value_in_any_row_is_left_out() -> None:
    table = made(["strategy", "MFU", "own", "note", "time"], ("a", "-", "baseline", "", "1"), ("b", *"---2"))
    assert table.shown.titles == ("strategy", "time")
    assert table.shown.texts == (("a", "1"), ("b", "2"))


@pytest.mark.parametrize("value", ["0", "no", "0 ns, 0.0 %", "none: emulated"])
def test_one_value_keeps_a_column(value) -> None:
    table = made(["strategy", "MFU"], ("a", "-"), ("b", value))
    assert table.shown == table.data


def skip(
    strategy: str, gpus: int, reason: str, *, scaling: str = "weak", batch: int = 8, **more: str
) -> Skip:
    return Skip(
        workload=more.get("workload", "gpt"),
        strategy=strategy,
        compression=more.get("compression", "none"),
        gpus=gpus,
        batch_size=batch,
        scaling=scaling,
        reason=reason,
        predicate=more.get("predicate"),
    )


def test_points_skipped_for_one_reason_are_one_row() -> None:
    skips = [
        skip(strategy, 1, f"{strategy} needs 2", predicate="needs 2", scaling=scaling, batch=batch)
        for strategy in ("ddp", "local-sgd:4")
        for scaling, batch in (("weak", 8), ("strong", 8))
    ]
    # --batch-size 8, and four ranks at most: 32 samples of all replicas.
    assert skipped_points(skipped_sizes(skips), {("gpt", 8): 32}) == [
        SkippedPoints(
            workload="gpt",
            strategies=("ddp", "local-sgd:4"),
            series=("weak 8", "strong 32"),
            gpus=(1,),
            reason="needs 2",
        )
    ]


def test_no_row_says_more_than_was_skipped() -> None:
    # ddp at 2 and 4, fsdp at 4 alone, zero-1 at 2 and 4 of another series, and another workload.
    skips = [
        *(skip("ddp", gpus, "not here") for gpus in (4, 2)),
        skip("fsdp", 4, "not here"),
        *(skip("zero-1", gpus, "not here", scaling="strong") for gpus in (2, 4)),
        skip("ddp", 2, "not here", workload="resnet"),
    ]
    found = [
        (row.workload, row.strategies, row.series, row.gpus)
        for row in skipped_points(skipped_sizes(skips), {})
    ]
    assert found == [
        ("gpt", ("ddp",), ("weak 8",), (2, 4)),
        ("gpt", ("fsdp",), ("weak 8",), (4,)),
        ("gpt", ("zero-1",), ("strong, batch size 8",), (2, 4)),
        ("resnet", ("ddp",), ("weak 8",), (2,)),
    ]


def test_a_reason_is_cut_by_what_the_plan_says_and_never_as_text() -> None:
    skips = [skip("ddp", 2, "ddp needs 2"), skip("fsdp", 2, "as ddp", compression="topk:0.1")]
    rows = skipped_points(skipped_sizes(skips), {})
    assert [(row.strategies, row.reason) for row in rows] == [
        (("ddp",), "ddp needs 2"),
        (("fsdp + topk:0.1",), "as ddp"),
    ]
