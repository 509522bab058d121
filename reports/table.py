"""A table: columns are declared once for the page, the terminal and the exported files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Generic, Literal, TypeVar

from reports.fields import Field
from reports.text import number

Row = TypeVar("Row")
Dtype = Literal["string", "Int64", "Float64", "boolean"]
"""pandas' nullable types: a gap in a column of integers does not turn them into floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One unit for all figures of a column, so that they can be compared by eye; the head names it."""

    scales: tuple[tuple[float, str], ...]
    """Divisors of a figure, the largest first, each with the name of the scaled unit."""
    form: Callable[[float], str] = number
    sized_by: Callable[[Any], float | None] | None = None
    """A function from a row to the size by which the unit is chosen; None: the figure itself."""

    def chosen(self, sizes: Iterable[float | None]) -> tuple[float, str]:
        """The scale in which the median size is at least 1."""
        known = [abs(size) for size in sizes if size]
        middle = median(known) if known else 0.0
        return next((one for one in self.scales if middle >= one[0]), self.scales[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Generic[Row]):
    """One column. It is exported if it has a `name`, and shown if it has a `title`."""

    value: Callable[[Row], Any] = field(compare=False)
    """The value of a row; None in an exported column is unknown."""
    name: str = ""
    """Its name in CSV, Parquet and JSON, which contains the unit."""
    dtype: Dtype = "string"
    json: Callable[[Row], Any] | None = field(default=None, compare=False)
    """The value for JSON, if it differs: a figure together with its interval."""
    title: str = ""
    """The head that a reader sees."""
    form: Callable[[Any], Field] | Unit = field(default=Field, compare=False)
    """How a value is shown."""
    numeric: bool = False
    """Whether it is set flush right, with digits of equal width."""
    anchor: str | None = None
    """The anchor of the column's definition in the report's method section."""
    hint: str = ""
    """The definition in a few words, shown when the pointer is over the head; empty for none."""

    def shown(self, rows: Sequence[Row]) -> tuple[Column[Row], list[Field]]:
        """The column with its unit in the head, and its field of each row.

        Raises TypeError for anything but a field with a text.
        """
        values = [self.value(row) for row in rows]
        if not isinstance(self.form, Unit):
            return self, [self._checked(self.form(value)) for value in values]
        unit, sized_by = self.form, self.form.sized_by
        scale, name = unit.chosen(values if sized_by is None else map(sized_by, rows))
        head = replace(self, title=f"{self.title}, {name}") if name else self
        return head, [Field("" if value is None else unit.form(value / scale), value) for value in values]

    def _checked(self, field: object) -> Field:
        if isinstance(field, Field) and isinstance(field.text, str):
            return field
        raise TypeError(
            f"column {self.title!r} shows {field!r}: words() shows a text, figures() a field of "
            f"reports.fields"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table as text: its columns and the fields of its rows."""

    columns: tuple[Column[Any], ...]
    rows: tuple[tuple[Field, ...], ...]

    @property
    def titles(self) -> tuple[str, ...]:
        return tuple(column.title for column in self.columns)

    @property
    def numeric(self) -> tuple[bool, ...]:
        return tuple(column.numeric for column in self.columns)

    @property
    def texts(self) -> tuple[tuple[str, ...], ...]:
        """The text of each field, by row."""
        return tuple(tuple(one.text for one in row) for row in self.rows)

    def columns_at(self, places: Sequence[int]) -> TextTable:
        """The table of these columns, in this order."""
        return TextTable(
            columns=tuple(self.columns[place] for place in places),
            rows=tuple(tuple(row[place] for place in places) for row in self.rows),
        )


def table(rows: Iterable[Row], columns: Sequence[Column[Row]]) -> TextTable:
    """Show every row in every column. Raises TypeError for anything but a field with a text."""
    kept = list(rows)
    shown = [column.shown(kept) for column in columns]
    return TextTable(
        columns=tuple(head for head, _ in shown),
        rows=tuple(tuple(fields[place] for _, fields in shown) for place in range(len(kept))),
    )


def words(
    title: str, show: Callable[[Row], str], *, anchor: str | None = None, hint: str = ""
) -> Column[Row]:
    """A column of words, set flush left."""
    return Column(title=title, value=show, anchor=anchor, hint=hint)


def figures(
    title: str, show: Callable[[Row], Field], *, anchor: str | None = None, hint: str = ""
) -> Column[Row]:
    """A column of figures (`reports.fields` makes them), set flush right."""
    return Column(title=title, value=show, form=lambda shown: shown, numeric=True, anchor=anchor, hint=hint)
