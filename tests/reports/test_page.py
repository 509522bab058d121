"""The page as a document: whole, escaped, the same every time, and honest when nothing succeeded."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from generated_study import Trouble, large_study
from html_page import Page

from reports.page.chart import log_ticks, nice_ticks
from reports.page.render import render_figures
from results.outcome import Evidence, Outcome


def page_of(planted) -> Page:
    return Page(planted.page())


def test_every_numeric_column_of_every_table_says_what_it_is(small, new_timing) -> None:
    small.series("weak", "ddp", [2], batch=8, compression="topk:0.01")
    compressed = small.plan().cells[0]
    small.run(compressed, new_timing(step_ms=9, exposed_ms=1, warnings=["on battery"], foreign_cpu_cores=0.5))
    page = page_of(small)
    # The answers, best of each size, a map, memory, failures, the full table, and each figure's values.
    assert page.tags.count("table") == 6 + page.tags.count("figure")
    assert page.bare == []


def test_a_numeric_column_that_says_nothing_is_noticed() -> None:
    # So that the test above is known to be able to fail.
    head = '<section id="a"><table><tr><th scope="col" class="n">figure</th></tr></table></section>'
    assert Page(head).bare == ["a: figure"]


def test_a_definition_is_on_hover_where_a_heading_links_to_it(small) -> None:
    html = small.page()
    head = re.search(r'<th scope="col" class="n" title="([^"]*)"><a href="#method-throughput">', html)
    # The first sentence of the definition, without its markup, and no more of it.
    assert head[1] == "Work of a step on all ranks / step time: total work over total time."


def test_the_page_loads_nothing_and_runs_its_own_script_alone(small) -> None:
    html = small.page()
    page = Page(html)
    assert [href for href in page.hrefs if not href.startswith(("#", "data:"))] == []
    assert {"img", "iframe", "object", "image"} & set(page.tags) == set()
    assert [name for name in page.attributes if name.startswith("on") or name == "src"] == []
    assert not re.search(r"url\((?!#)", html)
    (script,) = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline'; img-src data:"
    assert f"content=\"{policy}; base-uri 'none'; form-action 'none'\"" in html
    assert len(script.splitlines()) <= 330
    assert script.isascii()


def test_every_drawing_has_a_title_and_a_description(small) -> None:
    html = small.page()
    drawings = re.findall(r'<svg class="chart(?! small)[^>]*>.*?</svg>', html, flags=re.DOTALL)
    # Efficiency, throughput and the parts of a step, of weak and strong.
    assert len(drawings) == 6
    for drawing in drawings:
        label = re.search(r'role="group" aria-labelledby="(\S+)"', drawing)
        assert f'<title id="{label[1]}">' in drawing


def test_every_point_says_its_value_interval_and_runs_and_leads_to_its_row(small) -> None:
    html = small.page()
    points = re.findall(r'<a class="point" href="#([^"]+)" aria-label="([^"]+)"', html)
    rows = set(re.findall(r'<tr id="(cell-[^"]+)"', html))
    assert {href for href, _ in points} <= rows
    # 12.5 ms on 2, against 10 ms on 1: 80 %; at worst 9 / 13, at best 11 / 12.
    told = "ddp on 2 ranks (CPU): 80.0 % (69.2 to 91.7, range of 3); 3 measured"
    assert told in [label for _, label in points]


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0.0, 100.0, [0, 20, 40, 60, 80, 100]),
        (68.0, 101.0, [70, 80, 90, 100]),
        (0.0, 0.3, [0, 0.1, 0.2, 0.3]),
        (5.0, 5.0, [5]),
    ],
)
def test_ticks_are_round_and_within_the_axis(low, high, found) -> None:
    assert nice_ticks(low, high) == pytest.approx(found)


def test_ticks_of_a_logarithmic_axis_are_1_2_and_5_of_each_decade() -> None:
    assert log_ticks(4.0, 60.0) == pytest.approx([5, 10, 20, 50])
    assert log_ticks(1.0, 1e6) == pytest.approx([10**power for power in range(7)])


def test_the_same_study_gives_the_same_bytes(small) -> None:
    first = small.page()
    small.study.forget_derived()
    assert small.page() == first


def test_no_machine_number_reaches_the_reader(small) -> None:
    html = small.page()
    seen = re.sub(r"<(style|script)>.*?</\1>|base64,[^\"]*", "", html, flags=re.DOTALL)
    assert not re.search(r"\b(nan|inf|None|NaN|True|False)\b", seen)


def test_a_gpu_study_speaks_of_gpus(tmp_path, new_study) -> None:
    study = new_study(tmp_path / "gpus", device="cuda")
    study.points("ddp", {2: 10.0})
    page = page_of(study)
    assert "GPUs" in page.text
    assert "ranks (CPU)" not in page.text
    assert "method-cpu" not in page.ids


def test_hostile_texts_are_only_texts(tmp_path, new_study, new_timing, new_environment) -> None:
    bad = "<script>alert(1)</script>&\"'{{ 7 * 7 }}$x^2$]]>--> javascript:alert(3)"
    study = new_study(tmp_path / "<img src=x onerror=alert(2)>")
    cells = study.series("weak", f"ddp:{bad}", [2, 4], batch=8, workload=f"py:{bad}")
    study.skip(bad, 8, bad, batch=8)
    hostile = new_environment(host=bad, device_name=bad, nccl_settings={"NCCL_X": bad})
    study.run(cells[0], new_timing(step_ms=10, exposed_ms=1, unit=bad, warnings=[bad], environment=hostile))
    study.run(cells[1], new_timing(step_ms=1, outcome=Outcome.CRASHED, reason=bad, environment=hostile))
    html = study.page()
    page = Page(html)
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert html.count("<script") == 1
    assert "<img" not in html
    assert [href for href in page.hrefs if not href.startswith(("#", "data:"))] == []
    # Nothing was evaluated or lost on the way: the reader sees what was there.
    assert page.text.count(bad) >= 6


@pytest.mark.parametrize("sizes", [[], [2, 4]])
def test_when_nothing_succeeded_the_page_says_so_and_why(planted, new_timing, sizes) -> None:
    """A study with only skips, and one with a run that failed."""
    cells = planted.series("weak", "ddp", sizes, batch=8) if sizes else []
    planted.skip("ddp", 8, "8 devices asked for, 2 here", batch=8)
    for cell in cells[:1]:
        planted.run(cell, new_timing(step_ms=1, outcome=Outcome.OUT_OF_MEMORY, reason="no room for 2 GiB"))
    page = page_of(planted)
    assert "Nothing succeeded" in page.text
    assert "No further run is needed" not in page.text
    assert ("no room for 2 GiB" in page.text) == bool(sizes)
    assert "8 devices asked for, 2 here" in page.text
    assert "svg" not in page.tags


def test_sizes_that_failed_are_marked_and_named_at_the_foot(small) -> None:
    # The weak series failed on 8.
    html = small.page()
    assert html.count('class="gap"') >= 1
    assert 'aria-label="no result on 8: ddp: out of memory"' in html
    assert "Crosses: no result of ddp on 8 (out of memory)." in html


def test_each_network_has_drawings_of_its_own(planted) -> None:
    planted.points("single", {1: 10.0})
    for rate in (1000.0, None, 100.0):
        planted.points("ddp", {2: 10.0, 4: 10.0}, link_mbit_per_s=rate)
    html = planted.page()
    batch = "gpt-nano, batch 8 per replica"
    curves = html[html.index('<section id="curves"') : html.index('<section id="anatomy"')]
    titles = re.findall(r"<figcaption>(.*?): Efficiency", curves)
    assert titles == [f"{batch}, 100mbit links, weak", f"{batch}, 1gbit links, weak"]
    # An exchange has one name over each: no label has the link that the title names.
    assert len(re.findall(r"<text[^>]*>ddp</text>", curves)) == curves.count("<svg")


def test_emulated_points_are_said_to_be_so(planted) -> None:
    planted.points("ddp", {2: 10.0})
    planted.points("ddp", {4: 20.0}, evidence=Evidence.EMULATED)
    text = page_of(planted).text
    assert "hollow points emulated" in text
    assert "ddp on 4: emulated: a stand-in (shared cores, virtual nodes, a link) makes no" in text


def test_a_study_of_stand_ins_alone_claims_nothing_on_the_first_screen(planted) -> None:
    planted.points("ddp", {2: 20.0, 4: 20.0}, evidence=Evidence.EMULATED)
    html = planted.page()
    first = html[html.index('<section id="summary"') : html.index('<section id="best"')]
    assert "every figure is emulated" in first
    assert "<b>none</b>" in first
    assert "<b>not claimed</b>" in first


def test_disturbed_runs_warnings_and_left_out_runs_are_listed(planted, new_timing, new_environment) -> None:
    cell = planted.series("weak", "single", [1], batch=8)[0]
    left_out = planted.run(cell, new_timing(step_ms=10, environment=new_environment(torch="2.12.0")))
    disturbed = planted.run(cell, new_timing(step_ms=10, foreign_cpu_cores=0.5, warnings=["on battery"]))
    text = page_of(planted).text
    assert "on battery" in text
    assert disturbed in text
    assert left_out in text
    assert "torch: 2.12.0 here, 2.13.0 in the runs that count" in text


@pytest.mark.parametrize("sizes", [[2, 3], [8, 16, 24, 32, 40, 48, 56, 64]])
def test_sizes_of_any_spacing_are_drawn(planted, new_timing, sizes) -> None:
    cells = planted.series("weak", "ddp", sizes, batch=1)
    for cell in cells:
        planted.run(cell, new_timing(step_ms=10.0), sync=False)
    html = planted.page()
    start = html.index('<svg class="chart" ')
    first = html[start : html.index("</svg>", start)]
    assert first.count('class="point"') == len(sizes)


def test_environments_that_differ_are_named(planted, new_timing, new_environment) -> None:
    cells = planted.series("weak", "ddp", [2, 4], batch=8)
    planted.run(cells[0], new_timing(step_ms=10, environment=new_environment(torch="2.12.0", host="node-b")))
    planted.run(cells[1], new_timing(step_ms=10))
    text = page_of(planted).text
    assert "2 counted runs in 2 environments, which differ in hosts, torch." in text


def test_nodes_of_one_run_that_differ_are_a_warning(planted, new_environment) -> None:
    cell = planted.points("ddp", {2: 10.0})[0]
    planted.plan(repeats=1)
    folder = planted.study.rank_path(cell.id, "20260102T030405Z-000001", 1)
    text = folder.read_text(encoding="utf-8")
    folder.write_text(text.replace("node-a", "node-b").replace('"cores":8', '"cores":4'), encoding="utf-8")
    assert "the nodes differ in cores: 8 (node-a), 4 (node-b)" in page_of(planted).text


def test_the_first_screen_says_what_failed_what_was_disturbed_and_what_the_runs_leave_open() -> None:
    trouble = Trouble(disturbed=0.3, failed=0.12, dirty=True)
    page = render_figures(large_study(seed=7, trouble=trouble, priced=False))
    first = page[page.index('id="summary"') : page.index('id="best"')]
    for words in (
        "256 GPUs or more",
        "62 % of resamples name this size",
        "Second choice, if its loss is as good: ",
        "31.7 to 33.0, range of 2",
        "Cells with a figure: 74 of 85",
        "255 runs: 222 ok, 61 of them disturbed; 33 out of memory; code with local changes: 192",
        "training checked: 74 of 74",
        "Without one: 11 out of memory (gpt2-small)",
        "resamples of the runs name 128 GPUs in 38 %",
    ):
        assert words in first


def test_the_answer_is_divided_between_its_clauses_and_not_within_brackets() -> None:
    page = render_figures(large_study(seed=7))
    [finding] = re.findall(r'<p class="finding">(.*?)</p>', page, re.DOTALL)
    assert finding.count("(") == finding.count(")") > 0


def test_a_figure_that_is_narrower_than_its_interval_is_not_set_large(planted) -> None:
    planted.points("single", {1: [10.0, 10.0]})
    planted.points("ddp", {2: [3.0, 70.0], 4: [2.0, 60.0]}, foreign_cpu_cores=1.0)
    text = " ".join(page_of(planted).text.split())
    assert "cannot be told 2 of its 2 runs were disturbed: run again on a quiet machine" in text
