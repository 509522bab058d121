"""The flags of `bench matrix`, made from the one table of options that study files are read by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from harness.plan.options import OPTIONS, PlanOption

Function = Callable[..., Any]


def plan_options(function: Function) -> Function:
    """Decorate a command with a flag for every option of a study file, None where it is not given."""
    for option in reversed(OPTIONS):
        function = _flag(option)(function)
    return function


def _flag(option: PlanOption) -> Callable[[Function], Function]:
    if option.kind == "switch":
        return click.option(f"{option.flag}/--no-{option.flag[2:]}", default=None, help=option.help)
    return click.option(
        option.flag, type=_type(option), default=None, help=option.help, metavar=_meta(option)
    )


def _type(option: PlanOption) -> Any:
    if option.kind == "word":
        return click.Choice(option.choices)
    return {"int": int, "number": float}.get(option.kind, str)


def _meta(option: PlanOption) -> str | None:
    if option.kind == "word":
        return None
    return {
        "names": "NAME,...",
        "counts": "N,...",
        "gpus": "COUNTS",
        "int": "N",
        "number": "X",
        "duration": "TIME",
        "text": "TEXT",
    }[option.kind]
