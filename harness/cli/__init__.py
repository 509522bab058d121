"""The command line: parse, call, print. The home of click; a command is imported when it is called."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import get_args

import click

from results.errors import BenchError, UsageError, nearest
from results.extensions import blamed, extensions
from results.features import Command, CommandGroup, joined
from results.foreign_text import escape_unprintable, shortened, visible
from results.registry import load
from results.version import VERSION

_OWN = {
    "matrix": Command(
        "harness.cli.matrix:matrix_command",
        "Plan a matrix of training jobs, run what is left of it, and write the report.",
        "study",
        meant_by=("run", "start", "launch", "go", "plan", "submit", "resume"),
    ),
    "check": Command(
        "harness.cli.check:check_command",
        "Check a workload before a study plans with it: a step, a proof, every strategy.",
        "study",
        meant_by=("test", "verify", "validate"),
    ),
    "report": Command(
        "harness.cli.report:report_command",
        "Write the report of a study again, or of several side by side.",
        "study",
        meant_by=("open", "view", "html", "results"),
    ),
    "export": Command(
        "harness.cli.report:export_command", "Write a study as Markdown, CSV, JSON or Parquet.", "study"
    ),
    "status": Command(
        "harness.cli.study:status_command",
        "Show the state of a study: its cells and its jobs.",
        "study",
        meant_by=("jobs", "ps", "queue", "progress"),
    ),
    "show": Command(
        "harness.cli.logs:show_command",
        "Show one cell: its runs, and the last words of a rank that failed.",
        "study",
    ),
    "logs": Command(
        "harness.cli.logs:logs_command",
        "Print what the ranks of a launch have printed.",
        "study",
        meant_by=("tail", "output"),
    ),
    "collect": Command(
        "harness.cli.study:collect_command",
        "Derive the results of a study anew from its rank records.",
        "study",
    ),
    "cancel": Command(
        "harness.cli.study:cancel_command",
        "Cancel the pending and running jobs of a study.",
        "study",
        meant_by=("stop", "kill"),
        removes=True,
    ),
    "doctor": Command(
        "harness.cli.doctor:doctor_command",
        "Check whether this machine can run studies, and how well.",
        "machine",
        meant_by=("env", "info", "diagnose"),
    ),
    "list": Command(
        "harness.cli.list:list_command",
        "List the workloads, data sets, strategies, compressors, collectives and optimizers there are.",
        "machine",
        meant_by=("models", "workloads", "strategies"),
    ),
    "schema": Command(
        "harness.cli.list:schema_command",
        "Print the JSON Schema of a study file or a profile, for editors.",
        "machine",
    ),
}
_ADDED = joined(lambda one: one.commands)
COMMANDS = {
    name: one
    for group in get_args(CommandGroup)
    for name, one in (_OWN | _ADDED).items()
    if one.group == group
}
"""The commands of bench by name, in the order of its help; other packages add more."""
_GENERAL = {"-q": "quiet", "--quiet": "quiet", "-v": "verbose", "--verbose": "verbose", "--debug": "debug"}
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells report it: 128 + SIGINT."""
NOBODY_READS = 141
"""Exit code after `| head` closes the pipe, as shells report it: 128 + SIGPIPE."""


def command_of(name: str) -> click.Command:
    """Import the command of this name. Raises ExtensionError for one of another package that is wrong."""
    if name in COMMANDS:
        found: object = load(COMMANDS[name].place)
    else:
        extension = extensions("command", COMMANDS)[name]
        found = extension.load()
        if not isinstance(found, click.Command):
            raise extension.wrong(found, "a click command")
    assert isinstance(found, click.Command)
    return found


def every_command() -> list[str]:
    """The names of the commands of bench and of other packages."""
    return [*COMMANDS, *extensions("command", COMMANDS)]


class _Commands(click.Group):
    """Commands by name; their modules, and what these import, are loaded when one is called."""

    def list_commands(self, context: click.Context) -> list[str]:
        return every_command()

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = arguments[0]
        if name not in COMMANDS and not name.startswith("-") and name not in (known := every_command()):
            meant = next((other for other, one in COMMANDS.items() if name in one.meant_by), None)
            harmless = [other for other in known if other not in COMMANDS or not COMMANDS[other].removes]
            near = f" (did you mean {meant!r}?)" if meant else nearest(name, harmless)
            raise UsageError(f"there is no command {name!r}{near}; there are: {', '.join(known)}")
        return super().resolve_command(context, arguments)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return command_of(name) if name in COMMANDS or name in every_command() else None

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        added = extensions("command", COMMANDS)
        of_groups = {
            group.capitalize(): {name: one.help for name, one in COMMANDS.items() if one.group == group}
            for group in get_args(CommandGroup)
        } | {"Of other packages": {name: f"Is of the package {one.package}." for name, one in added.items()}}
        for heading, rows in of_groups.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl([*rows.items()])


_WIDEST = 200
"""Help is as wide as the terminal, up to this number of characters."""
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": _WIDEST, "show_default": True}
"""Settings of click, which the commands inherit."""


