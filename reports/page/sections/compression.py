"""Ways to exchange gradients beside the dense exchange of the same work."""

from __future__ import annotations

from collections.abc import Iterator

from reports.analysis.exchange import ExchangePart, exchange_parts
from reports.analysis.study import StudyFigures
from reports.page import tables
from reports.page.section import Block, Bullets, Heading, Paragraph, Section, Table
from results.link import NO_LINK

_ABOUT = Paragraph(
    "What compressors, collectives and strategies gain or lose against the dense exchange (no compressor, "
    "the backend's own all-reduce) of the same work and size over the same network. Whether the training is "
    "as good is another question: these are times."
)


def compression_section(study: StudyFigures) -> Section | None:
    """None where gradients were exchanged in one way alone."""
    parts = exchange_parts(study)
    if not parts:
        return None
    blocks = [block for part in parts for block in _blocks(study, part)]
    return Section(anchor="exchange", title="Exchange of gradients", blocks=(_ABOUT, *blocks))


def _blocks(study: StudyFigures, part: ExchangePart) -> Iterator[Block]:
    network = "network as it is" if part.link == NO_LINK else f"{part.link} links"
    title = f"{part.workload}, {network}"
    yield Heading(title)
    yield Paragraph(part.finding, "finding")
    yield Table(tables.exchange_table(study, part), f"Step time against the dense exchange: {title}")
    reasons = tables.exchange_reasons(part)
    if reasons:
        yield Bullets(tuple(f"Not judged: {reason}." for reason in reasons), "plain")
