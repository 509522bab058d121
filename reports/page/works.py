"""The pieces of work of a study: curves of the same work, scaled by the same rule over the same network."""

from __future__ import annotations

from collections.abc import Sequence

from reports.analysis.figures import CellFigures
from reports.analysis.scaling import Curve
from reports.analysis.study import StudyFigures
from results.link import NO_LINK

WorkCurves = tuple[str, tuple[Curve, ...]]
"""What the curves share, in words, and the curves; one at least has a point."""


def works(study: StudyFigures) -> list[WorkCurves]:
    """Every piece of work that has a point, in reading order."""
    groups: dict[tuple[object, ...], list[Curve]] = {}
    for curve in study.curves:
        key = (curve.key.workload, curve.key.kind, curve.key.batch, curve.key.setting, curve.key.link)
        groups.setdefault(key, []).append(curve)
    found = [curves for curves in groups.values() if any(curve.points for curve in curves)]
    return [(_title(study, curves[0]), tuple(curves)) for curves in found]


def cells_by_work(study: StudyFigures) -> list[tuple[str, list[CellFigures]]]:
    """The figures of each piece of work: what is drawn on one scale."""
    return [
        (title, [point.figures for curve in group for point in curve.points]) for title, group in works(study)
    ]


def cells_by_workload(study: StudyFigures) -> list[tuple[str, list[CellFigures]]]:
    cells: Sequence[CellFigures] = list(study.cells.values())
    workloads = dict.fromkeys(cell.cell.workload for cell in cells)
    return [(name, [cell for cell in cells if cell.cell.workload == name]) for name in workloads]


def _title(study: StudyFigures, curve: Curve) -> str:
    key = curve.key
    batch = f"batch {key.batch:,} per replica" if key.kind == "weak" else f"global batch {key.batch:,}"
    setting = study.settings[key.setting]
    link = "" if key.link == NO_LINK else f"{key.link} links"
    return ", ".join(part for part in (key.workload, batch, setting, link) if part)
