"""The section of the page: how fast each host copies memory, the slowest host first."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from bench_hostmem.kind import HOSTMEM
from reports import fields
from reports.analysis.study import StudyFigures
from reports.page.section import Definition, Paragraph, Section, Table
from reports.table import figures, table, words
from reports.text import percent, si
from results.outcome import Outcome

RATE = "method-hostmem"
DEFINITION = Definition(
    RATE,
    "Copy rate",
    "Bytes that the ranks of a host copy in a second, all at once: the sum of the ranks' medians, and of it "
    "the median over runs. A copy reads each byte and writes it.",
)


def hostmem_section(study: StudyFigures) -> Section | None:
    """A row a host; None for a study of another kind."""
    if study.kind != HOSTMEM:
        return None
    rates: dict[str, list[float]] = defaultdict(list)
    for pool in study.pools.values():
        # Runs without steps are in no figure of the core.
        for run in (run for run in pool.lost if run.outcome is Outcome.OK):
            of_run: dict[str, float] = defaultdict(float)
            for found in study.measured(run).values():
                of_run[found["host"]] += found["copied_bytes"] / median(found["copy_ns"]) * 1e9
            for host, rate in of_run.items():
                rates[host].append(rate)
    if not rates:
        return None
    rows = sorted(((host, median(each), len(each)) for host, each in rates.items()), key=lambda row: row[1])
    host, rate, _ = rows[0]
    behind = 1 - rate / median(row[1] for row in rows)
    data = table(
        rows,
        (
            words("host", lambda row: row[0]),
            figures("copy rate", lambda row: fields.si(row[1], "B/s"), anchor=RATE),
            figures("runs", lambda row: fields.whole(row[2])),
        ),
    )
    slowest = f"The slowest host, {host}, copies {si(rate, 'B/s')}, {percent(behind)} less than the median."
    return Section(
        anchor="hostmem",
        title="Memory of the hosts",
        blocks=(Paragraph(slowest, "finding"), Table(data, "Hosts by copy rate, the slowest first")),
        definitions=(DEFINITION,),
    )
