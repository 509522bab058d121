"""Cost and efficiency: the cost of training a cell, the frontier of time and cost, and the use of devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from reports.analysis.assumptions import Quote, study_day
from reports.analysis.cost import (
    NO_EPOCH,
    CellCost,
    Frontier,
    cell_costs,
    cheapest_text,
    frontiers,
    why_no_energy,
    within_text,
)
from reports.analysis.scaling import Curve
from reports.analysis.study import StudyFigures
from reports.page.chart import drawn
from reports.page.description import Chart, Point, interval_point
from reports.page.looks import ROW, Looks, line_of, looks, works
from reports.page.section import Block, Bullets, Definition, Drawing, Drawings, Paragraph, Section, absent
from reports.text import count, devices, duration, metric

DEFINITIONS = (
    Definition(
        "method-frontier",
        "Frontier of cost and time",
        "Cells that no other cell of the same workload, data, precision and source matches in time and in "
        "cost of a million samples and beats in one of the two. Figures are compared to nine digits, "
        "without their intervals: where these overlap, another repeat may change the frontier. Batches, "
        "optimizers and compressors may differ; how fast the loss falls is not compared.",
    ),
    Definition(
        "method-energy",
        "Energy of a sample",
        "Energy of all devices in a step by their own counters, over the samples of the step, in joules. It "
        "does not include the rest of the machine and its cooling.",
    ),
)


def cost_section(study: StudyFigures) -> Section | None:
    """Make the section; None if no cell has a figure."""
    if not study.cells:
        return None
    costs = cell_costs(study)
    notes = [*_prices(study, costs), *_reasons(study, costs)]
    title, found = "Cost and efficiency", frontiers(costs)
    if not found:
        return absent("cost", title, f"not available: {' '.join(notes)}", DEFINITIONS)
    blocks = (*_blocks(study, found), *([Bullets(tuple(notes), "plain")] if notes else []))
    return Section(anchor="cost", title=title, blocks=blocks, definitions=DEFINITIONS)


def _blocks(study: StudyFigures, found: Sequence[Frontier]) -> Iterator[Block]:
    for frontier in found:
        every = f"{count(len(frontier.best), 'cell')} of {len(frontier.costs):,} on the frontier"
        yield Paragraph(f"{frontier.title}: {cheapest_text(frontier)}; {every}.")
        if study.assumptions.within_s is not None:
            yield Paragraph(f"{frontier.title}: {within_text(frontier, study.assumptions.within_s)}.")
    if drawings := tuple(_drawings(study, found)):
        yield Drawings(drawings)


def _drawings(study: StudyFigures, found: Sequence[Frontier]) -> Iterator[Drawing]:
    """A panel for each piece of work, because axes shared with other scalings or batches would flatten it."""
    by_cell = {cost.cell.id: cost for frontier in found for cost in frontier.costs}
    best = frozenset(cost.cell.id for frontier in found for cost in frontier.best)
    for place, (title, curves) in enumerate(works(study)):
        own = [curve for curve in curves if any(point.cell.id in by_cell for point in curve.points)]
        if sum(len(curve.points) for curve in own) > 1:
            work = f"{title}, {curves[0].key.kind}"
            yield frontier_chart(f"frontier-{place}", work, own, by_cell, best, looks(study.curves))


def _prices(study: StudyFigures, costs: Sequence[CellCost]) -> Iterator[str]:
    """A sentence on each price: the device, the amount, the provider, the date and its age, and
    alternatives."""
    day = study_day(study.runs)
    quotes = {(quote.device_name, quote.price): quote for cost in costs if (quote := cost.quote) is not None}
    for quote in quotes.values():
        price, warning = quote.price, quote.warning(day)
        parts = [f"{quote.device_name}: {usd(price.usd_per_gpu_hour)} a device and hour", price.place]
        parts += [price.note or "", f"source: {price.source}"]
        if quote.origin in ("catalogue", "file"):
            parts.append(f"of {price.date}" if price.date else "undated")
        text = "; ".join(filter(None, (*parts, _alternatives(quote))))
        yield f"{text}.{f' Beware: {warning}.' if warning else ''}"


def _alternatives(quote: Quote) -> str:
    """How a price was chosen of several; empty if there is one."""
    if len(quote.alternatives) < 2:
        return ""
    dollars = [other.usd_per_gpu_hour for other in quote.alternatives]
    where = "the catalogue" if quote.origin == "catalogue" else "the file"
    return (
        f"the lowest of the newest in {where}, whose {len(dollars)} prices of it go from "
        f"{usd(min(dollars))} to {usd(max(dollars))}"
    )


def _reasons(study: StudyFigures, costs: Sequence[CellCost]) -> Iterator[str]:
    """Sentences on why figures are missing: each reason once, with the number of its cells."""
    cells = study.cells.values()
    for reason, number in Counter(filter(None, (cost.absent for cost in costs))).items():
        yield f"No cost of {count(number, 'cell')}: {reason}."
    if any(cost.epoch_ns is None for cost in costs if cost.quote):
        yield f"No cost of an epoch: {NO_EPOCH}."
    if study.assumptions.within_s is not None and not any(cost.quote for cost in costs):
        yield "Which cell finishes an epoch in time at the least cost is open: no cell has a cost."
    for what, reasons in (
        ("MFU", {cell.why_no_mfu for cell in cells}),
        ("energy of a sample", set(map(why_no_energy, cells))),
    ):
        yield from (f"No {what}: {reason}." for reason in sorted(filter(None, reasons)))


def usd(value: float) -> str:
    """A price to the cent, or with all the digits that it has."""
    whole, _, decimals = f"{value:,.4f}".partition(".")
    return f"{whole}.{decimals.rstrip('0').ljust(2, '0')} USD"


_TIMES = ((3600e9, "hours"), (60e9, "minutes"), (1e9, "seconds"), (1e6, "ms"))


def frontier_chart(
    name: str,
    work: str,
    curves: Sequence[Curve],
    costs: Mapping[str, CellCost],
    best: frozenset[str],
    shown: Looks,
) -> Drawing:
    """Draw cost against time on logarithmic axes, one line for each series from its largest size to its
    smallest."""
    points = [
        sorted(
            (costs[point.cell.id] for point in curve.points if point.cell.id in costs),
            key=lambda cost: cost.million_samples_ns.value,
        )
        for curve in curves
    ]
    fastest = min(cost.million_samples_ns.value for those in points for cost in those)
    scale, unit = next((one for one in _TIMES if fastest >= one[0]), _TIMES[-1])
    lines = []
    for curve, those in zip(curves, points, strict=True):
        if those:
            marks = tuple(_point(curve, cost, scale, on=cost.cell.id in best) for cost in those)
            lines.append(line_of(curve, shown, marks))
    return drawn(
        Chart(
            name=name,
            title=f"{work}: cost against time of a million samples",
            y_title="USD a million samples",
            x_title=f"{unit} a million samples",
            lines=tuple(lines),
            x_axis="log",
            y_axis="log",
            sizes=False,
            switchable=False,
            note="Ringed: no other cell is both faster and cheaper. Lines go from large sizes to small ones.",
        )
    )


def _point(curve: Curve, cost: CellCost, scale: float, *, on: bool) -> Point:
    usd = cost.usd_per_million_samples
    assert usd is not None
    where = devices(cost.cell.gpus, cost.cell.device)
    took = duration(cost.million_samples_ns.value)
    return interval_point(
        cost.million_samples_ns.value / scale,
        usd,
        label=f"{curve.key.label} on {where}: {metric(usd)}, {took} a million samples",
        href=f"{ROW}{cost.cell.id}",
        mark=f"{cost.cell.gpus:,}" if on else "",
    )
