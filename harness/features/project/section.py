"""Projection: the larger sizes that `bench project` projects or refuses, and the measurements that decide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from harness.features.project.bands import FARTHEST_VALIDATED, coverage_text
from harness.features.project.records import (
    ProjectedSeries,
    ProjectedSize,
    Projection,
    Refusal,
    Span,
    ahead,
    digest,
)
from harness.features.project.series import REPLAY
from reports import fields
from reports.analysis.study import StudyFigures
from reports.fields import NONE, Field
from reports.page.chart import drawn
from reports.page.description import Chart, Line, Point
from reports.page.looks import Looks, looks
from reports.page.section import (
    Block,
    Bullets,
    Command,
    Definition,
    Drawing,
    Drawings,
    Paragraph,
    Section,
    Table,
)
from reports.table import Column, TextTable, figures, table, words
from reports.text import duration, listed, order, percent
from results.grouping import grouped
from results.statistics import Metric

DEFINITION = Definition(
    "method-projection",
    "Projected",
    "Not measured: a law continues the step time from the largest measured size. A replay of the step "
    "answers if it is within 5 % of that size; otherwise constant efficiency, a ring law, a logarithm or "
    "a pooled slope, the simplest that is not worse on the study's own earlier sizes. The band is to contain "
    "the truth in 80 % of cases: its ends are errors of the same law on published tables "
    "(docs/projection.md). Refused: no law is known to be right there.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Sizes that one reason refuses."""

    series: ProjectedSeries
    gpus: tuple[int, ...]
    refusal: Refusal
    """The refusal of the smallest."""

    @property
    def command(self) -> str | None:
        return self.refusal.lift.command if self.refusal.lift else None

    @property
    def text(self) -> str:
        """The sizes, the reason and what lifts it, in two sentences."""
        sizes = listed([f"{size:,}" for size in self.gpus])
        told = f"{named(self.series)}, {sizes}: {self.refusal.reason}."
        lift = self.refusal.lift
        return f"{told} To lift it: {order(lift.what, lift.gpu_hours, lift.usd)}." if lift else told


def projection_section(study: StudyFigures) -> Section | None:
    """Make the section; None for a study that was not projected."""
    found = study.added.get("projection")
    if found is None:
        return None
    blocks: list[Block] = []
    if found.digest != digest(study):
        stale = "This projection is stale: the study has changed since it was made. Make it again:"
        blocks.append(Command(stale, found.command))
    for series in found.series:
        if series.advice is not None:
            told = f"{named(series)}: {series.advice}"
            blocks.append(Command(f"{told}:", series.verify) if series.verify else Paragraph(f"{told}."))
    drawings = tuple(_drawings(found, looks(study.curves)))
    if drawings:
        blocks.append(Drawings(drawings))
    blocks += [Table(size_table(series), named(series)) for series in found.series]
    for one in refusals(found):
        blocks.append(Paragraph(one.text, "plain") if one.command is None else Command(one.text, one.command))
    if said := tuple(remarks(found)):
        blocks.append(Bullets(said, "plain"))
    title = f"Projection to {found.to:,}"
    return Section(anchor="projection", title=title, blocks=tuple(blocks), definitions=(DEFINITION,))


def refusals(found: Projection) -> list[Refused]:
    """The refusals, each with all its sizes."""
    groups = grouped(
        ((place, size.refusal.kind), (size.gpus, size.refusal))
        for place, series in enumerate(found.series)
        for size in series.of("refused")
        if size.refusal is not None
    )
    return [
        Refused(series=found.series[place], gpus=tuple(gpus for gpus, _ in sizes), refusal=sizes[0][1])
        for (place, _), sizes in groups.items()
    ]


def remarks(found: Projection) -> Iterator[str]:
    """The laws that answer, with their skill and the coverage of their bands, and what was assumed."""
    for series in found.series:
        if series.law is not None:
            skill = "not tested on own sizes"
            if series.skill is not None:
                worse = ", which is nearer to them" if series.skill < 0 else ""
                skill = f"skill {max(series.skill, -1):.2f} against constant efficiency on own sizes{worse}"
            yield f"{named(series)}: {series.law}, {skill}."
    laws = {series.law for series in found.series} - {None}
    if laws - {REPLAY}:
        yield (
            "Bands of 80 %, mostly towards slower. Truths in them on published tables, each family of tables "
            f"left out in turn: {coverage_text()}. No public data are at 8x."
        )
    if REPLAY in laws:
        yield "A replay has the widest band of the laws: no public data validate its own."
    if found.network is not None:
        yield f"Network: {found.network}."
    yield from (f"What if {one}: not what was measured." for one in found.what_if)


