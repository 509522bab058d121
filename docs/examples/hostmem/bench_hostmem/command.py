"""`bench hostmem`: measure how fast the hosts of a cluster copy memory."""

from __future__ import annotations

from typing import Any

import click

from harness.cli.options import PlanCommand, plan_options
from harness.plan.study_file import OPTIONS

KEPT = (
    *("gpus", "gpus_per_node", "oversubscribe", "repeats", "name", "out"),
    *("launcher", "site", "partition", "account", "qos", "time"),
)
"""Options of `bench matrix` that the command has; the others are about steps."""


@click.command(cls=PlanCommand, name="hostmem", short_help="Measure how fast hosts copy memory.")
@click.option("--mib", type=click.IntRange(min=1), default=256, show_default=True, help="array of each rank")
@plan_options(without=[option.name for option in OPTIONS if option.name not in KEPT])
@click.option("--dry-run", is_flag=True, help="print the plan and the commands, and run nothing")
@click.pass_obj
def hostmem_command(arguments: tuple[str, ...], /, *, mib: int, dry_run: bool, **flags: Any) -> int:
    """Let --gpus ranks copy an array at once, and show how fast each host is: runs/hostmem/report.html."""
    from harness.matrix import Matrix
    from harness.plan.study_file import StudyFile
    from results.cell import REFERENCE_STRATEGY
    from results.plan import Order

    class HostMemory(Matrix):
        order = Order(kind="hostmem", values={"mib": mib})

    flags["name"] = flags["name"] or "hostmem"
    # The ranks run no model: the cell only says how many there are, and where.
    options = StudyFile(
        **flags, workload="mlp", strategy=REFERENCE_STRATEGY, batch_size="1", baseline=False, device="cpu"
    )
    call = HostMemory(options, study_file=None, arguments=arguments)
    if dry_run:
        call.show()
        return 0
    return call.run(report=True)
