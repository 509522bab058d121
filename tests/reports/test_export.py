"""Markdown, JSON and Parquet: the same figures as the report's, and what is read back is what was written."""

from __future__ import annotations

import io
import json
import re

import msgspec
import pandas as pd
import pytest

from reports.analysis.headline import headline
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.verdict import verdict
from reports.fields import Field
from reports.page import tables
from reports.page.export import export_text
from reports.page.markup import github_table, plain
from reports.page.tables import TABLES, export_table, frame_of
from reports.table import Column, TextTable
from results.errors import MachineError
from results.outcome import Outcome
from results.run import RankColumns
from results.statistics import Metric

RANKS = RankColumns(node=[0], compute_ns=[10], compute_sd_ns=[1], slowest_share=[1.0], steps=40)


def figures_of(planted, name: str = "study") -> StudyFigures:
    """With telemetry and ranks in the results of one device."""
    results = [
        msgspec.structs.replace(run, telemetry={"power_w": 0.1 + 0.2}, ranks=RANKS)
        if run.outcome is Outcome.OK and run.ranks_expected == 1
        else run
        for run in planted.study.collect()
    ]
    return planted.analysed(results, name=name)


@pytest.fixture
def studies(small, tmp_path, new_study) -> list[StudyFigures]:
    """A study with figures, failures and skips, and one that has not run."""
    waiting = new_study(tmp_path / "waiting")
    waiting.series("weak", "ddp", [2], batch=8)
    waiting.plan()
    return [figures_of(small, "one"), figures_of(waiting, "two")]


@pytest.mark.parametrize("name", TABLES)
def test_a_csv_read_back_is_the_frame(studies, name) -> None:
    frame = frame_of(studies, name)
    read = pd.read_csv(io.BytesIO(export_table(studies, name, "csv")), dtype=frame.dtypes.to_dict())
    pd.testing.assert_frame_equal(read, frame, check_exact=True)
    assert len(frame) > (0 if name == "skips" else 1)


@pytest.mark.parametrize("name", TABLES)
def test_a_parquet_file_read_back_is_the_frame(studies, name) -> None:
    frame = frame_of(studies, name)
    read = pd.read_parquet(io.BytesIO(export_table(studies, name, "parquet")), dtype_backend="numpy_nullable")
    pd.testing.assert_frame_equal(read.astype(frame.dtypes), frame, check_exact=True)


def test_without_pyarrow_parquet_says_how_to_install_it(studies, monkeypatch) -> None:
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="pip install 'pyarrow>=15'"):
        export_table(studies, "cells", "parquet")
    assert export_table(studies, "cells", "csv").startswith(b"study,cell_id,")


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_the_figures_of_the_json_are_those_of_the_report(studies) -> None:
    document = json.loads(export_text(studies, "json"), parse_constant=no_constant)
    assert list(document) == ["schema", "schema_version", "writer", "studies", "comparison"]
    assert (document["schema"], document["schema_version"]) == ("bench/export", 2)
    told = document["studies"][0]
    cells = {cell["id"]: cell for cell in told["cells"]}
    rows = headline(studies[0])
    assert len(rows) == 6
    for row in rows:
        figures = cells[row.figures.cell.id]["figures"]
        assert msgspec.convert(figures["step_ns"], Metric) == row.figures.step_ns
        assert msgspec.convert(figures["samples_per_s"], Metric) == row.figures.samples_per_s
        efficiency = figures["efficiency"][row.of[0]]["single"]["metric"]
        assert msgspec.convert(efficiency, Metric) == row.efficiency.metric
        assert figures["evidence"] == "measured"


