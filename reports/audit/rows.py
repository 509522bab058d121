"""A table: every recognised number in SI units, with its printed digits, and every cell not read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from reports.audit.columns import HEADERS, Meaning, meaning, unit_meaning
from reports.audit.findings import Disagreement, Quantity, difference, ends, reading
from reports.audit.intervals import Printed, printed, printed_in
from reports.audit.phrases import Phrases, phrases, precision, trains_a_part
from results.errors import UsageError

EMPTY = frozenset({"", "-", "--", "n/a", "na", "nan", "none", "null", "?"})
"""Texts that say that there is no number."""
_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
"""Of parameter counts: `8B`, `350m`."""
_RATE_SUFFIXES = {"k": 1e3, "K": 1e3, "M": 1e6}
_RATES = frozenset({"tokens_per_s", "tokens_per_s_device", "samples_per_s", "samples_per_s_device"})
_SHARES = frozenset({"mfu", "hfu", "efficiency"})
_PERCENT_FROM = 1.5
"""A column of shares whose numbers mostly exceed this holds percent."""
_SPOKEN = frozenset({"strategy"})
"""Facts in which phrases are looked for: `TP8` in the name of a source or a model is no size."""
_COLLECTIVES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast", "bcast": "broadcast", "reduce": "reduce", "sendrecv": "sendrecv",
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class AuditedRow:
    """One line of a table."""

    line: int
    values: Mapping[str, Quantity]
    """By the names of reports/audit/columns.py."""
    facts: Mapping[str, str]
    identity: tuple[str, ...]
    """Every cell that is not a measured number: two rows of one identity claim the same thing."""
    unknown: Mapping[str, str]
    """The cells of columns that are not on the list."""
    is_dense: bool
    """Whether a step uses all parameters for all tokens: no mixture of experts, no adapters."""
    states_twice: bool
    """Whether it has two numbers of one quantity, which are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadCell:
    """A cell that should be a number and is none."""

    line: int
    column: str
    text: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedTable:
    """A table that was read, and what of it was not."""

    rows: tuple[AuditedRow, ...]
    not_checked: tuple[str, ...]
    """Columns whose names are not on the list."""
    unread: tuple[UnreadCell, ...]
    findings: tuple[Disagreement, ...]
    """Numbers that no such quantity can be, and quantities that one row states twice."""


@dataclass(slots=True)
class _Cells:
    """What is found while one row is read."""

    line: int
    values: dict[str, Quantity] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    identity: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    unread: list[UnreadCell] = field(default_factory=list)
    findings: list[Disagreement] = field(default_factory=list)
    is_dense: bool = True
    states_twice: bool = False

    def add(self, meant: Meaning, number: Printed | float, shown: str) -> None:
        """Keep a number; the first of a quantity stays, and another one is a contradiction."""
        if isinstance(number, float):
            self.findings.append(_impossible(self.line, shown, meant.name))
            return
        if meant.kind == "count":
            number = number.exact()
        if meant.name == "gpus" and number.value == 0:
            self.findings.append(_impossible(self.line, shown, meant.name))
            return
        quantity = Quantity.of(meant.name, number, shown)
        first = self.values.setdefault(meant.name, quantity)
        if first is quantity:
            return
        self.states_twice = True
        if not first.loose.meets(quantity.loose):
            self.findings.append(_contradiction(self.line, meant.name, first, quantity))

    def skip(self, column: str, text: str, reason: str) -> None:
        self.unread.append(UnreadCell(line=self.line, column=column, text=text.strip(), reason=reason))


