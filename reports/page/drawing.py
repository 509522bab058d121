"""A finished drawing of the page."""

from __future__ import annotations

from dataclasses import dataclass, replace

from markupsafe import Markup, escape

from results.foreign_text import visible


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A finished figure of the page."""

    title: str
    svg: Markup
    width: float
    """In pixels, at which its letters have the size of the page's."""
    note: str = ""
    """What a reader must know beside the drawing; empty for nothing."""

    def of(self, work: str) -> Drawing:
        """The same, its caption with the work in front."""
        return replace(self, title=f"{work}: {self.title}")


def safe(text: str) -> Markup:
    """Text of others as it may stand in a drawing: escaped, and what acts without markup is shown."""
    return escape(visible(text))
