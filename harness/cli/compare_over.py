"""The flag `--compare-over` of `bench report` and `bench export`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def _settings() -> click.Choice[str]:
    # Loaded where a name is given or completed, since the help of a command is to load nothing heavy.
    from harness.plan.study_file import SETTINGS

    return click.Choice([name.replace("_", "-") for name in SETTINGS])


def _known(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    return None if value is None else _settings().convert(value, param, ctx)


def _completed(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _settings().shell_complete(ctx, param, incomplete)


compare_over = click.option(
    "--compare-over",
    metavar="SETTING",
    callback=_known,
    shell_complete=_completed,
    help="put cells that differ in this alone side by side, with their loss: precision, optimizer, ...",
)
