"""`bench project`: the larger sizes of a study, with bands, or why none is known and what would lift that."""

from __future__ import annotations

from typing import Any

import click

from harness.cli.report import price_options


@click.command(name="project")
@click.argument("study", metavar="STUDY")
@click.option("--to", type=click.IntRange(min=2), required=True, metavar="N", help="the largest size")
@click.option(
    "--network", metavar="FILE", help="a network table of bench network, by which steps are replayed"
)
@click.option(
    "--what-if",
    multiple=True,
    metavar="TERM=VALUE",
    help="replay the larger sizes on another network: inter_node_gbps or intra_node_gbps, the highest busbw "
    "of its largest groups between or inside nodes, where the table has one",
)
@price_options
def project_command(
    study: str, *, to: int, network: str | None, what_if: tuple[str, ...], **prices: Any
) -> int:
    """Project the series of STUDY (a folder) to N devices, and write STUDY/projection.json.

    A size is projected only where a law is known to be right (docs/projection.md), with a band of 80 %; each
    other size is refused, with the cheapest measurement that lifts the refusal. bench report draws the
    projection, and says when the study has changed since.
    """
    from harness.features.project.call import project
    from harness.reporting.assumptions import CostFlags
    from harness.terminal.console import Console

    project(study, to, CostFlags(**prices), Console(), network=network, what_if=what_if)
    return 0
