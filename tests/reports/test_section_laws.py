"""The laws of every section of the report. A line in `ADDED` checks a section of another package."""

from __future__ import annotations

import re
import sys
from html import unescape
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
from feature_figures import with_features
from html_page import Page
from packages import install

from harness.reporting.assumptions import CostFlags
from harness.reporting.studies import read_figures
from harness.terminal.console import Console
from reports.analysis.study import StudyFigures
from reports.page import render as page
from reports.page.contents import Maker, all_sections
from results.extensions import forget_packages
from results.outcome import Outcome

sys.path.append(str(Path(__file__).parents[2] / "docs" / "examples"))
from days_section import days_section

ADDED: dict[str, Maker] = {"days": days_section}
OWN = all_sections()
EVERY = {**OWN, **ADDED}
HOSTILE = "<blink>\"'&amp;</blink><script>alert(1)</script>"

each = pytest.mark.parametrize("name", EVERY)


@pytest.fixture
def measured(small) -> StudyFigures:
    return with_features(small.analysed(name=HOSTILE), HOSTILE)


@pytest.fixture
def empty(planted) -> StudyFigures:
    """Planned, and nothing was run."""
    planted.series("weak", "ddp", [1, 2], batch=8)
    return planted.analysed([], name="empty")


@pytest.fixture
def failed(planted, new_timing, new_environment) -> StudyFigures:
    """Every run failed, with words that are markup."""
    cells = planted.series("strong", "ddp", [2, 4], batch=32)
    planted.skip("ddp", 1, HOSTILE, batch=8)
    there = new_environment(host=HOSTILE, device_name=HOSTILE)
    for cell in cells:
        planted.run(
            cell,
            new_timing(
                step_ms=1, outcome=Outcome.CRASHED, reason=HOSTILE, warnings=[HOSTILE], environment=there
            ),
        )
    return planted.analysed(name="failed")


_MADE: dict[str, StudyFigures] = {}
"""Each is analysed once for all tests."""


@pytest.fixture(params=["measured", "empty", "failed"])
def study(request) -> StudyFigures:
    if request.param not in _MADE:
        _MADE[request.param] = request.getfixturevalue(request.param)
    return _MADE[request.param]


def alone(name: str, study: StudyFigures) -> str | None:
    """The page with this section and no other; None if the section has nothing to say of the study."""
    section = EVERY[name](study)
    if section is None:
        return None
    with patch.object(page, "contents", lambda _: (section,)), patch.object(page, "appendix", lambda _: ()):
        return page.render_figures(study)


@each
def test_a_section_has_a_title_and_its_name_as_anchor(name, study) -> None:
    section = EVERY[name](study)
    if section is not None:
        assert section.anchor == name
        assert section.title.strip()
        assert section.blocks
        assert all(defined.anchor.startswith("method-") for defined in section.definitions)
    assert re.fullmatch("[a-z][a-z-]*", name)
    assert (name in OWN) is (name not in ADDED)


@each
def test_a_section_is_valid_html_and_escapes_its_text(name, study) -> None:
    """Tags are closed, levels of headings do not jump, tables have captions; no element is of the study's
    own making, no script but the page's."""
    html = alone(name, study)
    if html is None:
        return
    shown = Page(html)
    assert name in shown.sections
    assert shown.tags.count("script") == 1
    assert "blink" not in shown.tags
    assert not [attribute for attribute in shown.attributes if attribute.startswith("on")]
    assert shown.tags.count("caption") == shown.tags.count("table")
    levels = [int(tag[1]) for tag in shown.tags if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert not [link for link in shown.hrefs if link.startswith(("http", "//"))]


@each
def test_the_same_study_gives_the_same_section(name, study) -> None:
    assert EVERY[name](study) == EVERY[name](study)


def test_the_whole_page_has_no_id_twice_and_no_broken_link(study) -> None:
    added = tuple(section for make in ADDED.values() if (section := make(study)) is not None)
    with patch.object(page, "contents", lambda study: (*ours(study), *added)):
        shown = Page(page.render_figures(study))
    assert len(shown.ids) == len(set(shown.ids))
    levels = [int(tag[1]) for tag in shown.tags if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    # A column may be explained by the definition of another section.
    assert shown.bare == []
    assert {link[1:] for link in shown.hrefs if link.startswith("#")} <= set(shown.ids)
    assert all(section.anchor in shown.sections for section in added)


ours = page.contents

BROKEN = {
    "3": "broken:section is 3, and must be a function that gives a Section or None: repair the package",
    "lambda study: 'a text'": "and must be a function that gives a Section or None: repair the package",
    "lambda study: study.nothing": "failed: AttributeError: 'StudyFigures' object has no attribute 'nothing'",
    "lambda study: made('a text')": "section 'broken' has 'a text' as a block: wrap text in Paragraph",
    "lambda study: made(Table(table([7], [figures('runs', lambda row: row)]), 'Runs'))": (
        "column 'runs' shows 7: words() shows a text, figures() a field of reports.fields"
    ),
}
"""Mistakes of an entry point, and the sentence that the page has on each."""
MODULE = """
from reports.page.section import Section, Table
from reports.table import figures, table

def made(*blocks):
    return Section(anchor="broken", title="Broken", blocks=blocks)

section = {}
"""


@pytest.mark.parametrize("mistake", BROKEN)
def test_a_broken_section_says_so_in_its_place(mistake, measured, tmp_path, monkeypatch) -> None:
    install(tmp_path, "a-package", {"bench.sections": {"broken": "broken:section"}})
    (tmp_path / "broken.py").write_text(MODULE.format(mistake))
    monkeypatch.syspath_prepend(str(tmp_path))
    whole = Page(page.render_figures(measured)).sections
    forget_packages()
    try:
        html = page.render_figures(measured)
    finally:
        sys.modules.pop("broken", None)
        forget_packages()
    assert "section 'broken' of the package a-package 1.0" in unescape(html)
    assert BROKEN[mistake] in unescape(html)
    assert set(Page(html).sections) == {*whole, "broken"}


def test_a_section_can_read_the_single_steps_of_a_run(small) -> None:
    (figures,) = read_figures([str(small.study.root)], CostFlags(), Console())
    (run, *_) = figures.runs
    records = small.study.rank_records(run.cell_id, run.run_id)
    assert {rank: steps.step_ns for rank, steps in figures.steps(run).items()} == {
        record.rank: record.steps.step_ns for record in records
    }
    assert all(record.steps.step_ns for record in records)


def test_days_are_counted(measured) -> None:
    section = days_section(measured)
    (table,) = (block.data for block in section.blocks if hasattr(block, "data"))
    # 3 runs each of 5 cells, and one that failed.
    assert sum(int(row[1]) for row in table.texts) == 16
    assert sum(int(row[2]) for row in table.texts) == 15
