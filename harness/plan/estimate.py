"""Estimates what a plan will take: seconds and device-hours, with the basis of the estimate.

The time of one run is the sum of its parts, by name as in `RankRecord.spent_ns`. Costs follow from the time
of a step and from the number of parameters, which is built, hashed, copied and simulated anew in addition to
the steps. Where a strategy works differently at first (a warm-up of a compressor), the proof takes more steps
than are counted here.

The time of a step is a replay (`strategies.closed_form.replay`) of its computation and messages. What the
study has measured (`Measured`) goes before what is assumed: computation of the same batch per replica before
FLOPs over an assumed rate, the network's table before assumed links. A pipeline's bubble is added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import msgspec

from harness.plan.schedule import PlannedLaunch
from harness.plan.surroundings import (
    BACKWARD_AND_FORWARD,
    CORE_BYTES_PER_S,
    HOST_LINK_BYTES_PER_S,
    Devices,
    Surroundings,
    devices_here,
    replica_seconds,
    updated_share,
)
from results.cell import FEWEST_QUADS, GPU_BLOCK_S, GPU_LONGEST_WARM_UP_S, Cell, Device, gpu_warm_up_s
from results.groups import Dimension
from results.parts import VALUE_BYTES, ModelParts, Unknown
from results.record import (
    COPIES,
    LATE_SHARE,
    LATE_STEPS,
    LONGEST_S,
    RECORDED_STEPS,
    STEPS,
    SUMMED_BYTES_PER_S,
)
from strategies.catalog import OPTIMIZERS, STRATEGIES, group_layout
from strategies.closed_form.moments import Footprint
from strategies.closed_form.replay import AT_ONCE, Work, operations_of, replay
from strategies.closed_form.terms import Term
from strategies.predictions import footprint, least_bytes, traffic
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
    exchange: Mapping[Dimension, tuple[float, float]] = field(default_factory=dict)
    """Seconds of the messages along each dimension, and the part of `exposed` that these are."""

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
        exchange=found.exchange,
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


Basis = Literal["known", "assumed", "budget"]

STARTUP_S: Mapping[Device, float] = {"cpu": 8.0, "cuda": 15.0}
"""Seconds from the start of torchrun to the first cell. CPU: a trivial torchrun of 2 ranks took 7.9 to 9.5 s
on a 2-core machine, of which `import torch` was 2.6 to 3.0 s (torch 2.13). CUDA: the same, with some seconds
for the CUDA context and NCCL's first communicator; assumed, not measured."""
_BUDGETED = ("warm-up", "measure")
_TIMED = (*_BUDGETED, "exposed", "recording")
"""Parts of a run that may take longer than in an earlier one, up to their limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """Times of earlier runs of a cell."""

    step_ns: float
    spent_s: Mapping[str, float] = field(default_factory=dict)
    """The longest time of each part of a run, by the names of `RankRecord.spent_ns`; empty: not recorded."""

    def and_then(self, later: Earlier) -> Earlier:
        """Join the times of two runs: the longest time of each part, and the step time of the later run."""
        longest = {part: max(seconds, self.spent_s.get(part, 0.0)) for part, seconds in later.spent_s.items()}
        return Earlier(step_ns=later.step_ns, spent_s={**self.spent_s, **longest})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of one step of a cell, and the basis of the figure."""

    basis: Basis
    seconds: float | Unknown
    """Unknown where the basis is only the budget."""
    measured: tuple[str, ...] = ()
    """The parts of an assumed time that were measured, as in `StepTimes`."""


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """The time of one launch."""

    longest_s: float
    """Its start and its runs, if each takes its whole measuring budget."""
    startup_s: float
    runs: tuple[tuple[str, Mapping[str, float]], ...]
    """The cell of each run, and the seconds of its parts, as long as earlier runs took if there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """All launches of a plan, one after another."""

    launches: tuple[LaunchTime, ...]
    """In the order of the launches that were given."""
    device_hours: float
    bases: Mapping[str, StepTime]
    """Step times by cell id."""

    @property
    def seconds(self) -> float:
        return sum(launch.longest_s for launch in self.launches)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that say how many cells rest on which basis; empty if all is known from earlier runs."""
        bases = [step.basis for step in self.bases.values()]
        total, budget = len(bases), bases.count("budget")
        unknown = (step.seconds for step in self.bases.values() if isinstance(step.seconds, Unknown))
        assumed = Counter(step.measured for step in self.bases.values() if step.basis == "assumed")
        notes = []
        for measured, number in sorted(assumed.items()):
            origin = "measured computation" if "computation" in measured else "their FLOPs"
            network = "the measured network" if "network" in measured else "an assumed network"
            told = f"assumed: step times of {number} of {total} cells follow from {origin} and {network}"
            notes.append(told if measured else f"{told}, unmeasured")
        if budget:
            reasons = "; ".join(dict.fromkeys(step.reason for step in unknown))
            notes.append(f"assumed: {budget} of {total} cells take their measuring budget: {reasons}")
        return tuple(notes)


