"""The pieces of work of a study: curves of the same work, scaled by the same rule over the same network."""

from __future__ import annotations

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


def _title(study: StudyFigures, curve: Curve) -> str:
    key = curve.key
    batch = f"batch {key.batch:,} per replica" if key.kind == "weak" else f"global batch {key.batch:,}"
    setting = study.settings[key.setting]
    link = "" if key.link == NO_LINK else f"{key.link} links"
    return ", ".join(part for part in (key.workload, batch, setting, link) if part)
