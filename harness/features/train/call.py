"""`bench train`: a study whose cells are trained to completion, by the launchers that measure cells."""

from __future__ import annotations

from pathlib import Path

import msgspec

from harness.features.train.conduct import TrainConduct, lost_checkpoints
from harness.features.train.files import checkpoints_folder, weights_path
from harness.features.train.log import SavedCheckpoint, TrainingLog, training_log
from harness.features.train.order import TrainOrder
from harness.features.train.trained import told_not_finite
from harness.features.train.worker.rules import cell_on
from harness.launchers.launcher import JobLauncher
from harness.launchers.registry import launcher, launchers
from harness.matrix import Matrix
from harness.plan.launchers import DEFAULT
from harness.plan.points import unsplittable, workloads_of
from harness.plan.request import plain_name
from harness.plan.study_file import OPTIONS, StudyFile
from harness.reporting.assumptions import CostFlags
from harness.reporting.report import write_report
from harness.reporting.studies import read_figures
from reports.text import count
from results.errors import UsageError, bench_call
from results.plan import Plan, Request, placement_of, read_values
from results.rebuild import rebuilt_plan
from results.run import RunResult
from results.store import Study
from strategies.refusal import untrainable
from workloads.catalog import WORKLOADS, facts
from workloads.datasets.facts import DATASETS

OF_THE_CALL = (
    *("name", "out", "launcher", "site", "partition", "account", "qos", "cpus_per_gpu", "time", "feed"),
    *("max_gpu_hours", "oversubscribe", "max_time", "hang_after", "retries", "tensorboard", "require"),
)
"""Options that may be given with a CELL, which itself says what is trained."""


