"""What a cell is called in a sentence."""

from __future__ import annotations

from reports.analysis.series import setting_of
from reports.analysis.study import StudyFigures
from reports.text import batch
from results.cell import Cell
from results.label import label


def cell_label(study: StudyFigures, cell: Cell) -> str:
    """`ddp x 16, 8 / 128`: its strategy, size, batch per replica and global batch, and what else tells it."""
    setting = study.settings[setting_of(cell)]
    workloads = {pool.cell.workload for pool in study.pools.values()}
    workload = f"{cell.workload}, " if len(workloads) > 1 else ""
    return f"{workload}{label(cell)} x {cell.gpus:,}, {batch(cell)}{f', {setting}' if setting else ''}"
