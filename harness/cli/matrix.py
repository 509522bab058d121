"""`bench matrix`: plan, launch, collect, report."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import click

from harness.cli.options import PlanCommand, plan_options, study_path


@click.command(cls=PlanCommand, name="matrix", short_help="Plan, launch, collect, report.")
@click.argument("study_file", required=False, metavar="[STUDY.yaml]")
@plan_options()
@click.option("--dry-run", is_flag=True, help="print the plan and the commands, and run nothing")
@click.option("--fresh", is_flag=True, help="measure again: in a new study, named after the time of day")
@click.option("--no-report", is_flag=True, help="leave the report for later: bench report STUDY")
@click.pass_obj
def matrix_command(
    arguments: tuple[str, ...],
    /,
    study_file: str | None,
    *,
    dry_run: bool,
    no_report: bool,
    fresh: bool,
    **flags: Any,
) -> int:
    """Plan a matrix of training jobs, run what is left of it, and write the report.

    STUDY.yaml can give every option, too (batch_size: 8,16); flags win. The same command again resumes
    where it stopped; with --fresh it measures all again, and ends with exit code 4 while another --fresh
    works on this host.
    """
    from harness.launchers.nights import night
    from harness.matrix import RUNS, Matrix
    from harness.plan.request import fresh_base, fresh_study
    from harness.plan.study_file import STUDY_FILE, StudyFile, merge

    path = study_path(study_file) if study_file else None
    given = StudyFile(**flags)
    options = merge(STUDY_FILE.read(path), given) if path else given
    if fresh:
        options = fresh_study(options, path)
        # A job that makes this call again continues the same study.
        arguments = (*(word for word in arguments if word != "--fresh"), "--name", str(options.name))
    matrix = Matrix(options, study_file=path, arguments=arguments)
    with night(fresh_base(str(options.name)), RUNS) if fresh and not dry_run else nullcontext():
        return matrix.carry_out(dry_run=dry_run, report=not no_report)
