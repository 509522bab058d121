"""Train one cell: steps, rows of the training log, validation, checkpoints, and the end.

Between two agreements ranks only train. They agree at the end of each row of steps, validation and
checkpoint; what follows (an end, the length of the next row) follows from figures that all of them have.
"""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from harness.features.train.files import checkpoints_folder, log_path, weights_path
from harness.features.train.log import (
    Ended,
    EndReason,
    Row,
    SavedCheckpoint,
    Started,
    Steps,
    TrainingLog,
    TrainingLogWriter,
    Validated,
)
from harness.features.train.order import MetricName, TrainOrder, larger_is_better
from harness.features.train.worker.rules import (
    cell_on,
    is_best,
    out_of_patience,
    rate_at,
    rate_scale,
    row_steps,
    total_steps,
)
from harness.worker.cell.memory import MemoryUse, reset_peaks
from harness.worker.cell.sampler import batch_print
from harness.worker.cell.setup import CellSetup, keep_first, seed_step
from harness.worker.measure.scalars import Scalars
from harness.worker.proof.causes import named_causes
from harness.worker.proof.fingerprints import shared_batches
from harness.worker.rank.context import Run
from harness.worker.rank.failure import DivergedError
from harness.worker.rank.log import HEARTBEAT_S
from results.cell import Cell
from results.errors import StoreError, UsageError
from results.plan import read_values
from results.store import utc_now
from strategies.evaluation import evaluate
from strategies.saving.checkpoints import Saving
from strategies.saving.run_folder import RunFolder
from strategies.saving.state import require_attachable
from strategies.trainer import Trainer
from workloads.batch import Batch
from workloads.datasets.facts import DATASETS, Own
from workloads.training_data import held_out, open_training, require_epochs
from workloads.workload import Workload

_ENDS: tuple[EndReason, ...] = ("epochs", "steps", "target", "patience")
Figures = Mapping[str, float]


class TrainingDivergedError(DivergedError):
    """A DivergedError that names the checkpoint that is left and what can be done; raised on all ranks."""

    def __init__(self, words: str) -> None:
        Exception.__init__(self, words)


class Rate:
    """The rates of an optimizer at each step: its initial rates, or a schedule's rates, times a factor."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._schedule: LRScheduler | None = None
        self._stepped = 0
        self.factor: Callable[[int], float] = lambda step: 1.0

    def follow(self, make: Callable[[Optimizer, int], LRScheduler], total: int) -> None:
        """Take the rates from a schedule that `make` returns for this optimizer and `total` steps.

        Every launch steps the schedule from the beginning, so that checkpoints need not contain it, and an
        order for more steps makes it longer. Raises UsageError if `make` returns anything else.
        """
        self._put_rates()
        for group in self._optimizer.param_groups:
            # An earlier launch's schedule has left its own value in the checkpoint.
            group.pop("initial_lr", None)
        schedule = make(self._optimizer, total)
        if not isinstance(schedule, LRScheduler) or isinstance(schedule, ReduceLROnPlateau):
            raise UsageError(
                f"schedule= made a {type(schedule).__name__}: it is called with an optimizer and a number of "
                f"steps, and makes a schedule of torch.optim.lr_scheduler other than ReduceLROnPlateau"
            )
        require_attachable("schedule=", schedule, self._optimizer)
        self._schedule, self._rates = schedule, [group["lr"] for group in self._optimizer.param_groups]

    def put(self, step: int) -> float:
        """Set the rates of a step, counted from 0. Returns the rate of the first group."""
        self._put_rates()
        if self._schedule is not None:
            with warnings.catch_warnings():
                # This optimizer has not counted the steps of earlier launches.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                while self._stepped < step:
                    self._schedule.step()
                    self._stepped += 1
            self._rates = [group["lr"] for group in self._optimizer.param_groups]
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self.factor(step)
        return float(self._optimizer.param_groups[0]["lr"])

    def _put_rates(self) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


def train_cell(run: Run, values: Mapping[str, Any]) -> None:
    """Train the cell of `run` by a stored order; collective. The run's record states the last step."""
    around, order = run.around, read_values(values, TrainOrder)
    run.found["trained_steps"] = 0
    around.log.event("build")
    around.exchange.reset()
    memory = MemoryUse(around.device)
    setup = CellSetup.of(around, cell_on(run.cell, around.rank.gpus, order.batch_rule))
    run.absent |= reset_peaks(around.device)
    folder = None if around.rank.rank else run.scalars_folder
    named = named_causes(setup, around.log.heartbeat)
    with named, setup.memory.kept(), closing(Scalars(folder)) as scalars:
        TrainingLoop(run, order, setup, scalars).train()
    run.found["memory"] = memory.record()
    run.absent |= scalars.absent


