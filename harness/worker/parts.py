"""What one cell needs to run on this rank: workload, data and Trainer, built anew for each run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.worker.rank import Rank
from results.cell import Cell
from strategies.parallel import Batch
from strategies.trainer import Trainer, TrainSettings
from workloads.build import build_workload
from workloads.data import DataRequest, open_batches
from workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How to build the parts of a cell on this rank."""

    cell: Cell
    rank: Rank
    device: torch.device
    source_folder: Path | None

    def workload(self) -> Workload:
        """A fresh model with the cell's initial parameters: the same on every rank, every time."""
        torch.manual_seed(self.cell.seed)
        return build_workload(self.cell.workload, source_folder=self.source_folder)

    def batches(self, workload: Workload, replica: int) -> Iterator[Batch]:
        """One replica's micro-batches from the first on."""
        form = torch.channels_last if self.cell.memory_format == "channels_last" else torch.contiguous_format
        return open_batches(
            DataRequest(
                workload=workload,
                dataset=self.cell.dataset,
                micro_batch=self.cell.micro_batch,
                replica=replica,
                replicas=self.cell.replicas,
                seed=self.cell.seed,
                device=self.device,
                memory_format=form,
                source_folder=self.source_folder,
            )
        )

    def trainer(self, workload: Workload, group: torch.distributed.ProcessGroup) -> Trainer:
        """The workload's model laid out over all ranks; collective."""
        return Trainer(
            workload.module,
            workload.loss,
            device=self.device,
            settings=TrainSettings.of(self.cell),
            layout=workload.layout,
            group=group,
        )
