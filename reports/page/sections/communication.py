"""The network: how much of a step the exchange takes, what limits it, and how other exchanges compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup

from reports.analysis.communication import (
    CellCommunication,
    LinkPeaks,
    communication,
    communication_finding,
    link_peaks,
    slow_links,
)
from reports.analysis.effect import claim_rule
from reports.analysis.exchange import FEWEST_RUNS, exchange_parts
from reports.analysis.headline import runs_text
from reports.analysis.scaling import Curve, CurvePoint
from reports.analysis.study import StudyFigures
from reports.page.chart import drawn
from reports.page.description import Chart, Point, interval_point
from reports.page.looks import ROW, cell_label, line_of, looks, works
from reports.page.section import Block, Bullets, Definition, Drawing, Drawings, Section
from reports.text import count, devices, duration, listed, metric, percent
from results.cell import REFERENCE_STRATEGY
from results.grouping import grouped
from results.notation import NO_LINK
from results.statistics import Metric

_DISTURBS_ABOVE = 0.10
"""Share by which the recorder may slow a step without a remark."""


def communication_section(study: StudyFigures) -> Section | None:
    """Make the section; None without findings on cells of several ranks."""
    peaks = link_peaks(study.cells.values())
    cells = {one.cell.id: communication(one, peaks) for one in study.cells.values() if one.cell.gpus > 1}
    if not cells:
        return None
    blocks = [*_findings(study, peaks, list(cells.values()))]
    charts = [
        found.of(f"{title}, {curves[0].key.kind}")
        for place, (title, curves) in enumerate(works(study))
        if (found := _exposed_chart(f"exposed-{place}", curves, cells, study)) is not None
    ]
    if charts:
        blocks.append(Drawings(tuple(charts)))
    if not blocks:
        return None
    return Section(anchor="communication", title="Network", blocks=tuple(blocks), definitions=DEFINITIONS)


def _findings(study: StudyFigures, peaks: LinkPeaks, cells: Sequence[CellCommunication]) -> Iterator[Block]:
    found = [slow.finding for slow in slow_links(list(study.cells.values()), peaks)]
    # For each piece of work, the cell with a finding that has the largest exposed share.
    worst: dict[str, str] = {}
    for _, curves in works(study):
        cells_of = [point.figures for curve in curves for point in curve.points]
        of_work = [(one, text) for one in cells_of if (text := communication_finding(one, peaks)) is not None]
        if of_work:
            one, text = max(of_work, key=lambda pair: communication(pair[0]).transfer_share or 0.0)
            worst[one.cell.id] = f"{cell_label(study, one.cell)}: {text}"
    found += [*worst.values(), *exchange_sentences(study)]
    if found:
        yield Bullets(tuple(found))
    remarks = list(_remarks(study, cells))
    if remarks:
        yield Bullets(tuple(remarks), "plain")


def exchange_sentences(study: StudyFigures) -> Iterator[str]:
    """Sentences on how compressors, collectives and strategies compare with the dense exchange of the same
    work, and on why some are not judged."""
    for part in exchange_parts(study):
        network = "" if part.link == NO_LINK else f", {part.link} links"
        yield f"{part.workload}{network}: {part.finding}"
        unjudged = ((row.reason, f"{row.name} on {row.cell.gpus:,}") for row in part.rows if row.reason)
        for reason, those in grouped(unjudged).items():
            yield f"Not judged: {listed(list(dict.fromkeys(those)))}: {reason}."


def _remarks(study: StudyFigures, cells: Sequence[CellCommunication]) -> Iterator[str]:
    """Name the cell in which two methods disagree most, and the one that the recorder slows most."""
    apart = [one for one in cells if one.disagreement_ns]
    if apart:
        shares = [abs(one.disagreement_ns or 0.0) / one.figures.step_ns.value for one in apart]
        worst = apart[shares.index(max(shares))]
        seen, blocked = (worst.seen_ns or 0.0), (worst.mean("blocked_ns") or 0.0)
        yield (
            f"{cell_label(study, worst.cell)}: two methods disagree by {percent(max(shares))} of the step: "
            f"on-off blocks measure {duration(seen)} of communication and wait, the recorder "
            f"{duration(blocked)} of blocked time{_more(apart)}."
        )
    slowed = [one for one in cells if _recorder_share(one) > _DISTURBS_ABOVE]
    if slowed:
        worst = max(slowed, key=_recorder_share)
        yield (
            f"{cell_label(study, worst.cell)}: with the recorder on a step took "
            f"{percent(_recorder_share(worst))} longer; its times are of that step{_more(slowed)}."
        )


def _more(those: Sequence[object]) -> str:
    return f" (the largest of {count(len(those), 'cell')})" if len(those) > 1 else ""


def _recorder_share(one: CellCommunication) -> float:
    """The time that the recorder adds to a step, as a share of the step."""
    recorded = one.mean("step_ns")
    return 0.0 if recorded is None else recorded / one.figures.step_ns.value - 1


def _exposed_chart(
    name: str, curves: Sequence[Curve], cells: Mapping[str, CellCommunication], study: StudyFigures
) -> Drawing | None:
    """Exposed transfer as a share of the step; None where fewer than two sizes have one."""
    lines = []
    for curve in curves:
        points = tuple(
            _point(curve, one.transfer_ns, point)
            for point in curve.points
            if (one := cells.get(point.figures.cell.id)) is not None and one.transfer_ns is not None
        )
        if points:
            lines.append(line_of(curve, looks(study.curves), points))
    if len({point.x for line in lines for point in line.points}) < 2:
        return None
    return drawn(
        Chart(
            name=name,
            title="exposed transfer, % of a step",
            y_title="exposed transfer, % of a step",
            x_title=study.devices_word,
            lines=tuple(lines),
            y_from=0.0,
            height=260,
        )
    )


def _point(curve: Curve, transfer: Metric, point: CurvePoint) -> Point:
    figures = point.figures
    share = 100 / figures.step_ns.value
    told = f"{metric(transfer)} exposed, {percent(transfer.value * share / 100)} of a step"
    where = devices(point.gpus, figures.cell.device)
    return interval_point(
        point.gpus,
        transfer,
        share,
        label=f"{curve.key.label} on {where}: {told}; {runs_text(figures)}",
        href=f"{ROW}{figures.cell.id}",
        hollow=figures.no_claim is not None,
    )


DEFINITIONS = (
    Definition(
        "method-overlap",
        "Hidden",
        Markup(
            "<code>1 - (exposed transfer + exposed wait) / in flight</code>, between 0 and 1; in flight is "
            "the union of the intervals in which an operation of the rank was under way."
        ),
    ),
    Definition(
        "method-bandwidth",
        "Bandwidth",
        Markup(
            "<code>Bytes x factor / transfer</code> over all runs, the bus bandwidth: with p ranks the "
            "factor is 2 (p - 1) / p for an all-reduce, p - 1 for an all-gather, (p - 1) / p for a "
            "reduce-scatter. The transfer of a collective is its shortest duration over the ranks."
        ),
    ),
    Definition(
        "method-link-peak",
        "Peak of the link",
        "Bus bandwidth of plain all-reduces while nothing else runs: the median over launches of one "
        "network and size. Below half of a smaller size's, or of the nominal rate, a link is slow. From 70 "
        "% of the peak a step is consistent with a full link; below 50 % with another limit; above 105 % "
        "the two contradict each other. The link is not judged where less than 10 % of a step is exposed, "
        "or launches differ more than twofold.",
    ),
    Definition(
        "method-exchange-cpu",
        "Encoding",
        "CPU time of a step of the threads that issue operations: compressing, adding up and unpacking.",
    ),
    Definition(
        "method-break-even",
        "Pays below",
        Markup(
            "The bandwidth of each rank's link below which this exchange would be faster than the dense "
            "one, projected: <code>(bytes of the dense - bytes) / (rest - rest of the dense)</code>, rest "
            "being step time less exposed transfer, bytes what a rank puts on the wire."
        ),
    ),
    Definition(
        "method-loss-guard",
        "Loss against the dense",
        "The loss of the last steps that all runs of both kept, compared with the loss of the dense exchange "
        "on the same samples. It guards against an exchange that breaks training at once, and is not a "
        "measure of convergence.",
    ),
)


def speed_up_definition(smallest: float) -> Definition:
    """Define the speed-up in the table of all cells, with the smallest effect that is reported."""
    return Definition(
        "method-speed-up",
        "Speed-up over the dense exchange",
        Markup(
            "<code>Step time of the dense exchange / step time</code> of cells that differ only in the "
            "exchange. The dense one has no compressor and the default collective, and is of the same "
            "strategy or else of {reference}. {rule}. Fewer than {runs} runs of either are not judged."
        ).format(reference=REFERENCE_STRATEGY, rule=claim_rule(smallest), runs=FEWEST_RUNS),
    )
