"""A CSV file: its encoding, its separator, and whether its commas are decimal."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from reports.audit.rows import AuditedTable, table
from results.errors import UsageError

_DELIMITERS = (",", ";", "\t")
_DECIMAL_COMMA = re.compile(r"\d{1,3}(?:\.\d{3})*,(?:\d{1,2}|\d{4,})|\d+,(?:\d{1,2}|\d{4,})|0,\d+", re.ASCII)
_DECIMAL_POINT = re.compile(r"\d+(?:,\d{3})*\.(?:\d{1,2}|\d{4,})|0\.\d+|\d{1,3}(?:,\d{3}){2,}", re.ASCII)


def read_csv(path: Path, mapping: Mapping[str, str]) -> AuditedTable:
    """The table of a CSV file. Raises UsageError if it is none, or holds no column that is recognised.

    `mapping` says what a column holds (`speed`: `tokens_per_s`), or what a cell stands for (`gpu:big`:
    `H100 SXM`).
    """
    text = _text(path)
    head = next(iter(text.splitlines()), "")
    if not head.strip():
        raise UsageError(f"{path} is empty: a table begins with a line of column names")
    delimiter = max(_DELIMITERS, key=head.count)
    try:
        lines = _numbered(csv.reader(io.StringIO(text), delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise UsageError(f"{path} is no CSV: {error}") from error
    headers = [name.strip() for name in lines[0][1]]
    columns, values = _parted(mapping, headers)
    return table(
        headers,
        lines[1:],
        columns,
        values=values,
        has_decimal_commas=_has_decimal_commas(lines[1:]),
        commas=delimiter == ",",
    )


def _parted(
    mapping: Mapping[str, str], headers: Sequence[str]
) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """What columns hold, and what cells stand for: `COLUMN:VALUE` is a cell where COLUMN is a column."""
    columns, values = {}, {}
    for left, right in mapping.items():
        column, separator, value = left.partition(":")
        if left not in headers and separator and column.strip() in headers:
            values[column.strip(), value.strip()] = right
        else:
            columns[left] = right
    return columns, values


def _has_decimal_commas(lines: Sequence[tuple[int, Sequence[str]]]) -> bool:
    """Whether some cells are numbers by a decimal comma alone (`12,5`), and none by a decimal point."""
    cells = [cell.strip() for _, row in lines for cell in row if "," in cell or "." in cell]
    if not any(_DECIMAL_COMMA.fullmatch(cell) for cell in cells):
        return False
    return not any(_DECIMAL_POINT.fullmatch(cell) for cell in cells if not _DECIMAL_COMMA.fullmatch(cell))


def _numbered(reader: Iterator[list[str]]) -> list[tuple[int, list[str]]]:
    # `line_num` is where a record ends; a quoted cell may span lines.
    lines, start = [], 1
    for cells in reader:
        lines.append((start, cells))
        start = reader.line_num + 1  # type: ignore[attr-defined]
    return lines


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not {encoding[:6].rstrip('-')} text (byte {error.start}); save it as UTF-8"
        ) from error
    if "\0" in text:
        raise UsageError(f"{path} is no text: it holds NUL characters")
    return text
