"""Communication: how much there is, how much of it a step sees, and what the network gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from reports.analysis.communication import (
    CellCommunication,
    communication,
    communication_finding,
    slow_links,
)
from reports.analysis.peaks import LinkPeaks, link_peaks
from reports.analysis.study import StudyFigures
from reports.page.bars import exposed_dots
from reports.page.communication_curves import communication_curves
from reports.page.communication_tables import operations_table, time_table, traffic_table
from reports.page.groups import line_styles
from reports.page.section import Block, Bullets, Definition, Drawings, Paragraph, Section, Table
from reports.page.tables import CellWords
from reports.page.works import cells_by_workload, works
from reports.text import count, duration, percent

_TITLE = "Communication"
_ABOUT = (
    "Three times of a step: what is in flight, what of it does not hide behind computation (exposed "
    "transfer), and what the mean rank waits for a slower one (exposed wait). How each was found stands "
    "beside it."
)
_REMARKS = 6
"""Remarks of one kind beyond so many are counted."""
_DISTURBS_ABOVE = 0.10
"""Share by which the recorder may slow a step before it is said."""


def communication_section(study: StudyFigures) -> Section:
    """What limits in words, then drawings against scale and tables; cells of one rank have nothing to say."""
    peaks = link_peaks(study.cells.values())
    cells = [communication(one, peaks) for one in study.cells.values() if one.cell.gpus > 1]
    if not cells:
        nothing = "No cell of several ranks has a figure." if study.cells else "No cell has a figure."
        return Section(anchor="communication", title=_TITLE, blocks=(Paragraph(nothing, "plain"),))
    return Section(
        anchor="communication",
        title=_TITLE,
        blocks=(Paragraph(_ABOUT), *_findings(study, peaks), *_drawn(study, cells), *_listed(study, cells)),
        definitions=_DEFINITIONS,
    )


def _findings(study: StudyFigures, peaks: LinkPeaks) -> Iterator[Block]:
    found = [slow.finding for slow in slow_links(list(study.cells.values()), peaks)]
    label = CellWords(study).label
    for cell_id in _worst_cells(study, peaks):
        finding = communication_finding(study.cells[cell_id], peaks)
        if finding is not None:
            found.append(f"{label(study.cells[cell_id].cell)}: {finding}")
    if found:
        yield Bullets(tuple(found))


def _worst_cells(study: StudyFigures, peaks: LinkPeaks) -> list[str]:
    """Of each piece of work the cell with a finding that has the largest share exposed."""
    worst: dict[str, None] = {}
    for _, curves in works(study):
        points = [point.figures for curve in curves for point in curve.points]
        with_finding = [one for one in points if communication_finding(one, peaks) is not None]
        if with_finding:
            share = {one.cell.id: communication(one).transfer_share or 0.0 for one in with_finding}
            worst[max(share, key=share.__getitem__)] = None
    return list(worst)


def _drawn(study: StudyFigures, cells: Sequence[CellCommunication]) -> Iterator[Block]:
    by_cell = {one.cell.id: one for one in cells}
    label = CellWords(study).label
    labels = {one.cell.id: label(one.cell) for one in cells}
    groups = [
        (name, [cell for cell in some if cell.cell.id in by_cell]) for name, some in cells_by_workload(study)
    ]
    curves = communication_curves(works(study), by_cell, line_styles(study.curves), study.devices_word)
    yield Drawings((*curves, *exposed_dots(groups, labels)))


def _listed(study: StudyFigures, cells: Sequence[CellCommunication]) -> Iterator[Block]:
    yield Table(time_table(study, cells), "Communication of a step, in time")
    label = CellWords(study).label
    remarks = [f"{label(one.cell)}: {_disagreement(one)}." for one in cells if one.disagreement_ns]
    if remarks:
        yield Bullets(_capped(remarks), "plain")
    disturbed = [one for one in cells if _recorder_share(one) > _DISTURBS_ABOVE]
    slowed = [f"{label(one.cell)}: {_slowed(one)}." for one in disturbed]
    if slowed:
        yield Bullets(_capped(slowed), "plain")
    yield Table(traffic_table(study, cells), "What is carried, and at which bandwidth")
    yield Table(operations_table(study, cells), "By kind of operation", folded=True)


def _capped(remarks: Sequence[str]) -> tuple[str, ...]:
    if len(remarks) <= _REMARKS:
        return tuple(remarks)
    return (*remarks[:_REMARKS], f"The same of {count(len(remarks) - _REMARKS, 'more cell')}.")


def _disagreement(one: CellCommunication) -> str:
    apart, seen, blocked = one.disagreement_ns, one.seen_ns, one.mean("blocked_ns")
    assert apart is not None
    assert seen is not None
    assert blocked is not None
    return (
        f"two methods disagree by {percent(abs(apart) / one.figures.step_ns.value)} of the step: on-off "
        f"blocks see {duration(seen)} of communication and wait, the recorder {duration(blocked)} of blocked "
        "time"
    )


def _recorder_share(one: CellCommunication) -> float:
    """What the recorder adds to a step, as a share of it."""
    recorded = one.mean("step_ns")
    return 0.0 if recorded is None else recorded / one.figures.step_ns.value - 1


def _slowed(one: CellCommunication) -> str:
    longer = percent(_recorder_share(one))
    return f"with the recorder on a step took {longer} longer; its times are of that step"


_DEFINITIONS = (
    Definition(
        "method-in-flight",
        "In flight",
        "Union of the intervals of a step in which an operation of this rank was under way, from its call "
        "until it was done; the mean over ranks and recorded steps. A rank that arrives early is in flight "
        "while it waits. Recorded in blocks of their own, after the timed ones.",
    ),
    Definition(
        "method-exposed-methods",
        "Method of exposed transfer and wait",
        Markup(
            "How exposed transfer and exposed wait were found. <em>on-off</em>: from steps with and without "
            "the exchange, interleaved in the same run. <em>recorded</em>, where a strategy cannot do "
            "without its exchange: from the time in which the training thread was blocked. Where both are "
            "known and differ by more than 20 % of the step, it is said: blocked time does not contain what "
            "the exchange slows the computation by, and on-off blocks contain whatever else the exchange "
            "does to a step. On less off is the plain difference of the blocks, each to the last rank; one "
            "without exchange evens out the skew of its steps, which exposed transfer leaves to the wait: "
            "so it is not their sum."
        ),
    ),
    Definition(
        "method-blocked",
        "Blocked",
        "Time of a step in which the training thread waited instead of computing (wall time less its own CPU "
        "time, without the data phase); on CUDA, kernels that communicate while none computes. The mean over "
        "ranks and recorded steps, to be compared with exposed transfer + exposed wait.",
    ),
    Definition(
        "method-overlap",
        "Hidden",
        Markup(
            "<code>1 - (exposed transfer + exposed wait) / in flight</code>: the share of communication "
            "that hides behind computation, kept between 0 and 1. Where more is seen than was in flight it "
            "is 0, and the table says &quot;slows compute&quot;: the rest is computation that the exchange "
            "takes cores or memory bandwidth from, in or after it."
        ),
    ),
    Definition(
        "method-over-compute",
        "Over compute",
        Markup(
            "<code>Exposed transfer / compute</code> of a step, with the compute of its budget: what is "
            "paid for each unit of work, and it grows with the size where communication does not scale."
        ),
    ),
    Definition(
        "method-inside",
        "Transfer and wait inside of collectives",
        Markup(
            "Of each collective <code>transfer = its shortest duration over the ranks</code> and <code>wait "
            "= duration - transfer</code>, added up over a step, the mean over ranks. The last rank to "
            "arrive waits for nobody, so clocks need not agree. Both may hide behind computation: only "
            "exposed wait is in the budget. Sends and receives between two ranks have neither."
        ),
    ),
    Definition(
        "method-bandwidth",
        "Bandwidth",
        Markup(
            "<code>Payload x factor / transfer</code> of the collectives of a step, the bus bandwidth: with "
            "p ranks the factor is 2 (p - 1) / p for an all-reduce, p - 1 for an all-gather and (p - 1) / p "
            "for a reduce-scatter, so that a link is as fast at any p."
        ),
    ),
    Definition(
        "method-link-peak",
        "Peak of the link",
        "The bus bandwidth of the best of a few plain all-reduces over all ranks of the launch, with "
        "nothing else running: for each network and size the median over launches, and their range. "
        "A size whose peak is below half of that of a smaller size, or of the link's nominal rate, is called "
        "a slow link. From 70 % of the peak a step is consistent with a full link; below 50 % with a limit "
        "that is not the bandwidth; above 105 % the two figures contradict each other. It is not said where "
        "less than 10 % of the step is exposed transfer, nor where launches differ more than twofold.",
    ),
)
