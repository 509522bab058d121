"""What the page is made of: sections, and the few kinds of block in them.

A section is made by a function of its module in `reports/page/sections/`; `contents.py` lists them in order.
It says what it shows and defines what it names; how it looks is the business of the templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reports.page.svg import Drawing
from reports.table import TextTable


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


@dataclass(frozen=True, slots=True)
class Table:
    """A table under its caption. One that is empty is not shown."""

    data: TextTable
    caption: str
    folded: bool = False
    """Whether it starts closed, under its caption: what most readers do without."""
    tools: bool = False
    """Whether the page's script adds a filter, and buttons that copy and download the rows shown."""


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

    def kind(self, block: Block) -> str:
        """The name of a block's kind, by which the template knows it."""
        return type(block).__name__.lower()
