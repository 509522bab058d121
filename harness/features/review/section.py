"""The review: who excluded which runs, noted or approved what, when and why."""

from __future__ import annotations

from collections.abc import Mapping

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
    blocks: list[Block] = [Paragraph(capital(sentence), "none") for sentence in study.review.damaged]
    if study.review_text:
        blocks.append(Paragraph(f"{capital(study.review_text)}.", "finding"))
    blocks.append(Table(entry_table(study), "Entries of reviewers, the oldest first"))
    return Section(anchor="review", title="Review", blocks=tuple(blocks))


def entry_table(study: StudyFigures) -> TextTable:
    """All entries, the oldest first."""
    names = run_names(study)
    columns: list[Column[ReviewEntry]] = [
        words("time", lambda entry: moment(entry.at)),
        words("author", lambda entry: entry.author),
        words("what", lambda entry: entry.what),
        words("runs", lambda entry: "; ".join(f"{names.get(one, '')} ({one})" for one in entry.run_ids)),
        words("why", lambda entry: entry.why),
    ]
    return table(study.review.entries, columns)


def run_names(study: StudyFigures) -> Mapping[str, str]:
    """The name of each run of a planned cell, by run id, such as `ddp on 16, batch 8 a replica, run 2`."""
    return {
        run.run_id: f"{cell_label(study, pool.cell)}, run {number}"
        for pool in study.pools.values()
        for number, run in enumerate(pool.every, 1)
    }
