"""A page of a report, parsed."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """The content of a page: ids, links, strings, and whether its tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.sections: list[str] = []
        self.hrefs: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""
        self.heads: list[tuple[str, bool, bool]] = []
        """Facts of every column: its section, whether it is numeric, and whether it is explained."""
        self.bare: list[str] = []
        """Numeric columns without an explanation."""
        self.open: list[str] = []
        self._bare = False
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.attributes += found
        if "id" in found:
            self.ids.append(found["id"] or "")
        if tag == "section":
            self.sections.append(found["id"] or "")
        if tag == "th":
            self._bare = "n" in (found.get("class") or "").split() and not found.get("title")
            assert found["scope"] in ("col", "row")
        for name in ("href", "xlink:href"):
            if found.get(name):
                self.hrefs.append(found[name] or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._bare and "th" in self.open and data.strip():
            self.bare.append(f"{self.sections[-1]}: {data.strip()}")
        # What a reader reads: no styles and no script.
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data
