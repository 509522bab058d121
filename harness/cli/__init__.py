"""The command line: parse, call, print. The home of click; one command a file, imported when it is called."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import click

from results.errors import BenchError, UsageError, nearest
from results.extensions import blamed
from results.foreign_text import escape_unprintable, shortened, visible
from results.version import VERSION

COMMANDS = {
    "matrix": "Plan a matrix of training jobs, run what is left of it, and write the report.",
    "train": "Train cells to an end, through crashes and restarts.",
    "check": "Check a workload before anything is planned with it: a step, a proof, every strategy.",
    "report": "Write the report of a study again, or of several side by side.",
    "export": "Write a study as Markdown, CSV, JSON or Parquet.",
    "compare": "Hold a study, a run or a baseline against another: is it slower, larger, otherwise?",
    "baseline": "Keep what was accepted, to compare later studies with it.",
    "history": "Keep nights of a study, and tell on which of them a figure changed.",
    "prune": "Remove old studies that no baseline and no night was made from.",
    "collect": "Derive the results of a study anew from its rank records.",
    "status": "Say where a study stands.",
    "cancel": "End the jobs of a study that wait or run.",
    "show": "Show one cell: its runs, and the last words of a rank that failed.",
    "logs": "Print what the ranks of a launch have printed.",
    "list": "List the workloads, data sets, strategies, compressors, collectives and optimizers there are.",
    "schema": "Print the JSON Schema of a study file or a profile, for editors.",
    "doctor": "Check whether this machine can run studies, and how well.",
}
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""
NOBODY_READS = 141
"""Exit code after `| head` has had enough, as shells have it: 128 + SIGPIPE."""


class _Commands(click.Group):
    """Commands by name; their modules, and what these import, are loaded when one is called."""

    def list_commands(self, context: click.Context) -> list[str]:
        # The builtin `list` is hidden here once the command of that name has been imported.
        return [*COMMANDS]

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = arguments[0]
        if name not in COMMANDS and not name.startswith("-"):
            known = ", ".join(COMMANDS)
            raise UsageError(f"there is no command {name!r}{nearest(name, COMMANDS)}; there are: {known}")
        return super().resolve_command(context, arguments)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(f"harness.cli.{name}").command
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])


@click.command(cls=_Commands, name="bench", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="bench")
@click.option("--debug", is_flag=True, help="Show the traceback of an error; may stand anywhere.")
def bench(debug: bool) -> None:
    """Scaling studies of distributed training: one command from a matrix to a report.

    `bench matrix --gpus 1..2` is a complete call. Exit codes: 0 all is well, 1 a cell failed, a table does
    not add up or a comparison shows a regression, 2 the call is wrong, 3 nothing could be compared, 4 another
    night has not ended, 130 interrupted.
    """


def main() -> None:
    """The console script."""
    escape_unprintable()
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    sys.exit(run([argument for argument in arguments if argument != "--debug"], debug=debug))


def run(arguments: list[str], *, debug: bool = False) -> int:
    """Run one command line. Returns its exit code; an error is one line on stderr, or is raised (`debug`)."""
    try:
        code = bench.main(arguments, prog_name="bench", standalone_mode=False, obj=tuple(arguments))
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # What is left to print when the interpreter ends goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
    except Exception as error:
        # The outermost handler: every error is told to the user in one line.
        if debug:
            raise
        return _tell(error)
    return code if isinstance(code, int) else 0


def _tell(error: Exception) -> int:
    text, code = reading(error)
    click.echo(f"error: {visible(' '.join(text.split()))}", err=True)
    return code


def _flags(command: click.Command) -> list[str]:
    return [text for param in command.params for text in (*param.opts, *param.secondary_opts)]


def _home(name: str, path: str) -> str:
    """Say where an option belongs that the command at `path` lacks; empty if no other command plans by it."""
    if path == "bench compare" and name in _flags(import_module("harness.cli.matrix").command):
        return (
            f": it is one of bench matrix, which stand after --, such as bench compare --ab A B -- {name} ..."
        )
    if path == "bench matrix" and name in _flags(import_module("harness.cli.train").command):
        return ": bench train has it"
    return ""


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
        # Of output the streams escape such characters; files are UTF-8.
        where = f"text of this environment, whose encoding is {sys.getfilesystemencoding()}"
        return f"{shortened(error.object)} is not {where}: set LC_ALL=C.UTF-8, or give it another name", 2
    if (of_package := blamed(error)) is not None:
        return str(of_package), of_package.exit_code
    return (
        f"{type(error).__name__}: {error}; this is a defect of bench: run again with --debug and report it"
    ), 1
