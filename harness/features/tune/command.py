"""`bench tune`: the fastest setting that fits, found by measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.cli.options import PlanCommand, plan_options

_NOT_OF_A_TUNE = (
    *("scaling", "baseline", "selective_checkpointing", "isolation", "require", "rerun", "prune", "link"),
    *("jobs_per_cell", "feed", "report_job", "kind", "trace", "tensorboard", "keep_unfit", "proof", "until"),
)
"""Options of `bench matrix` that a tune decides itself, or lacks."""


@click.command(cls=PlanCommand, name="tune", short_help="Find the fastest setting that fits.")
@plan_options(without=_NOT_OF_A_TUNE)
@click.option(
    "--space", metavar="FILE", help="YAML file with the values to search, such as precision: fp32,bf16"
)
@click.option(
    "--dry-run", is_flag=True, help="print the size of the space and the longest search; run nothing"
)
@click.option("--no-report", is_flag=True, help="leave the report for later: bench report STUDY")
@click.pass_obj
def tune_command(
    arguments: tuple[str, ...], /, *, space: str | None, dry_run: bool, no_report: bool, **flags: Any
) -> int:
    """Find the setting of one workload on one size that has the most throughput and fits into memory.

    Short runs race; the best three and the default are then measured as an ordinary study, in runs/NAME. A
    flag with several values narrows or widens what is searched. The same command again continues where it
    stopped. docs/tuning.md says more.
    """
    from harness.features.tune.call import Tune
    from harness.plan.study_file import StudyFile

    tune = Tune(StudyFile(**flags), space_file=Path(space) if space else None, arguments=arguments)
    return tune.carry_out(dry_run=dry_run, report=not no_report)
