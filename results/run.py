"""A run's result: what all ranks of one run come to together. Derived from rank records, rebuilt at will."""

from __future__ import annotations

import msgspec

from results.budget import Communication, RankColumns, StepBudget
from results.environment import Environment
from results.outcome import Evidence, Outcome
from results.record import Proof
from results.statistics import Metric
from results.training import Training
from results.value_types import require_times

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
    """Mean over ranks and steps; `other` is what the step has beyond its phases."""
    samples_per_s: float | None = None
    units_per_s: float | None = None
    unit: str | None = None
    flops_per_s: float | None = None
    mfu: float | None = None
    """Model FLOP/s over the dense peak of the devices at the cell's precision."""
    exposed_ns: Metric | None = None
    """Step time with minus without the exchange of gradients, from interleaved blocks of this run."""
    budget: StepBudget | None = None
    """The step time in parts."""
    communication: Communication | None = None
    ranks: RankColumns | None = None
    telemetry: dict[str, float] = {}
    """Means over ranks and samples by name, and `NAME_max`, the largest; units stand in the names."""
    energy_j: float | None = None
    """Of all devices for one step, by their counters."""
    bubble_ideal: float | None = None
    exchange_payload_bytes: int | None = None
    exchange_operations: float | None = None
    exchange_buckets: float | None = None
    """Of a step; the largest rank's."""
    exchange_buckets_early: float | None = None
    """Of them, how many began while gradients were still to come; the smallest rank's."""
    parameters: int | None = None
    flops_per_step: int | None = None
    """Of all ranks."""
    rss_peak_bytes: int | None = None
    """The largest rank's."""
    rss_over_idle_bytes: int | None = None
    """The same, less what the rank's idle process held before the run."""
    device_allocated_peak_bytes: int | None = None
    first_hash: str | None = None
    """Hash of the parameters after the first steps (`first_steps`): of the ranks' hashes, if they differ."""
    loss_fixed: float | None = None
    """Mean over ranks of the loss in the steps 11 to 20 after the first steps, whatever was measured."""
    loss_first: float | None = None
    """Mean over ranks of the first step's loss."""
    loss_last: float | None = None
    losses: tuple[float, ...] = ()
    """Mean over ranks and each `losses_every` steps, from the first of the warm-up while they are finite."""
    losses_every: int = 1
    first_steps: int | None = None
    """Steps before the first of `losses`."""
    warmup_steps: int = 0
    warmup_steady: bool | None = None
    stop: str | None = None
    proof: Proof | None = None
    training: Training | None = None
    """What the strategy says of its training; None where no rank recorded it."""
    replicas_agree: bool | None = None
    """Whether the parameters of all ranks were bit for bit equal at the end."""
    foreign_cpu_cores: float | None = None
    disturbed: bool = False
    """Whether others used more of the machine's CPU than a quiet run allows."""
    setup_ns: int | None = None
    first_step_ns: int | None = None
    startup_ns: int | None = None
    """From the start of the launch to its first cell."""
    spent_ns: dict[str, int] = {}
    """The longest time of each part of the run, over ranks, by the names of `RankRecord.spent_ns`."""
    warnings: tuple[str, ...] = ()
    absent: dict[str, str] = {}

    def __post_init__(self) -> None:
        require_times(self.started_at)
