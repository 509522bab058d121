"""What is predicted of a cell before it runs: the memory that it has, and the time of its step.

The time is that of its computation (FLOPs over an assumed rate), of its update (bytes over the rate of
memory), of a pipeline's bubble, and of what is sent and does not run beside computation:

    exposed = blocking + max(0, beside backward - 2/3 C / accumulation,
                                beside backward + beside all - C)

where C is the computation, two thirds of which are backward. It is to choose by, not to report: what is not
known of the machine is assumed, and said.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from harness.device import usable_cores, visible_gpus
from harness.plan.estimate import Hardware, step_time
from results.catalogue.gpus import link_bytes_per_s, memory_bytes, memory_bytes_per_s, peak_flops_per_s
from results.cell import Cell, Device
from results.groups import GroupLayout
from results.link import link_text
from results.parts import ModelParts
from strategies.catalog import OPTIMIZERS, group_layout, microbatches
from strategies.cut import stages_of
from strategies.footprint import updated_bytes
from strategies.traffic import Term

MIB = 2**20
SHARE = 0.95
"""Of the memory there is, what a prediction may take."""
RESERVE_BYTES: Mapping[Device, int] = {"cpu": 64 * MIB, "cuda": 1024 * MIB}
"""For what is not counted: stacks of threads, buffers of libraries and of the backend, a CUDA context is
before it. On CPU 24 MiB were measured (docs/memory.md)."""
BACKWARD_SHARE = 2 / 3
REPEATED_SHARE = 4 / 3
"""Computation with activation checkpointing over that without: the forward pass twice."""

ASSUMED_GPU = "A100-SXM4-80GB"
LINK_SHARE = 0.75
"""Of the peak of links between GPUs: 227 of 300 GB/s were seen on an A100 node."""
INSIDE_BYTES_PER_S: Mapping[Device, float] = {"cpu": 1e9, "cuda": 12e9}
"""Between ranks of a node where nothing is known: Gloo over loopback, and PCIe."""
ACROSS_BYTES_PER_S: Mapping[Device, float] = {"cpu": 1.25e9, "cuda": 17.5e9}
"""Of a node's network where nothing is known: 10 Gbit/s, and 200 Gbit/s of which 0.7 are reached."""
LATENCY_S: Mapping[Device, float] = {"cpu": 200e-6, "cuda": 30e-6}
"""Of one operation."""
CORE_BYTES_PER_S = 10e9
"""An update on one core: assumed."""
GPU_MEMORY_SHARE = 0.8
HOST_LINK_BYTES_PER_S = 20e9
"""Between a GPU and its host: assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What a choice goes by; None is what is not known."""

    cores: int | None = None
    """Of a node."""
    host_bytes: int | None = None
    """Memory of a node."""
    gpu_name: str | None = None
    gpu_bytes: int | None = None


@cache
def devices_here() -> Devices:
    """Those of this machine."""
    gpus = visible_gpus()
    return Devices(
        cores=len(usable_cores()),
        host_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu_name=gpus[0].name if gpus else None,
        gpu_bytes=gpus[0].memory_bytes if gpus else None,
    )


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Memory, links and rates around the ranks of one cell, and which of them are only assumed."""

    cell: Cell
    node_size: int
    devices: Devices
    notes: tuple[str, ...]

    @classmethod
    def of(cls, cell: Cell, devices: Devices, gpus_per_node: int | None) -> Surroundings:
        size = cell.node_size or (1 if cell.link_mbit_per_s is not None else gpus_per_node or cell.gpus)
        known, notes = devices, []
        if cell.device == "cuda" and (
            devices.gpu_name is None or peak_flops_per_s(devices.gpu_name, cell.precision) is None
        ):
            known = Devices(gpu_name=ASSUMED_GPU, gpu_bytes=devices.gpu_bytes, cores=devices.cores)
            notes.append(f"assumed: the GPU is like an {ASSUMED_GPU}")
        return cls(cell=cell, node_size=min(size, cell.gpus), devices=known, notes=tuple(notes))

    @property
    def name(self) -> str:
        """Of the GPU."""
        return self.devices.gpu_name or ASSUMED_GPU

    @cached_property
    def memory(self) -> int:
        """Bytes that a rank has."""
        if self.cell.memory_limit_mb is not None:
            return self.cell.memory_limit_mb * MIB
        if self.cell.device == "cpu":
            # Virtual nodes are on one host.
            virtual = self.cell.node_size is not None or self.cell.link_mbit_per_s is not None
            return (self.devices.host_bytes or 0) // (self.cell.gpus if virtual else self.node_size)
        return self.devices.gpu_bytes or memory_bytes(self.name) or 0

    @property
    def room(self) -> int:
        """Bytes that a prediction may have."""
        limited = self.cell.memory_limit_mb is not None and self.cell.device == "cuda"
        reserve = 0 if limited else RESERVE_BYTES[self.cell.device]
        return max(0, int(SHARE * self.memory) - reserve)

    @cached_property
    def inside(self) -> float:
        """Bytes that a rank sends to its neighbours in a second."""
        linked = link_bytes_per_s(self.name) if self.cell.device == "cuda" else None
        return LINK_SHARE * linked if linked else INSIDE_BYTES_PER_S[self.cell.device]

    @cached_property
    def across(self) -> float:
        """Bytes that a node sends to others in a second."""
        if self.cell.link_mbit_per_s is not None:
            return self.cell.link_mbit_per_s * 1e6 / 8
        return self.inside if self.cell.node_size is not None else ACROSS_BYTES_PER_S[self.cell.device]

    @property
    def memory_rate(self) -> float:
        if self.cell.device == "cpu":
            return CORE_BYTES_PER_S
        return GPU_MEMORY_SHARE * (memory_bytes_per_s(self.name) or 1e12)

    def seconds(self, term: Term, groups: GroupLayout) -> float:
        """Of one kind of message."""
        leaving = _leaving(groups, term, self.node_size)
        rate = self.across / leaving if leaving else self.inside
        return term.wire_bytes / rate + term.operations * LATENCY_S[self.cell.device]

    def lines(self) -> list[str]:
        """What was gone by."""
        cell, mib = self.cell, self.memory / MIB
        source = "a rank's part of this host" if cell.device == "cpu" else "of a GPU"
        if cell.memory_limit_mb is not None:
            source = "--memory-limit-mb"
        lines = [f"memory {mib:,.0f} MiB ({source}), of which {self.room / MIB:,.0f} may be planned"]
        if cell.gpus > 1:
            told = "the catalogue" if self.inside != INSIDE_BYTES_PER_S[cell.device] else "assumed"
            lines.append(f"ranks of a node send {self.inside / 1e9:,.2f} GB/s ({told})")
        if self.node_size < cell.gpus:
            virtual = "as inside: one host" if cell.node_size is not None else "assumed"
            told = f"--link {link_text(cell.link_mbit_per_s)}" if cell.link_mbit_per_s else virtual
            lines.append(f"nodes of {self.node_size} send {self.across / 1e9:,.3f} GB/s ({told})")
        return [*lines, *self.notes]


def _leaving(groups: GroupLayout, term: Term, node_size: int) -> int:
    """Rings of a message, or edges of a pipeline, that leave the busiest node; 0 if all stay inside."""
    out: dict[int, int] = {}
    for ranks in groups.groups(term.dimension):
        after = ranks[1:] if term.collective == "send" else [*ranks[1:], ranks[0]]
        for rank, following in zip(ranks, after, strict=False):
            if rank // node_size != following // node_size:
                out[rank // node_size] = out.get(rank // node_size, 0) + 1
    return max(out.values(), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one step."""

    compute: float
    update: float
    bubble: float
    exposed: float

    @property
    def step(self) -> float:
        return self.compute + self.update + self.bubble + self.exposed