def table(
    headers: Sequence[str],
    lines: Iterable[tuple[int, Sequence[str]]],
    mapping: Mapping[str, str],
    *,
    values: Mapping[tuple[str, str], str] | None = None,
    has_decimal_commas: bool = False,
    commas: bool = True,
) -> AuditedTable:
    """The table of these cells.

    `mapping` says what columns hold, and `values` what a cell of a column stands for. With
    `has_decimal_commas`, `1.234,5` is a number; otherwise `commas` says whether a comma may part thousands.
    """
    meanings = _meanings(headers, mapping)
    cells_of = [(line, cells) for line, cells in lines if any(cell.strip() for cell in cells)]
    for line, cells in cells_of:
        if len(cells) > len(headers):
            raise UsageError(f"line {line} has {len(cells)} cells, and the head names {len(headers)} columns")
    reader = _Reader(_in_percent(headers, cells_of, meanings), values or {}, has_decimal_commas, commas)
    found = [reader.row(line, dict(zip(headers, cells, strict=False))) for line, cells in cells_of]
    return AuditedTable(
        rows=tuple(
            AuditedRow(
                line=row.line,
                values=row.values,
                facts=row.facts,
                identity=tuple(row.identity),
                unknown=row.unknown,
                is_dense=row.is_dense,
                states_twice=row.states_twice,
            )
            for row in found
        ),
        not_checked=tuple(name for name in headers if meanings[name] is None),
        unread=tuple(cell for row in found for cell in row.unread),
        findings=tuple(finding for row in found for finding in row.findings),
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
        if meaning(meant) is None:
            raise UsageError(f"--map {column}={meant}: no such meaning; there are {', '.join(HEADERS)}")
    found = {name: meaning(mapping.get(name, name)) for name in headers}
    if not any(found.values()):
        raise UsageError(
            f"no column is recognised of {', '.join(headers)[:200]}; say what they are with --map"
        )
    return found


def _in_percent(
    headers: Sequence[str], lines: Sequence[tuple[int, Sequence[str]]], meanings: Mapping[str, Meaning | None]
) -> dict[str, Meaning | None]:
    """The meanings, with columns of shares whose numbers are mostly above 1.5 read as percent."""
    read = dict(meanings)
    for place, name in enumerate(headers):
        meant = meanings[name]
        if meant is None or meant.name not in _SHARES or meant.scale != 1:
            continue
        numbers = [printed(cells[place]) for _, cells in lines if place < len(cells)]
        values = [number.value for number in numbers if isinstance(number, Printed)]
        if len(values) > 1 and sum(value > _PERCENT_FROM for value in values) * 4 >= 3 * len(values):
            read[name] = Meaning(name=meant.name, kind=meant.kind, scale=0.01)
    return read


class _Reader:
    """Reads the rows of one table."""

    def __init__(
        self,
        meanings: Mapping[str, Meaning | None],
        values: Mapping[tuple[str, str], str],
        has_decimal_commas: bool,
        commas: bool,
    ) -> None:
        self._meanings = meanings
        self._values = values
        self._has_decimal_commas = has_decimal_commas
        self._commas = commas
        self._unit_column = next(
            (name for name, meant in meanings.items() if meant and meant.kind == "unit"), ""
        )

    def row(self, line: int, cells: dict[str, str]) -> _Cells:
        """What one line says."""
        for (column, text), stands_for in self._values.items():
            if cells.get(column, "").strip() == text:
                cells[column] = stands_for
        found = _Cells(line)
        unit = cells.get(self._unit_column, "").strip()
        for column, text in cells.items():
            meant = self._meanings[column]
            if meant is None:
                found.unknown[column] = text.strip()
                found.identity.append(text.strip())
            elif meant.kind in ("fact", "text"):
                _words(found, meant, column, text)
            elif meant.kind == "unit":
                found.identity.append(text.strip())
            elif meant.kind != "repeat":
                self._number(found, meant, column, text.strip(), unit)
        named = precision(found.facts.get("precision", "")) or precision(found.facts.get("strategy", ""))
        if named is not None:
            found.facts["precision"] = named
        return found

    def _number(self, found: _Cells, meant: Meaning, column: str, text: str, unit: str) -> None:
        real = unit_meaning(unit + meant.suffix) if meant.kind == "value" else meant
        if meant.kind == "count":
            found.identity.append(text)
        if text.lower() in EMPTY:
            return
        if real is None:
            found.skip(f"{column} in {unit or 'no unit'}", text, "the unit is not known")
            return
        number = self._printed(text, real)
        if number is None:
            _number_in_words(found, real, column, text)
            return
        found.add(real, number, f"{column} {text}{' ' + unit if meant.kind == 'value' else ''}")

    def _printed(self, text: str, meant: Meaning) -> Printed | float | None:
        if self._has_decimal_commas:
            is_grouped = "," in text or re.fullmatch(r"\d{1,3}(?:\.\d{3})+", text)
            text = text.replace(".", "").replace(",", ".") if is_grouped else text
        elif not self._commas and "," in text:
            return None
        scale, suffixes = meant.scale, _SUFFIXES if meant.name == "parameters" else {}
        if meant.name in _RATES:
            suffixes = _RATE_SUFFIXES
        last = text[-1] if meant.name != "parameters" else text[-1].lower()
        if last in suffixes:
            text, scale = text[:-1].rstrip(), scale * suffixes[last]
        elif last == "%" and meant.name in _SHARES:
            text, scale = text[:-1], 0.01
        return printed_in(text, scale)


def _words(found: _Cells, meant: Meaning, column: str, text: str) -> None:
    text = text.strip()
    if meant.name != "source" and trains_a_part(text):
        found.is_dense = False
    said = phrases(text) if meant.kind == "text" or meant.name in _SPOKEN else Phrases(numbers=(), rest=text)
    _add_phrases(found, said, column, text, f"in {meant.name}")
    found.identity += [f"{phrase.name}={digits}" for phrase, digits in said.numbers if phrase.kind == "count"]
    rest = said.rest.strip()
    found.identity.append(rest)
    if meant.kind == "fact" and text.lower() not in EMPTY:
        known = found.facts.get(meant.name)
        found.facts[meant.name] = _spelling(meant.name, rest if known is None else f"{known} {rest}")


def _spelling(name: str, text: str) -> str:
    """One spelling of a collective (`AllReduce`, `all_reduce_perf`) and of a machine (`8x H100`)."""
    if name == "collective" and text:
        first, *others = text.split(maxsplit=1)
        plain = re.sub(r"[\W_]", "", re.sub(r"_perf(_mpi)?$", "", first.lower()))
        return " ".join([_COLLECTIVES.get(plain, first), *others])
    if name == "hardware":
        return re.sub(r"^\d+ ?x ?(?=[A-Za-z])|\s+\(one node\)$", "", text)
    return text


def _number_in_words(found: _Cells, meant: Meaning, column: str, text: str) -> None:
    """A cell that is words where a number should be: its phrases, or nothing."""
    said = phrases(text)
    _add_phrases(found, said, column, text, f"in {column}")
    if trains_a_part(text):
        found.is_dense = False
    if not said.numbers and not said.unclear:
        found.skip(column, text, "it is no number")


def _add_phrases(found: _Cells, said: Phrases, column: str, text: str, place: str) -> None:
    for phrase, digits in said.numbers:
        number = printed_in(digits, phrase.scale)
        if number is not None:
            found.add(phrase, number, f"{phrase.name} {digits} ({place})")
    for name in said.unclear:
        found.skip(column, text, f"{name} stands in it with several numbers")


def _impossible(line: int, shown: str, name: str) -> Disagreement:
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
        quantity=name,
        quantities=(name,),
    )


def _contradiction(line: int, name: str, first: Quantity, other: Quantity) -> Disagreement:
    return Disagreement(
        check="contradiction",
        lines=(line,),
        formula="a row that states a quantity twice states one number",
        inputs=(first.shown, other.shown),
        expected=ends(first.rounded),
        found=ends(other.rounded),
        difference=difference(other.rounded, first.rounded),
        tolerance=0.0,
        why="the printed digits alone decide",
        reading=reading(other.rounded, first.rounded, name)
        or "words about another row, or one of the two is wrong",
        quantity=name,
        quantities=(name,),
    )
