"""`bench check`: try a workload before anything is planned with it."""

from __future__ import annotations

from pathlib import Path

import click

from harness.launch.check import check, check_request
from harness.plan.options import read_names
from harness.terminal.console import Console
from harness.worker.check_report import CheckReport, CheckRequest
from reports.text import duration, si, size


@click.command(name="check")
@click.argument("workload")
@click.option("--batch-size", type=click.IntRange(min=1), help="samples of a batch [default: the workload's]")
@click.option("--strategy", metavar="TEXT,...", help="strategies to try [default: all of them]")
def check_command(workload: str, *, batch_size: int | None, strategy: str | None) -> int:
    """Check a workload before anything is planned with it: a step, a proof, every strategy.

    Two ranks on the CPU of this machine build it (py:MODULE:FUNCTION from this folder), take steps without a
    strategy and with each, and prove the steps of the first strategy that works. Exit code 1 if it does not
    train, or a strategy fails.
    """
    console = Console()
    asked = None if strategy is None else read_names(strategy)
    request = check_request(workload, micro_batch=batch_size, folder=Path.cwd(), strategies=asked)
    report = check(request)
    if rows := workload_rows(request, report):
        console.table(["what", "found"], rows, numeric=[False, False])
    if report.strategies:
        console.result()
        words = [(word.strategy, word.verdict, word.words) for word in report.strategies]
        console.table(["strategy", "verdict", "on 2 ranks it says"], words, numeric=[False] * 3)
    for warning in report.warnings:
        console.warn(f"{request.workload}: {warning}")
    if report.failure is not None:
        console.error(f"{request.workload}: {report.failure}")
    return 0 if report.passed else 1


def workload_rows(request: CheckRequest, report: CheckReport) -> list[tuple[str, str]]:
    """Rows about the workload itself, whatever the strategy."""
    rows: list[tuple[str, str]] = []
    if report.module:
        frozen = report.parameters - report.trained
        rest = f", {frozen:,} of them frozen" if frozen else ""
        rows.append(("module", f"{report.module}, {report.parameters:,} parameters{rest}"))
        blocks = report.blocks
        found = f"{len(blocks)}: {blocks[0]} to {blocks[-1]}" if blocks else "none: sharded as a single unit"
        rows.append(("blocks", found))
    rows += [("batch" if not place else "", words) for place, words in enumerate(report.batch)]
    if report.loss is not None and report.step_s is not None:
        rows.append(("step", f"loss {report.loss:.4g}, {duration(report.step_s * 1e9)} on one core"))
        parts = {
            "parameters": report.parameter_bytes,
            "gradients": report.trained_bytes,
            f"state of {request.optimizer.partition(':')[0]}": report.optimizer_bytes or 0,
            f"activations of {request.micro_batch} samples": report.activation_bytes or 0,
        }
        named = ", ".join(f"{name} {size(part)}" for name, part in parts.items())
        rows.append(("memory", f"{size(sum(parts.values()))}: {named}"))
        counted = None if report.flops is None else f"{si(report.flops, 'FLOP')}, forward and backward"
        unknown = report.absent.get("flops", "the check ended before they were counted")
        rows.append(("a sample", counted or f"FLOPs unknown: {unknown}"))
    return rows + [("note", note) for note in report.notes]
