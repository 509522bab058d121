"""`bench list`: what there is."""

from __future__ import annotations

import click

from harness.console import Console
from results.spec import Catalog, Entry, Option
from strategies.catalog import COLLECTIVES, COMPRESSIONS, OPTIMIZERS, STRATEGIES
from workloads.catalog import DATASETS, WORKLOADS


@click.command(name="list")
def command() -> int:
    """List the workloads, data sets, strategies, compressors, collectives and optimizers there are."""
    console = Console()
    for catalog in (WORKLOADS, DATASETS, STRATEGIES, COMPRESSIONS, COLLECTIVES, OPTIMIZERS):
        _show(console, catalog)
    return 0


def _show(console: Console, catalog: Catalog) -> None:
    console.result(f"\n{_plural(catalog.kind)}")
    rows = [row for entry in catalog for row in _rows(entry)]
    console.table(["name", "default", "meaning"], rows, numeric=[False] * 3)


def _plural(noun: str) -> str:
    return f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"


def _rows(entry: Entry) -> list[tuple[str, str, str]]:
    rows = [(entry.name, "", entry.help)]
    if entry.positional is not None:
        rows.append((f"  {entry.name}:...", _default(entry.positional), entry.positional.help))
    rows += [
        (f"  {entry.name}:{key}=", _default(option), option.help) for key, option in entry.options.items()
    ]
    return rows


def _default(option: Option) -> str:
    return "" if option.default is None else str(option.default).lower()
