"""The sections of a study's page, in their order."""

from __future__ import annotations

from collections.abc import Callable

from reports.analysis.study import StudyFigures
from reports.page.section import Section
from reports.page.sections.anatomy import anatomy_section
from reports.page.sections.communication import communication_section
from reports.page.sections.compression import compression_section
from reports.page.sections.correctness import correctness_section
from reports.page.sections.cost import cost_section
from reports.page.sections.environment import environment_section, warnings_section
from reports.page.sections.headline import headline_section
from reports.page.sections.memory import memory_section
from reports.page.sections.outcomes import outcomes_section
from reports.page.sections.ranks import ranks_section
from reports.page.sections.scaling import strong_section, weak_section
from reports.page.sections.table import table_section
from reports.page.sections.verdict import verdict_section

Maker = Callable[[StudyFigures], Section | None]
SECTIONS: tuple[Maker, ...] = (
    verdict_section,
    headline_section,
    weak_section,
    strong_section,
    outcomes_section,
    anatomy_section,
    communication_section,
    compression_section,
    ranks_section,
    memory_section,
    cost_section,
    correctness_section,
    warnings_section,
    environment_section,
)
"""From the answer over its reasons to what a reader looks up; definitions of all follow them."""
APPENDIX: tuple[Maker, ...] = (table_section,)
"""Behind the definitions."""


def contents(study: StudyFigures) -> tuple[Section, ...]:
    """Every section that this study has something for."""
    return _made(SECTIONS, study)


def appendix(study: StudyFigures) -> tuple[Section, ...]:
    """The same for what follows the definitions."""
    return _made(APPENDIX, study)


def _made(makers: tuple[Maker, ...], study: StudyFigures) -> tuple[Section, ...]:
    return tuple(section for make in makers if (section := make(study)) is not None)
