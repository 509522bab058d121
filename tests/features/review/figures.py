"""A study with a reviewer's note."""

from __future__ import annotations

from dataclasses import replace

from reports.analysis.study import StudyFigures
from results.review import Review, ReviewEntry


def shown(study: StudyFigures, words: str) -> StudyFigures:
    note = ReviewEntry(at="2026-01-02T03:04:05Z", author=words, what="noted", why=words)
    return replace(study, review=Review((*study.review.entries, note)))
