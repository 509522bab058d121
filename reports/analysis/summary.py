"""A study in a line of counts."""

from __future__ import annotations

from reports.analysis.study import StudyFigures
from reports.text import count, moment


def summary(study: StudyFigures) -> str:
    """`Scaling of distributed training. 6 cells planned, ... Planned 2026-01-02 03:04 UTC`."""
    skipped = sum(len(group.gpus) for group in study.skipped)
    counts = [
        f"{count(len(study.pools), 'cell')} planned",
        f"{len(study.cells):,} with figures",
        f"{len(study.failures):,} without",
        f"{count(skipped, 'point')} skipped",
        f"{count(len(study.runs), 'run')} counted",
    ]
    planned = ", ".join(moment(plan.created_at) for plan in study.plans)
    return f"Scaling of distributed training. {', '.join(counts)}. Planned {planned}."
