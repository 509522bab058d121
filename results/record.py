"""A rank record: the measurements of one rank in one run. It is raw and immutable, and has one writer.

Durations are integer nanoseconds of the rank's own clock, which is not compared with other ranks' clocks.
Sizes are integer bytes. `None` is unknown and has its reason in `absent`.

Some parts are optional: the recorded collectives, the device, the peak of the network. The record also has
how the configuration trains differently from plain data parallelism, by the facts of its strategy. The number
of steps that a proof checks, and its limits, are declared here for ranks and for estimates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from results.environment import Environment
from results.groups import GroupLayout
from results.network import NetworkTimes
from results.outcome import Evidence, Outcome
from results.spec import split
from results.value_types import require_times

POINT_TO_POINT = ("send", "recv")
"""Operations between two ranks, which are not matched over the ranks."""
RECORDED_STEPS = 20
"""The approximate number of recorded steps, in whole periods, after one period that is not kept."""
MOST_OPERATIONS = 4000
"""Rows of `Operations` in one record: about 120 KiB. A step with more than this is not recorded."""


def _require_alike(what: str, columns: Mapping[str, Sequence[object] | None]) -> None:
    """Raises ValueError if the columns that are there differ in length."""
    lengths = {name: len(values) for name, values in columns.items() if values is not None}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the {what} differ in length: {lengths}")


class Operations(msgspec.Struct, frozen=True, kw_only=True):
    """One row an operation, in the order in which this rank issued them.

    The k-th row of a group, without point-to-point operations, is the k-th collective of that group on each
    of its ranks: rows are matched over ranks by this number, never by time.
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
    """Time from the start of the step to the call, or on CUDA to when the device could begin."""
    duration_ns: list[int] = []
    """Time from the call, or on CUDA from when the device could begin, until the operation was done on this
    rank."""

    def __post_init__(self) -> None:
        columns = ("step", "name", "group", "payload_bytes", "issued_ns", "duration_ns")
        _require_alike("columns of the operations", {name: getattr(self, name) for name in columns})


class KernelTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The device's time in a few profiled steps, by the union of its kernels' intervals. Only on CUDA."""

    steps: int
    compute_ns: int
    """Union of the intervals of kernels that compute, all steps together."""
    communication_ns: int
    """Union of the intervals of kernels that communicate."""
    overlap_ns: int
    """Their intersection: communication that hides behind computation."""


STAGE_PARTS = ("forward", "loss", "backward", "input", "weights")
"""The parts of a microbatch's pass through a stage of a pipeline. The last stage has a loss, and a schedule
that divides the backward pass has the gradients of input and weights instead of `backward`."""


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The mean times of one microbatch in one stage of this rank, over the recorded steps, without the waits
    for messages."""

    stage: int
    part_ns: dict[str, int]
    """The time of each of `STAGE_PARTS` that the stage has."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A block of steps with the recorder on, after the timed blocks. One value a step in each list."""

    step_ns: list[int] = []
    blocked_ns: list[int] | None = None
    """Time in which the training thread waited instead of computing: wall time less its own CPU time,
    without the data phase. Only on CPU."""
    dispatch_ns: list[int] | None = None
    """Host time of the step, in which it is queued on the device. Only on CUDA."""
    exchange_cpu_ns: list[int] | None = None
    """CPU time of threads other than the training thread that issued operations: encoding, decoding and
    adding up. None where the exchange uses the training thread."""
    bubble_ns: list[int] | None = None
    """Time in which a pipeline's stage was idle. None for strategies without stages."""
    stages: list[StageTimes] = []
    """The stages of this rank; empty for strategies without stages, and in older records."""
    bubble_replayed: float | None = None
    """Share of a step in which the busiest rank of a pipeline idles, by its schedule and the times of all
    stages, the mean over the ranks that compute one; None without these times."""
    operations: Operations = Operations()
    kernels: KernelTimes | None = None

    def __post_init__(self) -> None:
        columns = ("step_ns", "blocked_ns", "dispatch_ns", "exchange_cpu_ns", "bubble_ns")
        _require_alike("columns of the recorded steps", {name: getattr(self, name) for name in columns})


