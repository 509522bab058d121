"""`bench audit`: check whether the numbers of a table agree."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import click

from harness.console import Console
from reports.audit.audit import audit
from reports.audit.files import read_csv
from reports.audit.rows import AuditedTable
from reports.audit.study import read_study
from reports.audit.text import audit_json, lines
from results.errors import UsageError
from results.store import Study


@click.command(name="audit")
@click.argument("table")
@click.option(
    "--map",
    "mapping",
    multiple=True,
    metavar="COLUMN[:VALUE]=MEANING",
    help="what a column holds, or what one of its cells stands for; may be repeated",
)
@click.option("--json", "as_json", is_flag=True, help="everything as one JSON object")
def command(table: str, *, mapping: tuple[str, ...], as_json: bool) -> int:
    """Check the arithmetic of TABLE: a CSV of results of distributed training, or the folder of a study.

    A number is the interval that its printed digits leave, and a finding is where two cannot meet. Only
    columns whose names are on the list of docs/audit.md are read. Exit code 1 if there are findings, 2 if
    nothing could be checked.
    """
    # An audit makes no cycles: collections free nothing, and take a third of the time.
    gc.disable()
    try:
        found = audit(_read(Path(table), mapping))
    finally:
        gc.enable()
    console = Console()
    for line in [audit_json(found, table)] if as_json else lines(found):
        console.result(line)
    if found.findings or found.is_checked:
        return int(bool(found.findings))
    raise UsageError(
        f"{table} is not usable: no two of its numbers could be compared; say what its columns hold "
        "with --map COLUMN=MEANING (docs/audit.md lists the meanings)"
    )


def _read(path: Path, mapping: Sequence[str]) -> AuditedTable:
    if not path.is_dir():
        return read_csv(path, _pairs(mapping))
    if mapping:
        raise UsageError("--map is for CSV files, and the columns of a study are known; leave --map out")
    return read_study(Study.existing(path))


def _pairs(mapping: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in mapping:
        column, separator, meaning = text.rpartition("=")
        if not separator or not column:
            raise UsageError(
                f"--map {text}: write COLUMN=MEANING or COLUMN:VALUE=MEANING; docs/audit.md lists them"
            )
        pairs[column.strip()] = meaning.strip()
    return pairs
