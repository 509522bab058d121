"""A study that was projected."""

from __future__ import annotations

from dataclasses import replace

from reports.analysis.study import StudyFigures
from reports.projection.project import projected_series
from reports.projection.refusals import Outside
from results.projection import Projection


def shown(study: StudyFigures, words: str) -> StudyFigures:
    projection = Projection(
        digest=study.digest,
        to=16,
        command=words,
        network=None,
        what_if=(),
        series=projected_series(study, 16, Outside()),
    )
    return replace(study, added={**study.added, "projection": projection})
