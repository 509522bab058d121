"""The report: studies as one HTML file that needs no network and is complete without its script.

The same study gives the same bytes: the page does not depend on when or where it was written.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from reports.analysis.side_by_side import side_by_side
from reports.analysis.study import StudyFigures, summary
from reports.page.contents import appendix, contents
from reports.page.method import definitions, hints
from reports.page.section import Section
from reports.page.sections.comparison import comparison_section
from results import files
from results.foreign_text import visible

_FOLDER = Path(__file__).parent / "templates"


def _shown(value: object) -> object:
    """Make foreign text safe: markup is escaped, and characters that act without markup become visible."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_FOLDER),
    autoescape=True,
    finalize=_shown,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def _segments(text: str) -> list[str]:
    """Split a short text at its line breaks: before an interval, before a compressor, and after a comma."""
    return text.replace(" (", "\n(").replace(" + ", "\n+ ").replace(", ", ",\n").split("\n")


def _own_ids(html: str, prefix: str) -> Markup:
    """Put `prefix` before the ids of a part of the page, and before every reference of the part to them.

    Quotation marks in text are escaped, so the pattern matches only attributes.
    """
    ids = set(re.findall(r'\bid="([^"]+)"', html))

    def named(found: re.Match[str]) -> str:
        names = [f"{prefix}-{name}" if name in ids else name for name in found[2].split(" ")]
        return found[1] + " ".join(names)

    return Markup(_REFERENCE.sub(named, html))


_REFERENCE = re.compile(r'(\b(?:id|for|aria-[a-z]+)="|\bhref="#|url\(#)([^")]+)')
_TEMPLATES.filters |= {
    "segments": _segments,
    "data": lambda text: base64.b64encode(text.encode()).decode(),
    "own_ids": _own_ids,
    "breadth": lambda drawing: round(drawing.width),
    "kind": lambda block: type(block).__name__.lower(),
}


def render_figures(study: StudyFigures) -> str:
    """The report of an analysed study."""
    sections, last = contents(study), appendix(study)
    shown = {"title": study.name, "sections": sections, "appendix": last}
    return full_page("report.html.j2", [study], (*sections, *last), **shown)


def render_studies(studies: Sequence[StudyFigures]) -> str:
    """One page of several studies: their comparison, and then each under its name, folded but for its first
    screen. The anchor of a study is the prefix of all ids of its part."""
    comparison = comparison_section(side_by_side(studies))
    parts: list[dict[str, Any]] = [
        {
            "anchor": f"study-{number}",
            "name": study.name,
            "summary": summary(study),
            "sections": (*contents(study), *appendix(study)),
        }
        for number, study in enumerate(studies, start=1)
    ]
    sections = [comparison, *(section for part in parts for section in part["sections"])]
    title = ", ".join(study.name for study in studies)
    return full_page("studies.html.j2", studies, sections, title=title, comparison=comparison, parts=parts)


def render_sections(title: str, sections: Sequence[Section]) -> str:
    """One page of sections that are of no single study."""
    return full_page("report.html.j2", [], sections, title=title, sections=sections, appendix=())


def full_page(
    template: str, studies: Sequence[StudyFigures], defining: Sequence[Section], **shown: object
) -> str:
    """The document: what is `shown`, with the definitions of its sections, and the script."""
    names = ["script.js"] + ["reload.js"] * any(study.running for study in studies)
    scripts = [files.read(_FOLDER / name).text for name in names]
    if studies:
        cpu = any(pool.cell.device == "cpu" for study in studies for pool in study.pools.values())
        defined = definitions(defining, cpu=cpu)
    else:
        defined = tuple(one for section in defining for one in section.definitions)
    return _TEMPLATES.get_template(template).render(
        **shown,
        definitions=defined,
        hints=hints(defined),
        scripts=[Markup(script) for script in scripts],
        hashes=[base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts],
    )
