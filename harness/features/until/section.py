"""The growth of a study by rounds: when and why each series has ended."""

from __future__ import annotations

from harness.features.until.rounds import growing
from reports.analysis.study import StudyFigures
from reports.page.section import Bullets, Paragraph, Section
from reports.text import count, moment, percent


def growth_section(study: StudyFigures) -> Section | None:
    """Make the section; None for a study that does not grow by rounds."""
    plans = list({plan.cells: plan for plan in study.plans if plan.round}.values())
    numbers = {plan.round.number for plan in study.plans if plan.round}
    series = growing(study, plans)
    if not series:
        return None
    end = "goes on" if any(one.cell_ids for one in series) else "has stopped"
    told = (
        f"The study grew by {count(len(numbers), 'round')} until a size to buy has odds of "
        f"{percent(series[0].odds)}, and {end}. The last round was planned {moment(plans[-1].created_at)}."
    )
    adaptive = (
        "Intervals of this study are adaptive: what had been measured decided how often each size ran, so "
        "that sizes near the answer have more runs than others. The odds hold under this rule."
    )
    sentences = Bullets(tuple(one.sentence for one in series))
    blocks = (Paragraph(told, "finding"), sentences, Paragraph(adaptive, "plain"))
    return Section(anchor="growth", title="Growth", blocks=blocks)
