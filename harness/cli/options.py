"""The flags of `bench matrix` and `bench train`, made from the options that a study file has."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from harness.plan.options import PlanOption
from harness.plan.study_file import BY_NAME, OPTIONS, by_heading
from results.errors import UsageError
from results.spec import Catalog

Function = Callable[..., Any]
_BARE = tuple(option.flag for option in OPTIONS if option.kind.bare)
_NEGATED = {f"--no-{flag[2:]}": flag for flag in _BARE}
_ANSWER = r"\s*(true|false|all|none|selective)\s*"
_ALL = "harness.cli.options.all"
"""Key of click's `Context.meta`: whether the help has every option."""
_ANSWERS = re.compile(f"{_ANSWER}(,{_ANSWER})*", re.IGNORECASE)
"""Values of bare switches; any other word after a switch is a separate argument, such as the study file."""


def plan_options(*, without: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Decorate a command with a flag for each option of a study file, except those `without`.

    The value of a flag that is not given is None. `--help` shows the common options, `--help-all` every one.
    """

    def decorated(function: Function) -> Function:
        for option in reversed(OPTIONS):
            if option.name not in without:
                function = _flag(option)(function)
        return click.option(
            "--help-all",
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all_options,
            help="Show every option and exit.",
        )(function)

    return decorated


class PlanCommand(click.Command):
    """A command with `plan_options`: `--compile` means `--compile true`, and `--no-compile` means false."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = []
        for word, following in pairwise([*args, ""]):
            if word in _BARE and not _ANSWERS.fullmatch(following):
                words.append(f"{word}=true")
            elif word in _NEGATED:
                words.append(f"{_NEGATED[word]}=false")
            else:
                words.append(word)
        return super().parse_args(ctx, words)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the command's own options and the common ones; for --help-all every option by its heading."""
        headings, own = _headings(whole=bool(ctx.meta.get(_ALL))), "Options of this command"
        sections: dict[str, list[tuple[str, str]]] = {own: [], **{name: [] for name in headings.values()}}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            heading = headings.get(str(param.name)) if param.name in BY_NAME else own
            if record is not None and heading is not None:
                sections[heading].append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records, col_max=22)


def _headings(*, whole: bool) -> dict[str, str]:
    """The heading in the help of each option, or of each common one."""
    if not whole:
        return {option.name: "Common options" for option in OPTIONS if option.common}
    return {option.name: heading for heading, options in by_heading().items() for option in options}


class _Whole(click.types.IntParamType):
    """Whole numbers, which have no unit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        size = re.fullmatch(r"(\d+) ?([gm])i?b?", str(value), re.IGNORECASE)
        if size is not None and param is not None and str(param.name).endswith("_mb"):
            number = int(size[1]) * (1024 if size[2] in "gG" else 1)
            self.fail(f"{value!r} is not a number of MiB (did you mean {number}?).", param, ctx)
        return int(super().convert(value, param, ctx))


def catalogs() -> dict[str, Catalog]:
    """The names that options take, by option: for `bench list` and for the completion of a shell."""
    from strategies.catalog import COLLECTIVES, COMPRESSIONS, OPTIMIZERS, STRATEGIES
    from workloads.catalog import WORKLOADS
    from workloads.datasets.facts import DATASETS

    known: tuple[Catalog, ...] = (WORKLOADS, DATASETS, STRATEGIES, COMPRESSIONS, COLLECTIVES, OPTIMIZERS)
    return {catalog.kind: catalog for catalog in known}


def study_path(text: str) -> Path:
    """The path of a study file. Raises UsageError if `text` is the name of a workload or the like instead."""
    name, path = text.partition(":")[0], Path(text)
    option = next((option for option, catalog in catalogs().items() if name in catalog.entries), None)
    if option is not None and not path.exists():
        raise UsageError(f"there is no study file {text} (did you mean --{option} {text}?)")
    return path


def _flag(option: PlanOption) -> Callable[[Function], Function]:
    flag, kind = option.flag, option.kind
    told = f"{option.help}  [default: {option.default.strip('()')}]" if option.default else option.help
    if kind.flag_type is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", default=None, help=told)
    type_: Any = kind.flag_type if kind.metavar else click.Choice(kind.choices)
    type_ = _Whole() if type_ is int else type_
    # click asks the type where no function is given.
    complete = _complete_names if kind.flag_type is str and kind.metavar else None
    if kind.repeated:
        return click.option(
            flag,
            type=str,
            multiple=True,
            callback=lambda context, parameter, value: list(value) or None,
            help=told,
            metavar=kind.metavar,
        )
    return click.option(
        flag, type=type_, default=None, help=told, metavar=kind.metavar, shell_complete=complete
    )


def _show_all_options(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        context.meta[_ALL] = True
        click.echo(context.get_help())
        context.exit()


def _complete_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The names that a shell offers for the last of the comma-separated names in `incomplete`."""
    before, comma, begun = incomplete.rpartition(",")
    catalog = catalogs().get(parameter.name or "")
    names = sorted({*catalog.entries, *catalog.offered}) if catalog else []
    return [f"{before}{comma}{name}" for name in names if name.startswith(begun)]
