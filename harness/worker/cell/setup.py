"""Build what one cell needs on this rank, anew for each run: workload, data, Trainer and random state.

A description of the model that the workload's code built is recorded with each run, so that runs of unlike
programs are not pooled.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from harness.worker.cell.memory import MemoryLimit
from harness.worker.cell.rows import ExpertCounts
from harness.worker.cell.sampler import Draws, Sampler
from harness.worker.rank.context import RankContext
from harness.worker.rank.rank import Rank
from results.cell import Cell
from results.environment import Program
from results.errors import UsageError
from results.groups import GroupLayout
from results.layout import ModelLayout
from strategies.catalog import STRATEGIES, group_layout
from strategies.pipeline.chain import chained_layout
from strategies.trainer import Trainer
from strategies.training.loss import BatchLoss
from strategies.training.parallel import Blank, TrainSettings
from workloads.batch import Batch
from workloads.build import build_workload
from workloads.catalog import WORKLOADS, facts
from workloads.data import DataRequest, open_batches
from workloads.datasets.facts import DATASETS
from workloads.source import file_hash, imported_distributions, opened_files, source_hash
from workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSetup:
    """Builds workload, data and Trainer of a cell on this rank."""

    cell: Cell
    rank: Rank
    device: torch.device
    source_folder: Path | None
    memory: MemoryLimit = field(default_factory=MemoryLimit)
    """Limits what the strategy takes. What a proof adds is not limited."""

    @classmethod
    def of(cls, around: RankContext, cell: Cell) -> CellSetup:
        """Set up `cell` on this rank, with its memory limit. Made where the worker is idle."""
        return cls(
            cell=cell,
            rank=around.rank,
            device=around.device,
            source_folder=around.source_folder,
            memory=MemoryLimit(cell.memory_limit_mb, around.device),
        )

    def workload(self, *, with_values: bool = False) -> Workload:
        """A fresh model to train, with the cell's initial parameters: the same on every rank, every time.

        Where model and strategy can, it is on the meta device, and the strategy gives it its values a unit at
        a time; if `with_values`, it has all its values, whatever the strategy could do. Raises UsageError if
        a user's source or data file is not what the cell was planned with.
        """
        by_unit = STRATEGIES.facts(self.cell.strategy).by_unit and not with_values
        cell, folder = self.cell, self.source_folder or Path.cwd()
        workload, dataset = WORKLOADS.parse(cell.workload), DATASETS.facts(cell.dataset)
        if cell.source_hash is not None:
            _require_same(workload.text, cell.source_hash, source_hash(str(workload.positional), folder))
        if cell.dataset_hash is not None:
            _require_same(dataset.spec.text, cell.dataset_hash, file_hash(folder / str(dataset.file)))
        seed_torch(cell.seed)
        return build_workload(cell.workload, source_folder=self.source_folder, by_unit=by_unit)

    def program(self, module: nn.Module) -> Program:
        """Describe `module`, as this rank built it, before any strategy changes it."""
        known = facts(WORKLOADS.parse(self.cell.workload))
        folder = (self.source_folder or Path.cwd()).resolve()
        # Type and shape of each parameter and buffer, such as `float32 64x16`.
        tensors: dict[str, str] = {}
        for name, each in chain(module.named_parameters(), module.named_buffers()):
            shape = "unknown" if is_lazy(each) else "x".join(map(str, each.shape)) or "scalar"
            tensors[name] = f"{str(each.dtype).removeprefix('torch.')} {shape}"
        kinds = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in module.modules())
        return Program(
            names_hash=hashlib.sha256(repr(sorted(tensors.items())).encode()).hexdigest()[:16],
            tensors=dict(Counter(tensors.values())),
            modules=dict(kinds),
            distributions=imported_distributions(known.builder, folder) if known.own_code else {},
            files=opened_files(known.builder, folder) if known.own_code else {},
        )

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
    def node_size(self) -> int:
        """Ranks of a node: the virtual ones that were asked for, or the real ones of this launch."""
        return self.cell.node_size or self.rank.local_gpus

    @property
    def groups(self) -> GroupLayout:
        """The groups of all ranks, in every dimension."""
        return group_layout(self.cell.strategy, self.cell.gpus, self.node_size)

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
            settings=replace(TrainSettings.of(self.cell), node_size=self.node_size),
            layout=workload.layout
            if self.groups.pipeline == 1
            else layout_of(workload, self.cell.micro_batch),
            group=group,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The model, data and trainer that were built for one run."""

    setup: CellSetup
    workload: Workload
    trainer: Trainer
    batches: Draws
    blocks: Sequence[str]
    """Names of the modules of the bare model that are its blocks."""
    parameters: int
    """Parameters of the complete model."""
    deterministic: bool
    """Whether the user's code has asked cuDNN for deterministic algorithms."""
    rows: ExpertCounts


def keep_first(batches: Iterator[Batch], kept: list[Batch]) -> Iterator[Batch]:
    """Pass micro-batches on, and append the first one to `kept`."""
    for batch in batches:
        if not kept:
            kept.append(batch)
        yield batch


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
            f"{what} was edited after the cell was planned: run the same command again to plan it anew"
        )


def seed_torch(seed: int) -> None:
    """Seed torch on the CPU and on every CUDA device, as `torch.manual_seed` does.

    That function also formats a stack trace for each kind of device that is not in use yet: 0.5 to 2 ms a
    call, where a proof seeds torch for every step of every replica.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def seed_step(seed: int, step: int, replica: int) -> None:
    """Set the random state of one replica's step: what dropout draws follows from these three numbers.

    Python's and numpy's generators as well, which a user's model may draw from.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{replica}".encode()).digest()
    seed_torch(int.from_bytes(digest[:7], "big"))
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[:4], "big"))
