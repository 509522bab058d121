"""A study whose cells are programs of others."""

from __future__ import annotations

from dataclasses import replace

from harness.features.programs.reading import Waits
from harness.features.programs.records import Traced
from reports.analysis.study import StudyFigures

TRACED = {1: Traced(steps=3, compute_ns=4_000_000, exposed_ns=2_500_000, idle_ns=300_000)}


def shown(study: StudyFigures, words: str) -> StudyFigures:
    found = {
        cell_id: Waits(by_rank_ns=(2e6, 30e6), slow=0, by="collectives", notes=(words,), traced=TRACED)
        for cell_id in study.cells
    }
    return replace(study, added={**study.added, "program": found})
