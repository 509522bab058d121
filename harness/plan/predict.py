"""Predicts the memory of a cell and the time of its step before it runs.

The time is the sum of its computation (FLOPs over an assumed rate), its update (bytes over the rate of
memory), a pipeline's bubble, and the messages that do not overlap with computation:

    exposed = blocking + max(short(forward) + short(backward), all overlapping messages - C)
    short(passes) = max(0, overlapping one of them - T / accumulation, overlapping any of them - T)

where C is the computation, and T its passes of that kind: a third of it is forward, two thirds are backward.
Predictions serve to choose, not to report: unknown facts of the machine are assumed, and stated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from harness.plan.estimate import BACKWARD_AND_FORWARD, replica_seconds
from harness.plan.surroundings import CORE_BYTES_PER_S, HOST_LINK_BYTES_PER_S, Surroundings, devices_here
from results.cell import Cell
from results.parts import ModelParts, Unknown
from strategies.catalog import OPTIMIZERS, STRATEGIES, group_layout
from strategies.closed_form.moments import Footprint
from strategies.closed_form.terms import Overlap, Term
from strategies.predictions import footprint, least_bytes
from workloads.catalog import WORKLOADS, facts

REPEATED_SHARE = 4 / 3
"""Computation with activation checkpointing over that without: the forward pass twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step."""

    compute: float
    update: float
    bubble: float
    exposed: float

    @property
    def step(self) -> float:
        return self.compute + self.update + self.bubble + self.exposed


def predicted_bytes(cells: Iterable[Cell], gpus_per_node: int | None) -> dict[str, int]:
    """Memory of the fullest rank of each cell, by its id.

    Left out are cells whose model states no parts, and those with a compressor or a collective of our own:
    what these hold is not in the closed form.
    """
    found = {}
    for cell in cells:
        parts = facts(WORKLOADS.parse(cell.workload)).parts
        if cell.dense and not isinstance(parts, Unknown):
            found[cell.id] = footprint(_placed(cell, gpus_per_node), parts).total
    return found


def certain_bytes(cell: Cell, gpus_per_node: int | None) -> int:
    """Return a lower bound of the fullest rank's memory in bytes; 0 if the model states no parts."""
    parts = facts(WORKLOADS.parse(cell.workload)).parts
    if isinstance(parts, Unknown):
        return 0
    return least_bytes(_placed(cell, gpus_per_node), parts, dense=cell.source_hash is None)


def _placed(cell: Cell, gpus_per_node: int | None) -> Cell:
    return Surroundings.of(cell, devices_here(), gpus_per_node).placed(cell)


def unpredicted(cells: Iterable[Cell]) -> dict[str, str]:
    """Map the text of each workload whose parts are unknown, so that its memory cannot be predicted, to the
    reason."""
    workloads = dict.fromkeys(cell.workload for cell in cells)
    known = {workload: facts(WORKLOADS.parse(workload)).parts for workload in workloads}
    return {workload: parts.reason for workload, parts in known.items() if isinstance(parts, Unknown)}


def predicted_times(cell: Cell, parts: ModelParts, terms: Sequence[Term], around: Surroundings) -> StepTimes:
    alone = replica_seconds(cell, around.hardware)
    assert not isinstance(alone, Unknown), "with parts FLOPs are known, and so is the assumed GPU's peak"
    strategy = STRATEGIES.facts(cell.strategy)
    once = alone * strategy.busiest_share(cell, parts)
    compute = once * (REPEATED_SHARE if cell.activation_checkpointing is True else 1.0)
    # For each parameter it and its state are read and written, and its gradient is read.
    values = 3 + 2 * OPTIMIZERS.facts(cell.optimizer).state_values
    update = values * strategy.updated_bytes(cell, parts) / around.memory_rate
    # Offloaded shards move to the GPU twice and gradients back, and the update is in the host's memory.
    there = _offloaded(cell, parts)
    moved = 2 * there.parameters + there.gradients
    offloading = moved / HOST_LINK_BYTES_PER_S + values * there.gradients / CORE_BYTES_PER_S
    return StepTimes(
        compute=compute,
        update=update + offloading,
        bubble=compute * strategy.bubble(cell.gpus),
        exposed=_exposed(cell, terms, (once / BACKWARD_AND_FORWARD, compute), around),
    )


def offloaded_bytes(cell: Cell, parts: ModelParts) -> int:
    """Bytes of a rank in its host's memory: with offload=cpu a shard of parameters, gradients and state."""
    there = _offloaded(cell, parts)
    return there.certain - there.gathered


def _offloaded(cell: Cell, parts: ModelParts) -> Footprint:
    """Return the shards that a rank keeps in host memory, as in an update; 0 bytes without offload."""
    strategy = STRATEGIES.facts(cell.strategy)
    if cell.device == "cpu" or not strategy.offloads:
        return Footprint(moment="update", parameters=0)
    moments = strategy.moments(msgspec.structs.replace(cell, device="cpu", backend="gloo"), parts)
    return next(moment for moment in moments if moment.moment == "update")


def _exposed(
    cell: Cell, terms: Sequence[Term], computation: tuple[float, float], around: Surroundings
) -> float:
    """Seconds of messages that do not overlap with `computation` (of forward passes, and of a whole step)."""
    forward, compute = computation
    groups = group_layout(cell.strategy, cell.gpus, cell.node_size)
    spent: dict[Overlap, float] = defaultdict(float)
    for term in terms:
        spent[term.overlap] += around.seconds(term, groups)

    def short(one: Overlap, every: Overlap, passes: float) -> float:
        """Seconds by which messages outlast the passes of one micro-batch, or of all of them."""
        return max(0.0, spent[one] - passes / cell.accumulation, spent[one] + spent[every] - passes)

    apart = short("first forward", "forward", forward)
    apart += short("last backward", "backward", compute - forward)
    blocking = spent.pop("none", 0.0)
    return blocking + max(apart, sum(spent.values()) - compute)
