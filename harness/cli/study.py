"""`bench status`, `collect`, `cancel` and `prune`: where studies stand, and what is done with them
afterwards.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import click

from harness.jobs.documents import place
from harness.jobs.job_status import JobStatus
from harness.jobs.progress import CellProgress, progress
from harness.launch.tally import Conditions
from harness.launchers.jobs import cancel, job_statuses, kept_job_statuses
from harness.launchers.jobs import forget as forget_jobs
from harness.machine.code import planned_code
from harness.reporting.reading import warn_of_lost_plans
from harness.terminal.console import Console
from reports.analysis.outcomes import run_counts
from reports.text import count
from results.errors import BenchError, SchedulerError, UsageError, bench_call
from results.features import hook, inner_folders
from results.files import is_busy, study_lock
from results.job_store import JobStore
from results.store import Study

WATCH_S = 10.0
STATUS_HEADS = ("job", "id", "nodes x GPUs", "state", "cells", "words")
STATUS_NUMERIC = (False, True, False, False, True, False)
CELL_HEADS = ("cell", "state", "ok", "planned", "others")
"""Fields of `CellProgress` that are the heads of the table and the keys of the JSON."""


@click.command(name="status")
@click.argument("study")
@click.option("--watch", is_flag=True, help="print it again every 10 seconds, until it no longer runs")
@click.option("--json", "as_json", is_flag=True, help="the same as JSON")
def status_command(study: str, *, watch: bool, as_json: bool) -> int:
    """Show the state of the cells of STUDY, and of its jobs, if a scheduler has some.

    The scheduler is asked once for all jobs. Runs of other code or versions than the present ones are counted
    apart: they are not pooled with new ones. Exit code 1 if a cell lacks one of its runs. STUDY may be a
    folder of studies, such as runs/: a line for each, or with --json a list.
    """
    console = Console()
    below = _studies_in(Path(study))
    if below and not Study(Path(study)).is_there:
        if watch:
            raise UsageError(f"--watch follows one study: name one in {study}, such as {below[-1].root}")
        return _list(below, console, as_json=as_json)
    folder = Study.existing(Path(study))
    for one in below:
        console.note(f"{bench_call('status', one.root)} shows the study in it")
    warn_of_lost_plans(folder, console)
    for jobs, cells, runs in standings(folder, console):
        if as_json:
            found = {
                "jobs": [dict(zip(STATUS_HEADS, row, strict=True)) for row in status_rows(jobs)],
                "cells": [{name: getattr(cell, name) for name in CELL_HEADS} for cell in cells],
            }
            console.result(json.dumps(found))
        else:
            if jobs:
                console.table(STATUS_HEADS, status_rows(jobs), numeric=STATUS_NUMERIC)
                console.result()
            rows = [[cell.cell, cell.state, str(cell.ok), str(cell.planned), cell.others] for cell in cells]
            if rows:
                console.table(CELL_HEADS, rows, numeric=[False, False, True, True, False])
                console.result(_runs_text(folder, {cell.cell for cell in cells}))
        if not (watch and runs):
            break
        console.result()
    return int(any(cell.ok < cell.planned for cell in cells))


def _runs_text(study: Study, cells: Set[str]) -> str:
    """The runs of the planned cells, counted as a report counts them."""
    return run_counts(study.results(keep=True, cells=cells), study.review().excluded).text


def status_rows(statuses: Sequence[JobStatus]) -> list[list[str]]:
    """The rows of a table under STATUS_HEADS, one for each job."""
    return [
        [
            status.job.job_id,
            "" if status.submission is None else status.submission.scheduler_id,
            place(status.job.placement) if status.job.purpose == "run" else "",
            status.state,
            str(len(status.job.cells)) if status.job.purpose == "run" else "",
            status.words,
        ]
        for status in statuses
    ]


def _studies_in(folder: Path) -> list[Study]:
    """The studies directly in a folder. Raises UsageError if a feature knows what it has instead."""
    found = [study for path in sorted(folder.glob("[!.]*")) if (study := Study(path)).is_there]
    status = hook("status")
    if status is not None and not found and not Study(folder).is_there and (words := status(folder)):
        raise UsageError(words)
    return found


def standings(study: Study, console: Console) -> Iterator[tuple[list[JobStatus], list[CellProgress], bool]]:
    """Yield the states of the jobs and the cells, and whether the study runs, every 10 seconds until it
    does not."""
    runs = True
    while runs:
        # What makes short runs for a study may hold the lock of these only.
        folders = [study.root, *(study.root / name for name in inner_folders())]
        jobs, busy = _jobs(study, console), any(map(is_busy, folders))
        runs = busy or any(status.is_live for status in jobs)
        yield jobs, progress(study, study.told_plans(), _conditions(study), jobs, busy=busy), runs
        if runs:
            time.sleep(WATCH_S)


def running_cells(study: Study, console: Console) -> Iterator[tuple[dict[str, str], ...]]:
    """Yield the cells of `standings` as strings by head when they change; at the end, an empty tuple."""
    last: tuple[dict[str, str], ...] = ()
    for _, cells, runs in standings(study, console):
        found = tuple({name: str(getattr(cell, name)) for name in CELL_HEADS} for cell in cells)
        if not runs or found != last:
            yield found if runs else ()
        last = found


def _list(studies: list[Study], console: Console, *, as_json: bool) -> int:
    """Print a line for each study from its files, without asking a scheduler; warn of unreadable studies."""
    rows: list[dict[str, Any]] = []
    damaged = 0
    for study in studies:
        try:
            cells = progress(study, study.told_plans(), _conditions(study), kept_job_statuses(study))
        except BenchError as error:
            console.warn(f"{study.root}: {error}")
            damaged += 1
            continue
        states = Counter(str(cell.state) for cell in cells)
        ok, planned = sum(cell.ok for cell in cells), sum(cell.planned for cell in cells)
        rows.append({"study": study.name, "ok": ok, "planned": planned, "cells": states})
    if as_json:
        console.result(json.dumps(rows))
    else:
        texts = [
            (
                row["study"],
                str(row["ok"]),
                str(row["planned"]),
                ", ".join(f"{number} {state}" for state, number in row["cells"].items()),
            )
            for row in rows
        ]
        console.table(("study", "ok", "planned", "cells"), texts, numeric=[False, True, True, False])
    return int(damaged > 0 or any(row["ok"] < row["planned"] for row in rows))


def _jobs(study: Study, console: Console) -> list[JobStatus]:
    try:
        return job_statuses(study)
    except SchedulerError as error:
        # The states of the cells do not depend on the scheduler.
        console.warn(
            f"the states of jobs are those that were written down last, not the scheduler's: {error}"
        )
        return kept_job_statuses(study)


def _conditions(study: Study) -> Conditions:
    """The conditions of new runs; a study with jobs runs on other machines than this one."""
    code = planned_code(study.told_plans())
    return Conditions.elsewhere(code) if JobStore(study.root).jobs() else Conditions.here(code)


@click.command(name="collect")
@click.argument("study")
def collect_command(study: str) -> int:
    """Delete what was derived in STUDY and derive it anew from the rank records, which are never touched.

    First, jobs that ended without recording it are closed, for the reason that the scheduler gives.
    """
    folder, console = Study.existing(Path(study)), Console()
    with study_lock(folder.root):
        try:
            job_statuses(folder)
        except SchedulerError as error:
            # A study that was copied here has jobs that this machine cannot ask about.
            console.warn(f"the scheduler was not asked: {error}")
        warn_of_lost_plans(folder, console)
        folder.forget_derived()
        results = folder.collect()
    console.result(f"{count(len(results), 'run')} in {folder.root / 'index.jsonl'}")
    return 0


@click.command(name="cancel")
@click.argument("study")
@click.option("--forget", is_flag=True, help="close the jobs without asking the scheduler: it has lost them")
def cancel_command(study: str, *, forget: bool) -> int:
    """Cancel all jobs of STUDY that wait or run. Their measurements stay; `bench matrix` resumes later."""
    folder, console = Study.existing(Path(study)), Console()
    with study_lock(folder.root):
        if forget:
            console.result(f"{count(forget_jobs(folder), 'job')} closed")
            return 0
        done = cancel(folder)
    told = f": {', '.join(done.told)}" if done.told else ""
    console.result(f"{count(len(done.told) + len(done.by_hand), 'job')} cancelled{told}")
    for line in done.by_hand:
        console.result(line)
    return 0
