"""Find figures of a run's records that cannot all be right, because one follows from the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from results.cell import Cell
from results.record import RankRecord, Work

CONTRADICTS_ABOVE = 0.1
"""Share by which times of a record may exceed the time around them. Smaller ones carry the warning of
RESIDUAL_ABOVE: older records have blocks of GPUs by another clock than steps."""


def contradiction(cell: Cell, ranks: Sequence[RankRecord]) -> str | None:
    """Say which figures of the ranks of a run contradict each other; None if no contradiction is known."""
    for rank in ranks:
        for what, found in (("times", _of_times(rank)), ("counts", _of_counts(cell, rank))):
            if (words := next(found, None)) is not None:
                return f"rank {rank.rank}: its {what} contradict each other: {words}"
    return next(_of_ranks([rank.work for rank in ranks if rank.work is not None]), None)


def _of_times(rank: RankRecord) -> Iterator[str]:
    """Yield times that exceed the time around them by the same clock.

    Each block begins before its first step and ends after its last one, and lies in the part that measures.
    Records of GPUs are not compared, because older ones time steps by events of the device, and blocks by the
    clock of the host.
    """
    if rank.clock != "monotonic":
        return
    steps, quads, blocks_ns = rank.steps, rank.quads, sum(rank.blocks_ns)
    phases_ns = sum(steps.data_ns) + sum(steps.forward_ns) + sum(steps.backward_ns) + sum(steps.optimizer_ns)
    pairs = [
        ("the phases of its steps", phases_ns, "its steps", sum(steps.step_ns)),
        ("its steps", sum(steps.step_ns), "the blocks that they are of", blocks_ns),
    ]
    if "measure" in rank.spent_ns:
        pairs.append(("its blocks", blocks_ns, "the part that measured them", rank.spent_ns["measure"]))
    if quads is not None:
        around_ns = sum(quads.off_first_ns) + sum(quads.off_second_ns)
        pairs.append(("its steps without exchange", sum(quads.off_step_ns), "their blocks", around_ns))
    for number, block_ns in enumerate(rank.blocks_ns):
        of_block = steps.step_ns[number * rank.block_steps :][: rank.block_steps]
        pairs.append((f"the steps of block {number}", sum(of_block), "that block", block_ns))
    for part, part_ns, whole, whole_ns in pairs:
        if part_ns > (1 + CONTRADICTS_ABOVE) * whole_ns:
            yield f"{part} took {part_ns / 1e6:.6g} ms, and {whole} {whole_ns / 1e6:.6g} ms"


def _of_counts(cell: Cell, rank: RankRecord) -> Iterator[str]:
    """Yield counts that do not follow from each other, or from the cell."""
    steps, memory = len(rank.steps.step_ns), rank.memory
    if steps != rank.block_steps * len(rank.blocks_ns):
        yield f"it has {steps} steps, and {len(rank.blocks_ns)} blocks of {rank.block_steps}"
    if rank.work is not None:
        yield from _of_work(cell, rank.work, steps)
    if memory is not None and memory.device_reserved_peak_bytes is not None:
        reserved, allocated = memory.device_reserved_peak_bytes, memory.device_allocated_peak_bytes or 0
        if allocated > reserved:
            yield f"{allocated} bytes were allocated at the peak, and {reserved} reserved"


def _of_work(cell: Cell, work: Work, steps: int) -> Iterator[str]:
    """Yield counts of a step's work that do not follow from the cell, or from each other."""
    if work.samples != cell.batch_per_replica:
        yield f"a step has {work.samples} samples, and the cell gives a replica {cell.batch_per_replica}"
    if work.units % work.samples:
        yield f"{work.samples} samples have {work.units} {work.unit}"
    if work.updates is not None and work.updates > steps:
        yield f"it updated {work.updates} times in {steps} steps"


def _of_ranks(works: Sequence[Work]) -> Iterator[str]:
    """Yield figures of the same work that differ between ranks; a rank may lack one."""
    for field, name in (("parameters", "parameters"), ("flops", "FLOPs a step"), ("units", "units a step")):
        known = {value for work in works if (value := getattr(work, field)) is not None}
        if len(known) > 1:
            yield f"ranks contradict each other: they have {' and '.join(map(str, sorted(known)))} {name}"
