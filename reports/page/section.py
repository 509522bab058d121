"""What the page is made of: sections, and the few kinds of block in them.

A section is made by a function of its module in `reports/page/sections/`; `contents.py` lists them in order.
It says what it shows and defines what it names; how it looks is the business of the templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from reports.page.svg import Drawing
from reports.table import TextTable
from reports.text import NOTHING

_NO_VALUE = frozenset({NOTHING, "", "baseline"})
"""What a column may say without telling anything: a baseline against itself is 1."""


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph. Text is escaped; `Markup` goes in as it is."""

    text: str
    look: Literal["text", "plain", "finding", "none"] = "text"
    """`plain`: small, for remarks; `finding`: what the figures below come to; `none`: nothing to show."""


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading inside a section."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    items: tuple[str, ...]
    look: Literal["text", "plain"] = "text"


@dataclass(frozen=True)
class Table:
    """A table under its caption. One that is empty is not shown, nor is a column without a value."""

    data: TextTable
    caption: str
    folded: bool = False
    """Whether it starts closed, under its caption: what most readers do without."""
    tools: bool = False
    """Whether the page's script adds a filter, and buttons that copy and download the rows shown."""

    @property
    def shown(self) -> TextTable:
        """The columns that have a value in some row."""
        return self.data.columns_at(self._told)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Titles of the columns that are not shown."""
        return tuple(title for place, title in enumerate(self.data.titles) if place not in self._told)

    @property
    def over_workload(self) -> bool:
        """Whether the strategy follows the workload: a narrow screen has both in one column."""
        return self.shown.titles[:2] == ("workload", "strategy")

    @cached_property
    def _told(self) -> tuple[int, ...]:
        places = range(len(self.data.columns))
        return tuple(n for n in places if any(row[n].text not in _NO_VALUE for row in self.data.rows))


@dataclass(frozen=True, slots=True)
class Drawings:
    drawings: tuple[Drawing, ...]


@dataclass(frozen=True, slots=True)
class Downloads:
    """Files inside the page, by name."""

    files: tuple[tuple[str, str], ...]
    """Name and content, text."""


Block = Paragraph | Heading | Bullets | Table | Drawings | Downloads


@dataclass(frozen=True, slots=True)
class Definition:
    """What a number is: an entry of the method section, to which headings of columns link."""

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
    """Of the numbers that it alone shows."""

    def __post_init__(self) -> None:
        """Raises TypeError for a block of no kind that the page can show."""
        for block in self.blocks:
            if not isinstance(block, Block):
                raise TypeError(
                    f"section {self.anchor!r} has {block!r} for a block: wrap a text in Paragraph"
                )

    def kind(self, block: Block) -> str:
        """The name of a block's kind, by which the template knows it."""
        return type(block).__name__.lower()
