"""A section of the report from another package: how many runs were made on which day, and how they ended."""

from __future__ import annotations

from collections import Counter

from reports import fields
from reports.analysis.study import StudyFigures
from reports.page.section import Definition, Paragraph, Section, Table
from reports.table import figures, table, words
from results.run import RunResult

DAY = "method-days"
DEFINITION = Definition(DAY, "Day", "The day on which a run began, in UTC, as its record says.")


def days_section(study: StudyFigures) -> Section | None:
    """A row a day, the first day first; None for a study without a run."""
    runs = [run for pool in study.pools.values() for run in (*pool.runs, *pool.lost)]
    if not runs:
        return None
    days = sorted(Counter(_day(run) for run in runs).items())
    ok = Counter(_day(run) for run in runs if run.outcome == "ok")
    hosts = {day: {host for run in runs if _day(run) == day for host in run.hosts} for day, _ in days}
    data = table(
        days,
        (
            words("day", lambda row: row[0], anchor=DAY),
            figures("runs", lambda row: fields.whole(row[1]), anchor=DAY),
            figures("ok", lambda row: fields.whole(ok[row[0]]), anchor=DAY),
            words("hosts", lambda row: ", ".join(sorted(hosts[row[0]])) or "unknown"),
        ),
    )
    most = max(days, key=lambda row: row[1])
    finding = Paragraph(f"Most runs, {most[1]:,} of {len(runs):,}, began on {most[0]}.", "finding")
    return Section(
        anchor="days",
        title="Runs by day",
        blocks=(finding, Table(data, "Runs by the day on which they began")),
        definitions=(DEFINITION,),
    )


def _day(run: RunResult) -> str:
    return run.started_at[:10] if run.started_at else "unknown"
