"""Studies of which the section of every feature has something to show.

A feature with a section has `tests/features/NAME/figures.py`, with a function `shown(study, words)` that adds
what its section shows; `words` are put where others choose the text, such as names of machines.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from packages import module_at

from reports.analysis.study import StudyFigures

FEATURES = Path(__file__).parents[1] / "features"


def figures_of_features() -> list[tuple[str, ModuleType]]:
    """Name and module of each `figures.py`."""
    return [(file.parent.name, module_at(file)) for file in sorted(FEATURES.glob("*/figures.py"))]


def with_features(study: StudyFigures, words: str) -> StudyFigures:
    """The study, with what the sections of all features show."""
    for _, module in figures_of_features():
        study = module.shown(study, words)
    return study