def test_the_json_of_a_cell_by_hand(studies) -> None:
    told = json.loads(export_text(studies, "json"))["studies"][0]
    four = next(cell for cell in told["cells"] if cell["cell"]["gpus"] == 4)
    assert four["cell"]["strategy"] == "ddp"
    assert four["cell"]["compression"] == "none", "defaults stand in it too"
    assert (four["cell"]["global_batch"], four["cell"]["steps"]["block_steps"]) == (32, 5)
    assert (four["scaling"], four["outcome"], four["runs_planned"]) == (["weak", "strong"], "ok", 3)
    assert len(four["runs"]) == 3
    figures = four["figures"]
    # Runs of 14, 16 and 18 ms; four of which would be one of 10 ms alone.
    step = {"value": 16e6, "unit": "ns", "low": 14e6, "high": 18e6, "samples": 3, "interval": "range"}
    assert figures["step_ns"] == step
    assert figures["efficiency"]["weak"]["single"]["metric"]["value"] == pytest.approx(10 / 16)
    # Against its own smallest size: two in 12.5 ms.
    assert figures["efficiency"]["weak"]["own"]["metric"]["value"] == pytest.approx(12.5 / 16)
    assert figures["exposed_ns"]["value"] == 4e6
    assert figures["proof"]["method"] == "serial-simulation"
    failed = next(cell for cell in told["cells"] if cell["outcome"] != "ok")
    assert (failed["figures"], failed["reason"]) == (None, "rank 0: allocating 2 GiB")
    assert len(failed["runs_lost"]) == 1
    assert [(skip["strategy"], skip["gpus"]) for skip in told["skipped"]] == [("ddp", [1])]


def test_the_verdict_of_the_json_is_that_of_the_report(studies) -> None:
    told = json.loads(export_text(studies, "json"))["studies"][0]["verdict"]
    assert tuple(told["sentences"]) == verdict(studies[0]).sentences
    assert told["sentences"]


def test_a_value_without_a_json_number_is_null(small) -> None:
    output = export_text([small.analysed(mfu=float("inf"))], "json")
    assert json.loads(output, parse_constant=no_constant)["studies"][0]["cells"][0]["figures"]["mfu"] is None


def test_markdown_has_the_verdict_the_headline_and_the_environment(studies) -> None:
    page = export_text(studies[:1], "markdown")
    assert page.startswith(
        "# one\n\nScaling of distributed training; cells with a figure: 5 of 6; without one: 1 "
    )
    for sentence in verdict(studies[0]).sentences:
        assert f"- {plain(sentence)}\n" in page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    # Heads, rules, and six rows: the cell of four is in both series as one.
    assert len(rows) == 2 + len(headline(studies[0]))
    assert len({line.count(" | ") for line in rows}) == 1
    assert "62.5 %" in page
    assert (
        "Environment: device Example CPU, CPU Example CPU, nodes x devices a node 1 x 1, 1 x 2, 1 x 4" in page
    )
    assert "commit abc1234" in page


def test_markdown_of_a_study_without_figures_says_so(studies) -> None:
    page = export_text(studies[1:], "markdown")
    assert "No cell of this study has a figure." in page
    assert "Environment: no successful run recorded it." in page


def test_markdown_of_several_studies_has_them_side_by_side_first(studies) -> None:
    headings = re.findall(r"^# .*", export_text(studies, "markdown"), flags=re.MULTILINE)
    assert headings == ["# Studies side by side", "# one", "# two"]


def test_nothing_in_a_markdown_table_is_a_mark_a_tag_or_a_mention() -> None:
    columns = (Column(title="a|b", value=str), Column(title="n", value=len, numeric=True))
    texts = ("x|y\nz", r"\|"), ("<img src=x>", "*1* _2_ `3` ~4~"), ("@octocat [a](b)", "#5 &lt;")
    rows = tuple(tuple(Field(text) for text in row) for row in texts)
    assert github_table(TextTable(columns=columns, rows=rows)) == "\n".join(
        [
            r"| a\|b | n |",
            "| --- | ---: |",
            r"| x\|y z | \\\| |",
            r"| &lt;img src=x&gt; | \*1\* \_2\_ \`3\` \~4\~ |",
            r"| &#64;octocat \[a\](b) | \#5 &amp;lt; |",
        ]
    )
