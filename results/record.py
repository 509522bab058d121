"""A rank record: what one rank measured in one run. Raw, immutable, one writer each.

Durations are integer nanoseconds, sizes integer bytes; `None` is unknown and has its reason in `absent`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from results.environment import Environment
from results.outcome import Evidence, Outcome
from results.recorded import Buckets, LinkPeak, Recorded, Telemetry
from results.training import Training
from results.value_types import require_times

ProofMethod = Literal["serial-simulation", "sampled-gradients", "replica-agreement", "earlier-run"]


class StepColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One value a step and column, this rank's own clock."""

    step_ns: list[int] = []
    data_ns: list[int] = []
    forward_ns: list[int] = []
    backward_ns: list[int] = []
    """Backward with the exchange of gradients that it hides or waits for."""
    optimizer_ns: list[int] = []
    """Unscaling, clipping and the update."""
    loss: list[float | None] = []
    """Mean loss of this rank's samples; None where it was not finite."""

    def __post_init__(self) -> None:
        # Written out, because a study may have 100,000 records.
        alike = len(self.step_ns) == len(self.data_ns) == len(self.forward_ns) == len(self.backward_ns)
        if not alike or not len(self.step_ns) == len(self.optimizer_ns) == len(self.loss):
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
    """Every step of the off blocks, in order: what this rank needs when it waits for nobody. With an equal
    share of the time between steps, which older records left out: the sum is the block's time."""

    def __post_init__(self) -> None:
        lengths = [
            len(self.on_first_ns),
            len(self.off_first_ns),
            len(self.off_second_ns),
            len(self.on_second_ns),
        ]
        if lengths != lengths[:1] * 4:
            raise ValueError(f"the blocks of the quads differ in number: {lengths}")
        if self.off_step_ns and len(self.off_step_ns) != 2 * self.steps * lengths[0]:
            raise ValueError(
                f"the off blocks have {len(self.off_step_ns)} steps, not {2 * self.steps * lengths[0]}"
            )


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Peaks over the run; what the idle worker held before is `idle_*`."""

    rss_peak_bytes: int
    rss_idle_bytes: int
    device_allocated_peak_bytes: int | None
    device_reserved_peak_bytes: int | None
    device_idle_bytes: int | None


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What one step of this rank's replica is, counted, not timed."""

    samples: int
    units: int
    """Images, tokens or samples: the workload's unit of throughput."""
    unit: str
    parameters: int
    flops: int | None
    """Forward and backward of those samples, without recomputation; 1 MAC = 2 FLOP."""
    exchange_payload_bytes: int
    """Bytes of the buffers that this rank handed to collectives and sends in one step; 0 for none."""
    exchange_operations: float
    """Of one step, the mean: a strategy that exchanges in some steps alone has a fraction."""
    updates: int | None = None
    """Of the optimizer in all measured steps, counted; fewer than steps where a loss scaler left some out."""
    bubble_ideal: float | None = None
    """Share of a step in which a pipeline's stages idle at best, by its schedule; None without stages."""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """How it was checked that the run really trained."""

    method: ProofMethod
    passed: bool
    detail: str
    """What was compared and by which bound, in words; the run id for `earlier-run`."""
    max_difference: float | None = None
    """Largest difference of a gradient element from the reference."""
    max_bound: float | None = None
    """The bound of the element that used most of it (0: equality was asked)."""
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
    """What the strategy says of its training; None in records from before it was recorded."""
    trained_steps: int | None = None
    """Updates of a training run so far, those of earlier launches among them; None: the run was measured."""
    warmup: StepColumns = StepColumns()
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
    memory: Memory | None = None
    proof: Proof | None = None
    first_hash: str | None = None
    """Hash of all parameters after the first steps (`first_steps`), a fixed number. CPU alone."""
    parameters_hash: str | None = None
    """Hash of all parameters after the last measured step: equal on all replicas."""
    foreign_cpu_cores: float | None = None
    """CPU of this host used by other processes than its ranks while measuring, in cores."""
    warnings: list[str] = []
    absent: dict[str, str] = {}
    """Why a value is None."""

    def __post_init__(self) -> None:
        require_times(self.started_at, self.ended_at)