def predicted_times(cell: Cell, parts: ModelParts, terms: Sequence[Term], around: Surroundings) -> Times:
    hardware = Hardware(cores=around.devices.cores, gpu_name=around.name if cell.device == "cuda" else None)
    alone = step_time(cell, known_ns=None, hardware=hardware).seconds
    assert alone is not None, "the FLOPs of workloads with parts are known, and so is the assumed GPU's peak"
    repeated = REPEATED_SHARE if cell.activation_checkpointing is True else 1.0
    compute = alone * repeated * _share(cell, parts)
    state = 2 if cell.optimizer.startswith("adamw") else 1
    # Parameters and state are read and written, gradients read.
    update = (3 + 2 * state) * updated_bytes(cell, parts) / around.memory_rate
    return Times(
        compute=compute,
        update=update + _offloading(cell, parts, around),
        bubble=compute * _bubble(cell),
        exposed=_exposed(cell, terms, compute, around),
    )


def _share(cell: Cell, parts: ModelParts) -> float:
    """Of the computation of a replica, what the busiest of its ranks does."""
    total = sum(part.flops for part in parts.parts)
    groups = group_layout(cell.strategy, cell.gpus, cell.node_size)
    blocks = sum(block.flops for block in parts.blocks)
    if groups.pipeline > 1:
        return (
            max(
                sum(parts.blocks[index].flops for stage in own for index in stage.blocks)
                + sum(parts.stem.flops * stage.stem + parts.head.flops * stage.head for stage in own)
                for own in stages_of(cell, parts)
            )
            / total
        )
    return (total - blocks + blocks / groups.tensor) / total


def _bubble(cell: Cell) -> float:
    """Idle time over the computation of a stage: (p - 1) / m (Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2), of which each micro-batch has one."""
    groups = group_layout(cell.strategy, cell.gpus, cell.node_size)
    return (groups.pipeline - 1) / microbatches(cell.strategy)


def _offloading(cell: Cell, parts: ModelParts, around: Surroundings) -> float:
    """Shards to the GPU twice, gradients back, and an update from the host's memory."""
    if "offload=cpu" not in cell.strategy or cell.device == "cpu":
        return 0.0
    shard = updated_bytes(cell, parts)
    state = 2 if OPTIMIZERS.parse(cell.optimizer).name == "adamw" else 1
    return 3 * shard / HOST_LINK_BYTES_PER_S + (3 + 2 * state) * shard / CORE_BYTES_PER_S


def _exposed(cell: Cell, terms: Sequence[Term], compute: float, around: Surroundings) -> float:
    groups = group_layout(cell.strategy, cell.gpus, cell.node_size)
    spent = {"none": 0.0, "backward": 0.0, "compute": 0.0}
    for term in terms:
        spent[term.overlap] += around.seconds(term, groups)
    beside = spent["backward"] - BACKWARD_SHARE * compute / cell.accumulation
    return spent["none"] + max(0.0, beside, spent["backward"] + spent["compute"] - compute)
