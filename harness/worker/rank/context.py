"""The context of a launch on this rank: its process and machine, and its runs with their rank records.

The facts of process and machine are an allow-list, never the environment as a whole.
"""

from __future__ import annotations

import math
import os
import platform
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from torch.nn.attention import _cur_sdpa_kernel_backends

from harness.machine.code import with_packages
from harness.machine.device import GpuFaults, cpu_model, driver_version, nccl_settings, other_settings
from harness.worker.exchange.group import ExchangeGroup
from harness.worker.rank.control import Control, parameters_hash
from harness.worker.rank.failure import ProofFailedError, classify
from harness.worker.rank.log import RankLog
from harness.worker.rank.network import named_interfaces
from harness.worker.rank.rank import Rank
from harness.worker.rank.usage import started_by
from results.cell import Cell
from results.environment import Environment, Program
from results.launch import JobVariables, Launch, Slot
from results.outcome import Evidence, Outcome
from results.record import Proof, ProofMethod, RankRecord
from results.store import Study, utc_now
from strategies.catalog import STRATEGIES
from strategies.trainer import Trainer

SETTINGS = other_settings()
"""The settings that this process was given. Libraries of a workload may set others."""


@dataclass(slots=True)
class LastTimed:
    """The moment at which this process ended the last steps that a run timed: its device began to cool."""

    at_s: float = -math.inf

    @property
    def seconds_ago(self) -> float:
        return time.monotonic() - self.at_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """The surroundings of all runs of a launch on this rank."""

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
    """Warnings of this rank; the launch has others."""
    forked: bool = False
    """Whether this process runs only one run."""
    faults: GpuFaults | None = None
    """The faults that this rank's GPU reports; None on CPU."""
    network_log: Path | None = None
    """The file in which NCCL logs how it connects; None if it logs nothing, or to a file of the user's."""

    last_timed: LastTimed = field(default_factory=LastTimed)

    @property
    def source_folder(self) -> Path | None:
        """The folder that `py:` workloads are imported from."""
        return Path(self.launch.source_folder) if self.launch.source_folder else None

    def environment(
        self, cell: Cell, *, transports: Iterable[str] = (), program: Program | None = None
    ) -> Environment:
        """Describe this rank's process and machine for a run of `cell`.

        `transports` is what NCCL moves data by, and `program` the model that was built.
        """
        launch, cuda = self.launch, self.device.type == "cuda"
        properties = torch.cuda.get_device_properties(self.device) if cuda else None
        return Environment(
            host=platform.node(),
            os=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            torch=str(torch.__version__),
            device_name=properties.name if properties else cpu_model(),
            device_memory_bytes=properties.total_memory if properties else psutil.virtual_memory().total,
            allocation=allocation(launch.job_variables),
            device_uuid=device_uuid(self.device) if cuda else None,
            cpu_model=cpu_model(),
            cores=len(os.sched_getaffinity(started_by().pid)),
            threads=torch.get_num_threads(),
            code=with_packages(launch.code, [cell], launch.order),
            driver=driver_version() if cuda else None,
            cuda=torch.version.cuda if cuda else None,
            nccl=nccl_version() if launch.backend == "nccl" else None,
            nodes=launch.placement.nodes,
            gpus_per_node=launch.placement.gpus_per_node,
            pinned_cores=self.pinned,
            # The cell has the variables that it asks for, so they are no condition of the run.
            nccl_settings=without_own(nccl_settings(), cell),
            settings=without_own(SETTINGS, cell),
            interfaces=named_interfaces(),
            transports=tuple(transports),
            # The kernels of `scaled_dot_product_attention` that are switched on, the preferred one first. For
            # each call torch takes the first that can do it: by device, data type, head size and mask.
            attention=tuple(
                kernel.name.removesuffix("_ATTENTION").lower()
                for kernel in _cur_sdpa_kernel_backends(with_priority=True)
            ),
            process_group=self.exchange.class_name,
            program=program,
        )


def without_own(settings: Mapping[str, str], cell: Cell) -> dict[str, str]:
    """Return the settings without the variables that the cell itself sets."""
    own = {text.partition("=")[0] for text in cell.env}
    return {name: value for name, value in settings.items() if name not in own}


