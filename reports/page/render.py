"""The report: a study's figures put into one HTML file that needs no network and no script.

The same study gives the same bytes: nothing in the page comes from the time or the place of its making.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import jinja2

from reports.analysis.study import StudyFigures, analyse
from reports.page.contents import contents
from reports.page.frames import cells_csv, runs_csv
from reports.text import count, moment
from results.run import RunResult
from results.store import Study

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def _segments(text: str) -> list[str]:
    """Where a figure's text may be broken: before its interval, and before what the interval is."""
    return text.replace(" (", "\n(").replace(", ", ",\n").split("\n")


def _data(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


_TEMPLATES.filters |= {"segments": _segments, "data": _data}


def render(study: Study, results: Sequence[RunResult]) -> str:
    """The report of a study as one HTML document, from its plans and the results of all its runs."""
    return render_figures(analyse(study.name, study.plans(), results))


def cells_as_csv(study: Study, results: Sequence[RunResult]) -> str:
    """The full table as CSV, one row a cell."""
    return cells_csv(analyse(study.name, study.plans(), results))


def runs_as_csv(study: Study, results: Sequence[RunResult]) -> str:
    """Every run as CSV, one row a run."""
    return runs_csv(analyse(study.name, study.plans(), results))


def render_figures(study: StudyFigures) -> str:
    """The report of a study that is analysed already."""
    sections = contents(study)
    return _TEMPLATES.get_template("report.html.j2").render(
        title=study.name,
        summary=_summary(study),
        created=[moment(plan.created_at) for plan in study.plans],
        cpu=any(pool.cell.device == "cpu" for pool in study.pools.values()),
        sections=sections,
        definitions=[definition for section in sections for definition in section.definitions],
    )


def _summary(study: StudyFigures) -> str:
    """The study in a sentence of counts."""
    skipped = sum(len(group.gpus) for group in study.skipped)
    parts = [
        f"{count(len(study.pools), 'cell')} planned",
        f"{len(study.cells):,} with figures",
        f"{len(study.failures):,} without",
        f"{count(skipped, 'point')} skipped",
        f"{count(len(study.runs), 'run')} counted",
    ]
    return ", ".join(parts)
