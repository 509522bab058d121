"""A study in its third round."""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as with_fields

from reports.analysis.study import StudyFigures
from results.plan import Round


def shown(study: StudyFigures, words: str) -> StudyFigures:
    runs = {cell.id: 3 for plan in study.plans for cell in plan.cells}
    third = Round(number=3, odds=0.95, runs=runs)
    return replace(study, plans=tuple(with_fields(plan, round=third) for plan in study.plans))
