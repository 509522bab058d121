"""`bench network`: measure collectives over groups of ranks, or read them from nccl-tests or rccl-tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.cli.options import PlanCommand, plan_options

_OF_STEPS = (
    *("workload", "strategy", "batch_size", "global_batch_size", "scaling", "baseline", "dataset"),
    *("precision", "accumulation", "optimizer", "clip_norm", "compile", "memory_format", "seed", "target"),
    *("activation_checkpointing", "selective_checkpointing", "memory_limit_mb", "keep_unfit", "require"),
    *("warmup_steps", "block_steps", "quads", "prune", "compression", "collective", "jobs_per_cell", "until"),
    *("report_job", "trace", "tensorboard", "rerun", "proof", "isolation"),
)
"""Options of `bench matrix` about steps, which a measurement of the network lacks."""


@click.command(cls=PlanCommand, name="network", short_help="Measure collectives over groups of ranks.")
@click.argument("study", required=False, metavar="[STUDY]")
@click.option("--collectives", metavar="NAME,...", help="what is measured [default: docs/network.md]")
@click.option("--max-mib", type=click.IntRange(min=1), help="largest array [default: what fits]")
@click.option("--read", "read", multiple=True, metavar="FILE", help="read the output of nccl-tests instead")
@plan_options(without=_OF_STEPS)
@click.option("--dry-run", is_flag=True, help="print the plan and the commands, and run nothing")
@click.option("--no-report", is_flag=True, help="leave the page for later: bench report STUDY")
@click.pass_obj
def network_command(
    arguments: tuple[str, ...],
    /,
    study: str | None,
    *,
    collectives: str | None,
    max_mib: int | None,
    read: tuple[str, ...],
    **flags: Any,
) -> int:
    """Measure the collectives of a network by group size and array size: the network table network.json.

    With STUDY (a folder) the ranks are placed as the ranks of the study's largest cell, and the table is also
    written into the study's folder, where its report shows it. The measurement has a folder runs/NAME. The
    same command again continues after an interruption, and writes the table of jobs that have ended.
    """
    from harness.features.network.call import Network, collectives_of, options_of, read_outputs
    from harness.features.network.order import NetworkOrder
    from harness.plan.study_file import StudyFile
    from results.store import Study

    dry_run, report = flags.pop("dry_run"), not flags.pop("no_report")
    beside = None if study is None else Study.existing(Path(study))
    options = StudyFile(**flags)
    if read:
        return read_outputs([Path(path) for path in read], beside, options)
    order = NetworkOrder(
        collectives=collectives_of(beside, collectives),
        largest_bytes=None if max_mib is None else max_mib * 2**20,
    )
    options = options if beside is None else options_of(beside, options)
    network = Network(options, order, beside=beside, arguments=arguments)
    return network.carry_out(dry_run=dry_run, report=report)