class Buckets(msgspec.Struct, frozen=True, kw_only=True):
    """The buckets of a period of steps after the timed blocks: counted, not timed.

    One value a step in each list; what is counted as a bucket: `harness/worker/exchange/buckets.py`.
    """

    started: list[int]
    early: list[int] | None = None
    """The number of `started` that began while gradients of their backward pass were still to come, and may
    hide behind computation. None where it is unknown."""
    left: list[list[float]] | None = None
    """The share of the nodes of their backward pass that had not begun when each of `started` began. None
    where it is unknown."""

    def __post_init__(self) -> None:
        if self.early is not None and len(self.early) != len(self.started):
            raise ValueError(f"`started` has {len(self.started)} steps, and `early` has {len(self.early)}")
        if self.left is not None and [len(step) for step in self.left] != self.started:
            raise ValueError(f"the shares that are left are not of the {sum(self.started)} buckets")


class LinkPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The peak of the network: plain all-reduces over all ranks of the launch with nothing else running."""

    payload_bytes: int
    duration_ns: list[int]
    """Times of a few all-reduces in a row on this rank, each after a barrier."""


class Telemetry(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of the device or the host that a separate thread took while the timed blocks ran."""

    at_ms: list[int] = []
    """Milliseconds from the start of measuring to each sample."""
    series: dict[str, list[float | None]] = {}
    """One value a sample, by name; the names contain units (`power_w`, `rss_bytes`)."""
    window_ns: int | None = None
    """Time from the first to the last reading of the energy counter."""
    energy_j: float | None = None
    """The energy of the device over the window, by its counter; None for a device without a counter."""

    def __post_init__(self) -> None:
        _require_alike("series of the telemetry", {"at_ms": self.at_ms, **self.series})


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a strategy and of a collective on how they train, for comparisons of throughputs."""

    differences: tuple[str, ...] = ()
    """The differences from plain data parallelism, as verbs: `averages every 4 steps`."""
    averages_all_gradients: bool = True
    """Whether all replicas average their gradients in each step."""
    exchanges_by_nodes: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether the exchange goes inside of nodes and across them; unset in older records."""


def training_before(strategy: str) -> Training:
    """How a run trained that did not record it, by the strategies that there were (results 0.1)."""
    name, period, options = split(strategy)
    gathered = options.get("params", "fp32")
    differences = (f"gathers parameters in {gathered}",) if gathered != "fp32" else ()
    if name != "local-sgd" or period is None:
        return Training(differences=differences)
    every = f"averages every {period} step{'' if period == '1' else 's'}"
    return Training(differences=(every, *differences), averages_all_gradients=False)


def by_nodes_before(collective: str) -> bool:
    """Whether a run that did not record it exchanged by nodes: one collective did (results 0.1)."""
    return split(collective)[0] == "hierarchical"


ProofMethod = Literal["serial-simulation", "sampled-gradients", "replica-agreement", "earlier-run"]


class StepColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One value a step and column, this rank's own clock. The columns of the phases are empty where bench did
    not take the steps."""

    step_ns: list[int] = []
    data_ns: list[int] = []
    forward_ns: list[int] = []
    backward_ns: list[int] = []
    """Backward with the exchange of gradients that it hides or waits for."""
    optimizer_ns: list[int] = []
    """Unscaling, clipping and the update."""
    loss: list[float | None] = []
    """Mean loss of this rank's samples in nine significant digits, which identify a number of single
    precision; older records have more. None where it was not finite."""

    def __post_init__(self) -> None:
        # Written out, because a study may have 100,000 records.
        steps = len(self.step_ns)
        alike = len(self.data_ns) == len(self.forward_ns) == len(self.backward_ns) == len(self.optimizer_ns)
        if not alike or len(self.data_ns) not in (0, steps) or len(self.loss) != steps:
            lengths = {name: len(getattr(self, name)) for name in self.__struct_fields__}
            raise ValueError(f"the columns differ in length: {lengths}")


class Quads(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of `steps` steps in the order on, off, off, on: their times on this rank, as `blocks_ns`."""

    steps: int
    on_first_ns: list[int] = []
    off_first_ns: list[int] = []
    off_second_ns: list[int] = []
    on_second_ns: list[int] = []
    off_step_ns: list[int] = []
    """The times of all steps of the off blocks, in order, in which the rank does not wait for others. They
    include equal shares of the time between steps, which older records left out, so that the sum is the
    block's time."""
    copies_ns: list[int] = []
    """The time of a step's copies to the places that the exchange would fill: one value an off block, in
    order, the mean over its last period. It is empty in older records."""

    def __post_init__(self) -> None:
        blocks = ("on_first_ns", "off_first_ns", "off_second_ns", "on_second_ns")
        _require_alike("columns of the quads", {name: getattr(self, name) for name in blocks})
        off = 2 * len(self.on_first_ns)
        if self.off_step_ns and len(self.off_step_ns) != self.steps * off:
            raise ValueError(f"the off blocks have {len(self.off_step_ns)} steps, not {self.steps * off}")
        if self.copies_ns and len(self.copies_ns) != off:
            raise ValueError(f"the copies are of {len(self.copies_ns)} off blocks, not {off}")


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Peaks over the run. The `idle` fields are what the idle worker held before it."""

    rss_peak_bytes: int
    rss_idle_bytes: int
    device_allocated_peak_bytes: int | None
    device_reserved_peak_bytes: int | None
    device_idle_bytes: int | None

    @property
    def taken_bytes(self) -> int:
        """The bytes that predictions are about: the allocator's peak, and on a CPU the peak over idle."""
        on_device = self.device_allocated_peak_bytes
        return self.rss_peak_bytes - self.rss_idle_bytes if on_device is None else on_device


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one step of this rank's replica, counted, not timed."""

    samples: int
    units: int
    """Images, tokens or samples: the workload's unit of throughput."""
    unit: str
    parameters: int | None
    """None where bench did not build the model."""
    flops: int | None
    """Forward and backward of those samples, without recomputation; 1 MAC = 2 FLOP."""
    exchange_payload_bytes: int | None
    """Bytes of the buffers that this rank handed to collectives and sends in one step; 0 for none, None where
    nobody counts them."""
    exchange_operations: float | None
    """Operations of the mean step: a strategy that exchanges only in some steps has a fraction."""
    updates: int | None = None
    """Updates of the optimizer in all measured steps, counted: fewer than steps if a loss scaler skipped
    some."""
    bubble_ideal: float | None = None
    """Share of a step in which a pipeline's stages idle at best, by its schedule; None without stages."""


