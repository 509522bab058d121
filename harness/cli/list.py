"""`bench list` and `bench schema`: the names that options take, and the JSON Schema by which an editor checks
a study file or a profile.
"""

from __future__ import annotations

import json
from typing import Any

import click

from harness.cli.options import catalogs
from harness.launchers.registry import launcher
from harness.plan.launchers import launcher_help
from harness.plan.study_file import STUDY_FILE
from harness.terminal.console import Console
from results.errors import UsageError
from results.extensions import GROUPS, extensions, stray_groups
from results.registry import Registry
from results.spec import Catalog, Entry, Option
from results.strict_yaml import FileKind

_CATALOGS = {
    f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s": catalog for kind, catalog in catalogs().items()
}
_HEADS = ("name", "default", "meaning")
_ADDED = {"sections": "section", "commands": "command", "kinds": "kind"}
"""Nouns of members of other packages that need no import to be listed."""
_KINDS = (*_CATALOGS, "launchers", *_ADDED)


@click.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="the same as JSON, by kind")
@click.argument("kinds", nargs=-1, type=click.Choice(_KINDS, case_sensitive=False), metavar="[KIND]...")
def list_command(kinds: tuple[str, ...], *, as_json: bool) -> int:
    """List the workloads, data sets, strategies, compressors, collectives and optimizers there are.

    Launchers follow, and the sections, commands and kinds of study that other packages add, each with its
    package. With KIND, such as strategies, only that kind.
    """
    console = Console()
    listed = {kind: _rows_of(kind) for kind in kinds or _KINDS}
    if as_json:
        tables = {
            kind: [dict(zip(_HEADS, map(str.strip, row), strict=True)) for row in rows]
            for kind, rows in listed.items()
        }
        console.text(json.dumps(tables))
    for kind, rows in ({} if as_json else listed).items():
        if rows:
            console.result(f"\n{kind}")
            console.table(_HEADS, rows, numeric=[False] * 3)
        elif kinds:
            console.result(f"\n{kind}: no package adds one")
    for group, package in stray_groups().items():
        console.warn(
            f"the package {package} has entry points in the group {group}, which bench does not read: "
            f"its groups are {', '.join(GROUPS.values())}"
        )
    return 0


def _rows_of(kind: str) -> list[tuple[str, str, str]]:
    if kind == "launchers":
        return [(name, "", words) for name, words in launcher_help().items()]
    if kind in _ADDED:
        return [(name, "", f"is of {each.package}") for name, each in extensions(_ADDED[kind]).items()]
    catalog = _CATALOGS[kind]
    broken = [(name, "", str(error)) for name, error in catalog.admit_all().items()]
    absent = [(name, "", why) for name, why in catalog.absent.items()]
    rows = [row for entry in catalog for row in _rows(entry, _origin(catalog, entry.name))]
    return rows + broken + absent


def _origin(catalog: Catalog, name: str) -> str:
    """Return which package a name is of, and why the engine that it needs cannot be used here."""
    extension = catalog.offered.get(name)
    of = "" if extension is None or extension.own else f" (of {extension.package} {extension.version})"
    kinds = catalog.all_facts if isinstance(catalog, Registry) else ()
    engines = (getattr(facts, "engine", None) for facts in kinds if facts.name == name)
    missing = next((engine.missing for engine in engines if engine is not None), None)
    return f"{of} ({missing})" if missing else of


def _rows(entry: Entry, origin: str) -> list[tuple[str, str, str]]:
    rows = [(entry.name, "", entry.help + origin)]
    if entry.positional is not None:
        positional = entry.positional
        such_as = f", such as {positional.example}" if positional.example else ""
        rows.append((f"  {entry.name}:...", _default(positional), positional.help + such_as))
    rows += [
        (f"  {entry.name}:{key}=", _default(option), option.help) for key, option in entry.options.items()
    ]
    return rows


def _default(option: Option) -> str:
    return "" if option.default is None else str(option.default).lower()


@click.command(name="schema")
@click.argument("kind", type=click.Choice(["study", *launcher_help()]))
def schema_command(kind: str) -> int:
    """Print the JSON Schema of a study file, or of the profile (--site) that a launcher reads.

    Editors complete and check a YAML file that names its schema in the first line:
    # yaml-language-server: $schema=study.schema.json
    """
    found: FileKind[Any] | None = STUDY_FILE if kind == "study" else launcher(kind).site_file
    if found is None:
        raise UsageError(f"--launcher {kind} reads no profile; name study, or a launcher that has --site")
    click.echo(json.dumps(found.schema(), indent=2))
    return 0
