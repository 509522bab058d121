"""What people see: results on stdout, everything else on stderr. The home of rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

WIDE = 400
"""Columns of a table that is not printed on a terminal."""
PLAIN_EVERY_S = 15.0
"""Without a terminal, one line of progress at most this often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a study stands, as the progress line tells it."""

    done: int
    total: int
    doing: str
    left: str
    """Time left, in words."""


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
                description=standing.doing,
                left=standing.left,
            )
            return
        changed = standing.done != self._last.done
        if changed or (time.monotonic() - self._last_at > PLAIN_EVERY_S and standing != self._last):
            self._console.note(
                f"[{standing.done}/{standing.total}] {standing.doing}, about {standing.left} left"
            )
            self._last, self._last_at = standing, time.monotonic()


class Console:
    """The only place that prints."""

    def __init__(self) -> None:
        # Off a terminal nothing is cut or wrapped to a width that nobody has.
        width = None if sys.stdout.isatty() else WIDE
        self._out = RichConsole(file=sys.stdout, highlight=False, soft_wrap=True, width=width)
        self._err = RichConsole(file=sys.stderr, highlight=False, soft_wrap=True)

    def result(self, text: str = "") -> None:
        self._out.print(text, markup=False)

    def note(self, text: str) -> None:
        self._err.print(text, markup=False)

    def warn(self, text: str) -> None:
        self._err.print(f"warning: {text}", style="yellow", markup=False)

    def error(self, text: str) -> None:
        self._err.print(f"error: {text}", style="bold red", markup=False)

    def table(
        self, headers: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: Sequence[bool]
    ) -> None:
        """A table on stdout; figures are set flush right."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for header, is_number in zip(headers, numeric, strict=True):
            table.add_column(header, justify="right" if is_number else "left")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._out.print(table, soft_wrap=False)

    @contextmanager
    def progress(self, total: int) -> Iterator[ProgressLine]:
        if not self._err.is_terminal:
            yield ProgressLine(self, None, None)
            return
        columns = (
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            TextColumn("about {task.fields[left]} left", markup=False),
        )
        with Progress(*columns, console=self._err, transient=True) as bar:
            yield ProgressLine(self, bar, bar.add_task("starting", total=total, left="?"))
