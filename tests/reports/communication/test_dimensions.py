"""The exchange by dimension and the bubble of a pipeline: in the page's tables, in CSV and in JSON."""

from __future__ import annotations

import json

import msgspec
import pandas as pd
import pytest

from reports.page.json_document import json_document
from reports.page.section import Section, Table
from reports.page.sections.anatomy import anatomy_section
from reports.page.tables import frame_of
from results.run import DimensionSummary

MS = 1e6


def summary(name: str | None, transfer: float | None, wait: float | None) -> DimensionSummary:
    """The operations of a dimension by times in ms."""
    ns = [None if ms is None else ms * MS for ms in (transfer, wait)]
    return DimensionSummary(name=name, payload_bytes=8.0, transfer_ns=ns[0], wait_ns=ns[1])


def tables(section: Section) -> dict[str, list[dict[str, str]]]:
    """The rows of each table that is shown, by the titles of its columns with a value."""
    found = [block for block in section.blocks if isinstance(block, Table) and block.data.rows]
    return {
        block.caption: [dict(zip(block.shown.titles, row, strict=True)) for row in block.shown.texts]
        for block in found
    }


@pytest.fixture
def study(new_cell, new_run, new_budget, new_communication, study_of):
    """Two runs each of a grid, of pipelines, and of ddp from before dimensions were recorded."""
    grid, ddp = new_cell(strategy="fsdp:tp=2"), new_cell()
    pipeline = new_cell(strategy="pipeline:1f1b:dp=2")

    def run(cell, *dimensions, bubble=None, **fields):
        budget = msgspec.structs.replace(new_budget(6.0, 2.0, 1.0), bubble_ns=bubble and 0.5 * bubble)
        recorded = new_communication(bubble_ns=bubble, dimensions=dimensions)
        return new_run(cell, 10.0, 3.0, budget=budget, communication=recorded, **fields)

    shard, tensor, every = summary("shard", 4.0, 1.0), summary("tensor", 3.0, 2.0), summary(None, 0.5, 0.0)
    longer = summary("tensor", 5.0, 2.0)
    bubbles = {"bubble": 2.0 * MS, "bubble_ideal": 0.2}
    staged = summary("pipeline", None, None), summary("replicate", 3.0, 1.0)
    return study_of(
        {
            grid: [run(grid, shard, tensor, every), run(grid, shard, longer, every)],
            pipeline: [run(pipeline, *staged, **bubbles, bubble_replayed=share) for share in (0.25, 0.35)],
            ddp: [run(ddp), run(ddp)],
        }
    )


def test_the_parts_of_a_row_add_up_to_what_is_exposed(study) -> None:
    found = tables(anatomy_section(study))
    pipeline, grid = sorted(
        found["The exchange of a step by dimension"], key=lambda row: row["configuration"], reverse=True
    )
    # 4 + 1 of the shards, 4 + 2 of tensors, 0.5 of both at once, and 2 + 1 exposed.
    assert [
        grid[f"{name}, {part}"] for name in ("tensor", "shard", "several") for part in ("transfer", "wait")
    ] == ["4.00 ms", "2.00 ms", "4.00 ms", "1.00 ms", "500 us", "0 ns"]
    assert (grid["less overlap"], grid["exposed"]) == ("8.50 ms", "3.00 ms")
    # 3 + 1 of replicas and 2 for messages; half of the latter is the bubble.
    assert (pipeline["replicate, transfer"], pipeline["stages waited"]) == ("3.00 ms", "2.00 ms")
    assert (pipeline["less overlap"], pipeline["exposed"]) == ("2.00 ms", "4.00 ms")
    [bubble] = found["The bubble of pipelines, share of a step"]
    assert [bubble[name] for name in ("by the formula", "replayed", "measured")] == [
        "20.0 %",
        "30.0 %",
        "10.0 %",
    ]


def test_tables_and_documents_have_each_dimension(study) -> None:
    cells, runs = (frame_of([study], name).set_index("strategy") for name in ("cells", "runs"))
    grid = cells.loc["fsdp:tp=2"]
    assert (grid["dimension_tensor_transfer_ns"], grid["dimension_tensor_wait_ns"]) == (4 * MS, 2 * MS)
    assert grid["dimension_overlap_ns"] == 8.5 * MS
    assert runs.loc["fsdp:tp=2", "dimension_tensor_transfer_ns"].tolist() == [3 * MS, 5 * MS]
    assert runs.loc["fsdp:tp=2", "dimension_several_transfer_ns"].tolist() == [0.5 * MS] * 2
    assert cells.loc["pipeline:1f1b:dp=2", "bubble_replayed"] == pytest.approx(0.3)
    assert cells.loc["ddp", "dimension_overlap_ns"] is pd.NA
    found = {
        one["cell"]["strategy"]: one["figures"]
        for one in json.loads(json_document([study]))["studies"][0]["cells"]
    }
    assert [one["name"] for one in found["fsdp:tp=2"]["dimensions"]] == ["shard", "tensor", None]
    assert found["pipeline:1f1b:dp=2"]["bubble_replayed"] == pytest.approx(0.3)
    assert (found["ddp"]["dimensions"], found["ddp"]["dimension_overlap_ns"]) == ([], None)
