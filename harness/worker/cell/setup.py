"""What one cell needs to run on this rank: workload, data and Trainer, built anew for each run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from harness.worker.cell.memory_limit import MemoryLimit
from harness.worker.cell.sampler import Draws, Sampler
from harness.worker.cell.seeds import seed_torch
from harness.worker.rank.rank import Rank
from results.cell import Cell
from results.errors import UsageError
from results.groups import GroupLayout
from results.layout import ModelLayout
from strategies.catalog import STRATEGIES, group_layout
from strategies.pipeline.chain import chained_layout
from strategies.training.loss import BatchLoss
from strategies.training.parallel import Blank
from strategies.training.trainer import Trainer, TrainSettings
from workloads.build import build_workload
from workloads.catalog import WORKLOADS
from workloads.data import DataRequest, open_batches
from workloads.datasets.facts import DATASETS
from workloads.source import file_hash, source_hash
from workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSetup:
    """Builds workload, data and Trainer of a cell on this rank."""

    cell: Cell
    rank: Rank
    device: torch.device
    source_folder: Path | None
    memory: MemoryLimit = field(default_factory=MemoryLimit)
    """What the strategy may take; what a proof adds is not under it."""

    def workload(self) -> Workload:
        """A fresh model to train, with the cell's initial parameters: the same on every rank, every time.

        Where model and strategy can, it is on the meta device, and the strategy gives it its values a unit at
        a time. Raises UsageError if a user's source or data file is not what the cell was planned with.
        """
        return self._built(by_unit=STRATEGIES.facts(self.cell.strategy).by_unit)

    def whole_workload(self) -> Workload:
        """As `workload`, with the values of the module in it."""
        return self._built(by_unit=False)

    def _built(self, *, by_unit: bool) -> Workload:
        self._check_files()
        seed_torch(self.cell.seed)
        return build_workload(self.cell.workload, source_folder=self.source_folder, by_unit=by_unit)

    def _check_files(self) -> None:
        folder = self.source_folder or Path.cwd()
        workload, dataset = WORKLOADS.parse(self.cell.workload), DATASETS.facts(self.cell.dataset)
        if self.cell.source_hash is not None:
            _require_same(workload.text, self.cell.source_hash, source_hash(str(workload.positional), folder))
        if self.cell.dataset_hash is not None:
            _require_same(dataset.spec.text, self.cell.dataset_hash, file_hash(folder / str(dataset.file)))

    def data_request(self, workload: Workload, replica: int) -> DataRequest:
        """Which batches a replica is given."""
        form = torch.channels_last if self.cell.memory_format == "channels_last" else torch.contiguous_format
        return DataRequest(
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

    def batches(self, workload: Workload, replica: int) -> Draws:
        """One replica's micro-batches from the first on."""
        sampler = Sampler(self.cell, workload, self.device, self.source_folder)
        return Draws(open_batches(self.data_request(workload, replica)), sampler)

    @property
    def _node_size(self) -> int:
        """Ranks of a node: the virtual ones that were asked for, or the real ones of this launch."""
        return self.cell.node_size or self.rank.local_gpus

    @property
    def groups(self) -> GroupLayout:
        """Of all ranks."""
        return group_layout(self.cell.strategy, self.cell.gpus, self._node_size)

    @property
    def replica(self) -> int:
        """The number of the replica that this rank is a part of."""
        return self.groups.replica(self.rank.rank)

    def trainer(self, workload: Workload, group: torch.distributed.ProcessGroup | None) -> Trainer:
        """The workload's model laid out over all ranks; collective. Raises UsageError if none trains."""
        if not any(parameter.requires_grad for parameter in workload.module.parameters()):
            raise UsageError(f"{self.cell.workload} has no parameter that could be trained")
        module, initial = workload.module, workload.initial
        return Trainer(
            module if initial is None else Blank(module, initial),
            workload.loss if workload.step is None else BatchLoss(workload.step),
            device=self.device,
            settings=replace(TrainSettings.of(self.cell), node_size=self._node_size),
            layout=workload.layout
            if self.groups.pipeline == 1
            else layout_of(workload, self.cell.micro_batch),
            group=group,
        )


def layout_of(workload: Workload, micro_batch: int) -> ModelLayout | None:
    """The layout that a pipeline cuts: the workload's, or the one that is found in a chain of modules.

    Raises UsageError if the model has to be a chain of modules and has another form.
    """
    if workload.layout is not None or workload.synthetic is None or workload.loss is None:
        return workload.layout
    batch = workload.synthetic(torch.Generator().manual_seed(0), micro_batch)
    inputs = batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch
    return chained_layout(workload.module, inputs)


def _require_same(what: str, planned: str, found: str) -> None:
    if planned != found:
        raise UsageError(
            f"{what} was edited after the cell was planned: run the same command again for a cell of its own"
        )
