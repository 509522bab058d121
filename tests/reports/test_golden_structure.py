"""The page's outline against a golden file: sections, headings, blocks, heads of tables, drawings.

After a change that is meant, write it anew and read the difference:

    GOLDEN=write pytest tests/reports/test_golden_structure.py && git diff tests/reports/golden
"""

from __future__ import annotations

import os
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from builders import a_network

from reports.page.render import render_figures
from reports.projection.project import projected_series
from reports.projection.refusals import Outside
from results.outcome import Outcome
from results.projection import Projection
from results.review import Review, ReviewEntry
from results.statistics import Metric
from results.tuning import Contribution, TunedSetting, TunedTrial, Tuning, TuningAnswer

GOLDEN = Path(__file__).parent / "golden" / "structure.txt"
TEXTS = ("h1", "h2", "h3", "th", "dt", "summary", "caption")
SHOWN = (*TEXTS, "header", "nav", "main", "section", "table", "figure", "details", "ul", "dl", "script")

TUNING = Tuning(
    command="bench tune",
    default="a",
    settings=tuple(TunedSetting(id=one, choices={"strategy": one}) for one in "ab"),
    trials=tuple(
        TunedTrial(setting=one, rung=0, block=1, outcome=Outcome.OK, rate=rate, memory_bytes=2**20)
        for one, rate in (("a", 10.0), ("b", 20.0))
    ),
    answer=TuningAnswer(
        setting="b",
        sentence="Fastest that fits: b.",
        contributions=(
            Contribution(
                choice="strategy",
                value="b",
                instead="a",
                ratio=Metric(value=2.0, unit="x", low=None, high=None, samples=1, interval=None),
            ),
        ),
        remarks=("A remark.",),
        commands=("bench matrix", "bench train"),
    ),
)


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


def test_the_outline_is_the_golden_one(small, twenty_nights) -> None:
    found = small.analysed()
    note = ReviewEntry(at="2026-01-02T03:04:05Z", author="Ann", what="noted", why="a remark")
    running = ({"cell": "a", "state": "running", "ok": "0", "planned": "3", "others": ""},)
    figures = replace(
        found,
        nights={"here": twenty_nights(next(iter(found.pools.values())).cell, "a cell")},
        running=running,
        network=a_network(),
        review=Review((note,)),
        projection=Projection(
            digest=found.digest,
            to=16,
            command="bench project",
            network=None,
            what_if=(),
            series=projected_series(found, 16, Outside()),
        ),
        tuning=TUNING,
    )
    outline = "\n".join(Outline(render_figures(figures)).lines) + "\n"
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(outline, encoding="utf-8")
    assert outline == GOLDEN.read_text(encoding="utf-8")
