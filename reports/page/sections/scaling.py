"""Weak and strong scaling: throughput, speed-up and efficiency against size, with their baselines named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from reports.analysis.scaling import Curve
from reports.analysis.study import StudyFigures
from reports.page import tables
from reports.page.curves import efficiency_drawing, speed_up_drawing, throughput_drawing
from reports.page.groups import CurveGroup, LineStyles, line_styles
from reports.page.section import Block, Bullets, Drawings, Heading, Paragraph, Section, Table
from reports.page.svg import Drawing
from reports.page.works import works
from results.plan import Scaling

_ABOUT = {
    "weak": "The batch per replica stays, and the work grows with the size.",
    "strong": "The global batch stays, and each replica's share of it shrinks with the size.",
}
_BARS = Markup(
    '{} Bars around a mark are the <a href="#method-interval">interval</a> of the table below the drawing.'
)


def weak_section(study: StudyFigures) -> Section:
    return _section(study, "weak")


def strong_section(study: StudyFigures) -> Section:
    return _section(study, "strong")


def _section(study: StudyFigures, kind: Scaling) -> Section:
    styles = line_styles(study.curves)
    blocks: list[Block] = [Paragraph(_BARS.format(_ABOUT[kind]))]
    groups = [work for work in works(study) if work[1][0].key.kind == kind]
    for place, (title, curves) in enumerate(groups):
        group = CurveGroup(
            name=f"{kind}-{place}", title=title, curves=curves, devices_word=study.devices_word
        )
        blocks += _part(study, group, styles)
    if not groups:
        blocks.append(Paragraph(f"No {kind} series has a figure.", "plain"))
    return Section(anchor=kind, title=f"{kind.capitalize()} scaling", blocks=tuple(blocks))


def _part(study: StudyFigures, group: CurveGroup, styles: LineStyles) -> Iterator[Block]:
    yield Heading(group.title)
    yield Drawings((throughput_drawing(group, styles), *_claims(group, styles)))
    data = tables.scaling_table(study, group.curves)
    yield Table(data, f"Baselines: {'; '.join(_baselines(group.curves))}")
    reasons = tables.no_claim_reasons(group.curves)
    if reasons:
        yield Bullets(tuple(f"No efficiency for {reason}." for reason in reasons), "plain")


def _claims(group: CurveGroup, styles: LineStyles) -> tuple[Drawing, ...]:
    """Speed-up and efficiency, where there is one that is not its own baseline."""
    claims = [point.efficiency for curve in group.curves for point in curve.points]
    if not any(claim.metric is not None and not claim.is_baseline for claim in claims):
        return ()
    return speed_up_drawing(group, styles), efficiency_drawing(group, styles)


def _baselines(curves: Sequence[Curve]) -> tuple[str, ...]:
    singles = [curve.single for curve in curves if curve.single is not None]
    first = f"single device: {singles[0].label}" if singles else "single device: none ran this work"
    taken = {single.figures.cell.id for single in singles}
    owns = [curve.own for curve in curves if curve.own is not None]
    return (first, *(f"own smallest: {own.label}" for own in owns if own.figures.cell.id not in taken))
