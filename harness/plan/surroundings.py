"""Memory, links and rates of the ranks of a cell before it runs, known or assumed.

`Limit` is the number of workers that the machine at hand (`Machine`) can hold, with advice for cells that
need more.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import islice
from math import log2
from statistics import median

import msgspec

from harness.machine.device import usable_cores, visible_gpus
from results.catalogue.gpus import (
    catalogue_name,
    lacks_float8,
    link_bytes_per_s,
    memory_bytes,
    memory_bytes_per_s,
    peak_flops_per_s,
)
from results.cell import BASELINE_STRATEGY, DEFAULT_COLLECTIVE, HALVES, UNCOMPRESSED, Cell, Device, StepPolicy
from results.errors import SchemaError, StoreError
from results.groups import Dimension, GroupLayout
from results.network import NETWORK_FILE, NetworkTable
from results.notation import link_text
from results.outcome import Outcome
from results.parts import VALUE_BYTES, ModelParts, Unknown
from results.plan import Placement, Request, has_virtual_nodes
from results.run import RunResult
from results.schemas import NETWORK
from results.store import Study
from strategies.catalog import STRATEGIES
from strategies.closed_form.replay import Operation, Work
from strategies.closed_form.terms import Collective, wire_factor
from workloads.catalog import WORKLOADS, facts

CPU_CORE_FLOPS_PER_S = 50e9
"""One core in fp32 on large matrix products: measured on a 2-core x86 machine with torch 2.13."""
PEAK_SHARE = 0.4
"""Share of a GPU's dense peak that a training step reaches: assumed."""
BACKWARD_AND_FORWARD = 3
"""Ratio of the FLOPs of forward and backward to the FLOPs of forward: backward has two products for each of
forward's (Kaplan et al. 2020, arXiv:2001.08361, section 2.1)."""
MIB = 2**20
SHARE = 0.95
"""Share of the memory that a prediction may take."""
RESERVE_BYTES: Mapping[Device, int] = {"cpu": 64 * MIB, "cuda": 1024 * MIB}
"""Memory that a prediction does not count: stacks of threads, buffers of libraries and of the backend, the
CUDA context. On CPU 6 to 28 MiB were measured (docs/evidence.md)."""
GROWTH_BYTES = 6 * MIB
"""Address space that a short run on CPU leaves free, because heaps are fragmented: a worker grew by 3.5 MiB
in 200 steps of gpt-nano, and equal runs differ by 2 MiB."""
ASSUMED_GPU = "A100-SXM4-80GB"
LINK_SHARE = 0.75
"""Share of the peak of links between GPUs: 227 of 300 GB/s were seen on an A100 node."""
INSIDE_BYTES_PER_S: Mapping[Device, float] = {"cpu": 1e9, "cuda": 12e9}
"""Rate between ranks of a node if it is unknown: Gloo over loopback, and PCIe."""
NETWORK_SHARE = 0.7
"""Share of the rate of a node's network that is reached."""
ACROSS_BYTES_PER_S: Mapping[Device, float] = {"cpu": 1.25e9, "cuda": NETWORK_SHARE * 25e9}
"""Rate of a node's network if it is unknown: 10 Gbit/s, and that share of 200 Gbit/s."""
OPERATION_S: Mapping[Device, float] = {"cpu": 100e-6, "cuda": 25e-6}
"""Latency of one operation however few ranks it has: assumed."""
HOP_S: Mapping[Device, float] = {"cpu": 100e-6, "cuda": 5e-6}
"""Latency in addition for each hop of an operation: assumed. Between p ranks they are taken to be the mean of
log2 p (a tree) and p - 1 (a ring), of which a library chooses."""
CORE_BYTES_PER_S = 10e9
"""Rate of an update on one core: assumed."""
GPU_MEMORY_SHARE = 0.8
HOST_LINK_BYTES_PER_S = 20e9
"""Rate between a GPU and its host: assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a study: its steps and its network."""

    works: Mapping[str, Work] = field(default_factory=dict)
    """The computation of a rank that has a core and updates all parameters, by `local_work`; never of another
    batch of a replica."""
    network: NetworkTable | None = None

    def work(self, cell: Cell) -> Work | None:
        """The computation of a rank of the cell; None if it was not measured.

        A strategy that shards copies what it gathers and sums, which one device alone does not: its own steps
        without exchange come first.
        """
        own = STRATEGIES.facts(cell.strategy).shards and self.works.get(local_work(cell, cell.strategy))
        return own or self.works.get(local_work(cell))

    @classmethod
    def of_study(cls, study: Study, results: Iterable[RunResult]) -> Measured:
        """Take what these runs of a study say, without excluded ones, and the network table in its folder."""
        path, table = study.root / NETWORK_FILE, None
        # A torn table must not keep a study from being measured: the commands that need one say what to do.
        with suppress(SchemaError, StoreError):
            table = NETWORK.read(path)
        results = study.review().counted([*results])
        return cls.of(results, (cell for plan in study.plans() for cell in plan.cells), table)

    @classmethod
    def of(
        cls, results: Iterable[RunResult], cells: Iterable[Cell], network: NetworkTable | None = None
    ) -> Measured:
        """Take the medians of undisturbed runs, for each batch of a replica of its smallest cell."""
        runs: dict[str, list[Work]] = defaultdict(list)
        by_id = {cell.id: cell for cell in sorted(cells, key=lambda cell: (cell.gpus, cell.id))}
        for run in results:
            cell = by_id.get(run.cell_id)
            if cell is None or cell.model_parallel > 1 or run.outcome is not Outcome.OK or run.disturbed:
                continue
            if run.unproven is not None:
                continue
            if (work := _work_of(run, cell)) is not None:
                runs[cell.id].append(work)
        found: dict[str, Work] = {}
        for cell in by_id.values():
            if cell.id in runs:
                parts = {
                    name: median(getattr(work, name) for work in runs[cell.id])
                    for name in ("forward_s", "backward_s", "update_s")
                }
                work = Work(**parts, micro_batches=cell.accumulation)
                found.setdefault(local_work(cell), work)
                found.setdefault(local_work(cell, cell.strategy), work)
        return cls(works=found, network=network)


