"""One cell trained on this rank, from its last checkpoint to the end that was ordered."""

from __future__ import annotations

import time
import weakref

from harness.worker.cell.setup import CellSetup, seed_step
from harness.worker.measure.scalars import Scalars, live_scalars
from harness.worker.rank.context import Run
from harness.worker.train.loop import LoopParts, TrainingLoop
from harness.worker.train.rules import cell_on, rate_scale
from results.train_order import TrainOrder
from workloads.training_data import open_training, require_epochs


def train_cell(run: Run, order: TrainOrder) -> None:
    """Train the cell of `run` as ordered; collective. The run's record has how far it came."""
    around = run.around
    run.found["trained_steps"] = 0
    around.log.event("build")
    around.exchange.reset()
    setup = CellSetup.of(around, cell_on(run.cell, around.rank.gpus, order.batch_rule))
    folder = None if around.rank.rank else run.scalars_folder
    with setup.memory.kept(), live_scalars(folder) as scalars:
        _train(run, order, setup, scalars)
    run.absent |= scalars.absent


def _train(run: Run, order: TrainOrder, setup: CellSetup, scalars: Scalars) -> None:
    began = time.perf_counter_ns()
    workload = setup.workload()
    run.model = weakref.ref(workload.module)
    request = setup.data_request(workload, setup.replica)
    if order.epochs is not None:
        require_epochs(request)
    data = open_training(request)
    trainer = setup.trainer(workload, run.around.exchange)
    parts = LoopParts(
        run=run,
        order=order,
        setup=setup,
        trainer=trainer,
        data=data,
        request=request,
        scalars=scalars,
        scale=rate_scale(run.cell, setup.cell, order.batch_rule),
    )
    loop = TrainingLoop(parts)
    trainer.attach(data=data)
    seed_step(setup.cell.seed, 0, setup.replica)
    run.found["setup_ns"] = time.perf_counter_ns() - began
    run.around.log.event("resume")
    resumed = trainer.resume(parts.checkpoints)
    try:
        loop.train(None if resumed is None else resumed.step)
    finally:
        run.found["trained_steps"] = trainer.steps
    run.add_parameters_hash(trainer)
