"""A study that was projected."""

from __future__ import annotations

from dataclasses import replace

from harness.features.project.project import projected_series
from harness.features.project.records import Projection, digest
from harness.features.project.refusals import Outside
from reports.analysis.study import StudyFigures


def shown(study: StudyFigures, words: str) -> StudyFigures:
    projection = Projection(
        digest=digest(study),
        to=16,
        command=words,
        network=None,
        what_if=(),
        series=projected_series(study, 16, Outside()),
    )
    return replace(study, added={**study.added, "projection": projection})
