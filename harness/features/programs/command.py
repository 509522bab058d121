"""`bench program check`: try a program before a study plans with it."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.group(name="program")
def program_command() -> None:
    """Check a program that is not bench's own, which a file describes for --workload program:FILE.yaml."""


@program_command.command(name="check")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--gpus", type=click.IntRange(min=1), default=2, show_default=True, help="ranks to start")
@click.option("--strategy", metavar="NAME", help="a strategy of the file [default: its first]")
@click.option(
    "--batch-size", "batch", type=click.IntRange(min=1), help="samples of a replica [default: the file's]"
)
def check_command(file: Path, *, gpus: int, strategy: str | None, batch: int | None) -> int:
    """Run the program of FILE for some steps on this machine, and say what bench understood of it.

    Exit code 1 if its steps cannot be measured.
    """
    from harness.features.programs.check import check

    return check(file, gpus=gpus, strategy=strategy, batch=batch)


@program_command.command(name="schema")
def schema_command() -> int:
    """Print the JSON Schema of a program's file, by which an editor completes and checks it."""
    from harness.features.programs.file import file_kind

    click.echo(json.dumps(file_kind(Path()).schema(), indent=2))
    return 0
