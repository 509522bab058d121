"""Comparison over one setting that the user names (`--compare-over`), although the work then differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from reports.analysis.exchange import FEW_RUNS, FEWEST_RUNS, incomparable
from reports.analysis.figures import CellFigures, OfCell
from reports.analysis.losses import WINDOW_SHARE, LossCurve, loss_curve
from reports.analysis.memory import cell_memories
from reports.analysis.scaling import unlike_conditions
from reports.analysis.series import SIZED, setting_labels, setting_of, value_text
from reports.analysis.study import StudyFigures
from results.cell import Cell
from results.errors import UsageError
from results.statistics import Metric, differences, ratio_of_runs

_FOLLOWS = {"accumulation": ("micro_batch",), "dataset": ("dataset_hash",)}
"""Other fields that follow from an axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverRow(OfCell):
    """One value of the axis."""

    value: str
    memory_bytes: int | None
    """The largest memory of any rank and run: the allocator's peak, or on a CPU the memory over idle."""
    ratio: Metric | None
    """Step time of the first value over its own: above 1 it is faster. None for the first."""
    absent: str | None
    """Why the ratio is missing or cannot be judged; None for the first."""
    loss: Metric | None
    """The mean over runs of the training loss after the samples that every run of the group trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverGroup:
    """Cells of one size that differ only in the axis; they have at least two values of it."""

    rows: tuple[OverRow, ...]
    """Rows in the order of the study; the others are compared with the first."""
    samples: int | None
    """The number of samples after which losses are compared; None if no losses can be compared."""
    setting: str = ""
    """Settings in which its cells differ from other groups of their workload, without the axis."""

    @property
    def cell(self) -> Cell:
        """A cell with the fields that the rows share, which are all but the axis."""
        return self.rows[0].figures.cell


def comparing_over(study: StudyFigures, axis: str) -> StudyFigures:
    """The study with a comparison over an axis. Raises UsageError if the axis has only one value."""
    if not over_groups(study, axis):
        flag = f"--{axis.replace('_', '-')}"
        values = list(dict.fromkeys(value_text(getattr(one.cell, axis)) for one in study.cells.values()))
        found = f"no two cells with figures differ only in it ({', '.join(values)} are there)"
        if len(values) < 2:
            found = f"all cells with a figure have {values[0]}" if values else "no cell has a figure"
        raise UsageError(
            f"--compare-over {flag[2:]}: {found}; measure several in one study: bench matrix {flag} A,B"
        )
    return replace(study, compare_over=axis)


def over_groups(study: StudyFigures, axis: str) -> list[OverGroup]:
    """The cells of each way to train, at the largest size at which most values of the axis have figures.

    If several cells have one value (such as of two step policies), the one that was planned last is used.
    """
    follow = (axis, *_FOLLOWS.get(axis, ()))
    ways: dict[tuple[object, ...], dict[int, dict[object, CellFigures]]] = {}
    for one in study.cells.values():
        # The fields that cells of one group share: all but the axis, the size and what follows from them.
        cell, but = one.cell, {*follow, *SIZED}
        strong = study.scalings.get(cell.id, ()) == ("strong",)
        batch = ("strong", cell.global_batch) if strong else ("weak", cell.batch_per_replica)
        shared = (getattr(cell, name) for name in cell.__struct_fields__ if name not in but)
        sizes = ways.setdefault((batch, *shared), {})
        sizes.setdefault(cell.gpus, {})[getattr(cell, axis)] = one
    memory = {one.cell.id: one.step_bytes for one in cell_memories(study)}
    found = []
    for sizes in ways.values():
        most = max(sizes, key=lambda gpus: (len(sizes[gpus]), gpus))
        if len(sizes[most]) > 1:
            found.append(_group(list(sizes[most].values()), axis, memory))
    # The settings that distinguish a group are named without the axis.
    alike = [
        msgspec.structs.replace(group.cell, **{name: getattr(found[0].cell, name) for name in follow})
        for group in found
    ]
    labels = setting_labels(alike)
    return [
        replace(group, setting=labels[setting_of(cell)]) for group, cell in zip(found, alike, strict=True)
    ]


def _group(cells: Sequence[CellFigures], axis: str, memory: dict[str, int | None]) -> OverGroup:
    # Losses on different data are not compared: they belong to different tasks.
    curves = {
        one.cell.id: [
            curve for run in one.runs if axis != "dataset" and (curve := loss_curve(one, run)) is not None
        ]
        for one in cells
    }
    samples = min((curve.samples for those in curves.values() for curve in those), default=None)
    rows = [
        OverRow(
            value=value_text(getattr(one.cell, axis)),
            figures=one,
            memory_bytes=memory[one.cell.id],
            ratio=_ratio(one, cells[0]),
            absent=_why_not(one, cells[0]),
            loss=None if samples is None else _loss(curves[one.cell.id], samples),
        )
        for one in cells
    ]
    return OverGroup(rows=tuple(rows), samples=samples)


def _ratio(one: CellFigures, first: CellFigures) -> Metric | None:
    if one is first or unlike_conditions(one, first) is not None:
        return None
    return ratio_of_runs(first.run_step_ns, one.run_step_ns, "x")


def _why_not(one: CellFigures, first: CellFigures) -> str | None:
    few = FEW_RUNS if min(len(one.runs), len(first.runs)) < FEWEST_RUNS else None
    return None if one is first else incomparable(one, first) or few


def _loss(curves: Sequence[LossCurve], samples: int) -> Metric | None:
    """The loss after `samples`. After a long proof, a run may have no loss before these."""
    early = (curve for curve in curves if curve.first * curve.global_batch < samples)
    losses = [curve.loss_after(samples, window=samples / WINDOW_SHARE) for curve in early]
    return differences(losses, "loss") if losses else None