def named(series: ProjectedSeries) -> str:
    """`gpt2-small, ddp, weak, batch 8`."""
    parts = (series.workload, series.label, series.kind, f"batch {series.batch:,}", series.setting)
    return ", ".join(part for part in parts if part)


def size_table(series: ProjectedSeries) -> TextTable:
    """One row for each size, measured ones first.

    Of a series without a projected size only the two largest measured ones are shown.
    """
    measured = series.of("measured")
    shown = measured if series.of("projected") else measured[-2:]
    rows = [*shown, *series.sizes[len(measured) :]]
    anchor = DEFINITION.anchor
    columns: list[Column[ProjectedSize]] = [
        figures("size", lambda size: fields.whole(size.gpus), anchor=anchor),
        words("basis", partial(_basis, series), anchor=anchor),
        figures("step time", lambda size: _field(size.step_ns, "ns"), anchor=anchor),
        figures("efficiency", lambda size: _field(size.efficiency, "ratio"), anchor=anchor),
        figures("throughput", lambda size: _field(size.samples_per_s, "samples/s"), anchor=anchor),
        figures("epoch", lambda size: _time(size.epoch_ns), anchor=anchor),
        figures("USD an epoch", lambda size: _field(size.usd_per_epoch, "USD"), anchor=anchor),
        figures("memory", lambda size: fields.size(size.memory_bytes), anchor=anchor),
        words("largest loss", lambda size: size.loss or ""),
    ]
    return table(rows, columns)


def _basis(series: ProjectedSeries, size: ProjectedSize) -> str:
    if size.refusal is not None:
        return f"refused: {size.refusal.kind}"
    if size.basis == "measured":
        return "emulated" if size.emulated else size.basis
    largest = max(one.gpus for one in series.of("measured"))
    known = series.law != REPLAY and size.gpus <= 2**FARTHEST_VALIDATED * largest
    far = "" if known else ", not validated"
    return f"{series.law}{far}"


def _field(span: Span | None, unit: str) -> Field:
    if span is None:
        return NONE
    known = Metric(value=span.value, unit=unit, low=span.low, high=span.high, samples=1, interval=None)
    return fields.figure(known, ends=True)


def _time(span: Span | None) -> Field:
    if span is None:
        return NONE
    ends = (
        "" if span.low is None or span.high is None else f" ({duration(span.low)} to {duration(span.high)})"
    )
    return Field(f"{duration(span.value)}{ends}", span.value, "ns")


def _drawings(found: Projection, shown: Looks) -> Iterator[Drawing]:
    """A drawing of efficiencies for each piece of work that has a projected size."""
    works = grouped(((one.workload, one.kind, one.batch, one.setting), one) for one in found.series)
    for place, (work, series) in enumerate(works.items()):
        lines = tuple(line for one in series if (line := _line(one, shown)) is not None)
        if any(line.ahead for line in lines):
            against = next((one.against for one in series if one.against), "the smallest size")
            chart = Chart(
                name=f"projection-{place}",
                title=f"Efficiency against {against}: measured solid, projected dashed with its band",
                y_title=f"efficiency, % of {against}",
                x_title="devices",
                lines=lines,
                switchable=False,
            )
            yield drawn(chart).of(f"{work[0]}, {work[1]}, batch {work[2]:,}")


def _line(series: ProjectedSeries, shown: Looks) -> Line | None:
    measured = tuple(_points(series, series.of("measured")))
    if not measured:
        return None
    colour = shown[series.label].colour if series.label in shown else "blue"
    return Line(
        name=series.label, colour=colour, points=measured, ahead=tuple(_points(series, ahead(series.sizes)))
    )


def _points(series: ProjectedSeries, sizes: Iterable[ProjectedSize]) -> Iterator[Point]:
    for size in sizes:
        span = size.efficiency
        if span is not None:
            low, high = (None if end is None else 100 * end for end in (span.low, span.high))
            told = f"{series.label} on {size.gpus:,}, {size.basis}: {percent(span.value)}"
            hollow = size.basis == "projected"
            yield Point(x=size.gpus, y=100 * span.value, low=low, high=high, label=told, hollow=hollow)
