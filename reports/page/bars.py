"""One row a cell: the step by phase as stacked bars, and the exposed communication as dots with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from matplotlib.axes import Axes

from reports.analysis.figures import CellFigures
from reports.page.svg import BLUE, GREEN, MUTED, ORANGE, SKY, VERMILLION, Drawing, axes, inline
from reports.text import number
from results.run import PHASES

PHASE_COLOURS = {
    "data": ORANGE,
    "forward": SKY,
    "backward": BLUE,
    "optimizer": GREEN,
    "other": MUTED,
}
assert tuple(PHASE_COLOURS) == (*PHASES, "other")

_WIDTH, _ROW, _MARGINS = 5.4, 0.235, 0.75
_ROWS_OF_A_DRAWING = 24
"""More cells than this go on in the next drawing, so that one fits a sheet of paper."""

Labels = Mapping[str, str]
"""What a cell is called beside its bar, by id."""


Group = tuple[str, Sequence[CellFigures]]
"""Cells that are drawn on one scale, and what they have in common."""


def phase_bars(groups: Sequence[Group], labels: Labels) -> list[Drawing]:
    """Stacked bars of the phases; cells without phases are left to the table."""
    with_phases = [(name, [cell for cell in cells if cell.phase_ns]) for name, cells in groups]
    return _drawings(with_phases, labels, "step time by phase, ms", _phases)


def exposed_dots(groups: Sequence[Group], labels: Labels) -> list[Drawing]:
    """Exposed communication as a share of the step, with its interval."""
    with_share = [(name, [cell for cell in cells if cell.exposed_share]) for name, cells in groups]
    return _drawings(with_share, labels, "exposed communication, percent of the step", _exposed)


Painter = Callable[[Axes, Sequence[CellFigures]], None]


def _drawings(groups: Sequence[Group], labels: Labels, title: str, paint: Painter) -> list[Drawing]:
    drawings: list[Drawing] = []
    for common, cells in _sheets(groups):
        name = f"{paint.__name__.strip('_')}-{len(drawings)}"
        full = f"{common}: {title}"
        with axes(width=_WIDTH, height=_MARGINS + _ROW * len(cells)) as drawn:
            paint(drawn, cells)
            _rows(drawn, [labels[cell.cell.id] for cell in cells])
            drawn.set_title(title.partition(", ")[2])
            described = f"{full} of {len(cells)} cells. The numbers are in the table below."
            svg = inline(drawn, name=name, title=full, description=described)
        drawings.append(Drawing(title=full, svg=svg))
    return drawings


def _sheets(groups: Sequence[Group]) -> Iterator[Group]:
    for common, cells in groups:
        for start in range(0, len(cells), _ROWS_OF_A_DRAWING):
            yield common, cells[start : start + _ROWS_OF_A_DRAWING]


def _rows(drawn: Axes, labels: Sequence[str]) -> None:
    """Names of the rows, the first one on top."""
    drawn.set_yticks(range(len(labels)), labels)
    drawn.set_ylim(len(labels) - 0.4, -0.6)
    drawn.tick_params(axis="y", length=0)
    drawn.spines["left"].set_visible(False)
    drawn.xaxis.set_major_formatter(lambda value, _: number(value, digits=1))
    drawn.grid(axis="x")


def _phases(drawn: Axes, cells: Sequence[CellFigures]) -> None:
    places = list(range(len(cells)))
    lefts = [0.0] * len(cells)
    for phase, colour in PHASE_COLOURS.items():
        # `other` is a difference and can be a little below zero; a bar cannot. The table has it as it is.
        widths = [max(0.0, cell.phase_ns[phase]) / 1e6 for cell in cells]
        drawn.barh(places, widths, left=lefts, height=0.66, color=colour, label=phase)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    figure = drawn.get_figure(root=True)
    assert figure is not None
    figure.legend(loc="outside lower left", ncols=len(PHASE_COLOURS), columnspacing=1.2, handlelength=1.0)


def _exposed(drawn: Axes, cells: Sequence[CellFigures]) -> None:
    for place, cell in enumerate(cells):
        share = cell.exposed_share
        assert share is not None
        if share.low is not None and share.high is not None:
            drawn.plot([100 * share.low, 100 * share.high], [place, place], color=VERMILLION, linewidth=2)
        drawn.plot([100 * share.value], [place], "o", color=VERMILLION)
    drawn.axvline(0, color=MUTED, linewidth=1)
    drawn.set_xlim(min(0, drawn.get_xlim()[0]), max(1, drawn.get_xlim()[1]))
