"""A run's result: the figures of all ranks of one run together, derived from rank records.

Its budget, its communication and its ranks describe the time of a step. Times are of one step in nanoseconds;
the formulas are in `results/derivation/accounts.py` and `results/derivation/communication.py`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from results.environment import Environment
from results.groups import Dimension
from results.outcome import Evidence, Outcome
from results.record import Proof, Training
from results.statistics import Metric
from results.value_types import require_times

NOT_PROVEN = "not proven"
BudgetMethod = Literal["on-off", "recorded", "one rank"]


class StepBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The step time in parts that add up to it."""

    method: BudgetMethod
    """`on-off`: from blocks with and without the exchange; `recorded`: from the time blocked, by the
    recorder; `one rank`: without an exchange."""
    input_ns: float
    """Waiting for data and moving it, on the slowest rank of each period."""
    compute_ns: float
    """Forward, backward and update without any exchange, the mean over ranks."""
    transfer_ns: Metric
    """Exposed communication: the time that the exchange adds to the slowest rank, with the slowdown of
    compute."""
    wait_ns: Metric
    """Exposed wait: the time that the mean rank loses because another rank is the slowest of a step, less
    `imbalance_ns`."""
    imbalance_ns: float | None = None
    """The part of that time which the rows of the ranks' experts explain; None without experts, in a
    pipeline, whose stages do different work, and without blocks without exchange."""
    bubble_ns: float | None = None
    """Idle time of pipeline stages; None for strategies without stages."""
    other_ns: float
    """The step time less all other parts. It should be near zero: the rest is not explained."""

    @property
    def waits_ns(self) -> float:
        """Exposed wait, that by imbalance included."""
        return self.wait_ns.value + (self.imbalance_ns or 0.0)


class OperationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All operations of one kind over groups of one size, per step; times are means over ranks."""

    name: str
    group_size: int
    count: float
    payload_bytes: float
    """Bytes of one rank."""
    duration_ns: float
    transfer_ns: float | None
    """The shortest duration of each collective over its ranks; None for point-to-point operations."""
    wait_ns: float | None
    """Duration less transfer."""


class DimensionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All operations of the groups of one dimension, per step; times are means over ranks."""

    name: Dimension | None
    """None: groups whose ranks differ in several dimensions."""
    payload_bytes: float
    """Bytes that one rank hands over."""
    transfer_ns: float | None
    """Sum of the shortest durations of the collectives; None without collectives."""
    wait_ns: float | None
    """Sum of durations less these shortest ones, exposed or not; None without collectives."""


