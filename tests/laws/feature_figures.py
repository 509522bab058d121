"""Studies of which the section of every feature has something to show.

A feature with a section has `tests/features/NAME/figures.py`, with a function `shown(study, words)` that adds
what its section shows; `words` are put where others choose the text, such as names of machines.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from reports.analysis.study import StudyFigures

FEATURES = Path(__file__).parents[1] / "features"


def figures_of_features() -> Iterator[tuple[str, ModuleType]]:
    """Name and module of each `figures.py`."""
    for file in sorted(FEATURES.glob("*/figures.py")):
        spec = importlib.util.spec_from_file_location(f"figures_of_{file.parent.name}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield file.parent.name, module


def with_features(study: StudyFigures, words: str) -> StudyFigures:
    """The study, with what the sections of all features show."""
    for _, module in figures_of_features():
        study = module.shown(study, words)
    return study
