"""The headline: one row a cell and series, and the numbers as files."""

from __future__ import annotations

from markupsafe import Markup

from reports.analysis.headline import headline_table
from reports.analysis.study import StudyFigures
from reports.page.frames import cells_csv, runs_csv
from reports.page.section import Block, Downloads, Paragraph, Section, Table
from reports.table import TextTable
from results.outcome import Evidence

NOTHING_SUCCEEDED = Markup(
    "Nothing succeeded: no cell of this study has a figure. The reasons are under "
    '<a href="#outcomes">Failures and skips</a>.'
)
ON_A_CPU = (
    "Sizes are ranks on a CPU, not GPUs: a rank has one core and one thread, and the threads of the "
    "communication backend share it, so that little of the exchange overlaps with the computation. These "
    "figures say how this code scales here, not how GPUs would."
)
EMULATED = (
    "Emulated figures come from real code on a stand-in (more ranks than cores or devices, virtual nodes, a "
    "network link by traffic shaping): they make no efficiency claim."
)


_LATER = "batch per replica / global"
"""Behind the results: what comes first is what a narrow screen shows."""


def headline_section(study: StudyFigures) -> Section:
    """The first table of the page."""
    blocks: list[Block] = [
        Table(
            _reordered(headline_table(study)), "One row a cell and series; a heading links to what it means"
        )
        if study.cells
        else Paragraph(NOTHING_SUCCEEDED, "none")
    ]
    if any(pool.cell.device == "cpu" for pool in study.pools.values()):
        blocks.append(Paragraph(ON_A_CPU, "plain"))
    if any(cell.evidence is Evidence.EMULATED for cell in study.cells.values()):
        blocks.append(Paragraph(EMULATED, "plain"))
    blocks.append(Downloads((("cells.csv", cells_csv(study)), ("runs.csv", runs_csv(study)))))
    return Section(anchor="headline", title="Headline", blocks=tuple(blocks))


def _reordered(full: TextTable) -> TextTable:
    """The batch after the throughput."""
    titles = full.titles
    order = [place for place, title in enumerate(titles) if title != _LATER]
    order.insert(order.index(titles.index("throughput")) + 1, titles.index(_LATER))
    return full.columns_at(order)
