"""The review: who excluded which runs, noted or approved what, when and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reports.analysis.study import StudyFigures
from reports.page.looks import cell_label
from reports.page.section import Block, Paragraph, Section, Table
from reports.table import Column, TextTable, table, words
from reports.text import capital, moment
from results.review import ReviewEntry


def review_section(study: StudyFigures) -> Section | None:
    """Make the section; None for a study without a review."""
    if not study.review.entries and not study.review.damaged:
        return None
    return Section(anchor="review", title="Review", blocks=tuple(_blocks(study)))


def _blocks(study: StudyFigures) -> Iterator[Block]:
    if study.review_text:
        yield Paragraph(f"{capital(study.review_text)}.", "finding")
    for sentence in study.review.damaged:
        yield Paragraph(capital(sentence), "none")
    yield Table(entry_table(study), "Entries of reviewers, the oldest first")


def entry_table(study: StudyFigures) -> TextTable:
    """All entries, the oldest first."""
    names = run_names(study)
    columns: list[Column[ReviewEntry]] = [
        words("time", lambda entry: moment(entry.at)),
        words("author", lambda entry: entry.author),
        words("what", lambda entry: entry.what),
        words("runs", lambda entry: "; ".join(_named(run_id, names) for run_id in entry.run_ids)),
        words("why", lambda entry: entry.why),
    ]
    return table(study.review.entries, columns)


def run_names(study: StudyFigures) -> Mapping[str, str]:
    """The name of each run of a planned cell, by run id: `ddp x 16, 8 / 128, run 2`, the cell's second."""
    found: dict[str, str] = {}
    for pool in study.pools.values():
        runs = [*pool.runs, *(left.run for left in pool.left_out), *pool.lost]
        for number, run_id in enumerate(sorted(run.run_id for run in runs), 1):
            found[run_id] = f"{cell_label(study, pool.cell)}, run {number}"
    return found


def _named(run_id: str, names: Mapping[str, str]) -> str:
    return f"{names[run_id]} ({run_id})" if run_id in names else run_id
