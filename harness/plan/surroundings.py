"""Memory, links and rates of the ranks of a cell before it runs, known or assumed.

`Limit` is the number of workers that the machine at hand can hold, with advice for cells that need more.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

import msgspec

from harness.machine.device import usable_cores, visible_gpus
from harness.plan.estimate import CPU_CORE_FLOPS_PER_S, PEAK_SHARE, Hardware
from results.catalogue.gpus import link_bytes_per_s, memory_bytes, memory_bytes_per_s, peak_flops_per_s
from results.cell import Cell, Device
from results.groups import GroupLayout
from results.notation import link_text
from results.plan import Placement, Request, has_virtual_nodes
from strategies.closed_form.terms import Term

MIB = 2**20
SHARE = 0.95
"""Share of the memory that a prediction may take."""
RESERVE_BYTES: Mapping[Device, int] = {"cpu": 64 * MIB, "cuda": 1024 * MIB}
"""Memory that a prediction does not count: stacks of threads, buffers of libraries and of the backend, the
CUDA context. On CPU 6 to 28 MiB were measured (docs/memory.md)."""
ASSUMED_GPU = "A100-SXM4-80GB"
LINK_SHARE = 0.75
"""Share of the peak of links between GPUs: 227 of 300 GB/s were seen on an A100 node."""
INSIDE_BYTES_PER_S: Mapping[Device, float] = {"cpu": 1e9, "cuda": 12e9}
"""Rate between ranks of a node if it is unknown: Gloo over loopback, and PCIe."""
NETWORK_SHARE = 0.7
"""Share of the rate of a node's network that is reached."""
ACROSS_BYTES_PER_S: Mapping[Device, float] = {"cpu": 1.25e9, "cuda": NETWORK_SHARE * 25e9}
"""Rate of a node's network if it is unknown: 10 Gbit/s, and that share of 200 Gbit/s."""
LATENCY_S: Mapping[Device, float] = {"cpu": 200e-6, "cuda": 30e-6}
"""Latency of one operation."""
CORE_BYTES_PER_S = 10e9
"""Rate of an update on one core: assumed."""
GPU_MEMORY_SHARE = 0.8
HOST_LINK_BYTES_PER_S = 20e9
"""Rate between a GPU and its host: assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Devices of a node, by which a strategy is chosen; None if a fact is unknown."""

    cores: int | None = None
    """Cores of a node."""
    host_bytes: int | None = None
    """Memory of a node."""
    gpu_name: str | None = None
    gpu_bytes: int | None = None
    network_gbit_per_s: float | None = None
    """Rate of all adapters of a node together."""


@cache
def devices_here() -> Devices:
    """The devices of this machine."""
    gpus = visible_gpus()
    return Devices(
        cores=len(usable_cores()),
        host_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu_name=gpus[0].name if gpus else None,
        gpu_bytes=gpus[0].memory_bytes if gpus else None,
    )