class Communication(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded communication of a step, the mean over recorded steps and ranks."""

    steps: int
    step_ns: float
    """The step time with the recorder on; the difference from the step time is the recorder's overhead."""
    total_ns: float
    """Union of the intervals in which an operation was in flight."""
    blocked_ns: float | None
    """Time in which the training thread waited (CPU), or communication that did not overlap (CUDA)."""
    transfer_ns: float | None
    """Sum of the shortest durations of the collectives; None without collectives."""
    wait_ns: float | None
    """Sum of durations less these shortest ones: the wait for the last rank to arrive, exposed or not."""
    exchange_cpu_ns: float | None
    """Encoding, decoding and adding up on threads other than the training thread."""
    dispatch_ns: float | None
    bubble_ns: float | None
    operations: tuple[OperationSummary, ...]
    bus_bytes_per_s: float | None
    """Bus bandwidth of the collectives: payload times the factor of the operation over transfer time
    (all-reduce 2(p-1)/p, all-gather p-1 and reduce-scatter (p-1)/p of what a rank hands over)."""
    peak_bus_bytes_per_s: float | None
    """The bus bandwidth of the best of a few plain all-reduces while nothing else ran."""
    dimensions: tuple[DimensionSummary, ...] = ()
    """In the order of `DIMENSIONS`; empty where the records do not have the layout of the ranks."""


class RankColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One value a rank, in the order of ranks: who is slow, and whether it always is."""

    node: list[int]
    compute_ns: list[int]
    """Mean time of a step without exchange."""
    compute_sd_ns: list[int]
    """Standard deviation of single steps of it."""
    slowest_share: list[float]
    """Share of the steps, of whole periods between two exchanges, in which it was the slowest of all."""
    wait_ns: list[int] | None = None
    """Mean wait a step inside of collectives, by the recorder."""
    blocked_ns: list[int] | None = None
    steps: int
    """Steps without exchange that each value is over."""
    host: list[str] | msgspec.UnsetType = msgspec.UNSET
    """The host of each rank; unset in results from before it was kept."""
    rows: list[float] | None = None
    """Rows that the experts of each rank computed in the mean step, in all layers; None where none were
    counted."""


class BusiestExpert(msgspec.Struct, frozen=True, kw_only=True):
    """The expert whose rows exceed the mean of the experts of its layer most."""

    module: str
    """The layer's module of experts."""
    expert: int
    times_mean: float
    """Its rows over the mean of the layer's experts; 1 where all have as many."""


PHASES = ("data", "forward", "backward", "optimizer")


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one cell. Times are of a step, in nanoseconds; rates are over all ranks."""

    cell_id: str
    run_id: str
    launch_id: str
    repeat: int
    outcome: Outcome
    reason: str | None
    evidence: Evidence
    started_at: str | None
    ranks_expected: int
    ranks_present: int
    environment: Environment | None = None
    """Rank 0's; the hosts of all ranks are in `hosts`."""
    hosts: tuple[str, ...] = ()
    fingerprint: str | None = None
    steps: int = 0
    step_ns: Metric | None = None
    """Block wall time to the last rank over the block's steps; the interval is within this run only."""
    step_ns_median: float | None = None
    """Quantiles of the step's maximum over ranks."""
    step_ns_p10: float | None = None
    step_ns_p90: float | None = None
    step_ns_p99: float | None = None
    slow_steps: int | None = None
    phase_ns: dict[str, float] = {}
    """Mean over ranks and steps; `other` is the step time less its phases."""
    samples_per_s: float | None = None
    units_per_s: float | None = None
    unit: str | None = None
    flops_per_s: float | None = None
    mfu: float | None = None
    """Model FLOP/s over the dense peak of the devices at the cell's precision."""
    exposed_ns: Metric | None = None
    """Step time with minus without the exchange of gradients, from interleaved blocks of this run. If the
    copies in steps without it take more than 5 % of it, its interval ends at the figure without them."""
    copies_ns: float | None = None
    """The time of a step's copies to the places that the exchange would fill, in steps without it."""
    budget: StepBudget | None = None
    """The step time in parts."""
    communication: Communication | None = None
    ranks: RankColumns | None = None
    busiest_expert: BusiestExpert | None = None
    dropped_share: float | None = None
    """The share of the rows that tokens chose which no expert computed; None without experts."""
    even_workload: str | None = None
    """The workload that differs from the cell's only in that its experts get as many rows each; None where
    none is known, and in older results."""
    telemetry: dict[str, float] = {}
    """Means over ranks and samples by name, and `NAME_max`, the largest; the names contain units."""
    energy_j: float | None = None
    """Energy of all devices for one step, by their counters."""
    bubble_ideal: float | None = None
    bubble_replayed: float | None = None
    """Share of a step in which the busiest rank of a pipeline idles, by its schedule and the measured times
    of its stages."""
    exchange_payload_bytes: int | None = None
    exchange_operations: float | None = None
    exchange_buckets: float | None = None
    """Buckets of a step, of the rank that has most."""
    exchange_buckets_early: float | None = None
    """The number of buckets that began before the last gradient was ready, of the rank with the fewest."""
    exchange_backward_left: float | None = None
    """The share of the backward pass, by its nodes, that is left when a bucket begins: the mean over the
    buckets, of the rank with the least."""
    parameters: int | None = None
    flops_per_step: int | None = None
    """FLOPs of a step of all ranks."""
    rss_peak_bytes: int | None = None
    """The largest rank's."""
    rss_over_idle_bytes: int | None = None
    """The largest rank's peak less what its idle process held before the run."""
    device_allocated_peak_bytes: int | None = None
    first_hash: str | None = None
    """Hash of the parameters after the first steps (`first_steps`); if ranks differ, a hash of their
    hashes."""
    loss_fixed: float | None = None
    """Mean over ranks of the loss in the steps 11 to 20 after the first steps, whatever was measured."""
    loss_first: float | None = None
    """Mean over ranks of the first step's loss."""
    loss_last: float | None = None
    losses: tuple[float, ...] = ()
    """The mean loss over ranks and over each `losses_every` steps in a row, from the first step of the
    warm-up until a loss is not finite."""
    losses_every: int = 1
    first_steps: int | None = None
    """Steps before the first of `losses`."""
    warmup_steps: int = 0
    warmup_steady: bool | None = None
    stop: str | None = None
    proof: Proof | None = None
    training: Training | None = None
    """How the strategy trains; None where no rank recorded it."""
    replicas_agree: bool | None = None
    """Whether the parameters of all ranks were bit for bit equal at the end."""
    foreign_cpu_cores: float | None = None
    disturbed: bool = False
    """Whether other processes used more of the machine's CPU than a quiet run allows."""
    setup_ns: int | None = None
    first_step_ns: int | None = None
    startup_ns: int | None = None
    """Time from the start of the launch to its first cell."""
    spent_ns: dict[str, int] = {}
    """The longest time of each part of the run, over ranks, by the names of `RankRecord.spent_ns`."""
    warnings: tuple[str, ...] = ()
    absent: dict[str, str] = {}

    @property
    def unproven(self) -> str | None:
        """Why its proof failed, of a run that measured on; None of any other run."""
        failed = self.outcome is Outcome.OK and self.proof is not None and not self.proof.passed
        return self.proof.detail if failed and self.proof is not None else None

    @property
    def proof_word(self) -> str | None:
        """The method of its proof, or that the run is not proven; None where nothing was checked."""
        if self.proof is None:
            return None
        return self.proof.method if self.unproven is None else NOT_PROVEN

    def __post_init__(self) -> None:
        require_times(self.started_at)
