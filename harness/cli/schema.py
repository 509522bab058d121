"""`bench schema`: print the JSON Schema by which an editor checks a study file or a profile."""

from __future__ import annotations

import json
from typing import Any

import click

from harness.launchers.registry import launcher
from harness.plan.launchers import launcher_names
from harness.plan.study_file import STUDY_FILE
from results.errors import UsageError
from results.strict_yaml import FileKind


@click.command(name="schema")
@click.argument("kind", type=click.Choice(["study", *launcher_names()]))
def command(kind: str) -> int:
    """Print the JSON Schema of a study file, or of the profile (--site) that a launcher reads.

    Editors complete and check a YAML file that names its schema in the first line:
    # yaml-language-server: $schema=study.schema.json
    """
    click.echo(json.dumps(_file_kind(kind).schema(), indent=2))
    return 0


def _file_kind(kind: str) -> FileKind[Any]:
    found = STUDY_FILE if kind == "study" else launcher(kind).site_file
    if found is None:
        raise UsageError(f"--launcher {kind} reads no profile; name study, or a launcher that has --site")
    return found
