"""All output for people: results on stdout, everything else on stderr. The only module that uses rich."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column

from harness.terminal.table_text import INDENT, fitted_lines, table_lines
from results.foreign_text import visible

WIDE = 400
"""Columns that output has where it is not shown on a terminal."""
NARROW = 80
"""A terminal of at most this number of columns shows a progress line without its bar."""
PLAIN_EVERY_S = 15.0
"""Seconds between two lines of progress, at least, if the output is not a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a study is, as the progress line shows it."""

    done: int
    total: int
    doing: str
    left: str
    """Time left, in words."""
    elapsed: str = "0 s"
    """Time since the campaign began, in words."""
    waits_for: str | None = None
    """Whom the launch waits for, a noun; None for nobody."""

    @property
    def told(self) -> str:
        """The current work, and whom it waits for."""
        return self.doing if self.waits_for is None else f"{self.doing}, waits for {self.waits_for}"


class _Out(RichConsole):
    """Standard output; a closed pipe ends the command as the shell expects, not with rich's exit code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class ProgressLine:
    """A bar on a terminal; plain lines, now and then, elsewhere."""

    def __init__(self, console: Console, bar: Progress | None, task: TaskID | None) -> None:
        self._console = console
        self._bar = bar
        self._task = task
        self._last = Standing(done=-1, total=0, doing="", left="")
        self._last_at = 0.0

    def show(self, standing: Standing) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task,
                completed=standing.done,
                total=standing.total,
                description=visible(standing.told),
                left=standing.left,
                elapsed=standing.elapsed,
            )
            return
        changed = standing.done != self._last.done
        if changed or (time.monotonic() - self._last_at > PLAIN_EVERY_S and standing.told != self._last.told):
            self._console.note(
                f"[{standing.done}/{standing.total}] {standing.told}; {standing.elapsed} so far, "
                f"about {standing.left} left"
            )
            self._last, self._last_at = standing, time.monotonic()


class Console:
    """The only place that prints. What text of others could do to a terminal is shown instead of done."""

    loudness: ClassVar[int] = 0
    """The consoles of this process print only results, warnings and errors at -1, and also details at 1."""

    def __init__(self) -> None:
        # Without emoji: in `package.module:x:` they would be ":x:".
        self._out = _Out(file=sys.stdout, highlight=False, soft_wrap=True, emoji=False)
        self._err = RichConsole(file=sys.stderr, highlight=False, soft_wrap=True, emoji=False)

    @property
    def width(self) -> int:
        """Columns of what stdout is shown on, or what COLUMNS says; else there is room for everything."""
        told = os.environ.get("COLUMNS", "")
        if told.isdecimal() and int(told):
            return int(told)
        return self._out.width if self._out.is_terminal else WIDE

    def result(self, text: str = "") -> None:
        self._out.print(visible(text), markup=False)

    def text(self, line: str) -> None:
        """A line of much text on stdout: rich would take long over it."""
        self._out.file.write(f"{visible(line)}\n")
        self._out.file.flush()

    def note(self, text: str) -> None:
        if self.loudness >= 0:
            self._err.print(visible(text), markup=False)

    def detail(self, text: str) -> None:
        """Print on stderr what only `-v` asks for."""
        if self.loudness > 0:
            self.note(text)

    def warn(self, text: str) -> None:
        self._err.print(f"warning: {visible(text)}", style="yellow", markup=False)

    def error(self, text: str) -> None:
        self._err.print(f"error: {visible(text)}", style="bold red", markup=False)

    def table(
        self, headers: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: Sequence[bool]
    ) -> None:
        """A table on stdout; figures are flush right, and no cell is ever cut. Off a terminal each row is
        one line."""
        width = self.width
        lines = (
            table_lines(headers, rows, numeric=numeric)
            if width >= WIDE
            else fitted_lines(headers, rows, numeric=numeric, width=width)
        )
        for line in lines:
            self.result(line)

    def sentence(self, text: str) -> None:
        """Words on stdout, in lines that the terminal has room for."""
        width = self.width
        lines = (
            [text]
            if width >= WIDE
            else textwrap.wrap(
                visible(text), width, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False
            )
        )
        for line in lines:
            self.result(line)

    @contextmanager
    def progress(self, total: int) -> Iterator[ProgressLine]:
        if self.loudness < 0 or not self._err.is_terminal:
            yield ProgressLine(self, None, None)
            return
        columns = (
            MofNCompleteColumn(),
            *((BarColumn(bar_width=10),) if self._err.width > NARROW else ()),
            TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            TextColumn(
                "{task.fields[elapsed]}, {task.fields[left]} left",
                markup=False,
                table_column=Column(no_wrap=True),
            ),
        )
        with Progress(*columns, console=self._err, transient=True, expand=True) as bar:
            yield ProgressLine(self, bar, bar.add_task("starting", total=total, left="?", elapsed="0 s"))


class QuietConsole(Console):
    """A console of work within other work: its notes and warnings are details."""

    def note(self, text: str) -> None:
        if self.loudness > 0:
            super().note(text)

    warn = note
