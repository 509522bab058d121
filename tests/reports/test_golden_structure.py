"""The page's outline against golden files: sections, headings, blocks, heads of tables, drawings.

After a change that is meant, write them anew and read the difference:

    GOLDEN=write pytest tests/reports/test_golden_structure.py && git diff tests
"""

from __future__ import annotations

import os
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import patch

import pytest
from feature_figures import FEATURES, figures_of_features

from reports.page import render
from reports.page.contents import contents
from reports.page.render import render_figures

GOLDEN = Path(__file__).parent / "golden" / "structure.txt"
TEXTS = ("h1", "h2", "h3", "th", "dt", "summary", "caption")
SHOWN = (*TEXTS, "header", "nav", "main", "section", "table", "figure", "details", "ul", "dl", "script")


class Outline(HTMLParser):
    """A line a tag that gives the page its structure, indented by depth, with its id and its words."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._depth = 0
        self._text: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in SHOWN:
            return
        name = dict(attrs).get("id")
        self.lines.append("  " * self._depth + tag + (f" #{name}" if name else ""))
        self._depth += 1
        if tag in TEXTS:
            self._text = ""

    def handle_endtag(self, tag: str) -> None:
        if tag not in SHOWN:
            return
        self._depth -= 1
        if tag in TEXTS:
            self.lines[-1] += f": {' '.join((self._text or '').split())}"
            self._text = None

    def handle_data(self, data: str) -> None:
        if self._text is not None:
            self._text += data


def check(html: str, golden: Path) -> None:
    outline = "\n".join(Outline(html).lines) + "\n"
    if os.environ.get("GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(outline, encoding="utf-8")
    assert outline == golden.read_text(encoding="utf-8")


def test_the_outline_of_the_cores_sections_is_the_golden_one(small) -> None:
    running = ({"cell": "a", "state": "running", "ok": "0", "planned": "3", "others": ""},)
    check(render_figures(replace(small.analysed(), running=running)), GOLDEN)


@pytest.mark.parametrize(("feature", "figures"), figures_of_features())
def test_the_outline_of_a_features_sections_is_the_golden_one(feature, figures, small) -> None:
    """In its place: with the heading of the section that it follows."""
    without = {section.anchor for section in contents(small.analysed())}
    study = figures.shown(small.analysed(), "a word")
    page = contents(study)
    added = [at for at, section in enumerate(page) if section.anchor not in without]
    assert added
    near = tuple(page[at] for at in sorted({*added, *(at - 1 for at in added)}))
    with patch.object(render, "contents", lambda _: near), patch.object(render, "appendix", lambda _: ()):
        html = render_figures(study)
    check(html, FEATURES / feature / "structure.txt")
