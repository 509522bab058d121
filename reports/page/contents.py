"""The sections of a study's page, in their order: our own, then the sections of other packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from reports.analysis.study import StudyFigures
from reports.page.section import Paragraph, Section
from reports.page.sections.anatomy import anatomy_section
from reports.page.sections.best import best_section
from reports.page.sections.communication import communication_section
from reports.page.sections.correctness import correctness_section
from reports.page.sections.cost import cost_section
from reports.page.sections.environment import environment_section
from reports.page.sections.imbalance import imbalance_section
from reports.page.sections.memory import memory_section
from reports.page.sections.outcomes import outcomes_section, running_section
from reports.page.sections.over import over_section
from reports.page.sections.ranks import ranks_section
from reports.page.sections.scaling import curves_section
from reports.page.sections.summary import summary_section
from reports.page.sections.table import table_section
from results import features
from results.errors import ExtensionError
from results.extensions import Extension, extensions
from results.registry import load

Maker = Callable[[StudyFigures], Section | None]
SECTIONS: Mapping[str, Maker] = MappingProxyType(
    {
        "running": running_section,
        "summary": summary_section,
        "over": over_section,
        "best": best_section,
        "curves": curves_section,
        "anatomy": anatomy_section,
        "imbalance": imbalance_section,
        "communication": communication_section,
        "memory": memory_section,
        "cost": cost_section,
        "outcomes": outcomes_section,
        "ranks": ranks_section,
        "correctness": correctness_section,
        "environment": environment_section,
    }
)
"""The sections by anchor: the answer, then its reasons, then details. The sections of other packages follow,
and then all definitions."""
APPENDIX: Mapping[str, Maker] = MappingProxyType({"table": table_section})
"""The sections after the definitions."""


def all_sections() -> Mapping[str, Maker]:
    """Every section of bench, by anchor: the sections of the core and of all features."""
    added = features.joined(lambda one: one.sections)
    return {**SECTIONS, **{name: load(one.place) for name, one in added.items()}, **APPENDIX}


def contents(study: StudyFigures) -> tuple[Section, ...]:
    """Make every section that has content for this study; the anchor of another package's section is its
    name.

    Sections of other packages follow all others, unless the kind of the study places them. Raises
    ExtensionError if two have one name.
    """
    own = all_sections()
    added = {
        name: partial(_of_package, name, one) for name, one in extensions("section", {*own, "method"}).items()
    }
    placed = _sections(study, {**own, **added})
    return _made(placed | {name: make for name, make in added.items() if name not in placed}, study)


def _of_package(name: str, extension: Extension, study: StudyFigures) -> Section | None:
    """Make the section of another package; an error in its code must not prevent the rest of the page."""
    try:
        make = extension.load()
        section = make(study) if callable(make) else make
        if section is not None and not isinstance(section, Section):
            raise extension.wrong(make, "a function that gives a Section or None")
    except Exception as error:
        # Whatever the code of another package raises.
        failed = f"{extension} failed: {type(error).__name__}: {error}"
        reason = str(error) if isinstance(error, ExtensionError) else failed
        section = Section(anchor=name, title=name, blocks=(Paragraph(reason, "none"),))
    return None if section is None else replace(section, anchor=name)


def appendix(study: StudyFigures) -> tuple[Section, ...]:
    """Make the sections after the definitions."""
    return () if study.kind.sections else _made(APPENDIX, study)


def _sections(study: StudyFigures, every: Mapping[str, Maker]) -> dict[str, Maker]:
    """The sections of a page in their order: those that its kind names, else the sections of bench."""
    if study.kind.sections:
        return {name: every[name] for name in study.kind.sections if name in every}
    added = features.joined(lambda one: one.sections)
    return features.placed(
        SECTIONS, {name: (every[name], one.after) for name, one in added.items() if one.after}
    )


def _made(makers: Mapping[str, Maker], study: StudyFigures) -> tuple[Section, ...]:
    return tuple(section for make in makers.values() if (section := make(study)) is not None)
