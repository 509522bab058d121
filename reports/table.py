"""A table: its columns say once what a row shows, for the page and the command line alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from reports.fields import Field

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextColumn:
    """The head of a column."""

    title: str
    numeric: bool = False
    """Whether it is set flush right, in digits of one width."""
    anchor: str | None = None
    """Where the report's method section says what the column is."""
    hint: str = ""
    """The same in a few words, shown while a pointer is over the head; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table as it is printed."""

    columns: tuple[TextColumn, ...]
    rows: tuple[tuple[Field, ...], ...]

    @property
    def titles(self) -> tuple[str, ...]:
        return tuple(column.title for column in self.columns)

    @property
    def texts(self) -> tuple[tuple[str, ...], ...]:
        """What a reader sees of the rows."""
        return tuple(tuple(field.text for field in row) for row in self.rows)

    def columns_at(self, places: Sequence[int]) -> TextTable:
        """The table of these columns, in this order."""
        return TextTable(
            columns=tuple(self.columns[place] for place in places),
            rows=tuple(tuple(row[place] for place in places) for row in self.rows),
        )


Shown = tuple[TextColumn, Callable[[Row], Field]]
"""A column and what it shows of a row."""


def table(rows: Iterable[Row], columns: Sequence[Shown[Row]]) -> TextTable:
    """Every row through every column. Raises TypeError for what is no field, or a field without a text."""
    return TextTable(
        columns=tuple(column for column, _ in columns),
        rows=tuple(tuple(_field(column, show(row)) for column, show in columns) for row in rows),
    )


def _field(column: TextColumn, shown: object) -> Field:
    if not isinstance(shown, Field) or not isinstance(shown.text, str):
        raise TypeError(
            f"column {column.title!r} shows {shown!r}: words() shows a text, figures() a field of "
            f"reports.fields"
        )
    return shown


def words(title: str, show: Callable[[Row], str], *, anchor: str | None = None, hint: str = "") -> Shown[Row]:
    """A column of words, set flush left."""
    return TextColumn(title=title, anchor=anchor, hint=hint), lambda row: Field(show(row))


def figures(
    title: str, show: Callable[[Row], Field], *, anchor: str | None = None, hint: str = ""
) -> Shown[Row]:
    """A column of figures (`reports.fields` makes them), set flush right."""
    return TextColumn(title=title, numeric=True, anchor=anchor, hint=hint), show
