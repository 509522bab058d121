"""Drawings of a study as files for papers and slides: throughput, efficiency and losses, each by itself.

A file shows what a drawing of the page shows, from the same description (`reports.page.description`): the
lines of one piece of work with the page's colours and dashes, intervals, and the ideal as a thin line. Equal
studies give equal bytes: files do not contain a date.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from reports.analysis.losses import loss_group
from reports.analysis.scaling import Piece, pieces
from reports.analysis.side_by_side import side_by_side
from reports.analysis.study import StudyFigures
from reports.page.description import Chart, Line, Point
from reports.page.looks import ON_PAPER, looks
from reports.page.section import Drawing
from reports.page.sections.comparison import shared_charts
from reports.page.sections.correctness import loss_curves
from reports.page.sections.scaling import efficiency_chart, throughput_chart

FileForm = Literal["svg", "pdf", "png"]
FORMS: tuple[FileForm, ...] = ("svg", "pdf", "png")
Style = Literal["paper", "screen"]
MM = 1 / 25.4
"""One millimetre in inches."""


@dataclass(frozen=True, slots=True)
class _Look:
    """A style: the size of a drawing in millimetres, and of its fonts in points."""

    width_mm: float
    height_mm: float
    font: float
    line: float
    dots_per_inch: int


STYLES: dict[Style, _Look] = {
    # The column of two-column papers: 84 mm; Nature asks for fonts of 5 to 7 points, IEEE for 8.
    "paper": _Look(84, 60, 7, 1.0, 600),
    "screen": _Look(160, 100, 10, 1.6, 150),
}
MUTED = "#6b7480"
_PAGE_LINE = 2
"""Width of a line of the page: dashes are multiples of it."""
_MOST_LINES = 9
"""Largest number of lines that a reader can distinguish. A drawing says if others are left out."""
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")


FigureFile = tuple[str, bytes]
"""The name with its suffix, `gpt-nano-weak-b8-efficiency.pdf`, and the content."""


def figure_files(study: StudyFigures, forms: Sequence[FileForm], style: Style) -> Iterator[FigureFile]:
    """Every drawing of a study in every form; no drawing without figures."""
    taken: dict[str, int] = {}
    shown = looks(study.curves)
    for piece in pieces(study.curves):
        given = ("", piece.curves, shown, study.devices_word)
        losses = loss_group(piece.curves)
        drawings = {
            "throughput": throughput_chart(*given),
            "efficiency": efficiency_chart(*given),
            "losses": loss_curves(losses, shown, name="", common="") if losses else None,
        }
        yield from _piece_files(_stem(piece, taken), drawings, forms, style)


def shared_figure_files(
    studies: Sequence[StudyFigures], forms: Sequence[FileForm], style: Style
) -> Iterator[FigureFile]:
    """Draw several studies on the same axes: curves of equal work, and ratios of matched cells."""
    comparison = side_by_side(studies)
    taken: dict[str, int] = {}
    ratios = 0
    for those in comparison.pieces:
        drawings = shared_charts(comparison, those)
        ratio = drawings.pop("ratio", None)
        yield from _piece_files(_stem(those[0][1], taken), drawings, forms, style)
        if ratio is not None and ratio.chart is not None:
            ratios += 1
            yield from _files("ratios" if ratios == 1 else f"ratios-{ratios}", ratio.chart, "", forms, style)


def _piece_files(
    stem: str, drawings: Mapping[str, Drawing | None], forms: Sequence[FileForm], style: Style
) -> Iterator[FigureFile]:
    """Draw the fastest lines, and note how many there are."""
    charts = {kind: one.chart for kind, one in drawings.items() if one and one.chart}
    lines = charts["throughput"].lines if "throughput" in charts else ()
    ranked = sorted(lines, key=lambda line: line.points[-1].y, reverse=True)
    fastest = {line.name for line in ranked[:_MOST_LINES]}
    note = f"the {len(fastest)} fastest of {len(lines)} lines" if len(fastest) < len(lines) else ""
    for kind, chart in charts.items():
        kept = tuple(line for line in chart.lines if line.name in fastest) if note else chart.lines
        if kept:
            yield from _files(f"{stem}-{kind}", replace(chart, lines=kept), note, forms, style)


def _files(
    stem: str, chart: Chart, note: str, forms: Sequence[FileForm], style: Style
) -> Iterator[FigureFile]:
    look = STYLES[style]
    settings: dict[Any, Any] = {
        "font.size": look.font,
        "font.family": "DejaVu Sans",
        "axes.titlesize": look.font,
        "axes.labelsize": look.font,
        "legend.fontsize": look.font - 0.5,
        "xtick.labelsize": look.font - 0.5,
        "ytick.labelsize": look.font - 0.5,
        "lines.linewidth": look.line,
        "lines.markersize": 3.2 * look.line,
        "axes.linewidth": 0.6 * look.line,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "text.parse_math": False,
        # PDF files embed TrueType fonts, because journals refuse others.
        "pdf.fonttype": 42,
        "svg.fonttype": "path",
        "svg.hashsalt": "bench",
    }
    for form in forms:
        with mpl.rc_context(settings):
            figure = Figure(figsize=(look.width_mm * MM, look.height_mm * MM), layout="constrained")
            _draw(figure.add_subplot(), chart, note)
            file = io.BytesIO()
            metadata: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[form]
            figure.savefig(file, format=form, dpi=look.dots_per_inch, metadata=metadata)
        yield f"{stem}.{form}", file.getvalue()


def _stem(piece: Piece, taken: dict[str, int]) -> str:
    """A unique name for a piece; pieces that differ only in a setting are numbered."""
    key = piece.curves[0].key
    words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{key.workload}-{key.kind}-b{key.constant_batch}")[:80].strip(
        "-."
    )
    taken[words] = taken.get(words, 0) + 1
    return words if taken[words] == 1 else f"{words}-{taken[words]}"


def _draw(axes: Axes, chart: Chart, note: str) -> None:
    """Draw a chart: measured points are filled, emulated ones hollow, bars are intervals, crosses gaps."""
    for line, mark in zip(chart.lines, cycle(_MARKS), strict=False):
        _draw_line(axes, line, mark, chart.y_most)
    thin: dict[str, Any] = {"color": MUTED, "linewidth": 0.7, "linestyle": (0, (6, 2, 1, 2)), "zorder": 1}
    for rule in chart.rules:
        if rule.y is not None:
            axes.axhline(rule.y, **thin)
        elif rule.x is not None:
            axes.axvline(rule.x, **thin)
        elif rule.slope is not None:
            axes.axline((1, rule.slope), (2, 2 * rule.slope), **thin)
    gaps = [size for size, _ in chart.missing]
    axes.plot(gaps, [0.02] * len(gaps), "x", color=MUTED, transform=axes.get_xaxis_transform())
    _scale_axes(axes, chart)
    axes.set_xlabel(chart.x_title)
    axes.set_ylabel(chart.y_title)
    axes.grid(axis="y", linewidth=0.4)
    axes.set_title(note, loc="right", color=MUTED)
    axes.legend()


def _scale_axes(axes: Axes, chart: Chart) -> None:
    if chart.y_axis == "log":
        axes.set_yscale("log")
    if chart.y_from is not None:
        axes.set_ylim(bottom=chart.y_from)
    if chart.y_most is not None and axes.get_ylim()[1] > chart.y_most > axes.get_ylim()[0]:
        axes.set_ylim(top=chart.y_most)
    if chart.x_axis == "log":
        axes.set_xscale("log", base=2 if chart.sizes else 10)
    if chart.sizes:
        _tick_sizes(axes, chart)


def _tick_sizes(axes: Axes, chart: Chart) -> None:
    """Put a tick at each size."""
    sizes = {point.x for line in chart.lines for point in line.points} | {size for size, _ in chart.missing}
    axes.xaxis.set_major_locator(FixedLocator(sorted(sizes)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _draw_line(axes: Axes, line: Line, mark: str, most: float | None) -> None:
    colour = ON_PAPER.get(line.colour, MUTED)
    for point in line.points:
        if most is not None and point.y > most:
            axes.plot(point.x, most, "^", color=colour, clip_on=False)
    xs, ys = zip(*line.way, strict=True)
    if line.pale:
        axes.plot(xs, ys, color=colour, linewidth=0.4, alpha=0.35)
        return
    short = line.name if len(line.name) <= 40 else f"{line.name[:37]}..."
    axes.plot(xs, ys, color=colour, linestyle=_dashed(line.dash), label=short if line.plain else None)
    if not line.plain:
        _draw_marks(axes, line.points, label=short, color=colour, marker=mark, linestyle=_dashed(line.dash))


def _draw_marks(axes: Axes, points: Sequence[Point], *, color: str, **look: Any) -> None:
    """Draw points with their intervals, hollow if one of them is."""
    axes.errorbar(
        [point.x for point in points],
        [point.y for point in points],
        yerr=_errors(points),
        color=color,
        markerfacecolor="none" if any(point.hollow for point in points) else color,
        capsize=1.5,
        **look,
    )


def _dashed(dash: str) -> str | tuple[float, tuple[float, ...]]:
    """matplotlib's line style for a dash of the page, in units of the line's width."""
    return (0.0, tuple(float(part) / _PAGE_LINE for part in dash.split())) if dash else "-"


def _errors(points: Sequence[Point]) -> list[list[float]]:
    """Lengths of the error bars below and above each value; 0 without an interval."""
    below = [0.0 if one.low is None else one.y - one.low for one in points]
    above = [0.0 if one.high is None else one.high - one.y for one in points]
    return [below, above]
