"""Drawings of a study as files for papers and slides: throughput, efficiency and losses, each by itself.

Of each piece of work (a workload, a rule of scaling, a batch, a setting, a network): a line a strategy, marks
with their intervals, the ideal as a thin line. Equal studies give equal bytes: files hold no date.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from reports.analysis.losses import LossGroup, loss_group
from reports.analysis.pieces import Piece, pieces
from reports.analysis.scaling import Curve, CurvePoint
from reports.analysis.study import StudyFigures
from results.outcome import Evidence
from results.statistics import Metric

FileForm = Literal["svg", "pdf", "png"]
FORMS: tuple[FileForm, ...] = ("svg", "pdf", "png")
Style = Literal["paper", "screen"]
MM = 1 / 25.4
"""Inches."""


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
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe & Ito, Color Universal Design (2008), as on the page."""
MUTED = "#6b7480"
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureFile:
    """A drawing as a file."""

    name: str
    """With its suffix: `gpt-nano-weak-b8-efficiency.pdf`."""
    data: bytes


def figure_files(study: StudyFigures, forms: Sequence[FileForm], style: Style) -> Iterator[FigureFile]:
    """Every drawing of a study in every form; none where nothing has a figure."""
    taken: dict[str, int] = {}
    for piece in pieces(study.curves):
        stem = _stem(piece, taken)
        drawn: dict[str, Callable[[Axes], None]] = {
            "throughput": lambda axes, piece=piece: _throughput(axes, piece),  # type: ignore[misc]
            "efficiency": lambda axes, piece=piece: _efficiency(axes, piece),  # type: ignore[misc]
        }
        losses = loss_group(piece.curves)
        if losses is not None:
            drawn["losses"] = lambda axes, losses=losses: _losses(axes, losses)  # type: ignore[misc]
        for what, draw in drawn.items():
            for form in forms:
                yield FigureFile(name=f"{stem}-{what}.{form}", data=_file(draw, form, STYLES[style]))


def _stem(piece: Piece, taken: dict[str, int]) -> str:
    """A name of its own: pieces that differ in a setting alone are numbered."""
    key = piece.curves[0].key
    words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{key.workload}-{key.kind}-b{key.batch}")[:80].strip("-.")
    taken[words] = taken.get(words, 0) + 1
    return words if taken[words] == 1 else f"{words}-{taken[words]}"


def _file(draw: Callable[[Axes], None], form: FileForm, look: _Look) -> bytes:
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
        # Texts stay texts, in fonts that are part of the file: journals refuse others.
        "pdf.fonttype": 42,
        "svg.fonttype": "path",
        "svg.hashsalt": "bench",
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=(look.width_mm * MM, look.height_mm * MM), layout="constrained")
        draw(figure.add_subplot())
        file = io.BytesIO()
        metadata: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[form]
        figure.savefig(file, format=form, dpi=look.dots_per_inch, metadata=metadata)
        return file.getvalue()


def _throughput(axes: Axes, piece: Piece) -> None:
    _lines(axes, piece, lambda point: point.figures.throughput)
    axes.set_yscale("log")
    axes.set_ylabel(f"throughput ({piece.curves[0].points[0].figures.throughput.unit})")
    _finish(axes, piece)


def _efficiency(axes: Axes, piece: Piece) -> None:
    _lines(axes, piece, lambda point: point.efficiency.metric, scale=100)
    axes.axhline(100, color=MUTED, linewidth=0.7, linestyle=(0, (6, 2, 1, 2)), zorder=1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("efficiency (%)")
    _finish(axes, piece)


def _lines(
    axes: Axes, piece: Piece, metric: Callable[[CurvePoint], Metric | None], *, scale: float = 1.0
) -> None:
    """A line a strategy: measured points filled, emulated ones hollow; bars are the intervals."""
    for curve, colour, mark in zip(piece.curves, cycle(_COLOURS), cycle(_MARKS), strict=False):
        found = [(point, one) for point in curve.points if (one := metric(point)) is not None]
        if not found:
            continue
        sizes = [point.gpus for point, _ in found]
        values = [scale * one.value for _, one in found]
        ends = [
            (one.value if one.low is None else one.low, one.value if one.high is None else one.high)
            for _, one in found
        ]
        errors = [
            [value - scale * low for value, (low, _) in zip(values, ends, strict=True)],
            [scale * high - value for value, (_, high) in zip(values, ends, strict=True)],
        ]
        emulated = any(point.figures.evidence is Evidence.EMULATED for point, _ in found)
        axes.errorbar(
            sizes,
            values,
            yerr=errors,
            color=colour,
            marker=mark,
            markerfacecolor="none" if emulated else colour,
            linestyle=":" if emulated else "-",
            capsize=1.5,
            label=_name(curve, emulated=emulated),
        )


def _name(curve: Curve, *, emulated: bool) -> str:
    name = curve.key.label
    short = name if len(name) <= 40 else f"{name[:37]}..."
    return f"{short} (emulated)" if emulated else short


def _finish(axes: Axes, piece: Piece) -> None:
    sizes = sorted({point.gpus for curve in piece.curves for point in curve.points})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([*map(float, sizes)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    device = piece.curves[0].points[0].figures.cell.device
    axes.set_xlabel("GPUs" if device == "cuda" else "ranks (CPU)")
    axes.grid(axis="y", linewidth=0.4)
    axes.legend()


def _losses(axes: Axes, group: LossGroup) -> None:
    for curve, colour in zip(group.curves, cycle(_COLOURS), strict=False):
        samples = [step * curve.batch for step in curve.steps]
        axes.plot(samples, curve.losses, color=colour, linewidth=0.4, alpha=0.35)
        axes.plot(samples, group.smoothed(curve), color=colour, label=curve.label)
    axes.set_xlabel("samples")
    axes.set_ylabel("training loss")
    axes.grid(axis="y", linewidth=0.4)
    axes.legend()
