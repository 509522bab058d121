"""Weak and strong curves: a chart of efficiency and one of throughput against size for each piece of work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from reports.analysis.headline import runs_text
from reports.analysis.outcomes import outcome_words
from reports.analysis.scaling import Curve, CurvePoint, piece_of
from reports.analysis.size_to_buy import Purchase, sizes_to_buy
from reports.analysis.study import StudyFigures
from reports.page.chart import drawn
from reports.page.description import Axis, Chart, Line, Point, Rule, interval_point
from reports.page.looks import ROW, Looks, WorkCurves, line_of, looks, works
from reports.page.section import Block, Bullets, Drawing, Drawings, Paragraph, Section, absent
from reports.text import devices, duration, listed, metric
from results.cell import BASELINE_STRATEGY
from results.grouping import grouped
from results.statistics import Metric

_ABOUT = Paragraph(
    "Weak: the batch of a replica is constant, and the work grows with the size. Strong: the global batch "
    "is constant. Colours are strategies, dashes compressors and collectives; bars are intervals, small "
    "dots single runs, hollow points emulated or not proven.",
    "plain",
)


def curves_section(study: StudyFigures) -> Section | None:
    """Make the section; None if no curve has two sizes."""
    groups = works(study)
    found = tuple(_drawings(study, groups))
    blocks: list[Block] = [_ABOUT, Drawings(found)] if found else []
    reasons = tuple(f"No efficiency for {reason}." for reason in _no_claims(groups))
    if reasons:
        blocks.append(Bullets(reasons, "plain"))
    if not blocks:
        few = "not available: a curve needs three sizes with a figure"
        return absent("curves", "Weak and strong curves", few) if study.cells else None
    return Section(anchor="curves", title="Weak and strong curves", blocks=tuple(blocks))


def _drawings(study: StudyFigures, groups: Sequence[WorkCurves]) -> Iterator[Drawing]:
    """The drawings of each piece of work, without the one on the first screen."""
    shown, first = looks(study.curves), _first(study)
    for place, (title, curves) in enumerate(groups):
        work, given = f"{title}, {curves[0].key.kind}", (curves, shown, study.devices_word)
        points = [point for curve in curves for point in curve.points]
        claimed = {point.gpus for point in points if _claims(point)}
        drawings: list[Drawing | None] = []
        # One claim is not a curve, and for two sizes a drawing would only show one efficiency.
        if len(claimed) > 1 and not set(map(id, curves)) <= first:
            drawings.append(efficiency_chart(f"curve-{place}-efficiency", *given))
        if not claimed or len({point.gpus for point in points}) >= FEW:
            drawings.append(throughput_chart(f"curve-{place}-throughput", *given))
        yield from (drawing.of(work) for drawing in filter(None, drawings))


def _first(study: StudyFigures) -> set[int]:
    """The identities of the curves whose efficiency the first screen shows."""
    for size in sizes_to_buy(study)[:1]:
        piece = piece_of(study.curves, size.workload, size.scaling)
        return set(map(id, piece.curves)) if piece else set()
    return set()


def _claims(point: CurvePoint) -> bool:
    """Whether it has an efficiency against another point."""
    return point.efficiency.metric is not None and not point.efficiency.is_baseline


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
    points = [point for curve in curves for point in curve.points]
    if not any(map(_claims, points)):
        return None
    claims = [point.efficiency for point in points]
    baselines = dict.fromkeys(claim.baseline.name for claim in claims if claim.baseline is not None)
    against = next(iter(baselines)) if len(baselines) == 1 else "each series' own smallest size"
    missing, note = _gaps(curves)
    width, height = (820, 220) if first else _room(points)
    rules = [Rule(text="100 % ideal", y=100)]
    if chosen is not None:
        rules.append(Rule(text=f"to buy: {chosen.size}", x=chosen.gpus))
    return drawn(
        Chart(
            name=name,
            title=f"Efficiency against {against}, by {devices_word}",
            y_title=f"efficiency, % of {against}",
            x_title=devices_word,
            lines=_lines(curves, shown, _efficiency, scale=100),
            rules=tuple(rules),
            missing=missing,
            y_most=MOST,
            note=note,
            width=width,
            height=height,
        )
    )


def _gaps(curves: Sequence[Curve]) -> tuple[tuple[tuple[float, str], ...], str]:
    """The sizes at which a curve has no result, each with what is missing, and a note that names them."""
    gaps = [(curve.key.label, gap) for curve in curves for gap in curve.gaps if not gap.skipped]
    told = [(who, gap.gpus, outcome_words(gap.outcome or "")) for who, gap in gaps]
    missing = grouped((size, f"{who}: {how}") for who, size, how in told)
    gone = grouped(((who, how), f"{size:,}") for who, size, how in told)
    named = [f"{who} on {listed(sizes, most=9)} ({how})" for (who, how), sizes in gone.items()]
    return (
        tuple((size, f"no result on {size:,}: {'; '.join(missing[size])}") for size in sorted(missing)),
        f"Crosses: no result of {listed(named, most=6, last='; ')}." if named else "",
    )


def throughput_chart(name: str, curves: Sequence[Curve], shown: Looks, devices_word: str) -> Drawing | None:
    """Draw throughputs, on logarithmic axes where sizes double, so that no size is squashed; None for one
    size."""
    points = [point for curve in curves for point in curve.points]
    sizes = {point.gpus for point in points}
    if len(sizes) < 2:
        return None
    by, prefix = _prefix(max(point.figures.throughput.value for point in points))
    scale, unit = 1 / by, points[0].figures.throughput.unit
    doubles = max(sizes) >= DOUBLED * min(sizes)
    singles = [curve.single for curve in curves if curve.single is not None]
    slopes = [scale * single.throughput.value / single.cell.gpus for single in singles[:1]]
    axis: Axis = "log" if doubles else "linear"
    width, height = _room(points)
    return drawn(
        Chart(
            name=name,
            title=f"Throughput, {prefix}{unit}, by {devices_word}",
            y_title=f"throughput, {prefix}{unit}",
            x_title=devices_word,
            lines=_lines(curves, shown, lambda point: point.figures.throughput, scale=scale),
            rules=tuple(Rule(text="ideal", slope=slope) for slope in slopes),
            x_axis=axis,
            y_axis=axis,
            y_from=None if doubles else 0.0,
            width=width,
            height=height,
        )
    )


def _prefix(top: float) -> tuple[float, str]:
    """The divisor by which a rate is shown, and its prefix."""
    return next((one for one in ((1e9, "G "), (1e6, "M "), (1e3, "k ")) if top >= one[0]), (1.0, ""))


def _room(points: Sequence[CurvePoint]) -> tuple[float, float]:
    """The width and the height of a chart, which is small for few sizes."""
    few = len({point.gpus for point in points}) <= FEW
    return (FEW_WIDTH, 240) if few else (630, 330)


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
    if single is None or single.cell.gpus >= first or single.no_claim is not None:
        return None
    if figure is _efficiency:
        return single.cell.gpus, scale
    return single.cell.gpus, single.throughput.value * scale


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
