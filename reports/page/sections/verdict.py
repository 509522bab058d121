"""The verdict: how it scales and why, in a few sentences."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from reports.analysis.budget import RESIDUAL_ABOVE
from reports.analysis.compression import FEWEST_RUNS
from reports.analysis.knee import PAYS_FROM
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.scalability import LITTLE
from reports.analysis.verdict.verdict import verdict
from reports.page.section import Block, Bullets, Definition, Heading, Paragraph, Section
from reports.text import percent

_HOW = Markup(
    'Made from the figures below, of which only measured ones count; <a href="#method-verdict">by these '
    "rules</a>."
)


def verdict_section(study: StudyFigures) -> Section:
    """The first thing on the page."""
    return Section(
        anchor="verdict", title="Verdict", blocks=tuple(_blocks(study)), definitions=(_DEFINITION,)
    )


def _blocks(study: StudyFigures) -> Iterator[Block]:
    found = verdict(study)
    if not found.workloads:
        yield Bullets(found.sentences)
        return
    for one in found.workloads:
        if len(found.workloads) > 1:
            yield Heading(one.workload)
        yield Bullets(one.sentences)
    yield Paragraph(_HOW, "plain")


_DEFINITION = Definition(
    "method-verdict",
    "Verdict",
    Markup(
        "Per workload and kind of scaling: of the pieces of work (batch, setting, link) with most measured "
        "sizes, the one with the highest throughput. No difference is shown where the interval of the ratio "
        "of two throughputs holds 1. Knee: growing from n to m devices pays while each added one brings at "
        "least {pays} of what each brought before, <code>(X(m) / X(n) - 1) / (m / n - 1)</code> with X the "
        "throughput in samples a second, which for a doubling is an efficiency of 75 %; an interval must lie "
        "below as a whole, and above as a whole before a knee is ruled out. Fewer than {runs} runs of "
        "anything compared make no more than a seeming best. Plain data parallelism: the fastest that "
        "exchanges whole gradients in every step by the backend's own collectives; it has a sentence where "
        "another way is ahead. Lost: <code>step time - C(n0) (W(n) / n) / (W(n0) / n0)</code>, with C the "
        "compute of the baseline's budget and W the samples of a step; it is taken apart at the first size "
        "beyond the knee, else at the largest, and below {little} of a step nothing is blamed. Nor is it "
        "where the parts miss the step by more than {rest} of it and by more than half of the part that "
        "would be named. A part is named alone if it is the largest in every run, each held against every "
        "run of the baseline, and its lead is above zero by a one-sided Student's t at 95 %; else all that "
        "may be the largest are named, with the ranges of their runs. The cheapest: by the cost of a million "
        "samples."
    ).format(pays=percent(PAYS_FROM), little=percent(LITTLE), rest=percent(RESIDUAL_ABOVE), runs=FEWEST_RUNS),
)
