"""The flags of `bench report` about costs and the size to buy: what it is told beside what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from harness.cli.options import Function

_OPTIONS = (
    click.option("--price", type=float, metavar="USD", help="what one device (on CPU: rank) costs an hour"),
    click.option(
        "--prices", metavar="FILE.csv", help="prices by device: gpu, usd_per_gpu_hour, date, source"
    ),
    click.option("--epoch-samples", type=int, metavar="N", help="samples of one epoch"),
    click.option("--within", metavar="TIME", help="the cheapest cell that finishes an epoch in it, like 4h"),
    click.option(
        "--goal",
        metavar="GOAL",
        help="what the size to buy is chosen by: knee, throughput, cost, time:24h or efficiency:80%",
    ),
    click.option(
        "--smallest-effect",
        metavar="SHARE",
        help="differences below it are not called faster or slower (2%)",
    ),
)


def cost_options(function: Function) -> Function:
    """Decorate a command with the flags of `harness.reporting.studies.CostFlags` (None: not given)."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
