"""Drawings of a study as files for papers and slides: throughput, efficiency and losses, each by itself.

A drawing shows one piece of work (a workload, a rule of scaling, a batch, a setting, a network). It has a
line for each strategy with its compressor and collective, in the page's colour and dashes, marks with their
intervals, and the ideal as a thin line. Equal studies give equal bytes: files do not contain a date.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from reports.analysis.losses import LossGroup, loss_group
from reports.analysis.scaling import Curve, CurvePoint, Piece, pieces
from reports.analysis.side_by_side import CellInStudy, side_by_side
from reports.analysis.study import StudyFigures
from reports.page.chart import Axis
from reports.page.looks import ON_PAPER, Looks, colours_over_studies, looks, study_dash
from results.cell import Cell, label
from results.outcome import Evidence
from results.statistics import Metric

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
_ROWS = 12
"""Rows of a drawing of ratios."""
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureFile:
    """A drawing as a file."""

    name: str
    """The name with its suffix: `gpt-nano-weak-b8-efficiency.pdf`."""
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A curve as it is drawn."""

    curve: Curve
    name: str
    colour: str
    mark: str
    dash: str
    """The SVG dash pattern."""


def figure_files(study: StudyFigures, forms: Sequence[FileForm], style: Style) -> Iterator[FigureFile]:
    """Every drawing of a study in every form; no drawing without figures."""
    taken: dict[str, int] = {}
    shown = looks(study.curves)
    for piece in pieces(study.curves):
        stem = _stem(piece, taken)
        named = [
            (curve, curve.key.label, shown[curve.key.exchange].colour, shown[curve.key.exchange].dash)
            for curve in piece.curves
        ]
        yield from _curve_files(stem, _marked(named), forms, style, y_axis="linear")
        losses = loss_group(piece.curves)
        if losses is not None:
            yield from _files(f"{stem}-losses", partial(_losses, group=losses, shown=shown), forms, style)


def shared_figure_files(
    studies: Sequence[StudyFigures], forms: Sequence[FileForm], style: Style
) -> Iterator[FigureFile]:
    """Draw several studies on the same axes: curves of equal work, and ratios of matched cells."""
    comparison = side_by_side(studies)
    taken: dict[str, int] = {}
    for those in comparison.pieces:
        colours = colours_over_studies(curve for one in those for curve in one.piece.curves)
        named = [
            (
                curve,
                f"{curve.key.label}, {one.study}",
                colours[curve.key.exchange],
                study_dash(comparison.studies, one.study),
            )
            for one in those
            for curve in one.piece.curves
        ]
        stem = _stem(those[0].piece, taken)
        yield from _curve_files(stem, _marked(named), forms, style, y_axis="log")
    judged = [
        (shared.cell, entry)
        for shared in comparison.cells
        for entry in shared.entries[1:]
        if entry.ratio is not None
    ]
    for number in range(0, len(judged), _ROWS):
        part = judged[number : number + _ROWS]
        name = "ratios" if number == 0 else f"ratios-{number // _ROWS + 1}"
        yield from _files(name, partial(_ratios, rows=part), forms, style)


def _marked(named: Sequence[tuple[Curve, str, str, str]]) -> list[_Line]:
    """Lines with a name, a colour and a dash of the page, and a mark for each way to train."""
    marks = dict(zip(dict.fromkeys(curve.key.label for curve, *_ in named), cycle(_MARKS), strict=False))
    return [
        _Line(curve=curve, name=name, colour=ON_PAPER[colour], mark=marks[curve.key.label], dash=dash)
        for curve, name, colour, dash in named
    ]


def _curve_files(
    stem: str, lines: Sequence[_Line], forms: Sequence[FileForm], style: Style, *, y_axis: Axis
) -> Iterator[FigureFile]:
    """Draw the fastest lines and note how many there are; `y_axis` is the axis of the throughputs."""
    ranked = sorted(lines, key=lambda line: line.curve.points[-1].figures.samples_per_s.value, reverse=True)
    shown = [line for line in lines if line in ranked[:_MOST_LINES]]
    left_out = f"the {len(shown)} fastest of {len(lines)} lines" if len(shown) < len(lines) else ""
    throughput = partial(_throughput, lines=shown, note=left_out, y_axis=y_axis)
    yield from _files(f"{stem}-throughput", throughput, forms, style)
    yield from _files(f"{stem}-efficiency", partial(_efficiency, lines=shown, note=left_out), forms, style)


