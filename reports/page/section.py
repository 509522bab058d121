"""The parts of a page: sections, and the few kinds of block in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from markupsafe import Markup, escape

from reports.fields import Field
from reports.page.description import Chart
from reports.table import TextTable
from reports.text import NOTHING
from results.foreign_text import visible

_NO_VALUE = frozenset({NOTHING, "", "baseline"})
"""Values without information; a baseline compared with itself is always 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A finished figure of the page."""

    title: str
    svg: Markup
    width: float
    """The width in pixels at which its letters are as large as the page's."""
    note: str = ""
    """A note that a reader of the drawing needs; empty for no note."""
    name: str = ""
    """Unique on the page: the anchor is `figure-NAME`. Empty: no anchor."""
    values: TextTable | None = None
    """The values that it shows."""
    chart: Chart | None = None
    """Its description, which can also be drawn for paper; None for drawings that are not of lines."""

    @property
    def table(self) -> Table:
        """The values under the drawing's title."""
        assert self.values is not None
        return Table(self.values, self.title)

    def of(self, work: str) -> Drawing:
        """The drawing with the work in front of its caption."""
        return replace(self, title=f"{work}: {self.title}")


class Block:
    """The base class of the blocks of a section."""


def safe(text: str) -> Markup:
    """Make foreign text safe for a drawing: escape markup, and show characters that act without it."""
    return escape(visible(text))


@dataclass(frozen=True, slots=True)
class Paragraph(Block):
    """A paragraph. Text is escaped; `Markup` is inserted as it is."""

    text: str
    look: Literal["text", "plain", "finding", "none", "absent"] = "text"
    """`plain`: small, for remarks; `finding`: a conclusion from figures; `none`: says that figures are
    missing; `absent`: why a section has no content, on the line of its title."""


@dataclass(frozen=True, slots=True)
class Heading(Block):
    """A heading inside a section."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets(Block):
    items: tuple[str, ...]
    look: Literal["text", "plain"] = "text"


@dataclass(frozen=True)
class Table(Block):
    """A table under its caption. Empty tables, and columns without a value, are not shown."""

    data: TextTable
    caption: str
    tools: bool = False
    """Whether the page's script adds a filter, and buttons that copy and download the rows shown."""
    row_ids: tuple[str, ...] = ()
    """Anchors of the rows; empty for none."""
    presets: tuple[str, ...] = ()
    """The preset of each column; an empty string: the column is in all presets. Empty: no presets."""
    shaded: bool = False
    """Whether a higher figure has a darker background."""

    @cached_property
    def shown(self) -> TextTable:
        """The columns that have a value in some row."""
        every = range(len(self.data.columns))
        told = [n for n in every if any(row[n].text not in _NO_VALUE for row in self.data.rows)]
        return self.data.columns_at(every if self.presets else told)

    def shade(self, field: Field) -> int | None:
        """The background from 0, for the lowest figure of the table, to 100, for the highest; None for
        none."""
        if not self.shaded or field.value is None:
            return None
        values = [
            one.value
            for row in self.data.rows
            for one in row
            if one.value is not None and one.unit == field.unit
        ]
        low, high = min(values), max(values)
        return round(100 * (field.value - low) / (high - low)) if high > low else 0


@dataclass(frozen=True, slots=True)
class Drawings(Block):
    drawings: tuple[Drawing, ...]


@dataclass(frozen=True, slots=True)
class Downloads(Block):
    """Files inside the page, by name."""

    files: tuple[tuple[str, str], ...]
    """Name and content, text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One answer that is about the complete study."""

    title: str
    figure: str
    """The answer in a few words, in large type."""
    lines: tuple[str, ...]
    anchor: str
    """The anchor of its definition."""
    alarm: bool = False
    """Whether a reader must look at something in it."""


@dataclass(frozen=True, slots=True)
class Tiles(Block):
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One answer about a piece of work: a figure in large type, and what belongs to it."""

    figure: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answers about one piece of work."""

    work: str
    how: str
    told: tuple[Told, ...]
    """One for each question."""
    drawing: Markup | None
    """A small drawing; None for none."""


@dataclass(frozen=True, slots=True)
class Answers(Block):
    """A row for each piece of work, a column for each question."""

    questions: tuple[tuple[str, str], ...]
    """The heads, each with the anchor of its definition."""
    rows: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Points(Block):
    """Short answers, each after its question."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Command(Block):
    """A command to type, after the reason for it."""

    why: str
    text: str


@dataclass(frozen=True, slots=True)
class Facts(Block):
    """Names with their values, in columns."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Row(Block):
    """Blocks side by side, if there is room."""

    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Beside(Block):
    """A drawing with blocks at its side."""

    drawing: Drawing | None
    title: str
    """The title above the drawing."""
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Folded(Block):
    """Details that few readers need, closed under a summary."""

    summary: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Definition:
    """The definition of a number: an entry of the method section, to which column heads link."""

    anchor: str
    """`method-` and a name, unique on the page."""
    term: str
    text: str
    """May be `Markup`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    anchor: str
    """Unique on the page."""
    title: str
    blocks: tuple[Block, ...]
    definitions: tuple[Definition, ...] = ()
    """Definitions of numbers that only this section shows."""

    @property
    def absent(self) -> bool:
        """Whether it has no content, and takes one line."""
        return all(isinstance(block, Paragraph) and block.look == "absent" for block in self.blocks)

    def __post_init__(self) -> None:
        """Raises TypeError for a block that the page cannot show."""
        for block in self.blocks:
            if not isinstance(block, Block):
                raise TypeError(f"section {self.anchor!r} has {block!r} as a block: wrap text in Paragraph")


def absent(anchor: str, title: str, text: str, definitions: tuple[Definition, ...] = ()) -> Section:
    """A section without content: a line such as `not available: no price is known`."""
    return Section(anchor=anchor, title=title, blocks=(Paragraph(text, "absent"),), definitions=definitions)
