"""The growth of a study by rounds: when and why each series has ended."""

from __future__ import annotations

from collections.abc import Iterator

from harness.features.until.rounds import growing
from reports.analysis.study import StudyFigures
from reports.page.section import Block, Bullets, Paragraph, Section
from reports.text import count, moment, percent


def growth_section(study: StudyFigures) -> Section | None:
    """Make the section; None for a study that does not grow by rounds."""
    blocks = tuple(_blocks(study))
    return Section(anchor="growth", title="Growth", blocks=blocks) if blocks else None


def _blocks(study: StudyFigures) -> Iterator[Block]:
    last = max((plan.round.number for plan in study.plans if plan.round), default=0)
    plans = [plan for plan in study.plans if plan.round and plan.round.number == last]
    if not plans:
        return
    series = growing(study, plans)
    rounds = len({plan.round.number for plan in study.plans if plan.round})
    odds = plans[0].round.odds if plans[0].round else 0.0
    end = "goes on" if any(one.cell_ids for one in series) else "has stopped"
    yield Paragraph(
        f"The study grew by {count(rounds, 'round')} until a size to buy has odds of {percent(odds)}, "
        f"and {end}. The last round was planned {moment(plans[0].created_at)}.",
        "finding",
    )
    yield Bullets(tuple(one.sentence for one in series))
    yield Paragraph(
        "Intervals of this study are adaptive: what had been measured decided how often each size ran, so "
        "that sizes near the answer have more runs than others. The odds hold under this rule.",
        "plain",
    )
