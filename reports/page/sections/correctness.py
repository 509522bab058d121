"""Correctness: how each cell was checked, and the losses that training reached on real data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

from reports import fields
from reports.analysis.figures import NOT_CHECKED
from reports.analysis.losses import LossCurve, LossGroup, loss_group
from reports.analysis.study import StudyFigures
from reports.page.chart import drawn
from reports.page.description import Chart, Line, Rule, thinned
from reports.page.looks import Looks, looks, works
from reports.page.section import Block, Definition, Drawing, Drawings, Heading, Paragraph, Section, Table
from reports.table import Column, TextTable, figures, table, words
from reports.text import count, devices, number

_LOSS_DIGITS = 4
_SYNTHETIC = Paragraph(
    "The samples are synthetic and a model cannot learn from them, so no loss curve is drawn. First and last "
    "loss show that the update ran, not that a model is good.",
    "plain",
)
_SOME_SYNTHETIC = Paragraph(
    "Loss curves are drawn only for real data: a model cannot learn from synthetic samples.", "plain"
)
_NO_LOSSES = Paragraph("The data is real, but no counted run kept a loss for each step.", "plain")
_NO_ACCURACY = Paragraph(
    "Accuracy is not measured: no run evaluates its model on samples that it did not train on.", "plain"
)
_TARGET = Paragraph(
    "Losses are compared after the samples that all curves of a drawing were trained on. The target is the "
    "worst of them, so every exchange reaches it. The exchange that reaches it first trains fastest to an "
    "equal loss, whatever its step time is."
)
DEFINITIONS = (
    Definition(
        "method-bound",
        "Largest difference and its bound",
        "The largest difference of a gradient element from the reference, and the bound of the element "
        "that was nearest to its bound. A bound of 0 requires equality, bit for bit.",
    ),
    Definition(
        "method-replicas",
        "Replicas agree",
        "The number of counted runs in which the parameters of all ranks were equal bit for bit at the end.",
    ),
    Definition(
        "method-losses",
        "First and last loss",
        "The mean over ranks of the training loss of a run's first step (of the warm-up) and of its last, "
        "in the newest counted run. Runs end after different numbers of steps, as their warm-ups do: last "
        "losses after different numbers of samples do not compare.",
    ),
    Definition(
        "method-target",
        "Loss after the common samples, and time to the target",
        "The mean over the last tenth of the samples that all curves of the drawing were trained on, up to "
        "the last of them. The time to the target is the first step at which that running mean is at or "
        "below the target, times the cell's mean step time. Start-up, checks and pauses between blocks are "
        "not in it.",
    ),
)


def correctness_section(study: StudyFigures) -> Section | None:
    """Make the section; None if no cell has a figure."""
    if not study.cells:
        return None
    return Section(
        anchor="correctness",
        title="Training",
        blocks=(Paragraph(_finding(study)), *_losses(study), _NO_ACCURACY),
        definitions=DEFINITIONS,
    )


def target_table(group: LossGroup) -> TextTable:
    """One row a curve."""
    columns: list[Column[LossCurve]] = [
        words("strategy", attrgetter("label")),
        figures(
            f"loss after {count(group.samples, 'sample')}",
            lambda row: fields.number(group.final(row), digits=_LOSS_DIGITS),
            anchor="method-target",
        ),
        figures(
            "steps to the target",
            lambda row: fields.whole(group.steps_to_target(row)),
            anchor="method-target",
        ),
        figures(
            "time to the target", lambda row: fields.duration(group.ns_to_target(row)), anchor="method-target"
        ),
        figures(
            "step time", lambda row: fields.duration(row.figures.step_ns.value), anchor="method-step-time"
        ),
    ]
    return table(group.curves, columns)


def _finding(study: StudyFigures) -> str:
    """A sentence on how many cells were checked by which method, and why some strategies have no proof."""
    methods = Counter(cell.proof_method for cell in study.cells.values())
    reasons = sorted({why for cell in study.cells.values() if (why := cell.why_no_proof) is not None})
    told = "".join(f" Not checked: {why}." for why in reasons)
    checked = ", ".join(
        f"{cells:,} {name}" if name == NOT_CHECKED else f"{cells:,} by {name}"
        for name, cells in methods.items()
    )
    return f"Of {count(len(study.cells), 'cell')} with figures: {checked}.{told}"


def _losses(study: StudyFigures) -> Iterator[Block]:
    real = [not cell.cell.synthetic for cell in study.cells.values()]
    if not any(real):
        yield _SYNTHETIC
        return
    groups = [(title, group) for title, curves in works(study) if (group := loss_group(curves)) is not None]
    if not groups:
        yield _NO_LOSSES
        return
    yield Heading("Loss")
    yield _TARGET
    for place, (title, group) in enumerate(groups):
        yield from _drawn(study, title, group, place)
    if not all(real):
        yield _SOME_SYNTHETIC


def _drawn(study: StudyFigures, title: str, group: LossGroup, place: int) -> Iterator[Block]:
    common = f"{title}, {devices(group.gpus, group.curves[0].figures.cell.device)}"
    drawing = loss_curves(group, looks(study.curves), name=f"loss-{place}", common=common)
    yield Drawings((drawing,))
    if group.late:
        told = ", ".join(f"{curve.label} (after {curve.first:,} steps)" for curve in group.late)
        yield Paragraph(f"Left out, because their first loss came after another curve had ended: {told}.")
    yield Table(
        target_table(group), f"Time to a loss of {number(group.target, digits=_LOSS_DIGITS)}: {common}"
    )


def loss_curves(group: LossGroup, shown: Looks, *, name: str, common: str) -> Drawing:
    """Draw the smoothed losses, the single ones pale behind them, and the target as a line.

    `name` is unique on the page; `common` says in words what the curves share.
    """
    labels = "; ".join(f"{curve.label} {number(group.final(curve))}" for curve in group.curves)
    return drawn(
        Chart(
            name=name,
            title=f"Training loss by step, {common}",
            y_title="loss",
            x_title="step, from the first of the warm-up",
            lines=tuple(
                Line(
                    name=curve.label,
                    colour=shown[curve.label].colour,
                    dash="" if pale else shown[curve.label].dash,
                    points=thinned(
                        zip(curve.steps, curve.run.losses if pale else group.smoothed(curve), strict=True)
                    ),
                    plain=True,
                    pale=pale,
                )
                for pale in (True, False)
                for curve in group.curves
            ),
            rules=(Rule(text=f"target: {number(group.target)}", y=group.target),),
            x_axis="linear",
            note=f"After {count(group.samples, 'sample')}: {labels}.",
            sizes=False,
            switchable=False,
        )
    )
