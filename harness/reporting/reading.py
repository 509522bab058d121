"""What a feature reads of a study, for its section of the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from harness.launch.conduct import conduct_of
from harness.terminal.console import Console
from reports.analysis.study import StudyFigures
from results.features import figures as readers
from results.features import kind_of_file
from results.store import Study


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One reading of a study."""

    study: Study
    figures: StudyFigures
    """The figures of the study, so far without those of features."""
    console: Console
    redact: bool = False
    """Whether names of hosts, users and folders must not be read."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Files and folders that the call names, such as the nights of `--history`, by option."""

    def with_added(self) -> StudyFigures:
        """The figures with those of all features, and with the cells that their conducts call done."""
        done = (conduct_of(plan).done(self.study) for plan in self.figures.plans)
        kind = self.figures.kind if self.figures.plans else kind_of_file(self.study.root)
        return replace(
            self.figures,
            kind=kind,
            complete=frozenset().union(*filter(None, done)),
            added={name: read(self) for name, read in readers().items()},
        )
