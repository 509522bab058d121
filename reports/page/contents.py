"""The sections of a study's page, in their order."""

from __future__ import annotations

from collections.abc import Callable

from reports.analysis.study import StudyFigures
from reports.page.section import Section
from reports.page.sections.anatomy import anatomy_section
from reports.page.sections.communication import communication_section
from reports.page.sections.compression import compression_section
from reports.page.sections.environment import environment_section, warnings_section
from reports.page.sections.headline import headline_section
from reports.page.sections.outcomes import outcomes_section
from reports.page.sections.scaling import strong_section, weak_section
from reports.page.sections.work import work_section

SECTIONS: tuple[Callable[[StudyFigures], Section | None], ...] = (
    headline_section,
    weak_section,
    strong_section,
    anatomy_section,
    communication_section,
    compression_section,
    work_section,
    outcomes_section,
    warnings_section,
    environment_section,
)


def contents(study: StudyFigures) -> tuple[Section, ...]:
    """Every section that this study has something for."""
    return tuple(section for make in SECTIONS if (section := make(study)) is not None)
