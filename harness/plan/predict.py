"""Predicts the memory of a cell and the time of its step before it runs.

The time is a replay (`strategies.closed_form.replay`) of the step's computation and messages. What the
study has measured (`Measured`) goes before what is assumed: computation of the same batch per replica before
FLOPs over an assumed rate, the network's table before assumed links. A pipeline's bubble is added. The
predictions serve to choose and to plan; `StepTimes.measured` says which parts were measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from harness.plan.surroundings import (
    BACKWARD_AND_FORWARD,
    CORE_BYTES_PER_S,
    HOST_LINK_BYTES_PER_S,
    Surroundings,
    devices_here,
    replica_seconds,
    updated_share,
)
from results.cell import Cell
from results.parts import ModelParts, Unknown
from strategies.catalog import OPTIMIZERS, STRATEGIES, group_layout
from strategies.closed_form.moments import Footprint
from strategies.closed_form.replay import AT_ONCE, Work, operations_of, replay
from strategies.closed_form.terms import Term
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
    waits: float = 0.0
    """For ranks that are slower than the mean rank, if it is known how ranks differ."""
    measured: tuple[str, ...] = ()
    """The parts that follow from measurements, `computation` and `network`; the others are assumed."""

    @property
    def step(self) -> float:
        return self.compute + self.update + self.bubble + self.exposed + self.waits


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


def predicted_times(
    cell: Cell,
    parts: ModelParts,
    terms: Sequence[Term],
    around: Surroundings,
    *,
    delays_s: Sequence[float] = (),
) -> StepTimes:
    """Replay a step of a cell that sends `terms`; its groups lie on the nodes of `around`.

    `delays_s` is a sample of how much longer than the mean rank the slowest rank
    computes; without it all ranks are alike.
    """
    work, is_measured = step_work(cell, parts, around)
    groups = group_layout(cell.strategy, cell.gpus, cell.node_size)
    operations = operations_of(terms, work, groups, around.outlet)
    seconds = partial(around.seconds, groups=groups)
    found = replay(work, operations, seconds, at_once=AT_ONCE[cell.backend], delays_s=delays_s)
    by_table = bool(operations) and all(map(around.is_measured, operations))
    return StepTimes(
        compute=work.passes_s,
        update=work.update_s,
        bubble=work.passes_s * STRATEGIES.facts(cell.strategy).bubble(cell.gpus),
        exposed=found.exposed_s,
        waits=found.waits_s,
        measured=("computation",) * is_measured + ("network",) * by_table,
    )


def step_work(cell: Cell, parts: ModelParts, around: Surroundings) -> tuple[Work, bool]:
    """Return the computation of the busiest rank, and whether it was measured."""
    strategy = STRATEGIES.facts(cell.strategy)
    share, updated = strategy.busiest_share(cell, parts), strategy.updated_bytes(cell, parts)
    # Offloaded shards move to the GPU twice and gradients back, and the update is in the host's memory.
    there = _offloaded(cell, parts)
    moved = 2 * there.parameters + there.gradients
    # For each parameter it and its state are read and written, and its gradient is read.
    values = 3 + 2 * OPTIMIZERS.facts(cell.optimizer).state_values
    offloading = moved / HOST_LINK_BYTES_PER_S + values * there.gradients / CORE_BYTES_PER_S
    known = around.devices.measured.work(cell)
    if known is not None:
        crowd = around.crowd
        return Work(
            forward_s=crowd * share * known.forward_s,
            backward_s=crowd * share * known.backward_s,
            update_s=crowd * known.update_s * updated_share(cell, parts) + offloading,
            micro_batches=cell.accumulation,
        ), True
    alone = replica_seconds(cell, around.hardware)
    assert not isinstance(alone, Unknown), "the caller knows the FLOPs, and the assumed GPU's peak is known"
    once = alone * share
    forward = once / BACKWARD_AND_FORWARD
    compute = once * (REPEATED_SHARE if cell.activation_checkpointing is True else 1.0)
    return Work(
        forward_s=forward,
        backward_s=compute - forward,
        update_s=values * updated / around.memory_rate + offloading,
        micro_batches=cell.accumulation,
    ), False


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
