"""A table of a CSV: every recognised number of every row, in SI units, with its printed digits."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reports.audit.columns import HEADERS, Meaning, meaning, unit_meaning
from reports.audit.findings import Disagreement, Quantity
from reports.audit.intervals import Printed, printed
from reports.audit.phrases import phrases, precision
from results.errors import UsageError

EMPTY = frozenset({"", "-", "--", "n/a", "na", "nan", "none", "null", "?"})
"""Texts that say that there is no number."""
_SUFFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
"""Of parameter counts alone: `8B`."""
_DELIMITERS = (",", ";", "\t")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedRow:
    """One line of a table."""

    line: int
    values: Mapping[str, Quantity]
    """By the names of reports/audit/columns.py."""
    facts: Mapping[str, str]
    identity: tuple[str, ...]
    """Every cell that is not a measured number: two rows of one identity claim the same thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedTable:
    """A table that was read, and what of it was not."""

    rows: tuple[AuditedRow, ...]
    not_checked: tuple[str, ...]
    """Columns whose names are not on the list."""
    unreadable: Mapping[str, int]
    """Cells that should be numbers and are none, by column (or unit)."""
    findings: tuple[Disagreement, ...]
    """Numbers that no such quantity can be."""


@dataclass(slots=True)
class _Cells:
    """What is found while one row is read."""

    line: int
    values: dict[str, Quantity] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    identity: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    findings: list[Disagreement] = field(default_factory=list)

    def add(self, meant: Meaning, number: Printed | float, shown: str) -> None:
        """Keep a number; the first of a quantity stays."""
        if isinstance(number, float):
            self.findings.append(_impossible(self.line, shown))
            return
        if meant.kind == "count":
            number = number.exact()
        if meant.name == "gpus" and number.value == 0:
            self.findings.append(_impossible(self.line, shown))
            return
        self.values.setdefault(meant.name, Quantity.of(number.scaled(meant.scale), shown))


def read_csv(path: Path, mapping: Mapping[str, str]) -> AuditedTable:
    """The table of a CSV file. Raises UsageError if it is none, or holds no column that is recognised."""
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
    return table(headers, lines[1:], mapping, commas=delimiter == ",")


def _numbered(reader: Iterator[list[str]]) -> list[tuple[int, list[str]]]:
    # `line_num` is where a record ends; a quoted cell may span lines.
    lines, start = [], 1
    for cells in reader:
        lines.append((start, cells))
        start = reader.line_num + 1  # type: ignore[attr-defined]
    return lines


def table(
    headers: Sequence[str],
    lines: Iterable[tuple[int, Sequence[str]]],
    mapping: Mapping[str, str],
    *,
    commas: bool = True,
) -> AuditedTable:
    """The table of these cells; `commas`: whether a comma in a number may part thousands."""
    meanings = _meanings(headers, mapping)
    rows: list[AuditedRow] = []
    findings: list[Disagreement] = []
    unreadable: Counter[str] = Counter()
    for line, cells in lines:
        if len(cells) > len(headers):
            raise UsageError(f"line {line} has {len(cells)} cells, and the head names {len(headers)} columns")
        if not any(cell.strip() for cell in cells):
            continue
        found = _read(line, dict(zip(headers, cells, strict=False)), meanings, commas=commas)
        rows.append(
            AuditedRow(line=line, values=found.values, facts=found.facts, identity=tuple(found.identity))
        )
        findings += found.findings
        unreadable.update(found.unreadable)
    return AuditedTable(
        rows=tuple(rows),
        not_checked=tuple(name for name in headers if meanings[name] is None),
        unreadable=dict(unreadable),
        findings=tuple(findings),
    )