class ExpertRows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that the experts of one module computed on one rank, in all measured steps."""

    module: str
    """Its name in the bare model."""
    first: int
    """The number of the rank's first expert among the experts of the module."""
    rows: list[int]
    """One value for each expert of the rank."""
    dropped: int = 0
    """The rows of the rank's tokens that no expert had a place for."""
    row_flops: int = 0
    """The FLOPs of the forward pass of a row, where rows may be dropped."""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """How it was checked that the run really trained."""

    method: ProofMethod
    passed: bool
    detail: str
    """The comparison and its bound, in words; the run id for `earlier-run`."""
    max_difference: float | None = None
    """Largest difference of a gradient element from the reference."""
    max_bound: float | None = None
    """The bound of the element whose difference is the largest share of its bound (0: equality was
    required)."""
    late_first: int | None = None
    """The first step that was checked after the timed blocks, counted from 0; None: none was."""
    late_steps: int = 0
    """Steps in a row that were checked there."""


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one run."""

    cell_id: str
    run_id: str
    launch_id: str
    repeat: int
    gpus: int
    rank: int
    local_rank: int
    node_rank: int
    outcome: Outcome
    reason: str | None
    evidence: Evidence
    started_at: str
    ended_at: str
    clock: Literal["monotonic", "cuda-event"]
    environment: Environment
    setup_ns: int | None = None
    """Building model, data and strategy, without proof and warm-up."""
    first_step_ns: int | None = None
    """The very first step, with what is done once: allocation, tuning of kernels, compilation."""
    first_steps: int | None = None
    """Steps before the warm-up's first: those that a proof checks, proven or not."""
    spent_ns: dict[str, int] = {}
    """Time of each part of the run on this rank, in their order; empty in records from before it was kept.

    `build`, `proof` or `first steps`, `warm-up`, `measure`, `exposed`, `recording`, `hash`, `trace`, and
    `late proof`.
    """
    period: int = 1
    """Steps from one exchange to the next."""
    training: Training | None = None
    """How the strategy trains; None in records from before it was recorded."""
    layout: GroupLayout | None = None
    """The degrees of the dimensions, by which its groups of ranks are named; None in older records."""
    trained_steps: int | None = None
    """Updates of a training run so far, over all its launches; None: the run was measured."""
    network: list[NetworkTimes] | None = None
    """Times of collectives, of a run of `bench network`; None: of any other run."""
    measured: dict[str, Any] | None = None
    """Values that a kind of study of another package has measured, by name; None: of any other run."""
    warmup_loss: list[float | None] = []
    """The losses of the steps of the warm-up, as in `StepColumns`. No figure needs their times."""
    warmup_steady: bool | None = None
    """Whether warm-up ended because the step time (on a GPU its clock too) was steady; None if it did not
    end."""
    steps: StepColumns = StepColumns()
    blocks_ns: list[int] = []
    """Time of each measured block on this rank, from the barrier to its own last finished step, by `clock`.
    Older records of GPUs have it by the host's clock."""
    block_steps: int = 0
    stop: Literal["target", "budget", "blocks"] | None = None
    """Why measuring ended."""
    quads: Quads | None = None
    recorded: Recorded | None = None
    buckets: Buckets | None = None
    link_peak: LinkPeak | None = None
    telemetry: Telemetry | None = None
    work: Work | None = None
    experts: list[ExpertRows] = []
    """The rows of the modules that count them; empty where none does, and in older records."""
    even_workload: str | None = None
    """The workload that differs from the cell's only in that its experts get as many rows each; None where
    none is known, and in older records."""
    memory: Memory | None = None
    proof: Proof | None = None
    first_hash: str | None = None
    """Hash of all parameters after the first steps (`first_steps`), a fixed number. Only on CPU."""
    parameters_hash: str | None = None
    """Hash of all parameters after the last measured step: equal on all replicas."""
    foreign_cpu_cores: float | None = None
    """CPU of this host used by other processes than its ranks while measuring, in cores."""
    warnings: list[str] = []
    absent: dict[str, str] = {}
    """Why a value is None."""

    @property
    def has_steps(self) -> bool:
        """Whether its run measured steps, rather than trained or measured something else."""
        return self.trained_steps is None and self.network is None and self.measured is None

    def __post_init__(self) -> None:
        require_times(self.started_at, self.ended_at)


STEPS = 3
"""The first steps that are checked, of a strategy without a period."""
LONGEST_S = 60.0
"""The longest time for simulating them; if they would take longer, a weaker check is made."""
LATE_STEPS = 10
"""The most steps checked after the timed blocks. A defect in every tenth step, or more, is surely found."""
LATE_SHARE = 0.05
"""Largest share of the time of warm-up and timed blocks that the check after them may take."""
COPIES = 6
"""Approximate copies of its parameters, in host memory, that a rank holds while it simulates a step:
parameters and gradients of the strategy and of the simulation, and the state of an optimizer."""
SHARED_COPIES = 5
"""Copies on a rank that simulates one replica and does not compare: the gathered initial parameters, its
model and gradients with their sizes, and what it sends."""
SUMMED_BYTES_PER_S = 1e9
"""Rate at which Gloo sums simulated gradients in host memory. Assumed."""
