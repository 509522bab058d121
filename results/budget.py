"""Where the time of a step went, for a whole run: its budget, its communication, its ranks. Derived.

Times are of one step in nanoseconds. The formulas are in `results/derivation/accounts.py`
and `results/derivation/communication.py`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from results.statistics import Metric

BudgetMethod = Literal["on-off", "recorded", "one rank"]


class StepBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The step time in parts that add up to it."""

    method: BudgetMethod
    """`on-off`: blocks with and without the exchange; `recorded`: time blocked, by the recorder; `one rank`:
    nothing is exchanged."""
    input_ns: float
    """Waiting for data and moving it, on the slowest rank of each period."""
    compute_ns: float
    """Forward, backward and update without any exchange, the mean over ranks."""
    transfer_ns: Metric
    """Exposed communication: what the exchange adds to the slowest rank, with what it slows compute by."""
    wait_ns: Metric
    """Exposed wait: what the mean rank loses because the slowest of each step is slower."""
    bubble_ns: float | None = None
    """Idle time of pipeline stages; None for strategies without stages."""
    other_ns: float
    """The rest: step time less all of the above. Near zero, or something is not understood."""


class OperationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All operations of one kind over groups of one size, per step; times are means over ranks."""

    name: str
    group_size: int
    count: float
    payload_bytes: float
    """Of one rank."""
    duration_ns: float
    transfer_ns: float | None
    """The shortest duration of each collective over its ranks; None for point-to-point operations."""
    wait_ns: float | None
    """Duration less transfer."""


class Communication(msgspec.Struct, frozen=True, kw_only=True):
    """What the recorder saw, per step, the mean over recorded steps and ranks."""

    steps: int
    step_ns: float
    """With the recorder on; beside the step time it says how far the recorder disturbs."""
    total_ns: float
    """Union of the intervals in which an operation was in flight."""
    blocked_ns: float | None
    """Time in which the training thread waited (CPU), or communication that did not overlap (CUDA)."""
    transfer_ns: float | None
    """Sum of the shortest durations of the collectives; None without collectives."""
    wait_ns: float | None
    """Sum of what the durations are above them: waiting for the last rank to arrive, exposed or not."""
    exchange_cpu_ns: float | None
    """Encoding, decoding and adding up beside the training thread."""
    dispatch_ns: float | None
    bubble_ns: float | None
    operations: tuple[OperationSummary, ...]
    bus_bytes_per_s: float | None
    """Bus bandwidth of the collectives: payload times the factor of the operation over transfer time
    (all-reduce 2(p-1)/p, all-gather p-1 and reduce-scatter (p-1)/p of what a rank hands over)."""
    peak_bus_bytes_per_s: float | None
    """The same of the best of a few plain all-reduces that nothing else ran beside."""


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
