"""One cell trained on this rank, from its last checkpoint to its end, with a rank record of how it went."""

from __future__ import annotations

import time
import traceback
import weakref
from pathlib import Path

import torch

from harness.worker.cell.memory import MemoryLimit
from harness.worker.cell.setup import CellSetup, seed_step
from harness.worker.measure.scalars import Scalars, live_scalars
from harness.worker.rank.context import Ending, PartialRecord, RankContext
from harness.worker.rank.control import parameters_hash
from harness.worker.rank.failure import classify
from harness.worker.train.loop import LoopParts, TrainingLoop
from harness.worker.train.rules import cell_on, rate_scale
from results.cell import Cell
from results.launch import Slot
from results.outcome import Outcome
from results.record import RankRecord
from results.store import utc_now
from results.train_order import TrainOrder
from strategies.catalog import STRATEGIES
from strategies.training.trainer import Trainer
from workloads.training_data import open_training, require_epochs


class TrainingRun:
    """A cell in training; its record has how far it came."""

    def __init__(self, around: RankContext, slot: Slot, cell: Cell, order: TrainOrder) -> None:
        self._around, self._slot, self._planned, self._order = around, slot, cell, order
        self._started_at = utc_now()
        self._found = PartialRecord(clock="monotonic", spent_ns={}, trained_steps=0)
        self._absent: dict[str, str] = {}
        self._model: weakref.ref[torch.nn.Module] | None = None

    @property
    def model_is_gone(self) -> bool:
        """Whether the model of this run has been freed."""
        return self._model is None or self._model() is None

    def execute(self) -> RankRecord:
        """Train the cell. An exception becomes an outcome in the record, never more."""
        outcome, reason = Outcome.OK, None
        try:
            self._execute()
        except (Exception, SystemExit) as error:
            # The border of a run, as that of a measured one.
            traceback.print_exc()
            outcome, reason = classify(error)
            self._around.log.event("failed", outcome=outcome, reason=reason)
        ending = Ending(outcome=outcome, reason=reason, started_at=self._started_at)
        return self._around.record(self._slot, self._planned, ending, self._found, self._absent)

    def _execute(self) -> None:
        around = self._around
        around.log.event("build")
        around.exchange.reset()
        cell = cell_on(self._planned, around.rank.gpus, self._order.batch_rule)
        setup = CellSetup(
            cell=cell,
            rank=around.rank,
            device=around.device,
            source_folder=around.source_folder,
            memory=MemoryLimit(cell.memory_limit_mb, around.device),
        )
        with setup.memory.kept(), live_scalars(self._scalars_folder()) as scalars:
            self._train(setup, scalars)
        self._absent |= scalars.absent

    def _train(self, setup: CellSetup, scalars: Scalars) -> None:
        around, began = self._around, time.perf_counter_ns()
        workload = setup.workload()
        self._model = weakref.ref(workload.module)
        request = setup.data_request(workload, setup.replica)
        if self._order.epochs is not None:
            require_epochs(request)
        data = open_training(request)
        trainer = setup.trainer(workload, around.exchange)
        parts = LoopParts(
            around=around,
            slot=self._slot,
            cell=setup.cell,
            trainer=trainer,
            data=data,
            request=request,
            scalars=scalars,
            scale=rate_scale(self._planned, setup.cell, self._order.batch_rule),
        )
        loop = TrainingLoop(parts)
        trainer.attach(data=data)
        seed_step(setup.cell.seed, 0, setup.replica)
        self._found["setup_ns"] = time.perf_counter_ns() - began
        around.log.event("resume")
        resumed = trainer.resume(parts.checkpoints)
        try:
            loop.train(None if resumed is None else resumed.step)
        finally:
            self._found["trained_steps"] = trainer.steps
        self._add_hash(trainer)

    def _add_hash(self, trainer: Trainer) -> None:
        trainer.model.settle()
        if STRATEGIES.facts(self._planned.strategy).promise.all_equal:
            self._found["parameters_hash"] = parameters_hash(trainer)
        else:
            self._absent["parameters_hash"] = f"{self._planned.strategy} does not keep all replicas equal"

    def _scalars_folder(self) -> Path | None:
        around = self._around
        if not around.launch.tensorboard or around.rank.rank:
            return None
        return around.study.scalars_folder(around.launch.launch_id, 0, self._slot.cell_id)