class TrainingLoop:
    """Trains one cell on this rank, from its last checkpoint until an end that was ordered."""

    def __init__(self, run: Run, order: TrainOrder, setup: CellSetup, scalars: Scalars) -> None:
        """Build the model, its data and its trainer; collective.

        Raises UsageError on all ranks where the order asks for figures that cannot be had.
        """
        began = time.perf_counter_ns()
        self._run, self._around, self._order, self._setup = run, run.around, order, setup
        self._workload = setup.workload()
        run.model = weakref.ref(self._workload.module)
        request = setup.data_request(self._workload, setup.replica)
        if order.epochs is not None:
            require_epochs(request)
        self._data = open_training(request)
        # Only a user's code can give the same samples to several replicas.
        self._own_data = DATASETS.facts(request.dataset).takes == Own.takes
        self._trainer = setup.trainer(self._workload, self._around.exchange)
        # Made before the trainer resumes, because it takes the rates with which the optimizer was built.
        self._rate = Rate(self._trainer.optimizer)
        order.require_metrics(self._workload.metrics)
        forward_alone = self._trainer.model.forward_alone
        found = held_out(request)
        _require_validation(order, setup.cell, held_out=found is not None, forward_alone=forward_alone)
        self._held_out = found if forward_alone else None
        first = self._around.rank.rank == 0
        self._records = _Records(run, order, self._trainer, scalars) if first else None
        self._checkpoints = checkpoints_folder(self._around.study, run.slot.cell_id)
        self._total = 0
        self._loss = torch.zeros((), dtype=torch.float64, device=self._around.device)
        self._row_began = self._next_row = 0
        """Step after which the row under way began, and step at which it ends."""
        self._mark = 0.0
        self._learning_rate = 0.0
        self._pending: tuple[Saving, SavedCheckpoint] | None = None
        """The last checkpoint, and its row, until it is known how it ended."""
        self._trainer.attach(data=self._data)
        seed_step(setup.cell.seed, 0, setup.replica)
        run.found["setup_ns"] = time.perf_counter_ns() - began

    def train(self) -> None:
        """Train from the last checkpoint to the end; collective. Raises as `_steps`."""
        self._around.log.event("resume")
        resumed = self._trainer.resume(self._checkpoints)
        try:
            self._steps(None if resumed is None else resumed.step)
        finally:
            self._run.found["trained_steps"] = self._trainer.steps
        self._run.add_parameters_hash(self._trainer)

    def _steps(self, resumed_step: int | None) -> None:
        """Collective. Raises TrainingDivergedError, UsageError for a warm-up without steps behind it, and
        StoreError where the log or the last checkpoint cannot be written."""
        order, trainer, data = self._order, self._trainer, self._data
        self._total = total_steps(
            order,
            step=trainer.steps,
            samples=data.samples,
            per_epoch=data.samples_per_epoch,
            per_step=self._setup.cell.global_batch,
        )
        if order.warmup_steps and order.warmup_steps >= self._total:
            raise UsageError(
                f"--warmup-steps {order.warmup_steps} leaves nothing of {self._total} steps (--epochs "
                f"{order.epochs}): give fewer of them, or more epochs"
            )
        self._rate.factor = rate_at(
            order, self._total, rate_scale(self._run.cell, self._setup.cell, order.batch_rule)
        )
        schedule = self._workload.schedule
        if schedule is not None and order.schedule != "none":
            raise UsageError(
                f"--schedule {order.schedule}: the workload gives a schedule= as well; leave one of them out"
            )
        if schedule is not None:
            self._rate.follow(schedule, self._total)
        self._row_began, self._next_row = trainer.steps, trainer.steps + 1
        if self._records is not None:
            self._records.start(self._workload, self._setup.cell.replicas, resumed_step, self._total)
        self._around.log.event("train", step=trainer.steps, total=self._total)
        self._mark = time.perf_counter()
        end, _ = self._decided({})
        kept: list[Batch] = []
        batches = keep_first(data, kept) if self._own_data else data
        while end is None:
            self._learning_rate = self._rate.put(trainer.steps)
            epochs = data.epoch
            self._loss += trainer.step(batches).detach().double()
            if kept:
                # All ranks have their first micro-batch, and compare it.
                prints = self._around.control.of_all([batch_print(kept.pop())])
                warning = shared_batches(prints, self._setup.groups)
                if warning is not None:
                    self._run.warnings.append(warning)
                batches = data
            self._around.log.heartbeat()
            end = self._after_step(epoch_ended=data.epoch > epochs)
        self._end(end)

    def _after_step(self, *, epoch_ended: bool) -> EndReason | None:
        """Write a row, validate and save if this is due after a step; collective if something is due."""
        step, order = self._trainer.steps, self._order
        saves, last = step % order.checkpoint_every == 0, step >= self._total
        due = epoch_ended if self._data.samples_per_epoch is not None else saves
        if order.validate_every is not None:
            due = step % order.validate_every == 0
        validates = self._held_out is not None and (last or due)
        if not (saves or last or validates or step >= self._next_row):
            return None
        figures = {"loss": self._row()} | (self._validate() if validates else {})
        end, best = self._decided(figures, at_row=not (saves or last or validates))
        if saves or best or end is not None:
            self._save(figures, best=best)
        self._mark = time.perf_counter()
        return end

    def _row(self) -> float:
        """End a row of steps. Returns its mean loss over all ranks; collective.

        Raises TrainingDivergedError on all ranks if the loss of one is not finite.
        """
        control, steps = self._around.control, self._trainer.steps - self._row_began
        own = float(self._loss)
        seconds = time.perf_counter() - self._mark
        every = control.of_all([own, seconds])
        loss = sum(total for total, _ in every) / len(every) / steps
        longest = max(took for _, took in every)
        if not math.isfinite(loss):
            raise TrainingDivergedError(self._diverged())
        if self._records is not None:
            norm = self._trainer.gradient_norm
            self._records.add_steps(
                Steps(
                    at=utc_now(),
                    step=self._trainer.steps,
                    epoch=self._data.epochs,
                    samples=self._data.samples,
                    loss=loss,
                    seconds=longest,
                    learning_rate=self._learning_rate,
                    gradient_norm=None if norm is None else float(norm),
                ),
                samples_per_s=steps * self._setup.cell.global_batch / longest,
            )
            self._settle_last()
        self._loss.zero_()
        self._row_began = self._trainer.steps
        self._next_row = self._trainer.steps + row_steps(longest / steps)
        self._mark = time.perf_counter()
        return loss

    def _diverged(self) -> str:
        self._await_last()
        kept = RunFolder(self._checkpoints).kept()
        left = f"the last good checkpoint is {kept[-1].path}" if kept else "there are no earlier checkpoints"
        return (
            f"the loss is not finite (NaN or infinity) within steps {self._row_began + 1} to "
            f"{self._trainer.steps}; {left}: lower the rate (--optimizer), clip (--clip-norm 1) or look at "
            f"the data"
        )

    def _validate(self) -> dict[str, float]:
        began = time.perf_counter()
        assert self._held_out is not None
        batches = self._with_signs_of_life(self._held_out)
        found = evaluate(self._trainer, batches, metrics=self._workload.metrics)
        figures = {name: value for name, value in found.items() if math.isfinite(value)}
        if self._records is not None:
            self._records.add(
                Validated(
                    at=utc_now(),
                    step=self._trainer.steps,
                    epoch=self._data.epochs,
                    metrics=figures,
                    not_finite=tuple(found.keys() - figures),
                    seconds=time.perf_counter() - began,
                )
            )
        return figures

    def _with_signs_of_life(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            yield batch
            self._around.log.heartbeat()

    def _decided(self, figures: Figures, *, at_row: bool = False) -> tuple[EndReason | None, bool]:
        """Whether and why training ends now, and whether a metric is the best so far, as rank 0 decides."""
        code = 0
        if self._records is not None:
            end, best = self._records.judge(figures, at_row=at_row)
            if end is None and self._trainer.steps >= self._total:
                end = "epochs" if self._order.epochs is not None else "steps"
            code = 2 * (0 if end is None else 1 + _ENDS.index(end)) + best
        agreed = int(self._around.control.from_first(float(code)))
        return (_ENDS[agreed // 2 - 1] if agreed > 1 else None), bool(agreed % 2)

    def _save(self, figures: Figures, *, best: bool) -> None:
        """Begin to write a checkpoint during training, once the one before is written; collective."""
        began, metric = time.perf_counter(), self._order.best
        value = None if metric is None else figures.get(metric)
        least = -value if value is not None and metric is not None and larger_is_better(metric) else value
        self._await_last()
        saving = self._trainer.save(
            self._checkpoints, keep=self._order.keep, metric=least, metric_name=metric, asynchronous=True
        )
        row = SavedCheckpoint(at="", step=self._trainer.steps, seconds=time.perf_counter() - began, best=best)
        self._pending = saving, row
        self._around.log.heartbeat()

    def _await_last(self) -> str | None:
        """Wait for the checkpoint under way, if there is one. Returns why it was not written, or None.

        Not collective.
        """
        if self._pending is None:
            return None
        saving, _ = self._pending
        while not saving.ends_within(HEARTBEAT_S):
            self._around.log.heartbeat()
        saving.wait()
        self._settle_last()
        return saving.failure

    def _settle_last(self) -> None:
        """Write the row of a checkpoint of which it is known how it ended. Not collective."""
        if self._pending is None or not self._pending[0].done:
            return
        (saving, row), self._pending = self._pending, None
        if self._records is not None:
            failed = saving.failure
            best = row.best and failed is None
            self._records.add(msgspec.structs.replace(row, at=utc_now(), failed=failed, best=best))

    def _end(self, why: EndReason) -> None:
        """Wait for the last checkpoint, and export the model, before recording that training has ended;
        collective.

        Raises StoreError on all ranks if one of them could not be written.
        """
        if self._trainer.steps and self._pending is None:
            self._save({}, best=False)
        failed = self._await_last()
        if failed is not None:
            raise StoreError(
                f"training ended at step {self._trainer.steps}, and its last checkpoint was not "
                f"written: {failed}; the same command resumes from the one before"
            )
        self._around.log.event("export")
        self._trainer.export(weights_path(self._around.study, self._run.cell.id))
        if self._records is not None:
            self._records.end(why, self._trainer.steps)
        self._around.log.event("trained", why=why, step=self._trainer.steps)


def _require_validation(order: TrainOrder, cell: Cell, *, held_out: bool, forward_alone: bool) -> None:
    """Raise UsageError if validation is asked for, and data or strategy cannot give it."""
    asking = " and ".join(flag for flag, metric in order.asked.items() if metric != "loss")
    if order.validates and not held_out:
        raise UsageError(
            f"{asking} needs held-out samples, and dataset {cell.dataset} of {cell.workload} lacks them: use "
            f"real data (--dataset digits), give the workload held_out=, or ask for the metric loss"
        )
    if order.validates and not forward_alone:
        raise UsageError(
            f"{asking} needs validation, which {cell.strategy} cannot do: it has no separate forward pass; "
            f"use another strategy, or the metric loss"
        )


class _Records:
    """The training log, which rank 0 writes, and the ends that it decides on."""

    def __init__(self, run: Run, order: TrainOrder, trainer: Trainer, scalars: Scalars) -> None:
        self._run, self._order, self._trainer, self._scalars = run, order, trainer, scalars
        self._rows: list[Row] = []
        self._writer: TrainingLogWriter | None = None

    def start(self, workload: Workload, replicas: int, resumed_step: int | None, total: int) -> None:
        around, slot = self._run.around, self._run.slot
        path = log_path(around.study, slot.cell_id)
        self._rows = list(TrainingLog.read(path).rows)
        self._writer = TrainingLogWriter(path)
        self.add(
            Started(
                at=utc_now(),
                run_id=slot.run_id,
                launch_id=around.launch.launch_id,
                gpus=around.rank.gpus,
                replicas=replicas,
                resumed_step=resumed_step,
                order=self._order,
                total_steps=total,
                unit=workload.unit,
                units_per_sample=workload.units_per_sample,
            )
        )
        self._rows = list(TrainingLog(tuple(self._rows)).counted)

    def add(self, row: Row) -> None:
        assert self._writer is not None
        self._rows.append(row)
        self._writer.write(row)
        if isinstance(row, Validated):
            self._scalars.point(row.step, row.metrics)

    def add_steps(self, row: Steps, *, samples_per_s: float) -> None:
        self.add(row)
        figures = {"loss": row.loss, "learning_rate": row.learning_rate, "samples_per_s": samples_per_s}
        norm = {} if row.gradient_norm is None else {"gradient_norm": row.gradient_norm}
        self._scalars.point(row.step, figures | norm)

    def judge(self, figures: Figures, *, at_row: bool) -> tuple[EndReason | None, bool]:
        """Whether target or patience end training with these figures, and whether they have the best value.

        Without figures it judges the checkpoint that training resumes from.
        """
        log = TrainingLog(tuple(self._rows))
        figures = figures or log.figures_at(self._trainer.steps)
        goal, watched, best = self._order.goal, self._order.watched, not at_row and self._is_best(log)
        if goal is not None and goal.metric in figures and goal.reached(figures[goal.metric]):
            return "target", best
        if at_row or watched is None:
            return None, best
        values = [value for _, value in self._points(log, watched)]
        return ("patience" if out_of_patience(values, watched, self._order.patience) else None), best

    def _points(self, log: TrainingLog, metric: MetricName) -> list[tuple[int, float]]:
        """A metric at each validation; the loss at each checkpoint."""
        if metric == "loss":
            every = self._order.checkpoint_every
            return [(row.step, row.loss) for row in log.steps if row.step % every == 0]
        return [
            (row.step, row.metrics.get(metric, math.nan))
            for row in log.validations
            if metric in (*row.metrics, *row.not_finite)
        ]

    def _is_best(self, log: TrainingLog) -> bool:
        """Whether the last value of the metric is from this step and as good as the best one."""
        metric = self._order.best
        points = [] if metric is None else self._points(log.since_best_by(metric), metric)
        if metric is None or not points or points[-1][0] != self._trainer.steps:
            return False
        return is_best(points[-1][1], [value for _, value in points], metric)

    def end(self, why: EndReason, step: int) -> None:
        words: dict[EndReason, str] = {
            "epochs": f"{self._order.epochs} epochs, {step} steps",
            "steps": f"{step} steps",
            "target": f"{self._order.target} was reached at step {step}",
            "patience": f"{self._order.patience} validations in a row had no better {self._order.watched}",
        }
        self.add(Ended(at=utc_now(), step=step, why=why, words=words[why]))
