"""`bench list`: print the names that options take."""

from __future__ import annotations

import click

from harness.console import Console
from harness.plan.launchers import launcher_entries
from results.extensions import GROUPS, Extension, extensions, stray_groups
from results.spec import Catalog, Entry, Option
from strategies.catalog import COLLECTIVES, COMPRESSIONS, OPTIMIZERS, STRATEGIES
from workloads.catalog import WORKLOADS
from workloads.datasets.facts import DATASETS


@click.command(name="list")
def command() -> int:
    """List the workloads, data sets, strategies, compressors, collectives and optimizers there are.

    Launchers and the sections of the report follow, each with the package that adds it, if that is not bench.
    """
    console = Console()
    for catalog in (WORKLOADS, DATASETS, STRATEGIES, COMPRESSIONS, COLLECTIVES, OPTIMIZERS):
        _show(console, catalog.kind, _catalog_rows(catalog))
    launchers = launcher_entries().values()
    _show(console, "launcher", [(each.name, "", each.help) for each in launchers])
    sections = extensions("bench.sections")
    if sections:
        _show(console, "section", [(name, "", f"is of {each.package}") for name, each in sections.items()])
    for group, package in stray_groups().items():
        console.warn(
            f"the package {package} has entry points in the group {group}, which bench does not read: "
            f"its groups are {', '.join(GROUPS)}"
        )
    return 0


def _show(console: Console, kind: str, rows: list[tuple[str, str, str]]) -> None:
    console.result(f"\n{_plural(kind)}")
    console.table(["name", "default", "meaning"], rows, numeric=[False] * 3)


def _catalog_rows(catalog: Catalog) -> list[tuple[str, str, str]]:
    broken = [(name, "", str(error)) for name, error in catalog.admit_all().items()]
    rows = [row for entry in catalog for row in _rows(entry, catalog.offered.get(entry.name))]
    return rows + broken


def _plural(noun: str) -> str:
    return f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"


def _rows(entry: Entry, extension: Extension | None) -> list[tuple[str, str, str]]:
    origin = f" (of {extension.package} {extension.version})" if extension else ""
    rows = [(entry.name, "", entry.help + origin)]
    if entry.positional is not None:
        rows.append((f"  {entry.name}:...", _default(entry.positional), entry.positional.help))
    rows += [
        (f"  {entry.name}:{key}=", _default(option), option.help) for key, option in entry.options.items()
    ]
    return rows


def _default(option: Option) -> str:
    return "" if option.default is None else str(option.default).lower()