def estimate(
    launches: Sequence[PlannedLaunch], *, earlier: Mapping[str, Earlier], hardware: Devices | None = None
) -> Estimate:
    """Time and device-hours of `launches`.

    `earlier` holds what earlier runs took, by cell id; what they did not record is modelled (`run_parts`).
    A run is taken to use its whole budget, so that runs that reach their target sooner end earlier than said
    here. The steps of other cells are replayed (`predicted_times`).
    """
    cells = {cell.id: (cell, launch) for launch in launches for cell in launch.cells}
    steps = {
        cell_id: estimated_step_time(
            cell,
            known_ns=earlier[cell_id].step_ns if cell_id in earlier else None,
            hardware=hardware or Devices(),
            gpus_per_node=launch.placement.gpus_per_node,
        )
        for cell_id, (cell, launch) in cells.items()
    }
    proven = set(earlier)
    estimates: list[LaunchTime] = []
    device_hours = 0.0
    for launch in launches:
        seconds, runs = STARTUP_S[launch.device], []
        for number, cell in enumerate(launch.cells):
            known = earlier[cell.id].spent_s if cell.id in earlier else {}
            proves, hot = cell.id not in proven, number > 0
            parts = run_times(cell, steps[cell.id], proves=proves, known_s=known, hot=hot)
            seconds += sum(parts.values())
            runs.append((cell.id, {part: known.get(part, longest) for part, longest in parts.items()}))
            proven.add(cell.id)
        estimates.append(LaunchTime(seconds, STARTUP_S[launch.device], tuple(runs)))
        device_hours += seconds * launch.placement.gpus / 3600
    return Estimate(launches=tuple(estimates), device_hours=device_hours, bases=steps)


def estimated_step_time(
    cell: Cell, *, known_ns: float | None, hardware: Devices, gpus_per_node: int | None = None
) -> StepTime:
    """The step time of a cell: known, or a replay of its computation and messages, or Unknown.

    Messages of compressed gradients and of our own collectives have no closed form, and count as none. Of a
    model without parts the FLOPs over an assumed rate are taken.
    """
    if known_ns is not None:
        return StepTime(basis="known", seconds=known_ns / 1e9)
    alone = replica_seconds(cell, hardware)
    if isinstance(alone, Unknown):
        return StepTime(basis="budget", seconds=alone)
    parts = facts(WORKLOADS.parse(cell.workload)).parts
    if isinstance(parts, Unknown):
        idle = STRATEGIES.facts(cell.strategy).bubble(cell.gpus)
        return StepTime(basis="assumed", seconds=alone / cell.model_parallel * (1 + idle))
    around = Surroundings.of(cell, hardware, gpus_per_node)
    placed = around.placed(cell)
    times = predicted_times(placed, parts, traffic(placed, parts) if cell.dense else [], around)
    return StepTime(basis="assumed", seconds=times.step, measured=times.measured)


def run_times(
    cell: Cell, step: StepTime, *, proves: bool, known_s: Mapping[str, float], hot: bool = False
) -> dict[str, float]:
    """The parts of one run, by `run_parts` or, except for the budgeted ones, as long as earlier runs took
    (`known_s`).

    A step of unknown time is taken to be so long that the measuring budget has room for only `min_blocks`
    blocks, and a model of an unknown number of parameters to be small.
    """
    if isinstance(step.seconds, Unknown):
        # A step so long that the measuring budget has room for only the minimum number of blocks.
        period = STRATEGIES.facts(cell.strategy).promise.every
        step_s = cell.steps.budget_s / (cell.steps.min_blocks * cell.steps.steps_of_block(period))
    else:
        step_s = step.seconds
    counted = facts(WORKLOADS.parse(cell.workload)).parameters
    parameters = 0 if isinstance(counted, Unknown) else counted
    parts = run_parts(cell, step_s, parameters=parameters, proves=proves)
    if hot and cell.device == "cuda":
        # From the timed steps of the run before, which is taken to be like this one, to those of this run.
        idle_s = sum(seconds for part, seconds in parts.items() if part not in _TIMED)
        saved_s = GPU_LONGEST_WARM_UP_S - gpu_warm_up_s(idle_s)[1]
        parts["warm-up"] = max(0.0, parts["warm-up"] - saved_s)
    known = {part: known_s[part] for part in parts if part in known_s and part not in _BUDGETED}
    return parts | known


