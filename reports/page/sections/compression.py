"""Ways to exchange gradients beside the dense exchange of the same work."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from reports import fields
from reports.analysis.exchange import ExchangePart, ExchangeRow, exchange_parts
from reports.analysis.study import StudyFigures
from reports.page import tables
from reports.page.section import Block, Bullets, Definition, Heading, Paragraph, Section, Table
from reports.table import Shown, TextTable, figures, table, words
from reports.text import NOTHING
from results.link import NO_LINK

_ABOUT = Paragraph(
    "What compressors, collectives and strategies gain or lose against the dense exchange (no compressor, "
    "the backend's own all-reduce) of the same work and size over the same network. Whether the training is "
    "as good is another question: these are times, and the losses below are those of a few steps."
)


def compression_section(study: StudyFigures) -> Section | None:
    """None where gradients were exchanged in one way alone."""
    parts = exchange_parts(study)
    if not parts:
        return None
    blocks = [block for part in parts for block in _blocks(study, part)]
    return Section(
        anchor="exchange",
        title="Exchange of gradients",
        blocks=(_ABOUT, *blocks),
        definitions=_DEFINITIONS,
    )


def _blocks(study: StudyFigures, part: ExchangePart) -> Iterator[Block]:
    network = "network as it is" if part.link == NO_LINK else f"{part.link} links"
    title = f"{part.workload}, {network}"
    yield Heading(title)
    yield Paragraph(part.finding, "finding")
    yield Table(tables.exchange_table(study, part), f"Step time against the dense exchange: {title}")
    reasons = tables.exchange_reasons(part)
    if reasons:
        yield Bullets(tuple(f"Not judged: {reason}." for reason in reasons), "plain")
    yield Table(costs_table(study, part), f"What is sent, what it costs, and where it would pay: {title}")


def costs_table(study: StudyFigures, part: ExchangePart) -> TextTable:
    """Bytes, encoding, loss and break-even of each way to exchange."""
    columns: list[Shown[ExchangeRow]] = [
        words("exchange", lambda row: row.name, hint="strategy + compressor, collective"),
        figures(study.devices_word, lambda row: fields.whole(row.cell.gpus), anchor="method-sizes"),
        figures("batch per replica / global", lambda row: fields.batch(row.cell), anchor="method-scaling"),
        figures(
            "payload of the dense",
            lambda row: fields.percent(row.payload_ratio),
            anchor="method-payload-ratio",
        ),
        figures(
            "encode and decode, CPU",
            lambda row: fields.duration(row.exchange_cpu_ns),
            anchor="method-exchange-cpu",
        ),
        words("loss against the dense", _loss, anchor="method-loss-guard"),
        words("break-even, projected", _break_even, anchor="method-break-even"),
    ]
    return table(part.rows, columns)


def _loss(row: ExchangeRow) -> str:
    return NOTHING if row.loss_guard is None else str(row.loss_guard)


def _break_even(row: ExchangeRow) -> str:
    return NOTHING if row.break_even is None else str(row.break_even)


_DEFINITIONS = (
    Definition(
        "method-payload-ratio",
        "Payload of the dense",
        Markup(
            "<code>Payload / payload of the dense exchange</code> of a step and rank. What travels can be "
            "more: the all-gather of a compressor that selects elements carries the payload of every other "
            "rank to each."
        ),
    ),
    Definition(
        "method-exchange-cpu",
        "Encode and decode",
        "CPU time of a step, the mean over ranks, of the threads beside the training thread that issue "
        "operations: compressing, adding up and unpacking, hidden behind computation or not. Empty where "
        "the exchange has no thread of its own: the backend's own all-reduce, and on CUDA.",
    ),
    Definition(
        "method-loss-guard",
        "Loss against the dense",
        "The loss of the last steps that all runs of both kept together, of these steps' own batches, beside "
        "that of the dense exchange on the same samples; the mean over ranks and runs, steps counted from "
        "the first of the training. A guard against an exchange that breaks training at once. It is a few "
        "steps, and says nothing about convergence: docs/convergence.md tells how that is measured.",
    ),
    Definition(
        "method-break-even",
        "Break-even",
        Markup(
            "The bandwidth of each rank's link below which this exchange would be faster than the dense "
            "one, projected from measured parts: <code>B = (bytes of the dense - bytes) / (rest - rest of "
            "the dense)</code>, with <code>rest = step time - exposed transfer</code>, in which "
            "encoding and decoding are, and bytes what a rank puts on the wire by the algorithm: of a "
            "payload over p ranks 2 (p - 1) / p for an all-reduce, p - 1 for an all-gather, (p - 1) / p for "
            "an all-to-all, 1 for a send. It takes all of the transfer as exposed and full bandwidth for "
            "both. There is none where it sends no fewer bytes, with fewer than three runs of either, and "
            "where the two are not told apart. Where its rest is no longer than the dense one's and it is "
            "faster here, it pays at any bandwidth."
        ),
    ),
)
