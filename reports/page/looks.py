"""The names of pieces of work and cells, and the looks of series.

A strategy has one colour, and a compressor with its collective has one dash, on the complete page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from reports.analysis.scaling import Curve
from reports.analysis.series import setting_of
from reports.analysis.study import StudyFigures
from reports.page.description import Line, Point
from results.cell import BASELINE_STRATEGY, DEFAULT_COLLECTIVE, UNCOMPRESSED, Cell, label
from results.grouping import grouped
from results.notation import NO_LINK

COLOURS = ("blue", "vermillion", "green", "purple", "orange", "sky", "brown", "olive")
"""Variables of the page's style: Okabe & Ito, Color Universal Design (2008), and two more."""
ON_PAPER: Mapping[str, str] = {
    "ink": "#1c2024",
    "blue": "#0072b2",
    "vermillion": "#d55e00",
    "green": "#009e73",
    "purple": "#cc79a7",
    "orange": "#e69f00",
    "sky": "#56b4e9",
    "brown": "#8c510a",
    "olive": "#7f7f17",
}
"""The values of these variables in the page's light style."""
ROW = "cell-"
"""The prefix of a cell's id in the anchor of its row in the full table."""
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 4", "12 3", "6 2 1 2 1 2")


@dataclass(frozen=True, slots=True)
class Look:
    colour: str
    dash: str
    """The SVG dash pattern; empty for a solid line."""


Looks = Mapping[str, Look]
"""Looks by the exchange of a series: the same on the complete page and over every network."""


def looks(curves: Iterable[Curve]) -> Looks:
    """The look of each exchange. The single device is drawn in ink; after eight, colours and dashes
    repeat."""
    colours: dict[str, str] = {BASELINE_STRATEGY: "ink"}
    dashes: dict[tuple[str, str], str] = {(UNCOMPRESSED, DEFAULT_COLLECTIVE): ""}
    found: dict[str, Look] = {}
    for key in (curve.key for curve in curves):
        if key.strategy not in colours:
            colours[key.strategy] = COLOURS[(len(colours) - 1) % len(COLOURS)]
        exchange = (key.compression, key.collective)
        if exchange not in dashes:
            dashes[exchange] = _DASHES[len(dashes) % len(_DASHES)]
        found[key.exchange] = Look(colours[key.strategy], dashes[exchange])
    return found


def line_of(
    curve: Curve, shown: Looks, points: tuple[Point, ...], start: tuple[float, float] | None = None
) -> Line:
    """The line of a series, in the look of its exchange."""
    look = shown[curve.key.exchange]
    return Line(name=curve.key.exchange, colour=look.colour, dash=look.dash, points=points, start=start)


def colours_over_studies(curves: Iterable[Curve]) -> Mapping[str, str]:
    """Choose a colour for each exchange, also for compressors, where the dash distinguishes studies."""
    exchanges = dict.fromkeys(curve.key.exchange for curve in curves)
    others = [exchange for exchange in exchanges if exchange != BASELINE_STRATEGY]
    colours = {exchange: COLOURS[place % len(COLOURS)] for place, exchange in enumerate(others)}
    return {BASELINE_STRATEGY: "ink", **colours}


def study_dash(studies: Sequence[str], study: str) -> str:
    """The dash of a study where several share axes; the first is a solid line."""
    return _DASHES[studies.index(study) % 4]


def cell_label(study: StudyFigures, cell: Cell) -> str:
    """`ddp on 16, batch 8 a replica`: its strategy, size and batch, and its other settings."""
    setting = study.settings[setting_of(cell)]
    workloads = {pool.cell.workload for pool in study.pools.values()}
    workload = f"{cell.workload}, " if len(workloads) > 1 else ""
    work = f"{workload}{label(cell)} on {cell.gpus:,}, batch {cell.batch_per_replica:,} a replica"
    return f"{work}, {setting}" if setting else work


WorkCurves = tuple[str, tuple[Curve, ...]]
"""The description of the shared work, and the curves, of which at least one has a point."""


def works(study: StudyFigures) -> list[WorkCurves]:
    """Every piece of work that has a point, in reading order."""
    found: list[WorkCurves] = []
    for curves in grouped(((*curve.key.work, curve.key.link), curve) for curve in study.curves).values():
        if any(curve.points for curve in curves):
            key = curves[0].key
            size = (
                f"batch {key.constant_batch:,} per replica"
                if key.kind == "weak"
                else f"global batch {key.constant_batch:,}"
            )
            link = "" if key.link == NO_LINK else f"{key.link} links"
            parts = (key.workload, size, study.settings[key.setting], link)
            found.append((", ".join(part for part in parts if part), tuple(curves)))
    return found
