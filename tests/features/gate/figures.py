"""A study with the history of a cell."""

from __future__ import annotations

from dataclasses import replace

from harness.features.gate.records.baseline import Baseline, Subject
from harness.features.gate.reduce import subject_key
from reports.analysis.study import StudyFigures
from results.cell import Cell


def shown(study: StudyFigures, words: str) -> StudyFigures:
    cell = next(iter(study.pools.values())).cell
    return replace(study, added={**study.added, "nights": {words: twenty_nights(cell, words)}})


def twenty_nights(cell: Cell, label: str) -> list[Baseline]:
    """A history of a cell: from the thirteenth night on it takes 20 % longer, and 50 % more memory."""
    return [
        Baseline(
            name="nightly",
            measured_at=f"2026-01-{night + 1:02d}T03:00:00.000Z",
            commit=f"c{night:02d}{label}",
            subjects=(
                Subject(
                    key=subject_key(cell),
                    label=label,
                    facts={"torch": "2.12" if night < 12 else "2.13"},
                    timed={
                        "step_time": ((1.0 if night < 12 else 1.2) * (1e7 + 1e4 * (night % 3)),),
                        "peak_memory": ((1.0 if night < 12 else 1.5) * (2**27 + 2**15 * (night % 3)),),
                        "loss": (2.0 + 1e-3 * (night % 3),),
                    },
                ),
            ),
        )
        for night in range(20)
    ]
