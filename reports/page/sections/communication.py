"""The network: what limits it, and how other exchanges compare with the dense one."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from reports.analysis.communication import (
    communication,
    communication_finding,
    link_peaks,
    slow_links,
)
from reports.analysis.effect import claim_rule
from reports.analysis.exchange import FEWEST_RUNS, exchange_parts
from reports.analysis.study import StudyFigures
from reports.page.looks import cell_label, works
from reports.page.section import Bullets, Definition, Section, absent
from reports.text import count, listed, percent
from results.cell import REFERENCE_STRATEGY
from results.grouping import grouped

_DISAGREE_ABOVE, _DISTURBS_ABOVE = 0.20, 0.10
"""Shares of a step by which two methods may differ, and the recorder slow it, without a remark."""
_NOTHING = "not available: no link is known to limit a step, and no exchanges were compared"


def communication_section(study: StudyFigures) -> Section | None:
    """Make the section; None without cells of several ranks."""
    if not any(one.cell.gpus > 1 for one in study.cells.values()):
        return None
    found, remarks = Bullets(tuple(_findings(study))), Bullets(tuple(_remarks(study)), "plain")
    blocks = tuple(block for block in (found, remarks) if block.items)
    if not blocks:
        return absent("communication", "Network", _NOTHING, DEFINITIONS)
    return Section(anchor="communication", title="Network", blocks=blocks, definitions=DEFINITIONS)


def _findings(study: StudyFigures) -> Iterator[str]:
    peaks = link_peaks(study.cells.values())
    yield from (told for _, told in slow_links(list(study.cells.values()), peaks))
    told = []
    for _, curves in works(study):
        # The cell with a finding that has the largest exposed share.
        cells = [communication(point.figures, peaks) for curve in curves for point in curve.points]
        cells.sort(key=lambda one: one.transfer_share.value if one.transfer_share else 0.0, reverse=True)
        for one in cells:
            if text := communication_finding(one.figures, peaks):
                told.append(f"{cell_label(study, one.cell)}: {text}")
                break
    yield from dict.fromkeys(told)
    yield from exchange_sentences(study)


def exchange_sentences(study: StudyFigures) -> Iterator[str]:
    """Sentences on how compressors, collectives and strategies compare with the dense exchange of the same
    work, and on why some are not judged."""
    for part in exchange_parts(study):
        yield f"{part.workload}: {part.finding}"
        unjudged = ((row.reason, f"{row.name} on {row.cell.gpus:,}") for row in part.rows if row.reason)
        for reason, those in grouped(unjudged).items():
            yield f"Not judged: {listed(list(dict.fromkeys(those)))}: {reason}."


def _remarks(study: StudyFigures) -> Iterator[str]:
    """Name the cell in which two methods disagree most, and the one that the recorder slows most."""
    cells = [communication(one) for one in study.cells.values() if one.cell.gpus > 1]
    apart, slower = [abs(one.disagreement) for one in cells], [one.recorder_share for one in cells]
    methods = "on-off blocks and the recorder's time blocked differ"
    slowed = "the recorder, whose times are of slower steps, slows a step"
    for what, shares, above in ((methods, apart, _DISAGREE_ABOVE), (slowed, slower, _DISTURBS_ABOVE)):
        if (most := max(shares, default=0.0)) > above:
            worst, others = cells[shares.index(most)].cell, sum(share > above for share in shares) - 1
            more = f", and {count(others, 'other cell')} by less" if others else ""
            yield f"{cell_label(study, worst)}: {what} by {percent(most)} of the step{more}."


DEFINITIONS = (
    Definition(
        "method-overlap",
        "Hidden",
        Markup(
            "<code>1 - (exposed transfer + exposed wait) / in flight</code>, between 0 and 1; in flight is "
            "the time in which at least one operation of the rank was under way."
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
        "% of the peak a step is consistent with a full link, below 50 % with another limit. A link is not "
        "judged above 105 %, if under 10 % of a step is exposed, or if launches differ more than twofold.",
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
            "The bandwidth of each rank's link below which this exchange would be faster than the dense one: "
            "<code>(bytes of the dense - bytes) / (rest - rest of the dense)</code>, with rest the step time "
            "less exposed transfer, and bytes what a rank puts on the wire."
        ),
    ),
    Definition(
        "method-loss-guard",
        "Loss against the dense",
        "The loss of the last steps that all runs of both kept, on the same samples. It shows an exchange "
        "that breaks training at once, and is not a measure of convergence.",
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