def local_work(cell: Cell, strategy: str = BASELINE_STRATEGY) -> str:
    """Return what cells have in common whose ranks compute the same; with `strategy` only cells of it."""
    alone = {"strategy": strategy, "compression": UNCOMPRESSED, "collective": DEFAULT_COLLECTIVE}
    steps = StepPolicy()
    return msgspec.structs.replace(
        cell, gpus=1, model_parallel=1, node_size=None, link_mbit_per_s=None, steps=steps, **alone
    ).id


def updated_share(cell: Cell, parts: ModelParts) -> float:
    """The share of the trained parameters that the busiest rank updates."""
    whole = VALUE_BYTES * parts.trained.values
    return STRATEGIES.facts(cell.strategy).updated_bytes(cell, parts) / whole if whole else 1.0


def _work_of(run: RunResult, cell: Cell) -> Work | None:
    """Split the computation of a run, which includes the update, by its phases; None if it was not measured.

    On several ranks the passes contain waits: a third of them is taken to be forward. What ranks take longer
    because they share cores, and what they save because each updates a share, is taken out."""
    if run.budget is None:
        return None
    compute, phases = run.budget.compute_ns / 1e9, run.phase_ns
    update = min(phases.get("optimizer", 0.0) / 1e9, compute)
    forward = (compute - update) / BACKWARD_AND_FORWARD
    if run.ranks_expected == 1:
        forward = min(phases.get("forward", 0.0) / 1e9, compute - update)
    there, parts = run.environment, facts(WORKLOADS.parse(cell.workload)).parts
    devices = Devices(cores=there.cores) if there else Devices()
    around = Surroundings.of(cell, devices, there.gpus_per_node if there else None)
    share = 1.0 if isinstance(parts, Unknown) else updated_share(around.placed(cell), parts)
    return Work(
        forward_s=forward / around.crowd,
        backward_s=(compute - update - forward) / around.crowd,
        update_s=update / around.crowd / (share or 1.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Devices of a node, by which step times are assumed and a strategy is chosen; None if a fact is
    unknown."""

    cores: int | None = None
    """CPU cores of a node; ranks beyond them share. Where None, step times are of a core for each rank."""
    host_bytes: int | None = None
    """Memory of a node."""
    gpu_name: str | None = None
    """Name as its driver gives it."""
    gpu_bytes: int | None = None
    network_gbit_per_s: float | None = None
    """Rate of all adapters of a node together."""
    measured: Measured = Measured()
    """Measurements of the study, which predictions prefer to assumptions."""


@cache
def devices_here() -> Devices:
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

    @property
    def measured_room(self) -> int:
        """Bytes that a rank may take in a short run: on CPU whole MiB, including what `room` reserves."""
        if self.cell.device == "cuda":
            return self.room
        return max(1, int((SHARE * self.memory - GROWTH_BYTES) / MIB)) * MIB

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
    def crowd(self) -> float:
        """Ranks that share a core of their host, at least 1."""
        shares = self.cell.device == "cpu" and self.devices.cores is not None
        return max(1.0, self.host_size / (self.devices.cores or 1)) if shares else 1.0

    @property
    def hardware(self) -> Devices:
        """Hardware of all ranks, which share the cores of all hosts."""
        cores, hosts = self.devices.cores, self.cell.gpus // self.host_size
        return Devices(
            cores=None if cores is None else cores * hosts,
            gpu_name=self.name if self.cell.device == "cuda" else None,
        )

    def seconds(self, operation: Operation, groups: GroupLayout) -> float:
        """Seconds of one operation while no other runs, by the study's network table where that covers it,
        else assumed.

        A rank sends at most `inside` bytes a second, and the ranks of an outlet at most `across`. Groups that
        leave a node together share its way out: by the table, as its ranks do in one group over the same
        nodes.
        """
        table = self.network
        if operation.ranks == 1:
            return 0.0
        if table is None or not self.is_measured(operation):
            leaving = leaving_bytes(operation, groups, self.outlet)
            moving = max(operation.wire_bytes / self.inside, leaving / self.across)
            hops = 1.0 if operation.collective == "send" else operation.ranks - 1
            hops = (log2(1 + hops) + hops) / 2
            return moving + OPERATION_S[self.cell.device] + hops * HOP_S[self.cell.device]
        kind, payload, ranks = operation.collective, operation.payload_bytes, operation.ranks
        alone = table.seconds(kind, payload, ranks, operation.nodes)
        together = ranks * operation.rivals
        if operation.rivals == 1 or not table.covers(kind, together, operation.nodes):
            return alone
        # The busiest node of one ring over all these ranks sends as much as those of the groups do.
        whole = operation.rivals * operation.wire_bytes / wire_factor(kind, together)
        return max(alone, table.seconds(kind, whole, together, operation.nodes))

    def is_measured(self, operation: Operation) -> bool:
        """Whether the study's network table covers an operation."""
        table = self.network
        return table is not None and table.covers(operation.collective, operation.ranks, operation.nodes)

    @property
    def network(self) -> NetworkTable | None:
        """The study's network table, if it is of this device and backend, as far as known, and link."""
        table = self.devices.measured.network
        if table is None or table.facts.link_mbit_per_s != self.cell.link_mbit_per_s:
            return None
        there = catalogue_name(table.facts.device_name or "")
        if self.cell.device == "cuda" and there not in (None, catalogue_name(self.name)):
            return None
        return table if table.facts.backend == self.cell.backend else None

    def lines(self) -> list[str]:
        """The basis of a choice in lines, including its assumptions."""
        known = ["batches per replica that the study has measured: computation and update as measured"]
        works = known if self.devices.measured.works else []
        return [*self._memory_lines(), *self._rate_lines(), *works, *self._link_lines(), *self.notes]

    def _memory_lines(self) -> list[str]:
        cell = self.cell
        source = "a rank's part of this host" if cell.device == "cpu" else "of a GPU"
        if cell.memory_limit_mb is not None:
            source = "--memory-limit-mb"
        planned = f"of which {self.room / MIB:,.0f} may be planned"
        lines = [f"memory {self.memory / MIB:,.0f} MiB ({source}), {planned}"]
        if cell.precision in HALVES:
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
        latency = (
            f"{1e3 * OPERATION_S[cell.device]:g} ms an operation and {1e3 * HOP_S[cell.device]:g} ms a hop"
        )
        lines.append(f"{latency} (assumed)")
        if self.network is not None:
            lines.append(f"groups that the study's {NETWORK_FILE} covers: as measured there")
        return lines


def leaving_bytes(operation: Operation, groups: GroupLayout, node_size: int) -> float:
    """Bytes of an operation that leave the busiest node, if nodes are `node_size` consecutive ranks.

    In an all-to-all each rank sends a p-th of its buffer to every other; of a pipeline what goes over an edge
    leaves; all else goes around a ring, or down a chain.
    """
    edges = _leaving_edges(groups, operation.dimension, operation.collective, node_size)
    if operation.collective == "all-to-all":
        return edges * operation.payload_bytes / operation.ranks
    return edges * operation.wire_bytes


@cache
def _leaving_edges(groups: GroupLayout, dimension: Dimension, collective: Collective, node_size: int) -> int:
    """Count the pairs of ranks that send to each other out of the busiest node."""
    out: Counter[int] = Counter()
    for ranks in groups.peers(dimension):
        if collective == "all-to-all":
            for node, members in Counter(rank // node_size for rank in ranks).items():
                out[node] += members * (len(ranks) - members)
            continue
        after = ranks[1:] if collective == "send" else [*ranks[1:], ranks[0]]
        for rank, following in zip(ranks, after, strict=False):
            out[rank // node_size] += rank // node_size != following // node_size
    return max(out.values(), default=0)


def replica_seconds(cell: Cell, hardware: Devices) -> float | Unknown:
    """Seconds in which one device would compute all of a replica's step."""
    forward = facts(WORKLOADS.parse(cell.workload)).forward_flops
    if isinstance(forward, Unknown):
        return Unknown(f"the FLOPs of {cell.workload} are {forward}")
    # FLOP/s of one worker's share of the machine.
    if cell.device == "cpu":
        crowd = max(1.0, cell.gpus / (hardware.cores or cell.gpus))
        rate = CPU_CORE_FLOPS_PER_S / crowd
    elif hardware.gpu_name is None:
        return Unknown("the kind of GPU is unknown")
    else:
        peak = peak_flops_per_s(hardware.gpu_name, cell.precision)
        if peak is None:
            return Unknown(f"the GPU catalogue has no peak of {hardware.gpu_name} in {cell.precision}")
        rate = PEAK_SHARE * peak
    return BACKWARD_AND_FORWARD * forward * cell.batch_per_replica / rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Limits on the cells of a plan. A cell that exceeds one is skipped with a reason, not refused."""

    devices: int | None = None
    """Cores of this machine on CPU, its CUDA devices otherwise; None if the number is not limited."""
    word: str = ""
    """The noun of the devices: `cores` or `CUDA devices`."""
    hint: str = ""
    """Advice by which a larger cell would run."""
    where: str = "this machine"
    """The owner of the devices, in words."""
    trains: bool = False
    """Whether the cells are trained, and not measured."""
    link: str | None = None
    """Why no link can be made here; None if one can be made."""
    gpus: Devices | None = None
    """The GPUs whose memory each cell must fit into; None if memory is not limited."""
    measured: Measured = Measured()
    """Measurements of the study, by which `auto` chooses."""

    @property
    def gpu_bytes(self) -> int | None:
        """An upper bound of the memory of one GPU; None if it is not known or not limited."""
        if self.gpus is None:
            return None
        stated = memory_bytes(self.gpus.gpu_name or "")
        # The catalogue's GB can be GiB: an A100 of 80 GB has 85e9 bytes.
        return self.gpus.gpu_bytes or (stated and stated * 2**30 // 10**9)

    def arithmetic(self, cell: Cell) -> str | None:
        """Why the GPUs cannot compute in a cell's precision; None if they can, or if it is not known."""
        name = "" if self.gpus is None or cell.device != "cuda" else self.gpus.gpu_name or ""
        if cell.precision == "float8" and lacks_float8(name):
            return f"{name} has no products in float8; use --precision bf16"
        return None

    def reason(self, gpus: int) -> str | None:
        """Why a cell of `gpus` workers does not run here; None if it does."""
        if self.devices is None or gpus <= self.devices:
            return None
        word = self.word.removesuffix("s") if self.devices == 1 else self.word
        return f"needs {gpus}, {self.where} has {self.devices} {word}; {self.hint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The devices of this machine that this process may use."""

    cores: int
    gpu_names: tuple[str, ...]

    @classmethod
    def here(cls) -> Machine:
        return cls(cores=len(usable_cores()), gpu_names=tuple(gpu.name for gpu in visible_gpus()))

    def devices(self, device: Device) -> int:
        return self.cores if device == "cpu" else len(self.gpu_names)

    def limit(self, request: Request, offers: Iterator[str | None]) -> Limit:
        """The most that this machine can hold without `--oversubscribe`.

        The first of the `offers` of launchers says how to run more; they are asked only if a size is more.
        """
        shared, word = "--oversubscribe --backend gloo", "CUDA devices"
        if request.device == "cpu":
            shared, word = "--oversubscribe", "cores"
        devices, hint = self.devices(request.device), f"{shared} runs it emulated"
        if max((*request.gpus, *(one.gpus or 0 for one in request.include))) > devices:
            hint = ", ".join([hint, *islice(filter(None, offers), 1)])
        return Limit(devices=devices, word=word, hint=hint)

    @property
    def hardware(self) -> Devices:
        """The hardware from which step times are assumed."""
        return Devices(cores=self.cores, gpu_name=self.gpu_names[0] if self.gpu_names else None)

    def threads(self, device: Device) -> int:
        """Threads of one rank: one core on CPU; with a GPU its share of the machine's cores.

        The same for every size, so that a rank of two and a rank of eight do the same work.
        """
        return 1 if device == "cpu" else max(1, self.cores // max(1, len(self.gpu_names)))
