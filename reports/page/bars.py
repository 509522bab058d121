"""Drawings of one row a cell, and the exposed communication as dots with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from matplotlib.axes import Axes

from reports.analysis.figures import CellFigures
from reports.page.svg import MUTED, VERMILLION, Drawing, axes, inline
from reports.text import tick
from results.cell import Cell

_WIDTH, _ROW, _MARGINS, _LOWEST = 5.4, 0.235, 0.75, 1.6
"""In inches. The lowest drawing has room for a legend of two rows beside one bar."""
_LONGEST_LABEL = 48
_KEPT_END = 22
_ROWS_OF_A_DRAWING = 24
"""More cells than this go on in the next drawing, so that one fits a sheet of paper."""

Labels = Mapping[str, str]
"""What a cell is called beside its bar, by id."""


class BarRow(Protocol):
    """What is drawn in one row."""

    @property
    def cell(self) -> Cell: ...


RowT = TypeVar("RowT", bound=BarRow)
BarGroup = tuple[str, Sequence[RowT]]
"""Rows that are drawn on one scale, and what they have in common."""
Painter = Callable[[Axes, Sequence[RowT], Sequence[RowT]], None]
"""Draws the second rows, which are some of the first: those share a scale."""


def exposed_dots(groups: Sequence[BarGroup[CellFigures]], labels: Labels) -> list[Drawing]:
    """Exposed communication as a share of the step, with its interval."""
    with_share = [(name, [cell for cell in cells if cell.exposed_share]) for name, cells in groups]
    return drawings(with_share, labels, ("exposed communication", "percent of the step"), _exposed)


def drawings(
    groups: Sequence[BarGroup[RowT]], labels: Labels, drawn_in: tuple[str, str], paint: Painter[RowT]
) -> list[Drawing]:
    """Each group in as many drawings as it needs; `drawn_in` is what is drawn, and its unit."""
    quantity, unit = drawn_in
    drawn: list[Drawing] = []
    for common, rows, sheet in _sheets(groups):
        name = f"{paint.__name__.strip('_')}-{len(drawn)}"
        full = f"{common}: {quantity}, {unit}"
        with axes(width=_WIDTH, height=max(_LOWEST, _MARGINS + _ROW * len(sheet))) as plain:
            paint(plain, rows, sheet)
            _rows(plain, [labels[row.cell.id] for row in sheet])
            plain.set_title(unit)
            described = f"{full} of {len(sheet)} cells. The numbers are in the table below."
            svg = inline(plain, name=name, title=full, description=described)
        drawn.append(Drawing(title=full, svg=svg))
    return drawn


def _sheets(groups: Sequence[BarGroup[RowT]]) -> Iterator[tuple[str, Sequence[RowT], Sequence[RowT]]]:
    for common, rows in groups:
        for start in range(0, len(rows), _ROWS_OF_A_DRAWING):
            yield common, rows, rows[start : start + _ROWS_OF_A_DRAWING]


def _rows(drawn: Axes, labels: Sequence[str]) -> None:
    """Names of the rows, the first one on top."""
    drawn.set_yticks(range(len(labels)), [_shortened(label) for label in labels])
    drawn.set_ylim(len(labels) - 0.4, -0.6)
    drawn.tick_params(axis="y", length=0)
    drawn.spines["left"].set_visible(False)
    drawn.xaxis.set_major_formatter(lambda value, _: tick(value))
    drawn.grid(axis="x")


def _shortened(label: str) -> str:
    """So much that the axes keep their room, the size at its end too; the table has the whole name."""
    if len(label) <= _LONGEST_LABEL:
        return label
    return f"{label[: _LONGEST_LABEL - _KEPT_END - 3]}...{label[-_KEPT_END:]}"


def _exposed(drawn: Axes, cells: Sequence[CellFigures], sheet: Sequence[CellFigures]) -> None:
    for place, cell in enumerate(sheet):
        share = cell.exposed_share
        assert share is not None
        if share.low is not None and share.high is not None:
            drawn.plot([100 * share.low, 100 * share.high], [place, place], color=VERMILLION, linewidth=2)
        drawn.plot([100 * share.value], [place], "o", color=VERMILLION)
    drawn.axvline(0, color=MUTED, linewidth=1)
    shares = [cell.exposed_share for cell in cells if cell.exposed_share]
    ends = [100 * end for share in shares for end in (share.value, share.low, share.high) if end is not None]
    margin = 0.05 * (max(1, *ends) - min(0, *ends))
    drawn.set_xlim(min(0, min(ends) - margin), max(1, max(ends) + margin))
