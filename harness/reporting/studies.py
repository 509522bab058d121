"""Reads and analyses the studies that a command names, for reports and exports."""

from __future__ import annotations

import getpass
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.reporting.assumptions import CostFlags, read_assumptions
from harness.reporting.reading import Reading, warn_of_lost_plans
from harness.terminal.console import Console
from reports.analysis.assumptions import Assumptions
from reports.analysis.outcomes import outcome_words
from reports.analysis.over import comparing_over
from reports.analysis.pooling import pool
from reports.analysis.study import StudyFigures, analyse
from reports.redaction import Told, redactor
from reports.text import count
from results.errors import SchemaError, StoreError, UsageError, bench_call
from results.features import MEASURED, kind_of_file
from results.job_store import JobStore
from results.network import NETWORK_FILE, NetworkTable
from results.review import Review
from results.run import RunResult
from results.schemas import NETWORK
from results.store import Study, study_names


def _epochs(studies: Sequence[Study], text: str, console: Console) -> dict[str, int]:
    """Read `--epoch-samples`: samples by workload. A single number needs studies of one workload."""
    plans = [plan for study in studies for plan in study.told_plans()]
    workloads = sorted({cell.workload for plan in plans for cell in plan.cells})
    found = {}
    for item in text.split(","):
        workload, equals, number = item.rpartition("=")
        if not number.strip().isdecimal() or int(number) < 1:
            raise UsageError(f"--epoch-samples takes N or WORKLOAD=N,... with N of at least 1, not {item!r}")
        found[workload] = int(number)
        if equals and workload not in workloads:
            raise UsageError(f"--epoch-samples {item}: the workloads are {', '.join(workloads)}")
    if "" in found and len(workloads) > 1:
        each = ",".join(f"{workload}=N" for workload in workloads)
        console.warn(f"--epoch-samples {text} is of no single workload: give --epoch-samples {each}")
        return {}
    return {workload or workloads[0]: number for workload, number in found.items() if workloads}


@dataclass(frozen=True, slots=True)
class _Read:
    study: Study
    told: Told
    assumptions: Assumptions


def read_figures(
    paths: Sequence[str],
    flags: CostFlags,
    console: Console,
    *,
    redact: bool = False,
    given: Mapping[str, str] | None = None,
) -> list[StudyFigures]:
    """The figures of the studies at `paths`, each under a distinct name, with what features read of them and
    of the files that the call has `given`, by option.

    Writes only derived files, and only where the study may be written. Raises UsageError for a study without
    a plan, such as a tune whose job has not begun.
    """
    studies = [Study.existing(Path(path)) for path in paths]
    for study in studies:
        warn_of_lost_plans(study, console)
    names = study_names([study.root for study in studies])
    epochs = _epochs(studies, flags.epoch_samples, console) if flags.epoch_samples else {}
    read = [
        _Read(
            study,
            Told(name, study.told_plans(), read_results(study), read_review(study, console)),
            read_assumptions(study, flags, console, epochs),
        )
        for study, name in zip(studies, names, strict=True)
    ]
    for one in read:
        if not one.told.plans and (redact or kind_of_file(one.study.root) == MEASURED):
            status = bench_call("status", one.study.root)
            raise UsageError(f"{one.study.root} has nothing to report yet: {status} shows how far it is")
    if redact:
        read = _redacted(read)
    return [
        Reading(
            study=one.study,
            figures=analyse(
                one.told.name, one.told.plans, one.told.results, one.assumptions, one.told.review
            ),
            console=console,
            redact=redact,
            given=given or {},
        ).with_added()
        for one in read
    ]


def read_network(study: Study, console: Console, given: str | None = None) -> NetworkTable | None:
    """The network table at `given`, else in the folder of a study; None if it has no readable one.

    Raises SchemaError and StoreError if the table at `given` cannot be read.
    """
    path = study.root / NETWORK_FILE
    if given is not None:
        return NETWORK.read(given)
    try:
        return NETWORK.read(path) if path.exists() else None
    except (SchemaError, StoreError) as error:
        console.warn(f"no network table: {error}")
    return None


def warn_of_lost_runs(study: Study, results: Sequence[RunResult], console: Console) -> None:
    """Warn of runs that do not count although others of their cell do: an interval is wider than planned."""
    excluded = read_review(study, console).excluded
    for cell_id in dict.fromkeys(result.cell_id for result in results):
        mine = [result for result in results if result.cell_id == cell_id]
        pooled = pool(study.cell(cell_id), mine, planned=len(mine), excluded=excluded)
        whys = [f"{outcome_words(run.outcome)}: {run.reason}" for run in pooled.lost]
        whys += [left.reason for left in pooled.left_out]
        if pooled.runs and whys:
            left_out = f"{len(whys)} of {count(len(mine), 'run')} of {cell_id} in {study.root}"
            console.warn(f"{left_out} left out ({whys[-1]})")


def read_review(study: Study, console: Console) -> Review:
    """Read the study's review, and warn of lines that cannot be read: one may exclude a run."""
    review = study.review()
    for sentence in review.damaged:
        console.warn(sentence)
    return review


def read_results(study: Study) -> list[RunResult]:
    """Every run of the study; derived files are written if the study may be written."""
    return study.collect() if os.access(study.root, os.W_OK) else study.results()


def compared_over(studies: list[StudyFigures], setting: str | None) -> list[StudyFigures]:
    """The studies, asked to be compared over a setting as a flag writes it; None: as they are.

    Raises UsageError where a study has only one value of it.
    """
    if setting is None:
        return studies
    if len(studies) > 1:
        raise UsageError(
            f"--compare-over {setting} compares cells of one study: name one, in which bench matrix has "
            f"measured several values of --{setting}"
        )
    return [comparing_over(study, setting.replace("-", "_")) for study in studies]


def _nodes(store: JobStore) -> set[str]:
    """The nodes on which the jobs of a study ended."""
    ends = (
        end for job in store.jobs() for end in (*store.starts(job.job_id), store.ended(job.job_id)) if end
    )
    return {node for end in ends for node in end.nodes}


def _redacted(read: Sequence[_Read]) -> list[_Read]:
    """Redact the studies, each under its folder's name: a parent folder may be named after a user.

    Folders of the same name are numbered.
    """
    roots = [one.study.root for one in read]
    users = {entry.author for one in read for entry in one.told.review.entries}
    # A reason may name a node that left no record.
    hosts = {platform.node()}.union(*(_nodes(JobStore(root)) for root in roots))
    # In a container the number of the user may have no name.
    with suppress(KeyError, OSError):
        users.add(getpass.getuser())
    made = redactor(
        [one.told for one in read],
        hosts=hosts,
        users=users,
        paths={str(path) for root in roots for path in (root, root.resolve())},
    )
    redacted = []
    for place, one in enumerate(read):
        same = sum(root.resolve().name == one.study.name for root in roots[:place])
        name = f"{one.study.name} ({same + 1})" if same else one.study.name
        told = made.study(replace(one.told, name=name))
        redacted.append(replace(one, told=told, assumptions=made.value(one.assumptions)))
    return redacted
