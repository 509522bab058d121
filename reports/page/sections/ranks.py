"""Ranks: the exceptions, that is who is persistently slow, and what waiting for them costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reports.analysis.figures import CellFigures
from reports.analysis.stragglers import FALSE_ALARM, SLOW_ABOVE, Stragglers, numbered, stragglers
from reports.analysis.study import StudyFigures
from reports.page.labels import cell_label
from reports.page.rank_map import MapRow, rank_maps
from reports.page.section import Block, Bullets, Definition, Drawings, Paragraph, Section
from reports.text import count, listed

_DRAWN = 4
"""Cells with slow ranks that are drawn, the largest first."""

Found = tuple[CellFigures, Stragglers]


def ranks_section(study: StudyFigures) -> Section | None:
    """None where no cell of several ranks recorded them."""
    cells = [(one, found) for one in study.cells.values() if (found := stragglers(one)) is not None]
    if not cells:
        return None
    return Section(
        anchor="ranks", title="Slow ranks", blocks=tuple(_blocks(study, cells)), definitions=_DEFINITIONS
    )


def _blocks(study: StudyFigures, cells: Sequence[Found]) -> Iterator[Block]:
    slow = sorted((pair for pair in cells if pair[1].persistent), key=lambda pair: -pair[1].ranks)
    if not slow:
        yield Paragraph(f"No rank is persistently slow in any of {count(len(cells), 'cell')}.")
        return
    yield Bullets(tuple(_sentences(study, slow)))
    rows = [MapRow(label=cell_label(study, one.cell), stragglers=found) for one, found in slow[:_DRAWN]]
    yield Drawings(tuple(rank_maps(rows, study.devices_word)))


def _sentences(study: StudyFigures, slow: Sequence[Found]) -> Iterator[str]:
    """For each set of slow ranks at one size: the finding of one cell, and the other cells that share it."""
    groups: dict[tuple[int, tuple[int, ...]], list[Found]] = {}
    for one, found in slow:
        groups.setdefault((found.ranks, tuple(found.persistent)), []).append((one, found))
    for those in groups.values():
        one, found = those[0]
        others = [cell_label(study, other.cell) for other, _ in those[1:]]
        nodes = f" ({numbered('node', found.slow_nodes)} as a whole)" if found.slow_nodes else ""
        more = f" The same in {listed(others, last='; ')}." if others else ""
        yield f"{cell_label(study, one.cell)}: {found.finding}{nodes}{more}"


_DEFINITIONS = (
    Definition(
        "method-slow-rank",
        "Persistently slow",
        f"Mean compute more than {SLOW_ABOVE:.0%} above the median of the ranks in each run, on the same "
        "node, and by more than the spread of its own steps explains: a one-sided t-test with Bonferroni's "
        f"correction over the ranks. Of equal ranks one run of {1 / FALSE_ALARM:,.0f} would have one by "
        "chance. What the mean rank loses to it is the largest mean compute of a rank less the mean over the "
        "ranks, and 0 where no rank is persistently slow; the rest of the exposed wait is random skew.",
    ),
)
