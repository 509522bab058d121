"""All output for people: results on stdout, everything else on stderr. The only module that uses rich."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column

from results.foreign_text import visible

WIDE = 400
"""Columns that output has where it is not shown on a terminal."""
NARROW = 80
"""A terminal of at most this number of columns shows a progress line without its bar."""
PLAIN_EVERY_S = 15.0
"""Seconds between two lines of progress, at least, if the output is not a terminal."""

GAP = "  "
INDENT = "    "
_LONGEST_WORD = 40
"""A column of words is not narrowed below its longest word, of which this number of characters counts."""
Row = Sequence[str]


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


def table_lines(headers: Row, rows: Sequence[Row], *, numeric: Sequence[bool]) -> list[str]:
    """A table as lines of text: heads break at their blanks, cells never do."""
    rows = _plain(rows)
    widths = column_widths(headers, rows)
    heads = [textwrap.wrap(header, width) for header, width in zip(headers, widths, strict=True)]
    height = max(map(len, heads))
    lines = [[""] * (height - len(head)) + head for head in heads]
    return [
        GAP.join(
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in [*zip(*lines, strict=True), *rows]
    ]


def fitted_lines(headers: Row, rows: Sequence[Row], *, numeric: Sequence[bool], width: int) -> Iterator[str]:
    """Lay out a table in lines of at most `width` (at least 40) characters; only a longer figure exceeds it.

    Words wrap within their column; figures never break. The last columns that have no room are printed in
    lines below each row, each cell after its column's head; empty cells are left out.
    """
    rows = _plain(rows)
    for kept in range(len(headers), 0, -1):
        widths = _narrowed(headers[:kept], [row[:kept] for row in rows], numeric, width)
        if total_width(widths) <= width:
            break
    blocks = [_wrapped(row[:kept], widths, numeric) for row in rows]
    body = [line for block in blocks for line in block]
    laid_out = table_lines(headers[:kept], body, numeric=numeric[:kept])
    heads = len(laid_out) - len(body)
    yield from laid_out[:heads]
    lines = iter(laid_out[heads:])
    for row, block in zip(rows, blocks, strict=True):
        for _ in block:
            yield next(lines)
        rest = "; ".join(
            f"{head} {cell}" for head, cell in zip(headers[kept:], row[kept:], strict=True) if cell.strip("-")
        )
        yield from textwrap.wrap(
            rest, width, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False
        )


def column_widths(headers: Row, rows: Sequence[Row]) -> list[int]:
    """Characters of each column: its widest cell, or the longest word of its head."""
    return [
        max(max(map(len, header.split()), default=0), max((len(row[number]) for row in rows), default=0))
        for number, header in enumerate(headers)
    ]


def _plain(rows: Sequence[Row]) -> list[list[str]]:
    return [[visible(cell).replace("\n", " ") for cell in row] for row in rows]


def _narrowed(headers: Row, rows: Sequence[Row], numeric: Sequence[bool], width: int) -> list[int]:
    """Widths of columns: the widest columns of words are made narrower until all have room, if possible."""
    widths = column_widths(headers, rows)
    words = [[max(cell.split(), key=len, default="")[:_LONGEST_WORD] for cell in row] for row in rows]
    least = column_widths(headers, words)
    while total_width(widths) > width:
        texts = [place for place, wide in enumerate(widths) if not numeric[place] and wide > least[place]]
        if not texts:
            break
        widths[max(texts, key=widths.__getitem__)] -= 1
    return widths


def total_width(widths: Sequence[int]) -> int:
    """Characters of a line of columns with these widths."""
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _wrapped(row: Row, widths: Sequence[int], numeric: Sequence[bool]) -> list[tuple[str, ...]]:
    """The lines of a row, cell by cell. Each line of a cell begins with the blanks of the first one."""
    cells = []
    for cell, wide, is_number in zip(row, widths, numeric, strict=False):
        blanks = " " * (len(cell) - len(cell.lstrip()))
        wide = max(wide, len(blanks) + 1)
        lines = textwrap.wrap(cell, wide, subsequent_indent=blanks, break_on_hyphens=False)
        cells.append([cell] if is_number else lines or [""])
    return list(zip_longest(*cells, fillvalue=""))