def devices_of(request: Request) -> Devices:
    """The devices that a request's cells run on: known facts of the cluster, else this machine's devices."""
    if request.gpu_model is None:
        return replace(devices_here(), network_gbit_per_s=request.network_gbit_per_s)
    # Of the cluster's hosts nothing else is known.
    return Devices(gpu_name=request.gpu_model, network_gbit_per_s=request.network_gbit_per_s)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Memory, links and rates around the ranks of one cell, and which of them are only assumed."""

    cell: Cell
    node_size: int
    """Ranks of a node, virtual or real, by which groups of ranks are laid out."""
    host_size: int
    """Ranks of a real host, which share its cores, its memory and its connection to other hosts."""
    devices: Devices
    notes: tuple[str, ...]

    @classmethod
    def of(cls, cell: Cell, devices: Devices, gpus_per_node: int | None) -> Surroundings:
        linked = cell.link_mbit_per_s is not None
        host = min(cell.gpus, (None if linked else gpus_per_node) or cell.gpus)
        size = min(cell.gpus, cell.node_size or (1 if linked else host))
        known, notes = devices, []
        if cell.device == "cuda" and (
            devices.gpu_name is None or peak_flops_per_s(devices.gpu_name, cell.precision) is None
        ):
            # A host without GPUs is not the host that the cell runs on: its memory says nothing.
            memory = devices.host_bytes if devices.gpu_name else None
            known = replace(devices, gpu_name=ASSUMED_GPU, host_bytes=memory)
            why = "which GPU it is, is not known"
            if devices.gpu_name is not None:
                why = f"the catalogue has no peak of {devices.gpu_name} in {cell.precision}"
            notes.append(f"assumed: the GPU is like an {ASSUMED_GPU}; {why}")
        return cls(cell=cell, node_size=size, host_size=host, devices=known, notes=tuple(notes))

    def placed(self, cell: Cell) -> Cell:
        """A copy of a cell whose groups are laid out over these nodes, also if the nodes are real."""
        return msgspec.structs.replace(cell, node_size=self.node_size)

    @property
    def name(self) -> str:
        """Name of the GPU."""
        return self.devices.gpu_name or ASSUMED_GPU

    @cached_property
    def memory(self) -> int:
        """Bytes of memory of a rank."""
        if self.cell.memory_limit_mb is not None:
            return self.cell.memory_limit_mb * MIB
        if self.cell.device == "cpu":
            return (self.devices.host_bytes or 0) // self.host_size
        return self.devices.gpu_bytes or memory_bytes(self.name) or 0

    @property
    def room(self) -> int:
        """Bytes that a prediction may take."""
        limited = self.cell.memory_limit_mb is not None and self.cell.device == "cuda"
        reserve = 0 if limited else RESERVE_BYTES[self.cell.device]
        return max(0, int(SHARE * self.memory) - reserve)

    @cached_property
    def inside(self) -> float:
        """Bytes that a rank sends to its neighbours in a second."""
        linked = link_bytes_per_s(self.name) if self.cell.device == "cuda" else None
        return LINK_SHARE * linked if linked else INSIDE_BYTES_PER_S[self.cell.device]

    @property
    def outlet(self) -> int:
        """The number of ranks that share one connection to other nodes: the ranks of a host, or, under a
        link, of a virtual node."""
        return self.host_size if self.cell.link_mbit_per_s is None else self.node_size

    @cached_property
    def across(self) -> float:
        """Bytes that the ranks of one `outlet` send to other nodes in a second, together."""
        if self.cell.link_mbit_per_s is not None:
            return self.cell.link_mbit_per_s * 1e6 / 8
        known = self.devices.network_gbit_per_s
        return ACROSS_BYTES_PER_S[self.cell.device] if known is None else NETWORK_SHARE * known * 1e9 / 8

    @property
    def memory_rate(self) -> float:
        if self.cell.device == "cpu":
            return CORE_BYTES_PER_S
        return GPU_MEMORY_SHARE * (memory_bytes_per_s(self.name) or 1e12)

    @property
    def hardware(self) -> Hardware:
        """Hardware of all ranks, which share the cores of all hosts."""
        cores, hosts = self.devices.cores, self.cell.gpus // self.host_size
        return Hardware(
            cores=None if cores is None else cores * hosts,
            gpu_name=self.name if self.cell.device == "cuda" else None,
        )

    def seconds(self, term: Term, groups: GroupLayout) -> float:
        """Seconds of one kind of message: a rank sends at most `inside` bytes a second, and the ranks of an
        outlet at most `across`."""
        leaving = leaving_bytes(term, groups, self.outlet)
        moving = max(term.wire_bytes / self.inside, leaving / self.across)
        return moving + term.operations * LATENCY_S[self.cell.device]

    def lines(self) -> list[str]:
        """The basis of a choice in lines, including its assumptions."""
        return [*self._memory_lines(), *self._rate_lines(), *self._link_lines(), *self.notes]

    def _memory_lines(self) -> list[str]:
        cell = self.cell
        source = "a rank's part of this host" if cell.device == "cpu" else "of a GPU"
        if cell.memory_limit_mb is not None:
            source = "--memory-limit-mb"
        planned = f"of which {self.room / MIB:,.0f} may be planned"
        lines = [f"memory {self.memory / MIB:,.0f} MiB ({source}), {planned}"]
        if cell.precision in ("bf16", "fp16"):
            lines.append(
                f"{cell.precision} activations are counted as fp32, kept and sent: an upper estimate"
            )
        if cell.device == "cpu" and cell.memory_limit_mb is None:
            lines.append(
                "without --memory-limit-mb the heap keeps what is freed: sharded strategies take more than "
                "predicted (docs/memory.md)"
            )
        return lines

    def _rate_lines(self) -> list[str]:
        cell = self.cell
        if cell.device == "cpu":
            cores = self.devices.cores or self.host_size
            return [
                f"computation at {CPU_CORE_FLOPS_PER_S / 1e9:g} GFLOP/s a core (assumed); "
                f"a host has {cores}, and of the ranks {self.host_size}",
                f"updates at {CORE_BYTES_PER_S / 1e9:g} GB/s of memory a rank (assumed)",
            ]
        peak = (peak_flops_per_s(self.name, cell.precision) or 0) / 1e12
        peak_rate = self.memory_rate / GPU_MEMORY_SHARE / 1e9
        lines = [
            f"computation at {PEAK_SHARE:g} (assumed) of the catalogue's {peak:g} TFLOP/s {cell.precision}",
            f"updates at {GPU_MEMORY_SHARE:g} (assumed) of the catalogue's {peak_rate:,.0f} GB/s of memory",
        ]
        if cell.gpus > 1:
            lines.append(
                f"offload=cpu: {HOST_LINK_BYTES_PER_S / 1e9:g} GB/s between a GPU and its host, "
                f"updates there at {CORE_BYTES_PER_S / 1e9:g} GB/s (assumed)"
            )
        return lines

    def _link_lines(self) -> list[str]:
        cell = self.cell
        if cell.gpus == 1:
            return []
        linked = link_bytes_per_s(self.name) if cell.device == "cuda" else None
        told = f"{LINK_SHARE:g} of the catalogue's {linked / 1e9:g}" if linked else "assumed"
        lines = [f"ranks of a node send {self.inside / 1e9:,.2f} GB/s ({told})"]
        if self.outlet < cell.gpus:
            link, network = cell.link_mbit_per_s, self.devices.network_gbit_per_s
            told = "assumed: their network is not known"
            if link is not None:
                told = f"--link {link_text(link)}"
            elif network is not None:
                told = f"{NETWORK_SHARE:g} of the profile's {network:g} Gbit/s"
            lines.append(f"nodes of {self.outlet} send {self.across / 1e9:,.3f} GB/s ({told})")
        host = Placement(nodes=1, gpus_per_node=self.host_size)
        if cell.link_mbit_per_s is None and has_virtual_nodes(cell, host):
            lines.append(f"virtual nodes of {self.node_size} are parts of a host, and send as inside of it")
        return [*lines, f"{1e3 * LATENCY_S[cell.device]:g} ms an operation (assumed)"]


def leaving_bytes(term: Term, groups: GroupLayout, node_size: int) -> float:
    """Bytes of a message that leave the busiest node, if nodes are `node_size` consecutive ranks.

    In an all-to-all each rank sends a p-th of its buffer to every other; of a pipeline what goes over an edge
    leaves; all else goes around a ring, or down a chain.
    """
    out: Counter[int] = Counter()
    for ranks in groups.groups(term.dimension):
        if term.collective == "all-to-all":
            for node, members in Counter(rank // node_size for rank in ranks).items():
                out[node] += members * (len(ranks) - members)
            continue
        after = ranks[1:] if term.collective == "send" else [*ranks[1:], ranks[0]]
        for rank, following in zip(ranks, after, strict=False):
            out[rank // node_size] += rank // node_size != following // node_size
    most = max(out.values(), default=0)
    return most * (term.payload_bytes / term.ranks if term.collective == "all-to-all" else term.wire_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Limits on the cells of a plan. A cell that exceeds one is skipped with a reason, not refused."""

    devices: int | None = None
    """Cores of this machine on CPU, its CUDA devices otherwise; None if the number is not limited."""
    word: str = ""
    """The noun of the devices: `cores` or `CUDA devices`."""
    hint: str = ""
    """Advice by which a larger cell would run."""
    link: str | None = None
    """Why no link can be made here; None if one can be made."""
    gpus: Devices | None = None
    """The GPUs whose memory each cell must fit into; None if memory is not limited."""

    @property
    def gpu_bytes(self) -> int | None:
        """An upper bound of the memory of one GPU; None if it is not known or not limited."""
        if self.gpus is None:
            return None
        stated = memory_bytes(self.gpus.gpu_name or "")
        # The catalogue's GB can be GiB: an A100 of 80 GB has 85e9 bytes.
        return self.gpus.gpu_bytes or (stated and stated * 2**30 // 10**9)

    def reason(self, gpus: int) -> str | None:
        """Why a cell of `gpus` workers does not run here; None if it does."""
        if self.devices is None or gpus <= self.devices:
            return None
        word = self.word.removesuffix("s") if self.devices == 1 else self.word
        return f"needs {gpus}, this machine has {self.devices} {word}; {self.hint}"
