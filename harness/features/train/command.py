"""`bench train`: plan, launch, train to completion, report."""

from __future__ import annotations

from typing import Any, get_args

import click

from harness.cli.options import PlanCommand, plan_options, study_path
from harness.features.train.order import (
    CHECKPOINT_EVERY,
    KEEP,
    RESTARTS,
    BatchRule,
    Schedule,
    TrainOrder,
    read_elastic,
)
from workloads.shape import METRICS

NOT_OF_TRAINING = (
    *("budget", "target", "warmup_steps", "block_steps", "quads", "repeats", "until", "baseline", "trace"),
    *("isolation", "prune", "rerun", "report_job", "proof"),
)
"""Options of a measurement, which training lacks."""


@click.command(
    cls=PlanCommand, name="train", short_help="Train cells to completion, through crashes and restarts."
)
@click.argument("subject", required=False, metavar="[CELL|STUDY.yaml]")
@click.option("--epochs", type=int, help="passes over the data; this or --steps")
@click.option("--steps", type=int, help="updates of the optimizer")
@click.option("--checkpoint-every", type=int, default=CHECKPOINT_EVERY, show_default=True, help="steps")
@click.option("--keep", type=int, default=KEEP, show_default=True, help="last checkpoints that stay")
@click.option(
    "--best",
    metavar="METRIC",
    help=f"keep the best checkpoint by {', '.join(METRICS)} or one of the workload's metrics",
)
@click.option("--patience", type=int, help="end after this number of validations without a better value")
@click.option("--target", help="end when a validation reaches it: 'val_accuracy>=0.97'")
@click.option("--validate-every", type=int, help="steps [default: each epoch, else each checkpoint]")
@click.option(
    "--schedule",
    type=click.Choice(get_args(Schedule)),
    default="none",
    show_default=True,
    help="schedule of the learning rate, over the ordered steps",
)
@click.option("--warmup-steps", type=int, default=0, help="steps in which the schedule raises the rate")
@click.option(
    "--restarts",
    type=int,
    default=RESTARTS,
    show_default=True,
    help="maximum number of launches that follow failed ones",
)
@click.option(
    "--elastic", metavar="MIN:MAX", help="continue on fewer nodes, at least MIN, after one was lost"
)
@click.option(
    "--batch-rule",
    type=click.Choice(get_args(BatchRule)),
    default="global",
    show_default=True,
    help="on fewer nodes keep the global batch, or scale the rate with the replicas",
)
@plan_options(without=NOT_OF_TRAINING)
@click.option("--dry-run", is_flag=True, help="print the plan and the commands, and run nothing")
@click.option("--no-report", is_flag=True, help="leave the page for later: bench report STUDY")
@click.pass_obj
def train_command(
    arguments: tuple[str, ...], /, subject: str | None, *, dry_run: bool, no_report: bool, **flags: Any
) -> int:
    """Train to completion the cells of a matrix, as `bench matrix` plans it, or one CELL of a study.

    CELL is a folder such as runs/demo/cells/NAME. A launch that crashes, hangs or is preempted is started
    again and resumes from its last checkpoint; so does the same command. docs/training.md says more.
    """
    from harness.features.train.call import Train
    from harness.plan.study_file import STUDY_FILE, StudyFile, merge

    fields = {name: flags.pop(name) for name in TrainOrder.__struct_fields__ if name in flags}
    if fields["elastic"] is not None:
        fields["elastic"] = read_elastic(fields["elastic"])
    order, given = TrainOrder(**fields), StudyFile(**flags)
    path = study_path(subject) if subject else None
    cell = path if path is not None and path.is_dir() else None
    file = path if path is not None and cell is None else None
    options = merge(STUDY_FILE.read(file), given) if file else given
    train = Train(options, order, study_file=file, cell=cell, arguments=arguments)
    return train.carry_out(dry_run=dry_run, report=not no_report)
