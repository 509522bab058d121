"""The cheapest change of a cell's options that makes it fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from harness.plan.auto import weighed
from harness.plan.surroundings import MIB, SHARE, Surroundings
from harness.plan.unfit import unsplittable
from results.cell import Cell
from results.parts import Unknown
from results.spec import split
from strategies.catalog import STRATEGIES
from strategies.predictions import footprint
from strategies.refusal import refusal
from workloads import catalog as workloads

_SHARDING = {"reshard": "true", "stage": "3", "offload": "cpu"}
"""Options of strategies that take memory off a device, with the value that does so."""

_MOST_PIECES = 256
"""Micro-batches into which a micro-batch is divided at most."""


def lighter(cell: Cell, around: Surroundings) -> str | None:
    """Name the cheapest of accumulation, checkpointing, reshard and offload that makes a cell fit which does
    not, as a clause.

    The cell may not fit although it is predicted to: a change must also save a part of what is predicted.
    Computation that the study has measured counts as measured. None if no single change is enough, or if the
    model states no parts or no FLOPs.
    """
    known = workloads.facts(workloads.WORKLOADS.parse(cell.workload))
    parts = known.parts
    if isinstance(parts, Unknown) or isinstance(known.forward_flops, Unknown) or not cell.dense:
        return None
    most = min(around.room, int(SHARE * footprint(around.placed(cell), parts).total))

    def fits(changed: Cell) -> bool:
        if refusal(changed) or workloads.refusal(changed) or unsplittable(changed):
            return False
        return footprint(around.placed(changed), parts).total <= most

    # Of several changes of one kind the first that is enough changes least.
    first = [next(((options, one) for options, one in kind if fits(one)), None) for kind in _changes(cell)]
    weighted = {one[0]: weighed(one[1], parts, around) for one in first if one is not None}
    found = {options: after for options, after in weighted.items() if after.fits_host}
    if not found:
        return None
    before = weighed(cell, parts, around)
    options, best = min(found.items(), key=lambda item: item[1].times.step)
    by = "measured computation" if "computation" in best.times.measured else "prediction"
    # A measured and a predicted time have no ratio.
    alike = best.times.measured == before.times.measured
    slower = f", {best.times.step / before.times.step:.2f} times the step time" if alike else ""
    return f"{options} fits by {by} ({best.memory.total / MIB:,.0f} of {around.room / MIB:,.0f} MiB{slower})"


def _changes(cell: Cell) -> Iterator[Iterable[tuple[str, Cell]]]:
    """Yield the changes of each kind: options, and the cell with them. The samples of an update stay."""
    changed, count, samples = msgspec.structs.replace, cell.accumulation, cell.micro_batch
    yield (
        (
            f"--accumulation {count * pieces}",
            changed(cell, micro_batch=samples // pieces, accumulation=count * pieces),
        )
        for pieces in range(2, min(samples, _MOST_PIECES) + 1)
        if samples % pieces == 0
    )
    if cell.activation_checkpointing is False:
        selective = changed(cell, activation_checkpointing="selective")
        yield [("--activation-checkpointing selective", selective)]
    if cell.activation_checkpointing is not True:
        yield [("--activation-checkpointing all", changed(cell, activation_checkpointing=True))]
    name, positional, options = split(cell.strategy)
    for option, value in _SHARDING.items():
        if option in STRATEGIES.parse(cell.strategy).options:
            words = [f"{key}={text}" for key, text in (options | {option: value}).items()]
            strategy = STRATEGIES.parse(":".join([name, *([positional] if positional else ()), *words])).text
            if strategy != cell.strategy and not (option == "offload" and cell.device == "cpu"):
                yield [(f"--strategy {strategy}", changed(cell, strategy=strategy))]
