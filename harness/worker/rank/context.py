"""The context of a launch on this rank, and the rank record that it makes of what a run has found so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Required, TypedDict

import msgspec
import torch

from harness.machine.device import GpuFaults
from harness.worker.exchange.group import ExchangeGroup
from harness.worker.rank.control import Control
from harness.worker.rank.environment import probe
from harness.worker.rank.log import RankLog
from harness.worker.rank.rank import Rank
from results.cell import Cell
from results.environment import Program
from results.launch import Launch, Slot
from results.outcome import Evidence, Outcome
from results.record import Memory, Proof, Quads, RankRecord, StepColumns, Work
from results.recorded import Buckets, LinkPeak, Recorded, Telemetry
from results.store import Study, utc_now
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended on this rank."""

    outcome: Outcome
    reason: str | None
    started_at: str
    transports: Sequence[str] = ()
    """What the ranks' backend connected by, where it says so."""
    warnings: Sequence[str] = ()
    """Of this run on this rank."""
    program: Program | None = None
    """The program that was built; None if the run ended before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What stays the same for all runs of a launch on this rank."""

    study: Study
    launch: Launch
    evidence: Evidence
    rank: Rank
    device: torch.device
    cores: tuple[int, ...]
    """The cores of all ranks on this host."""
    pinned: tuple[int, ...]
    exchange: ExchangeGroup
    control: Control
    log: RankLog
    warnings: tuple[str, ...] = ()
    """Of this rank, beside those of the launch."""
    forked: bool = False
    """Whether this process is for one run alone."""
    faults: GpuFaults | None = None
    """Of this rank's GPU."""
    network_log: Path | None = None
    """What NCCL writes of how it connects; None where it writes none, or to a file of the user's."""

    @property
    def source_folder(self) -> Path | None:
        """Where `py:` workloads are imported from."""
        return Path(self.launch.source_folder) if self.launch.source_folder else None

    def record(
        self, slot: Slot, cell: Cell, ending: Ending, found: PartialRecord, absent: dict[str, str]
    ) -> RankRecord:
        """What this rank keeps of a run of `cell`, as it ended and as far as it came."""
        launch, rank = self.launch, self.rank
        faults = [] if self.faults is None else self.faults.take()
        return RankRecord(
            cell_id=slot.cell_id,
            run_id=slot.run_id,
            launch_id=launch.launch_id,
            repeat=slot.repeat,
            gpus=rank.gpus,
            rank=rank.rank,
            local_rank=rank.local_rank,
            node_rank=rank.node_rank,
            outcome=ending.outcome,
            reason=ending.reason,
            evidence=self.evidence,
            started_at=ending.started_at,
            ended_at=utc_now(),
            environment=msgspec.structs.replace(
                probe(launch, rank, self.device, self.pinned, cell, ending.transports),
                process_group=self.exchange.class_name,
                program=ending.program,
            ),
            warnings=[
                *launch.warnings,
                *self.warnings,
                *(f"rank {rank.rank}: {words}" for words in faults),
                *ending.warnings,
            ],
            absent=absent,
            **found,
        )
