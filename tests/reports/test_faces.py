"""Other faces of a study: frames by `reports.load`, LaTeX, losses, and drawings as files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import reports
from harness.cli import run
from reports.analysis.side_by_side import side_by_side
from reports.analysis.study import StudyFigures
from reports.page.json_document import json_document
from reports.page.looks import COLOURS, ON_PAPER, looks
from reports.page.markup import escaped, latex
from reports.page.paper import FORMS, STYLES, figure_files, shared_figure_files
from reports.page.render import render_studies
from reports.page.sections.comparison import shared_charts
from reports.page.sections.scaling import throughput_chart
from reports.page.tables import TABLES, frame_of
from results.errors import UsageError


def test_a_study_is_loaded_as_the_tables_of_the_export_and_nothing_is_written(small) -> None:
    root = small.study.root
    before = sorted(root.rglob("*"))
    loaded = reports.load(root, usd_per_device_hour=3.6)
    assert sorted(root.rglob("*")) == before
    plain = small.analysed()
    assert {name for name in TABLES if hasattr(loaded, name)} == set(TABLES)
    pd.testing.assert_frame_equal(loaded.runs, frame_of([plain], "runs"))
    # One device in 10 ms a step of 8 samples, at a cent in ten seconds.
    single = loaded.cells[(loaded.cells["strategy"] == "single") & (loaded.cells["global_batch"] == 8)]
    assert single["usd_per_1000_steps"].tolist() == pytest.approx([0.01])
    assert loaded.skips[["strategy", "gpus", "reason"]].values.tolist() == [
        ["ddp", 1, "ddp needs at least 2"]
    ]


def test_several_studies_stand_below_each_other(small, tmp_path, new_study) -> None:
    other = new_study(tmp_path / "other")
    other.points("single", {1: 5.0})
    other.plan()
    both = reports.load(small.study.root, other.study.root)
    assert both.cells.groupby("study").size().to_dict() == {"planted": 6, "other": 1}


def test_a_folder_that_is_not_a_study_is_refused(tmp_path, small) -> None:
    with pytest.raises(UsageError, match="is not a study"):
        reports.load(tmp_path / "nothing")
    with pytest.raises(UsageError, match="given twice"):
        reports.load(small.study.root, small.study.root)
    with pytest.raises(UsageError, match="epoch_samples is at least 1, not 0"):
        reports.load(small.study.root, epoch_samples=0)
    with pytest.raises(UsageError, match="usd_per_device_hour"):
        reports.load(small.study.root, usd_per_device_hour=-1)


def test_importing_reports_loads_neither_pandas_nor_matplotlib() -> None:
    program = "import sys, reports; print(sorted({'pandas', 'matplotlib', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_losses_are_a_table_with_the_step_and_the_samples_that_they_are_of(planted) -> None:
    planted.points("ddp", {2: 10.0}, dataset="digits")
    study = planted.analysed(losses=(3.0, 2.0, 1.5), losses_every=4, first_steps=3, warmup_steps=4, steps=6)
    frame = frame_of([study], "losses")
    # Three steps before, then every four up to the last, the thirteenth; 16 samples a step.
    assert frame[["step", "samples", "loss"]].values.tolist() == [
        [7, 112, 3.0],
        [11, 176, 2.0],
        [13, 208, 1.5],
    ]


def test_latex_is_a_table_of_booktabs_with_a_row_a_point(small) -> None:
    text = latex([small.analysed()])
    lines = [line.strip() for line in text.splitlines()]
    for word in ("\\toprule", "\\midrule", "\\bottomrule", "\\end{table}"):
        assert lines.count(word) == 1
    columns = re.search(r"begin\{tabular\}\{([lr]+)\}", text)
    rows = [line for line in lines if line.endswith("\\\\")]
    assert len(rows) == 7
    assert {len(re.split(r"(?<!\\)&", row)) for row in rows} == {len(columns[1])}
    assert "80.0 \\% (" in text
    # The caption names two intervals, and both are there.
    assert "Interval: of the step time over runs" in text
    assert "12.5 ms & 12.0 to 13.0, range of 3 & " in text
    # A per cent sign that is not escaped begins a comment, and takes the rest of the row with it.
    assert all("%" not in re.sub(r"\\%", "", row) for row in rows)


def test_signs_of_latex_are_printed_as_they_are() -> None:
    assert escaped(r"a_b & 5 % \x {y} ~ ^ $ # <z>") == (
        r"a\_b \& 5 \% \textbackslash{}x \{y\} \textasciitilde{} \textasciicircum{} \$ \# "
        r"\textless{}z\textgreater{}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_drawings_are_files_of_the_width_of_their_style(small, style) -> None:
    files = dict(figure_files(small.analysed(), FORMS, style))
    stems = {"gpt-nano-weak-b8", "gpt-nano-strong-b32"}
    assert files.keys() == {
        f"{stem}-{what}.{form}" for stem in stems for what in ("throughput", "efficiency") for form in FORMS
    }
    svg = files["gpt-nano-weak-b8-efficiency.svg"].decode()
    points = re.search(r'width="([\d.]+)pt"', svg)
    assert float(points[1]) / 72 * 25.4 == pytest.approx({"paper": 84, "screen": 160}[style], abs=0.1)
    assert files["gpt-nano-weak-b8-efficiency.png"].startswith(b"\x89PNG")
    pdf = files["gpt-nano-weak-b8-efficiency.pdf"]
    assert pdf.startswith(b"%PDF")
    # TrueType, and no date.
    assert b"/Type3" not in pdf
    assert b"CreationDate" not in pdf


def test_drawings_have_the_colours_the_dashes_and_the_axis_of_the_page(new_study, tmp_path) -> None:
    planted = new_study(tmp_path)
    points = {gpus: [10.0, 11.0, 12.0] for gpus in (2, 4)}
    for name, compression in (("ddp", "none"), ("ddp", "bf16"), ("fsdp", "none")):
        planted.points(name, points, compression=compression)
    study = planted.analysed()
    chart = throughput_chart("name", study.curves, looks(study.curves), "ranks")
    line = r'style="--c: var\(--(\w+)\)">\n?<polyline points="[^"]*"( stroke-dasharray)?'
    on_page = re.findall(line, chart.svg)
    assert {(name, bool(dash)) for name, dash in on_page} == {
        ("blue", False),
        ("blue", True),
        ("vermillion", False),
    }
    svg = next(iter(figure_files(study, ("svg",), "screen")))[1].decode()
    # Lines have their width in the style, and marks and bars another one.
    drawn = re.findall(
        r"none; (stroke-dasharray: \S+ stroke-dashoffset: 0; )?stroke: (#\w+); stroke-width: 1.6", svg
    )
    assert {(colour, bool(dash)) for dash, colour in drawn} == {
        ("#0072b2", False),
        ("#0072b2", True),
        ("#d55e00", False),
    }
    assert re.search(r"<!-- 0(\.0+)? -->", svg)


def test_colours_on_paper_are_those_of_the_light_style() -> None:
    style = (Path(reports.__file__).parent / "page/templates/style.css.j2").read_text()
    light = dict(re.findall(r"--(\w+): (#\w{6});", style.split("@media")[0]))
    assert {name: light[name] for name in ("ink", *COLOURS)} == ON_PAPER


@pytest.fixture
def two(new_study, tmp_path) -> list[StudyFigures]:
    """The same series twice, of half the step time in the second, and one that differs in its batch."""
    made = []
    for name, factor, batch in (("before", 1.0, 16), ("after", 0.5, 32)):
        planted = new_study(tmp_path / name)
        step_ms = [factor * ms for ms in (10.0, 11.0, 12.0)]
        planted.points("ddp", {2: step_ms, 4: step_ms})
        planted.points("fsdp", {2: step_ms}, batch=batch)
        made.append(planted.analysed())
    return made


def test_two_studies_share_axes_and_a_drawing_of_ratios(two) -> None:
    files = dict(shared_figure_files(two, ("svg",), "paper"))
    # The batch of fsdp differs: its curves share no axes, and it has no ratio.
    assert files.keys() == {
        "gpt-nano-weak-b8-throughput.svg",
        "gpt-nano-weak-b8-efficiency.svg",
        "ratios.svg",
    }


def test_a_drawing_that_leaves_lines_out_says_how_many(two, monkeypatch) -> None:
    monkeypatch.setattr("reports.page.paper._MOST_LINES", 1)
    svg = next(iter(shared_figure_files(two, ("svg",), "paper")))[1].decode()
    # The text of glyphs stands beside them as a comment.
    assert "<!-- the 1 fastest of 2 lines -->" in svg
    assert "<!-- ddp, after -->" in svg
    assert "<!-- ddp, before -->" not in svg


def test_in_several_studies_a_compressor_has_a_colour_and_a_study_a_dash(new_study, tmp_path) -> None:
    made = []
    for name in ("before", "after"):
        planted = new_study(tmp_path / name)
        for compression in ("none", "bf16"):
            points = {gpus: [10.0, 11.0, 12.0] for gpus in (2, 4)}
            planted.points("ddp", points, compression=compression)
        made.append(planted.analysed())
    comparison = side_by_side(made)
    svg = str(shared_charts(comparison, comparison.pieces[0])["throughput"].svg)
    looks = re.findall(r'style="--c: ([^"]*)">\n?<polyline points="[^"]*"( stroke-dasharray="[^"]*")?', svg)
    assert len(looks) == len(set(looks)) == 4
    assert len({colour for colour, _ in looks}) == len({dash for _, dash in looks}) == 2


def test_the_page_of_two_studies_draws_them_on_the_same_axes_with_the_ratio_of_each_cell(two) -> None:
    comparison = side_by_side(two)
    throughput, _, ratio = shared_charts(comparison, comparison.pieces[0]).values()
    assert throughput.title == "gpt-nano, weak scaling, batch 8: throughput by ranks (CPU)"
    assert re.findall(r'data-series="([^"]*)"', str(throughput.svg)) == ["ddp, before", "ddp, after"]
    assert re.findall(r'data-series="([^"]*)"', str(ratio.svg)) == ["ddp, after"]
    labels = re.findall(r'aria-label="([^"]*)"', str(ratio.svg))
    # 11 / 5.5; the nearest runs give 10 / 6, the farthest 12 / 5.
    assert labels[0].startswith("ddp on 2 ranks (CPU), after: 2 times as fast (1")
    assert labels[0].endswith("faster")
    page = render_studies(two)
    assert "shared-0-ratio-title" in page


def test_the_json_of_two_studies_has_the_ratio_of_each_matched_cell_and_names_unlike_work(two) -> None:
    found = json.loads(json_document(two))["comparison"]
    assert [(one["id"], one["first"], one["study"], one["change"]) for one in found["cells"]] == [
        (cell.cell.id, "before", "after", "faster")
        for cell in two[0].cells.values()
        if cell.cell.strategy == "ddp"
    ]
    assert [one["ratio"]["value"] for one in found["cells"]] == pytest.approx([2.0, 2.0])
    [unlike] = found["unlike"]
    assert unlike.startswith("gpt-nano, fsdp on 2: micro_batch 16 in before, 32 in after")
    assert "comparison" not in json.loads(json_document(two[:1]))


def test_the_command_writes_them_beside_the_page(small, tmp_path, capsys) -> None:
    root = str(small.study.root)
    assert run(["report", root, "--figures", "svg", "--style", "paper"]) == 0
    assert len(list((small.study.root / "figures").glob("*.svg"))) == 4
    assert "figures: 4 files in " in capsys.readouterr().out
    for flags in (["--figures", "gif"], ["--figures", ""], ["--style", "paper"]):
        assert run(["report", root, *flags]) == 2
        assert "--figures" in capsys.readouterr().err
