"""What a rank recorded beside its timed blocks: its collectives, its device, what its network can do.

All of it is optional in a rank record. Durations are integer nanoseconds of this rank's own clock; no clock
is compared with another rank's.
"""

from __future__ import annotations

import msgspec

POINT_TO_POINT = ("send", "recv")
"""Operations between two ranks: they are no collective, and not matched over the ranks."""
RECORDED_STEPS = 20
"""About so many, in whole periods, after one period that is not kept."""
MOST_OPERATIONS = 4000
"""Rows of `Operations` in one record: about 120 KiB. A step with more than this is not recorded."""


class Operations(msgspec.Struct, frozen=True, kw_only=True):
    """One row an operation, in the order in which this rank issued them.

    The k-th row of a group that is no point-to-point operation is the k-th collective of that group on every
    rank of it: so rows are matched over ranks, never by time.
    """

    names: list[str] = []
    """Kinds of operation as the process group calls them: `allreduce`, `_allgather_base`, `send`."""
    groups: list[str] = []
    """Their groups, by the global ranks in them: `0-7`, `0,2,4`."""
    step: list[int] = []
    """Which of the recorded steps, from 0."""
    name: list[int] = []
    """Index into `names`."""
    group: list[int] = []
    """Index into `groups`."""
    payload_bytes: list[int] = []
    """Bytes of the buffers that this rank handed over; for `recv`, of those it receives into."""
    issued_ns: list[int] = []
    """From the start of its step to the call, or on CUDA to when the device could begin."""
    duration_ns: list[int] = []
    """From the call, or on CUDA from when the device could begin, until it was done on this rank."""

    def __post_init__(self) -> None:
        columns = ("step", "name", "group", "payload_bytes", "issued_ns", "duration_ns")
        lengths = {name: len(getattr(self, name)) for name in columns}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns of the operations differ in length: {lengths}")


class KernelTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The device's time in a few profiled steps, by the union of its kernels' intervals. CUDA alone."""

    steps: int
    compute_ns: int
    """Union of the intervals of kernels that compute, all steps together."""
    communication_ns: int
    """Union of the intervals of kernels that communicate."""
    overlap_ns: int
    """Their intersection: communication that hides behind computation."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A block of steps with the recorder on, after the timed blocks. One value a step in each list."""

    step_ns: list[int] = []
    blocked_ns: list[int] | None = None
    """Time in which the training thread waited instead of computing: wall time less its own CPU time,
    without the data phase. CPU alone."""
    dispatch_ns: list[int] | None = None
    """Host time of the step: what it takes to queue it on the device. CUDA alone."""
    exchange_cpu_ns: list[int] | None = None
    """CPU time of the threads beside the training thread that issued operations: encoding, decoding and
    adding up. None where the exchange has no thread of its own."""
    bubble_ns: list[int] | None = None
    """Time in which a pipeline's stage had nothing to do. None for strategies without stages."""
    operations: Operations = Operations()
    kernels: KernelTimes | None = None

    def __post_init__(self) -> None:
        lists = ("blocked_ns", "dispatch_ns", "exchange_cpu_ns", "bubble_ns")
        lengths = {name: len(values) for name in lists if (values := getattr(self, name)) is not None}
        if any(length != len(self.step_ns) for length in lengths.values()):
            raise ValueError(f"of {len(self.step_ns)} recorded steps there are {lengths}")


class Buckets(msgspec.Struct, frozen=True, kw_only=True):
    """What was exchanged at once, in a period of steps after the timed blocks: counted, not timed.

    One value a step in each list; what is counted as a bucket: `harness/worker/exchange/buckets.py`.
    """

    started: list[int]
    early: list[int] | None = None
    """Those of `started` that began while gradients of their backward pass were still to come: what may hide
    behind computation. None where that is not known."""

    def __post_init__(self) -> None:
        if self.early is not None and len(self.early) != len(self.started):
            raise ValueError(f"of {len(self.started)} steps with buckets {len(self.early)} have early ones")


class LinkPeak(msgspec.Struct, frozen=True, kw_only=True):
    """What the network reached when it did nothing else: plain all-reduces over all ranks of the launch."""

    payload_bytes: int
    duration_ns: list[int]
    """Of each of a few all-reduces in a row on this rank, each after a barrier."""


class Telemetry(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of the device or the host while the timed blocks ran, by a thread of their own."""

    at_ms: list[int] = []
    """From the start of measuring."""
    series: dict[str, list[float | None]] = {}
    """One value a sample, by name; units stand in the names (`power_w`, `rss_bytes`)."""
    window_ns: int | None = None
    """From the first to the last reading of the energy counter."""
    energy_j: float | None = None
    """Of the whole device over the window, by its own counter; None where it has none."""

    def __post_init__(self) -> None:
        lengths = {name: len(values) for name, values in self.series.items()}
        if any(length != len(self.at_ms) for length in lengths.values()):
            raise ValueError(f"of {len(self.at_ms)} samples there are {lengths}")