class Run:
    """One run of a cell on this rank: what it has found so far, and its rank record, however it ends."""

    def __init__(self, around: RankContext, slot: Slot, cell: Cell) -> None:
        self.around = around
        self.slot = slot
        self.cell = cell
        """The cell as it was planned."""
        self.found: dict[str, Any] = {"clock": "monotonic", "spent_ns": {}}
        """Fields of the run's `RankRecord`, by their names; a field that is not found keeps its default."""
        self.absent: dict[str, str] = {}
        """Reasons for figures that are missing, by their names."""
        self.warnings: list[str] = []
        self.transports: Sequence[str] = ()
        """The transports that NCCL uses, on any rank."""
        self.program: Program | None = None
        """The description of the model that was built; None before that."""
        self.surroundings: dict[str, Any] = {}
        """Fields of the record's `Environment` that differ from this process's."""
        self.model: weakref.ref[torch.nn.Module] | None = None
        """A weak reference to the model, which shows whether it has been freed."""
        self._started_at = utc_now()
        self._part: tuple[str, int] | None = None
        """The part of the run that is under way, and the clock when it began."""

    def execute(self, work: Callable[[Run], None]) -> RankRecord:
        """Do `work` and return the record. An exception becomes the record's outcome, never more."""
        outcome, reason = Outcome.OK, None
        try:
            with self._beats_of_compiler():
                work(self)
        except (Exception, SystemExit) as error:
            # The border of a run: whatever a workload or a strategy raises is this cell's outcome.
            traceback.print_exc()
            outcome, reason = classify(error)
            self.around.log.event("failed", outcome=outcome, reason=reason)
        self._end_part()
        around, slot, rank = self.around, self.slot, self.around.rank
        faults = [] if around.faults is None else around.faults.take()
        return RankRecord(
            cell_id=slot.cell_id,
            run_id=slot.run_id,
            launch_id=around.launch.launch_id,
            repeat=slot.repeat,
            gpus=rank.gpus,
            rank=rank.rank,
            local_rank=rank.local_rank,
            node_rank=rank.node_rank,
            outcome=outcome,
            reason=reason,
            evidence=around.evidence,
            started_at=self._started_at,
            ended_at=utc_now(),
            environment=msgspec.structs.replace(
                around.environment(self.cell, transports=self.transports, program=self.program),
                **self.surroundings,
            ),
            warnings=[
                *around.launch.warnings,
                *around.warnings,
                *(f"rank {rank.rank}: {words}" for words in faults),
                *self.warnings,
            ],
            absent=self.absent,
            **self.found,
        )

    @contextmanager
    def _beats_of_compiler(self) -> Iterator[None]:
        """Say that the rank works when it begins and ends to compile a graph, which may take minutes."""
        if not self.cell.compile:
            yield
            return
        from torch._dynamo.callback import callback_handler as compiler

        def beat(_: object) -> None:
            self.around.log.heartbeat()

        compiler.register_start_callback(beat)
        compiler.register_end_callback(beat)
        try:
            yield
        finally:
            compiler.remove_start_callback(beat)
            compiler.remove_end_callback(beat)

    def begin(self, part: str) -> None:
        """Say in the log that a part of the run begins, and end the part before it."""
        self._end_part()
        self._part = part, time.perf_counter_ns()
        self.around.log.event(part)

    def require(self, missed: str | None) -> None:
        """Fail on all ranks if on one of them a step did not do what the cell asks for; collective."""
        every = self.around.control.union([] if missed is None else [missed])
        if every:
            self.fail(missed or every[0])

    def fail(self, detail: str, method: ProofMethod = "serial-simulation") -> None:
        """Record that the proof failed, and end the run, unless the launch reports failed proofs and measures
        on. All ranks must call it."""
        failed = Proof(method=method, passed=False, detail=detail)
        if self.proof_failed:
            first = self.found["proof"]
            failed = msgspec.structs.replace(first, detail=f"{first.detail}; {detail}")
        self.found["proof"] = failed
        if self.around.launch.proof == "strict":
            raise ProofFailedError(detail)

    @property
    def proof_failed(self) -> bool:
        """Whether a comparison of this run has failed already, on any rank."""
        proof = self.found.get("proof")
        return proof is not None and not proof.passed

    def add_parameters_hash(self, trainer: Trainer) -> None:
        """Hash the parameters that training ends with; collective."""
        trainer.model.settle()
        if STRATEGIES.facts(self.cell.strategy).promise.all_equal:
            self.found["parameters_hash"] = parameters_hash(trainer)
        else:
            self.absent["parameters_hash"] = f"{self.cell.strategy} does not keep all replicas equal"

    @property
    def scalars_folder(self) -> Path | None:
        """The folder for this rank's scalars for TensorBoard; None if nobody asked for them."""
        launch, rank = self.around.launch, self.around.rank.rank
        if not launch.tensorboard:
            return None
        return self.around.study.scalars_folder(launch.launch_id, rank, self.slot.cell_id)

    def _end_part(self) -> None:
        if self._part is not None:
            part, began = self._part
            self.found["spent_ns"][part] = time.perf_counter_ns() - began


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

    For a part of a GPU, CUDA gives the UUID of the part (cuDeviceGetUuid_v2), and a name such as `NVIDIA
    A100-SXM4-40GB MIG 1g.5gb`.
    """
    found = torch.cuda.get_device_properties(device)
    return f"{'MIG' if ' MIG ' in found.name else 'GPU'}-{found.uuid}"


def nccl_version() -> str:
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
