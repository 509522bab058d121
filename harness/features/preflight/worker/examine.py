"""Examine the devices and the network of every rank: what a preflight compares over nodes.

Virtual nodes of one kernel multiply in turns, because they share its cores. Other nodes multiply
at once, as in training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import msgspec
import psutil
import torch

from harness.features.preflight.verdict import Examined, Reduced
from harness.machine.device import Gpu, gpu_warnings, read_fact, visible_gpus
from harness.worker.exchange.group import ExchangeGroup
from harness.worker.rank.context import Run, device_uuid
from results.plan import Placement
from strategies.collectives.link import Link
from strategies.devices import device_of

FACTORS = MappingProxyType({"cpu": (512, torch.float32), "cuda": (8192, torch.bfloat16)})
"""The side of square matrices and the type of their values."""
SLICE = MappingProxyType({"cpu": (0.2, 1), "cuda": (1.0, 20)})
"""Seconds between two barriers, and products that are queued before the rank waits for its device."""
PAYLOAD_BYTES = MappingProxyType({"cpu": 2**23, "cuda": 2**28})
FEWEST_SLICES, SAMPLES = 6, 5
MOST_ROUNDS = 7
"""Rounds of pairs: of up to eight nodes each meets each other, of more each meets a few."""
_KERNEL = Path("/proc/sys/kernel/random/boot_id")


def examine(run: Run, values: object) -> None:
    """Examine this rank's node, and add what is found to the rank's record; collective."""
    around, device = run.around, run.around.device
    run.begin("build")
    around.exchange.reset()
    memory = device_of(device).memory()
    free = psutil.virtual_memory().available if memory is None else memory.free
    # The process on a GPU is this rank's.
    faults = gpu_warnings(replace(gpu, processes=None) for gpu in _own_gpu(device))
    run.begin("measure")
    products = list(_products(run))
    faults += [f"{gpu.name} is throttled under load" for gpu in _own_gpu(device) if gpu.throttled]
    reduced = list(_reduced(run, around.launch.backend, around.exchange, device))
    if around.launch.backend == "nccl":
        # Ranks also agree over Gloo in host memory, on an interface that may be another.
        hosts = ExchangeGroup(around.rank.rank, around.rank.gpus)
        hosts.timeout = around.exchange.timeout
        reduced += _reduced(run, "gloo", hosts, torch.device("cpu"))
    examined = Examined(products=products, free_bytes=int(free), faults=faults, reduced=reduced)
    run.found["measured"] = msgspec.to_builtins(examined)


def _own_gpu(device: torch.device) -> list[Gpu]:
    """The GPU of this rank as NVML sees it now; none on CPU, and where NVML does not show it."""
    uuid = device_uuid(device) if device.type == "cuda" else None
    return [gpu for gpu in visible_gpus() if gpu.uuid == uuid]


def _products(run: Run) -> Iterator[float]:
    """Multiply matrices for the budget of the cell, and yield FLOP/s of each slice; collective."""
    control, device, budget_s = run.around.control, run.around.device, run.cell.steps.budget_s
    (side, dtype), (slice_s, in_a_row) = FACTORS[device.type], SLICE[device.type]
    one, other, product = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))

    def rate(seconds: float) -> float:
        began, rows = time.perf_counter(), 0
        while rows == 0 or time.perf_counter() - began < seconds:
            for _ in range(in_a_row):
                torch.mm(one, other, out=product)
            control.synchronize()
            rows += 1
        return rows * in_a_row * 2 * side**3 / (time.perf_counter() - began)

    rate(0.0)
    turns, mine = _turns(run)
    began, slices, over = time.monotonic(), 0, False
    while not over or slices < FEWEST_SLICES:
        for turn in range(turns):
            control.barrier()
            run.around.log.heartbeat()
            if turn == mine:
                yield rate(slice_s)
        slices += 1
        over = bool(control.from_first(float(time.monotonic() - began >= budget_s)))


def _turns(run: Run) -> tuple[int, int]:
    """The turns of a round, and the turn of this node: its place among the nodes of its kernel."""
    kernel = float(int((read_fact(_KERNEL) or "0").replace("-", "")[:12], 16))
    own = float(run.around.rank.node_rank)
    every = run.around.control.of_all([kernel, own])
    nodes = {one: sorted({node for other, node in every if other == one}) for one, _ in every}
    return max(map(len, nodes.values())), nodes[kernel].index(own)


def _reduced(run: Run, over: str, whole: ExchangeGroup, device: torch.device) -> Iterator[Reduced]:
    """Time all-reduces inside of nodes, over pairs of nodes and over all; collective."""
    values = torch.zeros(PAYLOAD_BYTES[device.type] // 4, device=device)
    for groups, parts in rounds_of(run.around.launch.placement):
        link, times = Link(whole.split_into(parts)), []
        mine = [group for group in groups if run.around.rank.node_rank in group]
        for _ in range(SAMPLES + 1):
            run.around.control.barrier()
            run.around.log.heartbeat()
            began = time.perf_counter_ns()
            if mine:
                link.all_reduce(values)
            run.around.control.synchronize()
            times.append(time.perf_counter_ns() - began)
        # The first operation connects.
        for group in mine:
            yield Reduced(
                over=over, nodes=group, ranks=link.size, payload_bytes=values.nbytes, duration_ns=times[1:]
            )
        whole.reset()


def rounds_of(placement: Placement) -> Iterator[tuple[list[tuple[int, ...]], list[list[int]]]]:
    """Disjoint groups of nodes that exchange at once, and their ranks; ranks of no group are a group."""
    each, every = placement.gpus_per_node, tuple(range(placement.nodes))
    alone: list[tuple[int, ...]] = [(node,) for node in every]
    rounds = [alone, *rounds_of_pairs(len(every)), [every]]
    for groups in rounds[each == 1 : len(rounds) - (len(every) < 3)]:
        parts = [[node * each + rank for node in group for rank in range(each)] for group in groups]
        others = {*range(placement.gpus)}.difference(*parts)
        yield groups, [*parts, *filter(None, [sorted(others)])]


def rounds_of_pairs(nodes: int) -> list[list[tuple[int, ...]]]:
    """Rounds of disjoint pairs of nodes, by the circle method of tournaments: no pair meets twice."""
    places, rounds = [*range(nodes), *([-1] * (nodes % 2))], []
    for _ in range(min(len(places) - 1, MOST_ROUNDS)):
        met = zip(places, reversed(places[len(places) // 2 :]), strict=False)
        rounds.append([tuple(sorted(pair)) for pair in met if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds
