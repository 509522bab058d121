"""Tables as lines of text, on terminals of any width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from results.foreign_text import visible

GAP = "  "
INDENT = "    "
_LONGEST_WORD = 40
"""A column of words is not narrowed below its longest word, of which this number of characters counts."""

Row = Sequence[str]


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