def _meanings(headers: Sequence[str], mapping: Mapping[str, str]) -> dict[str, Meaning | None]:
    twice = [name for name, times in Counter(headers).items() if times > 1]
    if twice:
        raise UsageError(f"the column {twice[0]!r} stands twice")
    for column, meant in mapping.items():
        if column not in headers:
            raise UsageError(
                f"--map {column}={meant}: there is no column {column!r}; there are {', '.join(headers)}"
            )
        if meant not in HEADERS:
            raise UsageError(f"--map {column}={meant}: no such meaning; there are {', '.join(HEADERS)}")
    found = {name: meaning(mapping.get(name, name)) for name in headers}
    if not any(found.values()):
        raise UsageError(
            f"no column is recognised of {', '.join(headers)[:200]}; say what they are with --map"
        )
    return found


def _read(
    line: int, cells: Mapping[str, str], meanings: Mapping[str, Meaning | None], *, commas: bool
) -> _Cells:
    found = _Cells(line)
    unit = next(
        (
            cells[name].strip()
            for name, meant in meanings.items()
            if meant and meant.kind == "unit" and name in cells
        ),
        "",
    )
    for column, text in cells.items():
        meant = meanings[column]
        if meant is None or meant.kind == "unit":
            found.identity.append(text.strip())
        elif meant.kind in ("fact", "text"):
            _words(found, meant, text)
        else:
            _number(found, meant, column, text if commas or "," not in text else f"?{text}", unit)
    _infer_precision(found)
    return found


def _words(found: _Cells, meant: Meaning, text: str) -> None:
    said = phrases(text)
    for phrase, digits in said.numbers:
        number = printed(digits)
        if number is not None:
            found.add(phrase, number, f"{phrase.name} {digits} (in {meant.name})")
            if phrase.kind == "count":
                found.identity.append(f"{phrase.name}={digits}")
    found.identity.append(said.rest.strip())
    if meant.kind == "fact" and text.strip().lower() not in EMPTY:
        found.facts[meant.name] = said.rest.strip()


def _infer_precision(found: _Cells) -> None:
    named = precision(found.facts.get("precision", "")) or precision(found.facts.get("strategy", ""))
    if named is not None:
        found.facts["precision"] = named


def _number(found: _Cells, meant: Meaning, column: str, text: str, unit: str) -> None:
    text = text.strip()
    real = unit_meaning(unit + meant.suffix) if meant.kind == "value" else meant
    if meant.kind == "count":
        found.identity.append(text)
    if text.lower() in EMPTY:
        return
    if real is None:
        found.unreadable.append(f"{column} in {unit or 'no unit'}")
        return
    number = _printed(text, real)
    if number is None:
        _number_in_words(found, real, column, text)
        return
    found.add(real, number, f"{column} {text}{' ' + unit if meant.kind == 'value' else ''}")


def _printed(text: str, meant: Meaning) -> Printed | float | None:
    if meant.name == "parameters" and text[-1] in _SUFFIXES:
        number = printed(text[:-1])
        return number.scaled(_SUFFIXES[text[-1]]) if isinstance(number, Printed) else number
    if text.endswith("%") and meant.name in ("mfu", "efficiency"):
        number = printed(text[:-1])
        return number.scaled(0.01 / meant.scale) if isinstance(number, Printed) else number
    return printed(text)


def _number_in_words(found: _Cells, meant: Meaning, column: str, text: str) -> None:
    """A cell that is words where a number should be: its phrases, or nothing."""
    said = phrases(text)
    for phrase, digits in said.numbers:
        number = printed(digits)
        if number is not None:
            found.add(phrase, number, f"{phrase.name} {digits} (in {column})")
    if not said.numbers:
        found.unreadable.append(column)


def _impossible(line: int, shown: str) -> Disagreement:
    return Disagreement(
        check="value",
        lines=(line,),
        formula="a quantity is a number from 1e-30 to 1e30, or 0 (a count of devices is not 0)",
        inputs=(shown,),
        expected=None,
        found=None,
        difference=None,
        tolerance=0.0,
        why="no measurement is near it",
        reading="",
    )


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
