"""`bench review`: exclude runs of a study, add notes, approve it, and show what reviewers did."""

from __future__ import annotations

import getpass
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from harness.terminal.console import Console
    from reports.analysis.study import StudyFigures
    from results.run import RunResult


@click.command(name="review")
@click.argument("study")
@click.option("--exclude", multiple=True, metavar="RUN", help="leave RUN out of all figures; repeatable")
@click.option("--include", multiple=True, metavar="RUN", help="take the exclusion of RUN back; repeatable")
@click.option("--reason", metavar="TEXT", help="why, with --exclude and --include")
@click.option("--note", metavar="TEXT", help="add a remark")
@click.option("--approve", is_flag=True, help="approve the study as it is now, with its exclusions")
@click.option("--author", metavar="NAME", help="the reviewer: by default your name in git, else your login")
def review_command(
    study: str, *, exclude: tuple[str, ...], include: tuple[str, ...], approve: bool, **texts: str | None
) -> int:
    """Add to the review of STUDY; without options, show it and the names of all runs.

    RUN is a run's id, or its name as shown here and on the page. Nothing is deleted: each call adds lines
    to STUDY/review.jsonl. An excluded run is in no figure and does not count as done for bench matrix. An
    approval lapses when a run or an exclusion is added.
    """
    from harness.gate.baselines import require_idle
    from harness.reporting.studies import CostFlags, read_figures, read_results
    from harness.terminal.console import Console
    from results.errors import UsageError
    from results.review import ReviewEntry
    from results.store import Study, utc_now

    reason, note = ((texts[name] or "").strip() for name in ("reason", "note"))
    if bool(exclude or include) != bool(reason):
        raise UsageError("--exclude RUN and --include RUN need --reason TEXT, and --reason needs one of them")
    if texts["note"] is not None and not note:
        raise UsageError("--note is empty: give the text of the remark")
    console, folder = Console(), Study.existing(Path(study))
    (figures,) = read_figures([study], CostFlags(), console)
    if not (exclude or include or note or approve):
        _show(figures, console)
        return 0
    excluded, included = _run_ids(figures, exclude), _run_ids(figures, include)
    others = [run_id for run_id in included if run_id not in figures.review.excluded]
    if others:
        raise UsageError(f"{others[0]} is not excluded; bench review {study} lists what is")
    if approve:
        require_idle(study)
    author = _author(texts["author"])
    entries = [
        ReviewEntry(at=utc_now(), author=author, what="excluded", run_ids=excluded, why=reason),
        ReviewEntry(at=utc_now(), author=author, what="included", run_ids=included, why=reason),
        ReviewEntry(at=utc_now(), author=author, what="noted", why=note),
    ]
    folder.add_to_review([one for one in entries if one.run_ids or (one.what == "noted" and note)])
    if approve:
        results, review = read_results(folder), folder.review()
        state, at = review.state_of(results), utc_now()
        approval = ReviewEntry(at=at, author=author, what="approved", state=state, runs=len(results))
        folder.add_to_review([approval])
    (figures,) = read_figures([study], CostFlags(), console)
    console.sentence(f"{figures.review_text or 'no run is excluded, and no approval was given'}")
    console.result(f"review: {folder.review_path}")
    return 0


def _show(figures: StudyFigures, console: Console) -> None:
    from reports.analysis.outcomes import outcome_words
    from reports.page.sections.review import entry_table, run_names
    from reports.text import duration

    names, rows = run_names(figures), []
    for pool in figures.pools.values():
        left = {one.run.run_id: one for one in pool.left_out}
        for run in sorted((*pool.runs, *(one.run for one in left.values()), *pool.lost), key=_run_id):
            why = left[run.run_id].reason if run.run_id in left else ""
            step = duration(run.step_ns.value) if run.step_ns else ""
            rows.append((names[run.run_id], run.run_id, outcome_words(run.outcome), step, why))
    heads = ("run", "id", "outcome", "step time", "left out because")
    console.table(heads, rows, numeric=[False, False, False, True, False])
    console.result()
    if figures.review.entries:
        table = entry_table(figures)
        console.table(table.titles, table.texts, numeric=table.numeric)
        console.result()
    console.sentence(figures.review_text or "no run is excluded, and no approval was given")


def _run_id(run: RunResult) -> str:
    return run.run_id


def _run_ids(figures: StudyFigures, asked: Sequence[str]) -> tuple[str, ...]:
    """The ids of runs that a user names by id or name. Raises UsageError for an unknown run."""
    from reports.page.sections.review import run_names
    from results.errors import UsageError, nearest

    names = run_names(figures)
    known = {name: run_id for run_id, name in names.items()} | {run_id: run_id for run_id in names}
    for name in asked:
        if name not in known:
            raise UsageError(
                f"{figures.name} has no run {name!r}{nearest(name, known)}; bench review lists its runs"
            )
    return tuple(dict.fromkeys(known[name] for name in asked))


def _author(given: str | None) -> str:
    """The reviewer's name: as given, else by git, else the login. Raises UsageError if none is known."""
    from results.errors import UsageError

    name = given
    if name is None:
        with suppress(OSError, subprocess.SubprocessError):
            command = ["git", "config", "user.name"]
            name = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    if name is None:
        # In a container the number of the user may have no name.
        with suppress(KeyError, OSError):
            name = getpass.getuser()
    if not (name or "").strip():
        raise UsageError("nobody's name is known: give --author NAME")
    return str(name).strip()
