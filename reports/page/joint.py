"""The report of several studies: their comparison, then the report of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reports.analysis.side_by_side import side_by_side
from reports.analysis.study import StudyFigures, summary
from reports.page.contents import appendix, contents
from reports.page.render import full_page
from reports.page.section import Section
from reports.page.sections.comparison import comparison_section


@dataclass(frozen=True, slots=True)
class StudyPart:
    """One study of a page of several."""

    anchor: str
    """A prefix that is unique on the page, for all ids of the part."""
    name: str
    summary: str
    sections: tuple[Section, ...]
    """The sections; the first screen is open, and the others are folded."""


def render_studies(studies: Sequence[StudyFigures]) -> str:
    """One page of several studies: their comparison, and then each under its name."""
    comparison = comparison_section(side_by_side(studies))
    parts = [
        StudyPart(f"study-{number}", study.name, summary(study), (*contents(study), *appendix(study)))
        for number, study in enumerate(studies, start=1)
    ]
    sections = [comparison, *(section for part in parts for section in part.sections)]
    title = ", ".join(study.name for study in studies)
    return full_page("studies.html.j2", studies, sections, title=title, comparison=comparison, parts=parts)
