"""The sections of a study's page, in their order: our own, then the sections of other packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from reports.analysis.study import StudyFigures
from reports.page.section import Paragraph, Section
from reports.page.sections.anatomy import anatomy_section
from reports.page.sections.best import best_section
from reports.page.sections.communication import communication_section
from reports.page.sections.correctness import correctness_section
from reports.page.sections.cost import cost_section
from reports.page.sections.environment import environment_section
from reports.page.sections.history import history_section
from reports.page.sections.memory import memory_section
from reports.page.sections.network import network_section
from reports.page.sections.outcomes import outcomes_section, running_section
from reports.page.sections.over import over_section
from reports.page.sections.projection import projection_section
from reports.page.sections.ranks import ranks_section
from reports.page.sections.review import review_section
from reports.page.sections.scaling import curves_section
from reports.page.sections.summary import summary_section
from reports.page.sections.table import table_section
from reports.page.sections.training import accuracy_section, training_section
from reports.page.sections.tuning import tuning_section
from results.errors import ExtensionError
from results.extensions import extensions

Maker = Callable[[StudyFigures], Section | None]
SECTIONS: Mapping[str, Maker] = MappingProxyType(
    {
        "running": running_section,
        "summary": summary_section,
        "tuning": tuning_section,
        "over": over_section,
        "best": best_section,
        "curves": curves_section,
        "projection": projection_section,
        "anatomy": anatomy_section,
        "communication": communication_section,
        "network": network_section,
        "memory": memory_section,
        "cost": cost_section,
        "outcomes": outcomes_section,
        "review": review_section,
        "ranks": ranks_section,
        "history": history_section,
        "correctness": correctness_section,
        "environment": environment_section,
    }
)
"""The sections by anchor: the answer, then its reasons, then details. The sections of other packages follow,
and then all definitions."""
APPENDIX: Mapping[str, Maker] = MappingProxyType({"table": table_section})
"""The sections after the definitions."""
GROUP = "bench.sections"
_EVERY = {**SECTIONS, "training": training_section, "accuracy": accuracy_section}
_OF_TRAINED = ("running", "training", "accuracy", "outcomes", "review", "environment")
TRAINED: Mapping[str, Maker] = MappingProxyType({name: _EVERY[name] for name in _OF_TRAINED})
"""The sections of a study that was trained and not measured."""
_OF_NETWORK = ("running", "network", "outcomes", "review")
NETWORK: Mapping[str, Maker] = MappingProxyType({name: _EVERY[name] for name in _OF_NETWORK})
"""The sections of a study that measured the network instead of steps."""
SEARCHED: Mapping[str, Maker] = MappingProxyType({name: _EVERY[name] for name in ("running", "tuning")})
"""The sections of a tune that has not measured its final."""
TAKEN = frozenset({*SECTIONS, *TRAINED, *APPENDIX, "method"})
"""Anchors of the page's own sections, and of the definitions."""


def contents(study: StudyFigures) -> tuple[Section, ...]:
    """Make every section that has content for this study; the anchor of another package's section is its
    name.

    Raises ExtensionError if two have one name.
    """
    made = [*_made(_sections(study), study)]
    for name, extension in extensions(GROUP, TAKEN).items():
        try:
            make = extension.load()
            section = make(study) if callable(make) else make
            if section is not None and not isinstance(section, Section):
                raise extension.wrong(make, "a function that gives a Section or None")
        except Exception as error:
            # An error in the code of another package must not prevent the rest of the page.
            failed = f"{extension} failed: {type(error).__name__}: {error}"
            reason = str(error) if isinstance(error, ExtensionError) else failed
            section = Section(anchor=name, title=name, blocks=(Paragraph(reason, "none"),))
        if section is not None:
            made.append(replace(section, anchor=name))
    return tuple(made)


def appendix(study: StudyFigures) -> tuple[Section, ...]:
    """Make the sections after the definitions."""
    return _made(APPENDIX, study) if _sections(study) is SECTIONS else ()


def _sections(study: StudyFigures) -> Mapping[str, Maker]:
    if study.only_network:
        return NETWORK
    if study.only_searched:
        return SEARCHED
    return TRAINED if study.training and not study.cells else SECTIONS


def _made(makers: Mapping[str, Maker], study: StudyFigures) -> tuple[Section, ...]:
    return tuple(section for make in makers.values() if (section := make(study)) is not None)
