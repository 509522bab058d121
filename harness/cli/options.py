"""The flags of `bench matrix`, made from the options that a study file has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from harness.plan.options import PlanOption
from harness.plan.study_file import OPTIONS

Function = Callable[..., Any]


def plan_options(function: Function) -> Function:
    """Decorate a command with a flag for every option of a study file, None where it is not given."""
    for option in reversed(OPTIONS):
        function = _flag(option)(function)
    return function


def _flag(option: PlanOption) -> Callable[[Function], Function]:
    flag, kind = option.flag, option.kind
    if kind.flag_type is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", default=None, help=option.help)
    type_ = kind.flag_type if kind.metavar else click.Choice(kind.choices)
    # click asks the type where no function is given.
    complete = _complete_names if kind.flag_type is str and kind.metavar else None
    return click.option(
        flag, type=type_, default=None, help=option.help, metavar=kind.metavar, shell_complete=complete
    )


def _complete_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The names a shell offers for the last of `incomplete`, texts joined by commas."""
    from harness.cli.catalogs import CATALOGS

    before, comma, begun = incomplete.rpartition(",")
    catalog = CATALOGS.get(parameter.name or "")
    names = sorted({*catalog.entries, *catalog.offered}) if catalog else []
    return [f"{before}{comma}{name}" for name in names if name.startswith(begun)]
