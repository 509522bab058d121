"""The context of a launch on this rank: its process and machine, and the rank records that are made there.

The facts of process and machine are an allow-list, never the environment as a whole.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Required, TypedDict

import msgspec
import psutil
import torch
from torch.nn.attention import _cur_sdpa_kernel_backends

from harness.machine.device import GpuFaults, cpu_model, driver_version, nccl_settings, other_settings
from harness.machine.code import with_packages
from harness.worker.exchange.group import ExchangeGroup
from harness.worker.rank.control import Control
from harness.worker.rank.log import RankLog
from harness.worker.rank.rank import Rank
from harness.worker.rank.usage import started_by
from results.cell import Cell
from results.environment import Environment, Program
from results.launch import JobVariables, Launch, Slot
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


SETTINGS = other_settings()
"""The settings that this process was given. Libraries of a workload may set others."""


def probe(
    launch: Launch,
    rank: Rank,
    device: torch.device,
    cores: tuple[int, ...],
    cell: Cell,
    transports: Iterable[str] = (),
) -> Environment:
    """What this rank runs on; `cores` are those it is bound to, empty for none; `transports` what NCCL moves
    data by."""
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return Environment(
        host=platform.node(),
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        device_name=properties.name if properties else cpu_model(),
        device_memory_bytes=properties.total_memory if properties else psutil.virtual_memory().total,
        allocation=allocation(launch.job_variables),
        device_uuid=device_uuid(device) if cuda else None,
        cpu_model=cpu_model(),
        cores=len(os.sched_getaffinity(started_by().pid)),
        threads=torch.get_num_threads(),
        code=with_packages(launch.code, [cell]),
        driver=driver_version() if cuda else None,
        cuda=torch.version.cuda if cuda else None,
        nccl=nccl_version() if launch.backend == "nccl" else None,
        nodes=launch.placement.nodes,
        gpus_per_node=launch.placement.gpus_per_node,
        pinned_cores=cores,
        nccl_settings=nccl_settings(),
        settings=SETTINGS,
        transports=tuple(transports),
        attention=tuple(attention_kernels()),
    )


def attention_kernels() -> list[str]:
    """Those of torch's `scaled_dot_product_attention` that are switched on, the preferred one first.

    Of these torch takes for each call the first that can do it: by device, data type, head size and mask.
    """
    kernels = _cur_sdpa_kernel_backends(with_priority=True)
    return [kernel.name.removesuffix("_ATTENTION").lower() for kernel in kernels]


def allocation(names: Iterable[JobVariables], variables: Mapping[str, str] = os.environ) -> str | None:
    """The scheduler's job that this process runs in, such as `slurm 17, restart 2`; None for none."""
    for told in names:
        if (job := variables.get(told.job)) is not None:
            # A job that was put back into the queue keeps its number and gets other nodes.
            restart = variables.get(told.restarts, "0")
            return f"{told.scheduler} {job}" + (f", restart {restart}" if restart != "0" else "")
    return None


def device_uuid(device: torch.device) -> str:
    """The name that NVML has for a CUDA device.

    Of a part of a GPU CUDA gives the part's own UUID (cuDeviceGetUuid_v2), and a name such as `NVIDIA
    A100-SXM4-40GB MIG 1g.5gb`.
    """
    found = torch.cuda.get_device_properties(device)
    return f"{'MIG' if ' MIG ' in found.name else 'GPU'}-{found.uuid}"


def nccl_version() -> str:
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
