"""Weak and strong curves: efficiency and throughput against size, of every piece of work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reports.analysis.pieces import piece_of
from reports.analysis.scaling import Curve
from reports.analysis.size_to_buy import sizes_to_buy
from reports.analysis.study import StudyFigures
from reports.page.drawing import Drawing
from reports.page.looks import looks
from reports.page.scaling_charts import FEW, efficiency_chart, throughput_chart
from reports.page.section import Block, Bullets, Drawings, Paragraph, Section
from reports.page.works import works

_ABOUT = Paragraph(
    "Weak: the batch of a replica stays, and the work grows with the size. Strong: the global batch stays. "
    "Colours are strategies, dashes compressors and collectives; bars are intervals, small dots single runs, "
    "hollow points emulated.",
    "plain",
)


def curves_section(study: StudyFigures) -> Section | None:
    """None where no curve has two sizes."""
    groups = works(study)
    if not groups:
        return None
    shown = looks(study.curves)
    first = _of_first_screen(study)
    drawings: list[Drawing] = []
    for place, (title, curves) in enumerate(groups):
        work, name = f"{title}, {curves[0].key.kind}", f"curve-{place}"
        above = set(map(id, curves)) <= set(map(id, first))
        found = (
            None
            if above or not _bends(curves)
            else efficiency_chart(f"{name}-efficiency", curves, shown, study.devices_word),
            None
            if _told_by_efficiency(curves)
            else throughput_chart(f"{name}-throughput", curves, shown, study.devices_word),
        )
        drawings += [drawing.of(work) for drawing in found if drawing is not None]
    blocks: list[Block] = [_ABOUT, Drawings(tuple(drawings))] if drawings else []
    reasons = tuple(f"No efficiency for {reason}." for reason in no_claims(groups))
    if reasons:
        blocks.append(Bullets(reasons, "plain"))
    if not blocks:
        return None
    return Section(anchor="curves", title="Weak and strong curves", blocks=tuple(blocks))


def _told_by_efficiency(curves: Sequence[Curve]) -> bool:
    """Whether there are two sizes and one efficiency: it says all that a drawing would."""
    claims = [(point.gpus, point.efficiency) for curve in curves for point in curve.points]
    return len({gpus for gpus, _ in claims}) < FEW and any(
        claim.metric is not None and not claim.is_baseline for _, claim in claims
    )


def _bends(curves: Sequence[Curve]) -> bool:
    """Whether there is a claim at two sizes: of one there is no curve."""
    claims = [(point.gpus, point.efficiency) for curve in curves for point in curve.points]
    return len({gpus for gpus, claim in claims if claim.metric is not None and not claim.is_baseline}) > 1


def _of_first_screen(study: StudyFigures) -> tuple[Curve, ...]:
    """The curves whose efficiency the first screen shows."""
    for size in sizes_to_buy(study)[:1]:
        piece = piece_of(study.curves, size.workload, size.scaling)
        if piece is not None:
            return tuple(curve for curve in study.curves if curve in piece.curves)
    return ()


def no_claims(groups: list[tuple[str, tuple[Curve, ...]]]) -> Iterator[str]:
    """Why points have no efficiency: each reason once, with its points."""
    points: dict[str, dict[str, None]] = {}
    for curve in (curve for _, curves in groups for curve in curves):
        for point in curve.points:
            for claim in (point.single, point.own):
                if claim.baseline is not None and claim.reason is not None:
                    points.setdefault(claim.reason, {})[f"{curve.key.label} on {point.gpus:,}"] = None
    for reason, those in points.items():
        yield f"{', '.join(those)}: {reason}"