class Train(Matrix):
    """One `bench train` call."""

    short_order = TrainOrder(steps=4, checkpoint_every=2, validate_every=2, keep=1, restarts=0).stored

    def __init__(
        self,
        options: StudyFile,
        order: TrainOrder,
        *,
        study_file: Path | None = None,
        cell: Path | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        """Train the matrix of `options`, or the cell whose folder is `cell`."""
        _require_launcher(order, options)
        self._training, self.order = order, order.stored
        self._one = None if cell is None else _plan_of(cell)
        given = [
            option.flag
            for option in OPTIONS
            if option.name not in OF_THE_CALL and getattr(options, option.name) is not None
        ]
        if cell is not None and given:
            raise UsageError(
                f"a cell is trained as it is: leave out {', '.join(given)}, or give the flags of a matrix "
                f"and no CELL"
            )
        if study_file is not None and options.name is None and options.out is None:
            # The plain name is for the study that measures the cells of the same file.
            options = msgspec.structs.replace(options, name=f"{plain_name(study_file.stem)}-train")
        super().__init__(options, study_file=study_file, arguments=arguments)

    def _folder_name(self) -> str:
        if self._name is not None or self._one is None:
            return f"{'' if self._name else 'train-'}{super()._folder_name()}"
        return f"train-{self._one.cells[0].id}"

    def _requested(self, options: StudyFile, folder: Path) -> tuple[Request, ...]:
        asked = (self._one.request,) if self._one is not None else super()._requested(options, folder)
        return tuple(msgspec.structs.replace(request, repeats=1) for request in asked)

    def _plans(self, study: Study) -> list[Plan]:
        if self._one is None:
            plans = super()._plans(study)
        else:
            self._require_one_kind(study)
            plan = msgspec.structs.replace(
                self._one,
                study=self._name or study.name,
                request=self._request,
                command=self._arguments,
                order=self.order,
            )
            plans = [plan]
        for plan in plans:
            _require_elastic(plan)
        return plans

    def _check(self) -> None:
        super()._check()
        texts = {text for request in self._requests for text in workloads_of(request)}
        if all(facts(WORKLOADS.parse(text)).builder.startswith("workloads.") for text in texts):
            # bench's workloads have no own metrics. Ranks build all others, and check their metrics.
            self._training.require_metrics(())
        for dataset in dict.fromkeys(request.dataset for request in self._requests):
            if DATASETS.facts(dataset).takes is not None:
                continue
            if self._training.epochs is not None:
                raise UsageError(
                    f"--epochs {self._training.epochs}: {dataset} data have no epochs; give --steps, or real "
                    f"data (--dataset)"
                )
            if self._training.validates:
                raise UsageError(
                    f"{dataset} data have no held-out samples, which the metrics val_loss and val_accuracy "
                    f"need: use real data (--dataset digits), or the metric loss"
                )

    def _finish(self, study: Study, plan: Plan, results: list[RunResult], *, report: bool) -> int:
        done = TrainConduct(plan).done(study)
        lost = [words for cell in plan.cells if (words := lost_checkpoints(study, cell.id)) is not None]
        for cell in plan.cells:
            log = training_log(study, cell.id)
            for line in told_run(study, cell.id, log):
                self._console.result(line)
        if report:
            (figures,) = read_figures([str(study.root)], CostFlags(), self._console)
            write_report(study, figures, self._console)
        left = len(plan.cells) - len(done)
        if left:
            self._console.note(
                f"{count(left, 'cell')} of {len(plan.cells)} not trained to completion; why: "
                f"{bench_call('status', study.root)}; run the same command again after the reason is removed"
            )
        for words in lost:
            self._console.error(words)
        return max(int(left > 0 or bool(lost)), self._without_cells(plan))


def _require_launcher(order: TrainOrder, options: StudyFile) -> None:
    """Raise UsageError for a launcher that does not train, or does not train as the order requires."""
    chosen = launcher(options.launcher or DEFAULT)
    if order.elastic is not None and chosen.several_hosts:
        raise UsageError(
            f"--elastic works only with virtual nodes of this host so far: leave --launcher {chosen.name} or "
            f"--elastic out"
        )
    if not chosen.trains:
        others = " or ".join(each.name for each in launchers() if each.trains)
        raise UsageError(f"bench train has no --launcher {chosen.name}: use {others}")
    if isinstance(chosen, JobLauncher) and options.time is None:
        raise UsageError(
            "how long a job trains is not known beforehand: give its limit, such as --time 2h; the same "
            "command resumes where it stopped"
        )


def _require_elastic(plan: Plan) -> None:
    """Raise UsageError for cells that cannot be trained on every number of nodes that may be left."""
    assert plan.order is not None
    order = read_values(plan.order.values, TrainOrder)
    if order.elastic is None:
        return
    least, most = order.elastic
    for cell in plan.cells:
        placement = placement_of(cell, plan.request.gpus_per_node)
        if placement.nodes != most or most < 2:
            raise UsageError(
                f"--elastic {least}:{most}: {cell.id} is on {count(placement.nodes, 'node')}, and training "
                f"begins on all of its nodes, at least 2: give --elastic MIN:{max(2, placement.nodes)}; the "
                f"nodes of this host are virtual ones, such as --gpus 2 --link 1gbit has"
            )
        for gpus in range(least * placement.gpus_per_node, cell.gpus, placement.gpus_per_node):
            fitted = cell_on(cell, gpus, order.batch_rule)
            refused = untrainable(fitted) or unsplittable(fitted)
            if refused is not None:
                raise UsageError(
                    f"{cell.id} cannot continue on {count(gpus, 'worker')} (micro-batch "
                    f"{fitted.micro_batch}, accumulation {fitted.accumulation}): {refused}; leave --elastic "
                    f"out, or give a larger MIN"
                )


def told_run(study: Study, cell_id: str, log: TrainingLog) -> list[str]:
    """Report how the training of a cell went, in a few lines."""
    if not log.rows:
        return [f"{cell_id}: never began"]
    end = "not at its end" if log.ended is None else f"ended: {log.ended.words}"
    lines = [f"{cell_id}: {end}"]
    figures = [f"loss {log.steps[-1].loss:.4g}"] if log.steps else []
    if log.validations:
        figures += [f"{name} {value:.4g}" for name, value in sorted(log.validations[-1].metrics.items())]
    if figures:
        lines.append(f"  step {log.step:,}: {', '.join(figures)}")
    goodput = "" if log.goodput is None else f", goodput {100 * log.goodput:.0f} %"
    lines.append(f"  {count(log.restarts, 'restart')}, {log.wasted_steps} steps done again{goodput}")
    lines += [f"  {sentence}" for sentence in told_not_finite(log)]
    failed = [row for row in log.rows if isinstance(row, SavedCheckpoint) and row.failed is not None]
    if failed:
        lines.append(f"  {len(failed)} checkpoints were not written, the last one: {failed[-1].failed}")
    lines.append(f"  checkpoints: {checkpoints_folder(study, cell_id)}")
    if log.ended is not None and (weights := weights_path(study, cell_id)).exists():
        lines.append(f"  weights of the end: {weights}")
    return lines


def _plan_of(folder: Path) -> Plan:
    """Plan one cell of a study. Raises UsageError if `folder` is not the folder of a cell."""
    root = folder.resolve().parents[1] if len(folder.resolve().parents) > 1 else folder
    if folder.resolve().parent.name != "cells" or not Study(root).is_there:
        raise UsageError(
            f"{folder} is not the folder of a cell: name one such as runs/STUDY/cells/CELL, or a study file "
            f"(STUDY.yaml)"
        )
    study = Study(root)
    cell = study.cell(folder.resolve().name)
    plan = rebuilt_plan(study.name, [cell], study.launches())
    source = next((one.request for one in study.plans() if cell in one.cells), plan.request)
    names = ("node_size", "clip_norm", "activation_checkpointing", "compile", "memory_format", "env")
    request = msgspec.structs.replace(
        plan.request,
        source_folder=source.source_folder,
        gpus_per_node=source.gpus_per_node,
        links=(cell.link,),
        **{name: getattr(cell, name) for name in (*names, "memory_limit_mb")},
    )
    return msgspec.structs.replace(plan, request=request)