SETUP_S = 1.0
"""Set-up of a run of any size: data and strategy, counting FLOPs, the network's peak. Assumed."""
VALUES_PER_S = 100e6
"""Initial values that one core draws: 96 million a second for gpt-nano, 136 for gpt2-small, measured on a
2-core x86 machine with torch 2.13."""
HASHED_BYTES_PER_S = 1.1e9
"""BLAKE2b on one core: 1.10 to 1.26 GB/s on the same machine."""
COPIED_BYTES_PER_S = 2.5e9
"""Copies into new host memory: 2.6 to 5.5 GB/s on the same machine. Assumed from a GPU too."""
QUAD_BLOCKS = 4


def run_parts(cell: Cell, step_s: float, *, parameters: int, proves: bool) -> dict[str, float]:
    """Seconds of each part of a run whose step takes `step_s`.

    `parameters` is the number of parameters of the whole model. A run is taken to use its whole budget, with
    the fewest quads, and the longest warm-up. The simulation of a step does the work of all
    ranks of every replica that it simulates, without a bubble.
    """
    policy, period = cell.steps, STRATEGIES.facts(cell.strategy).promise.every
    warm_up_s = policy.warmup_max_steps * step_s
    by_time = cell.device == "cuda" and policy.warmup_max_steps > 0
    block_s = policy.steps_of_block(period, step_s if by_time else None) * step_s
    if by_time:
        block_s = max(block_s, GPU_BLOCK_S)
    hash_s = VALUE_BYTES * parameters / HASHED_BYTES_PER_S
    build_s = parameters / VALUES_PER_S
    # A simulated step is one of one replica on one device, after which all parameters are copied.
    simulated_s = step_s * cell.model_parallel / (1 + STRATEGIES.facts(cell.strategy).bubble(cell.gpus))
    compared_s = COPIES * VALUE_BYTES * parameters / COPIED_BYTES_PER_S
    quads = min(policy.quads, FEWEST_QUADS) * (cell.gpus > 1)
    blocks_s = policy.budget_s - quads * QUAD_BLOCKS * block_s
    measured_s = {
        "warm-up": max(GPU_LONGEST_WARM_UP_S, block_s) + block_s if by_time else warm_up_s,
        "measure": min(max(blocks_s, policy.min_blocks * block_s), policy.max_blocks * block_s),
    }
    begins = max(STEPS, STRATEGIES.facts(cell.strategy).promise.shown_after)
    first_s = begins * step_s
    if proves:
        summed_s = VALUE_BYTES * parameters / SUMMED_BYTES_PER_S
        first_s += build_s + _proof_s(cell.replicas, begins, simulated_s, summed_s, compared_s) + hash_s
    parts = {"build": SETUP_S + build_s, "proof" if proves else "first steps": first_s}
    parts |= measured_s
    if cell.gpus > 1:
        # A snapshot copies the parameters and the optimizer state of one rank.
        ranks = cell.gpus if STRATEGIES.facts(cell.strategy).shards else cell.model_parallel
        values = 1 + OPTIMIZERS.facts(cell.optimizer).state_values
        undone_s = 2 * (VALUE_BYTES * values * parameters / ranks) / COPIED_BYTES_PER_S
        parts["exposed"] = quads * (QUAD_BLOCKS * block_s + undone_s)
        # Whole periods are recorded, with the one before them.
        parts["recording"] = (max(1, RECORDED_STEPS // period) + 1) * period * step_s
    parts["hash"] = hash_s
    late_s = _late_s(cell, step_s, simulated_s, compared_s, sum(measured_s.values()))
    parts["late proof"] = build_s + late_s + hash_s
    return parts


def _proof_s(replicas: int, steps: int, one_s: float, summed_s: float, compared_s: float) -> float:
    """Seconds of the checks of the first steps.

    If one rank takes too long to simulate all replicas, it simulates one. Then each rank simulates one, or
    none if that takes too long as well.
    """
    longest_s = LONGEST_S / steps
    alone_s, shared_s = replicas * one_s, one_s + summed_s
    if alone_s <= longest_s:
        return steps * (alone_s + compared_s)
    checked = steps if replicas > 1 and shared_s <= longest_s else 0
    return one_s + compared_s + checked * (shared_s + compared_s)


def _late_s(cell: Cell, step_s: float, one_s: float, compared_s: float, measured_s: float) -> float:
    """Seconds of the most steps that may precede the first checked step, and of the checked steps."""
    facts = STRATEGIES.facts(cell.strategy)
    promise = facts.promise
    by_each = (cell.model_parallel == 1 and not facts.shards) or promise.of == "parameters"
    checked_s = step_s + min((1 if by_each else cell.replicas) * one_s, LONGEST_S) + compared_s
    fewest = min(promise.every, LATE_STEPS) if promise.of == "parameters" else 1
    allowed_s = min(LONGEST_S, LATE_SHARE * measured_s, LATE_STEPS * checked_s)
    return max(LATE_STEPS - 1, 2 * promise.every) * step_s + max(fewest * checked_s, allowed_s)
