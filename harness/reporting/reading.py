"""One reading of a study, with what features read of it for their sections of the page.

It also says which options of a call find the study again, and which of its plans are lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

from harness.launch.conduct import conduct_of
from harness.plan.study_file import STUDY_FILE
from harness.terminal.console import Console
from reports.analysis.study import StudyFigures
from reports.text import count
from results.errors import SchemaError, StoreError, UsageError
from results.features import MEASURED, joined, kind_of_file
from results.job_store import JobStore
from results.registry import load
from results.store import Study


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    study: Study
    figures: StudyFigures
    """The figures of the study, before its single steps, its call and the figures of features are added."""
    console: Console
    redact: bool = False
    """Whether names of hosts, users and folders must not be read."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Files and folders that the call names, such as the nights of `--history`, by option."""

    def with_added(self) -> StudyFigures:
        """The figures, to which all features have added, with the cells that their conducts call done."""
        study, done = self.study, set[str]()
        for plan in self.figures.plans:
            # What cannot be read of a cell is told by the reader of its feature.
            with suppress(StoreError):
                done |= conduct_of(plan).done(study) or frozenset()
        added = {name: load(place)(self) for name, place in joined(lambda one: one.figures).items()}
        kind = self.figures.kind if self.figures.plans else kind_of_file(study.root)
        return replace(
            self.figures,
            steps=study.steps,
            measured=self.figures.measured if self.redact else study.measured,
            placed=self.figures.placed if self.redact else place_words(study),
            kind=kind if added.get(kind.shows, True) else MEASURED,
            complete=frozenset(done),
            added=added,
        )


def place_words(study: Study) -> tuple[str, ...]:
    """The options of a call that continues the study: its folder, and those that say where its jobs run.

    These are from the call that made the newest plan, and from its study file where that is still there.
    """
    words: list[str] = []
    for plan in study.told_plans()[-1:]:
        given = dict(_study_file_options(plan.command))
        for word, value in zip_longest(plan.command, plan.command[1:]):
            flag, equals, joined = word.partition("=")
            given |= {flag: joined if equals else value} if flag in WHERE else {}
        words = [text for flag in WHERE if given.get(flag) for text in (flag, str(given[flag]))]
    if "--launcher" not in words:
        with suppress(SchemaError):
            words += [
                text for job in JobStore(study.root).jobs()[-1:] for text in ("--launcher", job.launcher)
            ]
    return ("--out", str(study.root), *words)


WHERE = ("--launcher", "--site", "--partition", "--account", "--qos", "--cpus-per-gpu")
"""Options that say where a launch runs."""


def _study_file_options(command: Sequence[str]) -> Iterator[tuple[str, object]]:
    """The options of `WHERE` in the study file of a call."""
    for word in command:
        if word.endswith((".yaml", ".yml")) and Path(word).is_file():
            with suppress(UsageError):
                options = STUDY_FILE.read(Path(word))
                yield from ((flag, getattr(options, flag[2:].replace("-", "_"))) for flag in WHERE)


def warn_of_lost_plans(study: Study, console: Console) -> None:
    """Warn of lost plans and cells of a study, and say how to restore them."""
    unplanned = study.unplanned_cells()
    if unplanned:
        damaged = "; ".join(study.damaged_plans()) or "a plan is missing"
        console.warn(
            f"{count(len(unplanned), 'cell')} of {study.root} are in no plan that can be read ({damaged}): "
            f"they are read from their own files, and the same bench matrix command plans them again"
        )
    lost = study.lost_cells()
    if lost:
        console.warn(
            f"{', '.join(lost)} in {study.root / 'cells'} have runs but no cell.json that can be read, and "
            f"are in no plan: repeat the bench matrix command that planned them to restore them"
        )
