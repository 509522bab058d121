"""`bench review`: exclude runs of a study, add notes and approve it; `bench site`: an index of studies."""

from __future__ import annotations

import getpass
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from harness.cli.report import given_files, given_options
from harness.features.review.section import entry_table, run_names
from harness.machine.code import git_user
from harness.reporting.assumptions import CostFlags
from harness.reporting.studies import read_figures, read_results
from harness.terminal.console import Console
from reports.analysis.study import StudyFigures
from reports.text import duration
from results.errors import UsageError, nearest
from results.files import require_idle
from results.review import ReviewEntry
from results.store import Study, utc_now


@click.command(name="review")
@click.argument("study")
@click.option("--exclude", multiple=True, metavar="RUN", help="leave RUN out of all figures; repeatable")
@click.option("--include", multiple=True, metavar="RUN", help="take the exclusion of RUN back; repeatable")
@click.option("--reason", default="", metavar="TEXT", help="why, with --exclude and --include")
@click.option("--note", default="", metavar="TEXT", help="add a remark")
@click.option("--approve", is_flag=True, help="approve the study as it is now, with its exclusions")
@click.option("--author", metavar="NAME", help="the reviewer: by default your name in git, else your login")
def review_command(
    study: str, *, exclude: tuple[str, ...], include: tuple[str, ...], approve: bool, **texts: str
) -> int:
    """Add to the review of STUDY; without options, show it and the names of all runs.

    RUN is a run's id, or its name as shown here and on the page. Nothing is deleted: each call adds lines
    to STUDY/review.jsonl. An excluded run is in no figure and does not count as done for bench matrix. An
    approval lapses when a run or an exclusion is added.
    """
    reason, note = texts["reason"].strip(), texts["note"].strip()
    if bool(exclude or include) != bool(reason):
        raise UsageError("--exclude RUN and --include RUN need --reason TEXT, and --reason needs one of them")
    console, folder = Console(), Study.existing(Path(study))
    (figures,) = read_figures([study], CostFlags(), console)
    if not (exclude or include or note or approve):
        _show(figures, console)
        return 0
    excluded, included = _run_ids(figures, exclude), _run_ids(figures, include)
    for run_id in set(included) - figures.review.excluded.keys():
        raise UsageError(f"{run_id} is not excluded; bench review {study} lists what is")
    if approve:
        require_idle(Path(study))
    entry = partial(ReviewEntry, at=utc_now(), author=(texts["author"] or "").strip() or _author())
    entries = [
        *([entry(what="excluded", run_ids=excluded, why=reason)] if excluded else []),
        *([entry(what="included", run_ids=included, why=reason)] if included else []),
        *([entry(what="noted", why=note)] if note else []),
    ]
    if entries:
        folder.add_to_review(entries)
    if approve:
        runs = read_results(folder)
        state = folder.review().state_of(runs)
        folder.add_to_review([entry(what="approved", state=state, runs=len(runs))])
    (figures,) = read_figures([study], CostFlags(), console)
    console.sentence(figures.review_text or "no run is excluded, and no approval was given")
    console.result(f"review: {folder.review_path}")
    return 0


def _show(figures: StudyFigures, console: Console) -> None:
    names, rows = run_names(figures), []
    for run in (run for pool in figures.pools.values() for run in pool.every):
        step = duration(run.step_ns.value) if run.step_ns else ""
        why = figures.review.excluded.get(run.run_id, "")
        rows.append((names[run.run_id], run.run_id, f"{run.outcome}", step, why))
    heads = ("run", "id", "outcome", "step time", "excluded because")
    console.table(heads, rows, numeric=[head == "step time" for head in heads])
    table = entry_table(figures)
    if table.rows:
        console.result()
        console.table(table.titles, table.texts, numeric=table.numeric)
    console.sentence(figures.review_text or "no run is excluded, and no approval was given")


def _run_ids(figures: StudyFigures, asked: Sequence[str]) -> tuple[str, ...]:
    """The ids of runs that a user names by id or name. Raises UsageError for an unknown run."""
    names = run_names(figures)
    known = {name: run_id for run_id, name in names.items()} | {run_id: run_id for run_id in names}
    for name in asked:
        if name not in known:
            raise UsageError(
                f"{figures.name} has no run {name!r}{nearest(name, known)}; bench review lists its runs"
            )
    return tuple(dict.fromkeys(known[name] for name in asked))


def _author() -> str:
    name = git_user()
    # In a container the number of the user may have no name.
    with suppress(KeyError, OSError):
        name = name or getpass.getuser()
    return name or f"user {os.getuid()}"


@click.command(name="site")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False), default=Path("runs"))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("public"),
    show_default=True,
    help="the folder to write it into",
)
@given_options("site")
@click.option("--redact", is_flag=True, help="without nights, hosts, users, paths, addresses and device ids")
@click.option("--serve", is_flag=True, help="then serve it on 127.0.0.1 until Ctrl-C")
def site_command(folder: Path, output: Path, *, redact: bool, serve: bool, **others: Any) -> int:
    """Write an index of the studies in FOLDER (default: runs), with their pages, as a static folder.

    The index has a row a study: its answer, what changed since the last study like it, and how many cells
    have no figure. The browser searches and sorts it, from a file or from any static host. Pages that this
    site has of unchanged studies are kept.
    """
    from harness.features.review.site import serve as serve_site
    from harness.features.review.site import write_site

    console = Console()
    history = given_files("site", others).get("history")
    console.result(f"site: {write_site(folder, output, console, history=history, redact=redact)}")
    if serve:
        serve_site(output, console)
    return 0
