"""Weak and strong curves: a chart of efficiency and one of throughput against size for each piece of work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from reports.analysis.headline import runs_text
from reports.analysis.outcomes import outcome_words
from reports.analysis.scaling import Curve, CurvePoint, piece_of
from reports.analysis.size_to_buy import Purchase, sizes_to_buy
from reports.analysis.study import StudyFigures
from reports.page.chart import drawn
from reports.page.description import Chart, Line, Point, Rule, interval_point
from reports.page.looks import ROW, Looks, WorkCurves, line_of, looks, works
from reports.page.section import Block, Bullets, Drawing, Drawings, Paragraph, Section, absent
from reports.text import devices, duration, listed, metric
from results.cell import BASELINE_STRATEGY
from results.statistics import Metric

_ABOUT = Paragraph(
    "Weak: the batch of a replica is constant, and the work grows with the size. Strong: the global batch "
    "is constant. Colours are strategies, dashes compressors and collectives; bars are intervals, small "
    "dots single runs, hollow points emulated or not proven.",
    "plain",
)


def curves_section(study: StudyFigures) -> Section | None:
    """Make the section; None if no curve has two sizes."""
    groups, shown = works(study), looks(study.curves)
    # The curves whose efficiency the first screen shows.
    first: tuple[Curve, ...] = ()
    for size in sizes_to_buy(study)[:1]:
        piece = piece_of(study.curves, size.workload, size.scaling)
        first = piece.curves if piece is not None else ()
    drawings: list[Drawing | None] = []
    for place, (title, curves) in enumerate(groups):
        work, given = f"{title}, {curves[0].key.kind}", (curves, shown, study.devices_word)
        claims = [(point.gpus, point.efficiency) for curve in curves for point in curve.points]
        claimed = {gpus for gpus, one in claims if one.metric is not None and not one.is_baseline}
        # One claim is not a curve, and for two sizes a drawing would only show one efficiency.
        if len(claimed) > 1 and not set(map(id, curves)) <= set(map(id, first)):
            drawings.append(_of(work, efficiency_chart(f"curve-{place}-efficiency", *given)))
        if not claimed or len({gpus for gpus, _ in claims}) >= FEW:
            drawings.append(_of(work, throughput_chart(f"curve-{place}-throughput", *given)))
    found = tuple(drawing for drawing in drawings if drawing is not None)
    blocks: list[Block] = [_ABOUT, Drawings(found)] if found else []
    reasons = tuple(f"No efficiency for {reason}." for reason in _no_claims(groups))
    if reasons:
        blocks.append(Bullets(reasons, "plain"))
    if not blocks:
        few = "not available: a curve needs three sizes with a figure"
        return absent("curves", "Weak and strong curves", few) if study.cells else None
    return Section(anchor="curves", title="Weak and strong curves", blocks=tuple(blocks))


def _of(work: str, drawing: Drawing | None) -> Drawing | None:
    return drawing and drawing.of(work)


def _no_claims(groups: list[WorkCurves]) -> Iterator[str]:
    """Reasons why points have no efficiency: each once, with its points."""
    points: dict[str, dict[str, None]] = {}
    for curve in (curve for _, curves in groups for curve in curves):
        for point in curve.points:
            for claim in (point.single, point.own):
                if claim.baseline is not None and claim.reason is not None:
                    points.setdefault(claim.reason, {})[f"{curve.key.label} on {point.gpus:,}"] = None
    for reason, those in points.items():
        yield f"{listed(list(those), most=len(those), last=', ')}: {reason}"


FEW, FEW_WIDTH = 3, 415.0
"""The number of sizes up to which a chart is narrow, and its width then."""

DOUBLED = 4
"""The ratio of the largest size to the smallest from which axes are logarithmic: two doublings."""
MOST = 150.0
"""The highest efficiency, in percent, that an axis reaches: few curves are super-linear, and none by more."""

Figure = Callable[[CurvePoint], Metric | None]


def efficiency_chart(
    name: str,
    curves: Sequence[Curve],
    shown: Looks,
    devices_word: str,
    *,
    chosen: Purchase | None = None,
    first: bool = False,
) -> Drawing | None:
    """Draw efficiencies, zoomed to the curves; None if only the baseline makes a claim."""
    claims = [point.efficiency for curve in curves for point in curve.points]
    if not any(claim.metric is not None and not claim.is_baseline for claim in claims):
        return None
    lines = _lines(curves, shown, _efficiency, scale=100)
    baselines = dict.fromkeys(claim.baseline.short for claim in claims if claim.baseline is not None)
    missing: dict[int, list[str]] = {}
    gone: dict[tuple[str, str], list[str]] = {}
    for curve in curves:
        for gap in (one for one in curve.gaps if not one.skipped):
            outcome = outcome_words(gap.outcome or "")
            missing.setdefault(gap.gpus, []).append(f"{curve.key.label}: {outcome}")
            gone.setdefault((curve.key.label, outcome), []).append(f"{gap.gpus:,}")
    named = [f"{who} on {listed(sizes, most=9)} ({how})" for (who, how), sizes in gone.items()]
    against = next(iter(baselines)) if len(baselines) == 1 else "each series' own smallest size"
    rules = [Rule(text="100 % ideal", y=100)]
    if chosen is not None:
        rules.append(Rule(text=f"to buy: {chosen.size}", x=chosen.gpus))
    return drawn(
        Chart(
            name=name,
            title=f"Efficiency against {against}, by {devices_word}",
            y_title=f"efficiency, % of {against}",
            x_title=devices_word,
            lines=lines,
            rules=tuple(rules),
            missing=tuple(
                (size, f"no result on {size:,}: {'; '.join(those)}")
                for size, those in sorted(missing.items())
            ),
            y_most=MOST,
            note=f"Crosses: no result of {listed(named, most=6, last='; ')}." if named else "",
            width=820 if first else _width(curves),
            height=220 if first else 330 if _width(curves) > FEW_WIDTH else 240,
        )
    )


def throughput_chart(name: str, curves: Sequence[Curve], shown: Looks, devices_word: str) -> Drawing | None:
    """Draw throughputs, on logarithmic axes where sizes double, so that no size is squashed; None for one
    size."""
    points = [point for curve in curves for point in curve.points]
    if len({point.gpus for point in points}) < 2:
        return None
    top = max(point.figures.throughput.value for point in points)
    by, prefix = next((one for one in ((1e9, "G "), (1e6, "M "), (1e3, "k ")) if top >= one[0]), (1.0, ""))
    scale = 1 / by
    unit = points[0].figures.throughput.unit
    sizes = {point.gpus for point in points}
    doubles = max(sizes) >= DOUBLED * min(sizes)
    singles = [curve.single for curve in curves if curve.single is not None]
    slope = [
        Rule(text="ideal", slope=scale * single.figures.throughput.value / single.gpus)
        for single in singles[:1]
    ]
    return drawn(
        Chart(
            name=name,
            title=f"Throughput, {prefix}{unit}, by {devices_word}",
            y_title=f"throughput, {prefix}{unit}",
            x_title=devices_word,
            lines=_lines(curves, shown, lambda point: point.figures.throughput, scale=scale),
            rules=tuple(slope),
            x_axis="log" if doubles else "linear",
            y_axis="log" if doubles else "linear",
            y_from=None if doubles else 0.0,
            width=_width(curves),
            height=330 if _width(curves) > FEW_WIDTH else 240,
        )
    )


def _width(curves: Sequence[Curve]) -> float:
    sizes = {point.gpus for curve in curves for point in curve.points}
    return FEW_WIDTH if len(sizes) <= FEW else 630


def _efficiency(point: CurvePoint) -> Metric | None:
    return point.efficiency.metric


def _lines(curves: Sequence[Curve], shown: Looks, figure: Figure, *, scale: float) -> tuple[Line, ...]:
    """The lines of curves with points, without the single device if it is the baseline of others."""
    several = any(curve.key.strategy != BASELINE_STRATEGY and curve.points for curve in curves)
    found = []
    for curve in curves:
        if several and curve.key.strategy == BASELINE_STRATEGY:
            continue
        points = tuple(
            _point(curve, point, value, scale)
            for point in curve.points
            if (value := figure(point)) is not None
        )
        if points:
            found.append(line_of(curve, shown, points, _start(curve, figure, scale)))
    return tuple(found)


def _start(curve: Curve, figure: Figure, scale: float) -> tuple[float, float] | None:
    """The single device that is a line's baseline, as the first vertex of efficiencies and throughputs."""
    single = curve.single
    first = min(point.gpus for point in curve.points)
    if single is None or single.gpus >= first or single.figures.no_claim is not None:
        return None
    if figure is _efficiency:
        return single.gpus, scale
    return single.gpus, single.figures.throughput.value * scale


def _point(curve: Curve, point: CurvePoint, value: Metric, scale: float) -> Point:
    figures = point.figures
    mean = figures.step_ns.value
    own = [value.value * scale * mean / step for step in figures.run_step_ns]
    where = devices(point.gpus, figures.cell.device)
    return interval_point(
        point.gpus,
        value,
        scale,
        runs=tuple(own),
        excluded=tuple(
            (
                value.value * scale * mean / left.run.step_ns.value,
                f"{left.run.run_id}, {duration(left.run.step_ns.value)}: {left.reason}",
            )
            for left in figures.pool.excluded
            if left.run.step_ns is not None
        ),
        label=f"{curve.key.label} on {where}: {metric(value)}; {runs_text(figures)}",
        href=f"{ROW}{figures.cell.id}",
        hollow=figures.no_claim is not None,
    )