@click.command(cls=_Commands, name="bench", context_settings=_SETTINGS)
@click.version_option(VERSION, prog_name="bench")
@click.option("-q", "--quiet", is_flag=True, help="Print only results, warnings and errors.")
@click.option("-v", "--verbose", is_flag=True, help="Print details too, such as each launch's command.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def bench(**_: bool) -> None:
    """Scaling studies of distributed training: one command from a matrix to a report.

    -q, -v and --debug may be given anywhere before a --. A variable such as BENCH_MATRIX_WORKLOAD gives an
    option of a command its default.

    `bench matrix --gpus 1..2` is a complete call. Exit codes: 0 all is well, 1 a cell failed or a
    comparison shows a regression, 2 the call is wrong, 3 nothing could be compared, 4 another night has not
    ended, 130 interrupted.
    """


def main() -> None:
    """The console script."""
    escape_unprintable()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line. Returns its exit code; an error is one line on stderr, or is raised (--debug)."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    general = {_GENERAL[word] for word in arguments[:end] if word in _GENERAL}
    arguments = [*(word for word in arguments[:end] if word not in _GENERAL), *arguments[end:]]
    try:
        _set_loudness(("verbose" in general) - ("quiet" in general))
        arguments = _with_defaults(arguments)
        code = bench.main(arguments, prog_name="bench", standalone_mode=False, obj=tuple(arguments))
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes the rest of the output to nowhere when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
    except Exception as error:
        # The outermost handler: the user sees every error as one line.
        if "debug" in general:
            raise
        text, code = reading(error)
        click.echo(f"error: {visible(' '.join(text.split()))}", err=True)
    finally:
        _set_loudness(0)
    return code if isinstance(code, int) else 0


def _set_loudness(loudness: int) -> None:
    # Most of the time of a help text would be this import.
    if loudness or "harness.terminal.console" in sys.modules:
        import_module("harness.terminal.console").Console.loudness = loudness


def _with_defaults(arguments: list[str]) -> list[str]:
    """Add the options that variables such as BENCH_MATRIX_WORKLOAD give and the call does not.

    The variables are taken out of the environment, so that no process that this one starts reads them.
    """
    called = arguments[0] if arguments else ""
    known = COMMANDS if called in COMMANDS or called.startswith("-") else every_command()
    prefixes = {name: f"BENCH_{name.upper().replace('-', '_')}_" for name in known}
    given = {
        name: os.environ.pop(name) for name in sorted(os.environ) if name.startswith(tuple(prefixes.values()))
    }
    if called not in known:
        return arguments
    prefix = prefixes[called]
    mine = {name: value for name, value in given.items() if name.startswith(prefix)}
    return [called, *_given_words(called, prefix, mine, arguments), *arguments[1:]]


def _given_words(called: str, prefix: str, given: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """The words of the options that variables give, without those that the call gives itself."""
    options = {
        prefix + param.opts[-1].lstrip("-").replace("-", "_").upper(): param
        for param in command_of(called).params
        if isinstance(param, click.Option)
    }
    added: list[str] = []
    for name, value in given.items():
        if name not in options:
            raise UsageError(f"{name} names no option of bench {called}{nearest(name, options)}: unset it")
        words = _words(options[name], name, value)
        if words and not any(word.partition("=")[0] in _flags_of(options[name]) for word in arguments):
            import_module("harness.terminal.console").Console().note(
                f"{' '.join(words)} by the variable {name}"
            )
            added += words
    return added


def _words(option: click.Option, name: str, value: str) -> list[str]:
    """The words that give an option a variable's value. Raises UsageError for a switch that is not a bool."""
    flag = option.opts[-1]
    if not option.is_flag:
        return [f"{flag}={value}"]
    answer = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}.get(
        value.lower()
    )
    if answer is None:
        raise UsageError(f"{name} takes true or false, not {value!r}")
    return [flag] if answer else option.secondary_opts[-1:]


def _flags(command: click.Command) -> list[str]:
    return [text for param in command.params for text in _flags_of(param)]


def _flags_of(param: click.Parameter) -> tuple[str, ...]:
    return (*param.opts, *param.secondary_opts)


def _home(name: str, path: str) -> str:
    """Name the command that has an option which the command at `path` lacks; empty if no command has it."""
    called = _ADDED.get(path.removeprefix("bench "))
    if called is not None and called.passes and name in _flags(command_of("matrix")):
        return f": it is an option of bench matrix: {called.passes.format(name)}"
    alike = [other for other, one in _ADDED.items() if one.group != "team"]
    has_it = [other for other in alike if path == "bench matrix" and name in _flags(command_of(other))]
    return f": bench {has_it[0]} has it" if has_it else ""


def reading(error: Exception) -> tuple[str, int]:
    """Return the message for the user and the exit code of an error."""
    if isinstance(error, BenchError):
        return str(error), error.exit_code
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "bench"
        if isinstance(error, click.NoSuchOption):
            name = error.option_name
            near = nearest(name, _flags(context.command)) if context else ""
            return f"there is no option {name}{_home(name, path) or near}; see {path} --help", 2
        return f"{error.format_message()} See {path} --help", 2
    if isinstance(error, UnicodeEncodeError):
        # The streams escape such characters in output, and files are UTF-8.
        where = f"text of this environment, whose encoding is {sys.getfilesystemencoding()}"
        return f"{shortened(error.object)} is not {where}: set LC_ALL=C.UTF-8, or give it another name", 2
    if (of_package := blamed(error)) is not None:
        return str(of_package), of_package.exit_code
    return (
        f"{type(error).__name__}: {error}; this is a defect of bench: run again with --debug and report it"
    ), 1