def _files(
    stem: str, draw: Callable[[Axes], None], forms: Sequence[FileForm], style: Style
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
            draw(figure.add_subplot())
            file = io.BytesIO()
            metadata: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[form]
            figure.savefig(file, format=form, dpi=look.dots_per_inch, metadata=metadata)
        yield FigureFile(name=f"{stem}.{form}", data=file.getvalue())


def _stem(piece: Piece, taken: dict[str, int]) -> str:
    """A unique name for a piece; pieces that differ only in a setting are numbered."""
    key = piece.curves[0].key
    words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{key.workload}-{key.kind}-b{key.constant_batch}")[:80].strip(
        "-."
    )
    taken[words] = taken.get(words, 0) + 1
    return words if taken[words] == 1 else f"{words}-{taken[words]}"


def _throughput(axes: Axes, lines: Sequence[_Line], note: str, y_axis: Axis) -> None:
    _draw(axes, lines, lambda point: point.figures.throughput)
    if y_axis == "log":
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(f"throughput ({lines[0].curve.points[0].figures.throughput.unit})")
    _finish(axes, lines, note)


def _efficiency(axes: Axes, lines: Sequence[_Line], note: str) -> None:
    _draw(axes, lines, lambda point: point.efficiency.metric, scale=100)
    axes.axhline(100, color=MUTED, linewidth=0.7, linestyle=(0, (6, 2, 1, 2)), zorder=1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("efficiency (%)")
    _finish(axes, lines, note)


def _draw(
    axes: Axes, lines: Sequence[_Line], metric: Callable[[CurvePoint], Metric | None], *, scale: float = 1.0
) -> None:
    """Draw the lines: measured points are filled, emulated ones hollow, and bars are intervals."""
    for line in lines:
        found = [(point, one) for point in line.curve.points if (one := metric(point)) is not None]
        if not found:
            continue
        emulated = any(point.figures.evidence is Evidence.EMULATED for point, _ in found)
        short = line.name if len(line.name) <= 40 else f"{line.name[:37]}..."
        axes.errorbar(
            [point.gpus for point, _ in found],
            [scale * one.value for _, one in found],
            yerr=_errors([one for _, one in found], scale),
            color=line.colour,
            marker=line.mark,
            markerfacecolor="none" if emulated else line.colour,
            linestyle=_dashed(line.dash),
            capsize=1.5,
            label=f"{short} (emulated)" if emulated else short,
        )


def _dashed(dash: str) -> str | tuple[float, tuple[float, ...]]:
    """matplotlib's line style for a dash of the page, in units of the line's width."""
    return (0.0, tuple(float(part) / _PAGE_LINE for part in dash.split())) if dash else "-"


def _errors(metrics: Sequence[Metric], scale: float) -> list[list[float]]:
    """Lengths of the error bars below and above each value; 0 without an interval."""
    below = [0.0 if one.low is None else scale * (one.value - one.low) for one in metrics]
    above = [0.0 if one.high is None else scale * (one.high - one.value) for one in metrics]
    return [below, above]


def _finish(axes: Axes, lines: Sequence[_Line], note: str) -> None:
    points = [point for line in lines for point in line.curve.points]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted({float(point.gpus) for point in points})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("GPUs" if points[0].figures.cell.device == "cuda" else "ranks (CPU)")
    axes.grid(axis="y", linewidth=0.4)
    axes.set_title(note, loc="right", color=MUTED)
    axes.legend()


def _ratios(axes: Axes, rows: Sequence[tuple[Cell, CellInStudy]]) -> None:
    """Draw a row for each matched cell: the ratio to the first study with its interval; hollow: not
    judged."""
    for place, (_, entry) in enumerate(rows):
        assert entry.ratio is not None
        colour = ON_PAPER.get({"faster": "green", "slower": "vermillion"}.get(entry.change or "", ""), MUTED)
        axes.errorbar(
            [entry.ratio.value],
            [place],
            xerr=_errors([entry.ratio], 1.0),
            color=colour,
            marker="o",
            markerfacecolor="none" if entry.change is None else colour,
            linestyle="none",
            capsize=1.5,
        )
    axes.axvline(1, color=MUTED, linewidth=0.7, zorder=1)
    names = [f"{label(cell)} on {cell.gpus:,}, {entry.study}" for cell, entry in rows]
    axes.set_yticks(range(len(rows)), [one if len(one) <= 40 else f"{one[:37]}..." for one in names])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("times as fast as in the first study")
    axes.grid(axis="x", linewidth=0.4)


def _losses(axes: Axes, group: LossGroup, shown: Looks) -> None:
    for curve in group.curves:
        look = shown[curve.label]
        colour, samples = ON_PAPER[look.colour], [step * curve.global_batch for step in curve.steps]
        axes.plot(samples, curve.losses, color=colour, linewidth=0.4, alpha=0.35)
        axes.plot(
            samples, group.smoothed(curve), color=colour, linestyle=_dashed(look.dash), label=curve.label
        )
    axes.set_xlabel("samples")
    axes.set_ylabel("training loss")
    axes.grid(axis="y", linewidth=0.4)
    axes.legend()
