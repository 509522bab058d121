"""What a run has found so far: the fields of its rank record that it fills one after the other."""

from __future__ import annotations

from typing import Literal, Required, TypedDict

from results.record import Memory, Proof, Quads, StepColumns, Work
from results.recorded import Buckets, LinkPeak, Recorded, Telemetry
from results.training import Training


class PartialRecord(TypedDict, total=False):
    """Fields of `results.record.RankRecord`, by their names there; what is not found has its default."""

    clock: Required[Literal["monotonic", "cuda-event"]]
    setup_ns: int
    first_step_ns: int | None
    first_steps: int
    spent_ns: dict[str, int]
    period: int
    training: Training
    trained_steps: int
    warmup: StepColumns
    warmup_steady: bool
    steps: StepColumns
    blocks_ns: list[int]
    block_steps: int
    stop: Literal["target", "budget", "blocks"]
    quads: Quads
    recorded: Recorded
    buckets: Buckets | None
    link_peak: LinkPeak
    telemetry: Telemetry
    work: Work
    memory: Memory
    proof: Proof
    first_hash: str
    parameters_hash: str
    foreign_cpu_cores: float | None
