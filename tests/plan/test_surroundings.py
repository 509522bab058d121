"""Surroundings of the ranks of a cell: nodes, memory, rates, and bytes that leave a node, by hand."""

from __future__ import annotations

import msgspec
import pytest
from builders import nano_cell, parts_of

from harness.plan.surroundings import (
    MIB,
    RESERVE_BYTES,
    SHARE,
    Devices,
    Measured,
    Surroundings,
    devices_here,
    devices_of,
    leaving_bytes,
)
from results.cell import Cell
from results.network import Measurement, NetworkFacts, NetworkTable
from results.outcome import Evidence
from results.plan import Request
from strategies.catalog import group_layout
from strategies.closed_form.replay import Operation, Work, operations_of
from strategies.predictions import traffic

HOST = Devices(cores=8, host_bytes=64 * 2**30)
GPU = {"device": "cuda", "backend": "nccl"}


def operation_of(cell: Cell, what: str) -> Operation:
    """All operations of a term as one."""
    term = next(term for term in traffic(cell, parts_of(cell.workload)) if term.what == what)
    return Operation(
        collective=term.collective,
        payload_bytes=term.payload_bytes,
        ranks=term.ranks,
        dimension=term.dimension,
        ready_s=0,
        needed_s=0,
    )


def test_an_all_to_all_leaves_a_node_from_every_rank() -> None:
    """On 8 in nodes of 4 each of 4 ranks sends 4 eighths of its n bytes out: 2.0 n. In nodes of 2, 2 x 6 / 8;
    nodes of 3, the fullest of which has 3 x 5 / 8. A ring's one edge of a node has what a rank sends."""
    cell = nano_cell("scratch-fsdp", 8)
    groups, averaged = group_layout(cell.strategy, 8), operation_of(cell, "gradients")
    assert averaged.collective == "all-to-all"
    for node_size, times in ((4, 2.0), (2, 1.5), (3, 15 / 8), (8, 0)):
        assert leaving_bytes(averaged, groups, node_size) == pytest.approx(times * averaged.payload_bytes)
    gathered = operation_of(cell, "parameters")
    assert leaving_bytes(gathered, groups, 4) == gathered.wire_bytes
    # Of 4 x 2 ranks, an all-reduce over the 2 nodes of each of 4 shards is 4 rings.
    hybrid = nano_cell("hsdp", 8, node_size=4)
    summed = operation_of(hybrid, "shards of gradients")
    assert leaving_bytes(summed, group_layout("hsdp", 8, 4), 4) == 4 * summed.wire_bytes


@pytest.mark.parametrize("rate", [0.5e9, 1.25e9, 4e9])
def test_ranks_send_no_faster_across_nodes_than_inside(rate) -> None:
    """Inside 1 GB/s; one ring leaves a node, so that more than 1 GB/s across does not help."""
    cell = nano_cell("ddp", 8, node_size=4, link_mbit_per_s=rate * 8 / 1e6)
    sums, groups = operation_of(cell, "gradients"), group_layout("ddp", 8)
    # 0.1 ms, and 0.1 ms for each of (log2 8 + 7) / 2 hops.
    seconds = Surroundings.of(cell, HOST, None).seconds(sums, groups) - 600e-6
    assert seconds == pytest.approx(sums.wire_bytes / min(1e9, rate))
    alone = Surroundings.of(nano_cell("ddp", 8), HOST, None).seconds(sums, groups) - 600e-6
    assert seconds >= alone * (1 - 1e-12)


def test_groups_of_a_table_share_a_nodes_way_out() -> None:
    """hsdp on 2 nodes of 8: a sum of 2 ranks takes 1 s while no other runs. 8 of them together take at least
    as long as one sum over all 16 that moves as much out of a node."""
    cell = nano_cell("hsdp", 16, node_size=8, **GPU)
    groups = group_layout("hsdp", 16, 8)
    [_, across] = [term for term in traffic(cell, parts_of(cell.workload)) if term.collective != "all-gather"]
    [one, *_] = operations_of([across], Work(forward_s=1, backward_s=2), groups, 8)
    assert (one.ranks, one.nodes, one.rivals) == (2, 2, 8)
    whole = 8 * one.wire_bytes / (2 * 15 / 16)
    pair = Measurement(
        collective="all-reduce", payload_bytes=int(one.payload_bytes), ranks=2, nodes=2, runs=9,
        median_s=1.0, low_s=1.0, high_s=1.0,
    )  # fmt: skip
    for seconds, expected in ((3.0, 3.0), (0.5, 1.0)):
        times = {"median_s": seconds, "low_s": seconds, "high_s": seconds}
        flat = msgspec.structs.replace(pair, ranks=16, payload_bytes=round(whole), **times)
        table = NetworkTable(
            source="bench", measured_at="2026-01-01T00:00:00Z", facts=NetworkFacts(backend="nccl"),
            evidence=Evidence.MEASURED, measurements=(pair, flat),
        )  # fmt: skip
        around = Surroundings.of(cell, Devices(measured=Measured(network=table)), 8)
        assert around.seconds(one, groups) == pytest.approx(expected, rel=1e-3)
        # A table of another device says nothing of this one.
        there = msgspec.structs.replace(table.facts, device_name="NVIDIA H100 80GB HBM3")
        other = Measured(network=msgspec.structs.replace(table, facts=there))
        for name, known in (("H100-SXM5-80GB", True), ("NVIDIA A100-SXM4-80GB", False)):
            around = Surroundings.of(cell, Devices(gpu_name=name, measured=other), 8)
            assert around.is_measured(one) is known


@pytest.mark.parametrize(
    ("node_size", "per_node", "link", "nodes", "host", "outlet"),
    [
        # All on one host, in one node or in virtual ones, which send to each other as inside.
        (None, None, None, 16, 16, 16),
        (4, None, None, 4, 16, 16),
        # Real nodes, whether they are named twice or not; virtual ones inside of them.
        (None, 8, None, 8, 8, 8),
        (8, 8, None, 8, 8, 8),
        (4, 8, None, 4, 8, 8),
        # Under a link every virtual node has its own.
        (4, None, 100.0, 4, 16, 4),
        (None, None, 100.0, 1, 16, 1),
    ],
)
def test_nodes_are_real_or_parts_of_a_host(node_size, per_node, link, nodes, host, outlet) -> None:
    cell = nano_cell("ddp", 16, node_size=node_size, link_mbit_per_s=link)
    around = Surroundings.of(cell, HOST, per_node)
    assert (around.node_size, around.host_size, around.outlet) == (nodes, host, outlet)
    assert around.memory == 64 * 2**30 // host
    assert around.across == (12.5e6 if link else 1.25e9)
    # 8 cores of each host.
    assert around.hardware.cores == 8 * 16 // host
    virtual = [line for line in around.lines() if line.startswith("virtual nodes")]
    assert bool(virtual) == (node_size == 4 and link is None)
    assert any(line.startswith(f"nodes of {outlet} send") for line in around.lines()) == (outlet < 16)


@pytest.mark.parametrize(("limit", "room"), [(1000, 950 - 64), (None, None)])
def test_a_margin_is_left(limit, room) -> None:
    cell = nano_cell("ddp", 4, memory_limit_mb=limit)
    around = Surroundings.of(cell, HOST, None)
    if room is None:
        assert around.memory == 64 * 2**30 // 4
        assert around.room == int(SHARE * around.memory) - RESERVE_BYTES["cpu"]
    else:
        assert around.room == room * MIB


def test_a_gpu_is_known_by_its_name_or_assumed() -> None:
    cell = nano_cell("ddp", 16, workload="llama-1b", micro_batch=1, precision="bf16", **GPU)
    known = Surroundings.of(cell, Devices(gpu_name="NVIDIA H200", gpu_bytes=140 * 10**9), 8)
    assert (known.inside, known.across, known.memory) == (0.75 * 450e9, 17.5e9, 140 * 10**9)
    assert known.notes == ()
    unknown = Surroundings.of(cell, Devices(), 8)
    assert (unknown.inside, unknown.memory) == (0.75 * 300e9, 80 * 10**9)
    assert unknown.notes == ("assumed: the GPU is like an A100-SXM4-80GB; which GPU it is, is not known",)
    # This host is not the one that has the GPUs, unless it has one that nothing is known of.
    assert Surroundings.of(cell, HOST, 8).devices.host_bytes is None
    new = Surroundings.of(
        cell, Devices(gpu_name="a device of tomorrow", gpu_bytes=10**9, host_bytes=2**40), 8
    )
    assert (new.name, new.memory, new.devices.host_bytes) == ("A100-SXM4-80GB", 10**9, 2**40)
    assert "the catalogue has no peak of a device of tomorrow in bf16" in new.notes[0]


def test_the_hardware_of_a_profile_goes_before_this_machines() -> None:
    named = Request(
        workloads=("llama-1b",),
        gpus=(16,),
        strategies=("auto",),
        device="cuda",
        gpu_model="H100-SXM5-80GB",
        network_gbit_per_s=3200.0,
    )
    cell = nano_cell("ddp", 16, workload="llama-1b", micro_batch=1, precision="bf16", **GPU)
    around = Surroundings.of(cell, devices_of(named), 8)
    assert (around.name, around.notes, around.inside) == ("H100-SXM5-80GB", (), 0.75 * 450e9)
    assert around.across == pytest.approx(0.7 * 400e9)
    assert "nodes of 8 send 280.000 GB/s (0.7 of the profile's 3200 Gbit/s)" in around.lines()
    # No cores and no memory: those of this machine are not the cluster's.
    assert devices_of(named).cores is None
    here = devices_of(msgspec.structs.replace(named, gpu_model=None))
    assert (here.cores, here.network_gbit_per_s) == (devices_here().cores, 3200.0)


def test_every_assumption_is_named() -> None:
    around = Surroundings.of(nano_cell("ddp", 4), HOST, None)
    assert around.lines() == [
        "memory 16,384 MiB (a rank's part of this host), of which 15,501 may be planned",
        "without --memory-limit-mb the heap keeps what is freed: sharded strategies take more than predicted "
        "(docs/memory.md)",
        "computation at 50 GFLOP/s a core (assumed); a host has 8, and of the ranks 4",
        "updates at 10 GB/s of memory a rank (assumed)",
        "ranks of a node send 1.00 GB/s (assumed)",
        "0.1 ms an operation and 0.1 ms a hop (assumed)",
    ]
    limited = Surroundings.of(nano_cell("ddp", 4, memory_limit_mb=1000), HOST, None).lines()
    assert limited[:2] == [
        "memory 1,000 MiB (--memory-limit-mb), of which 886 may be planned",
        around.lines()[2],
    ]
    fields = GPU | {"precision": "bf16"}
    assert Surroundings.of(nano_cell("ddp", 16, **fields), Devices(), 8).lines() == [
        "memory 76,294 MiB (of a GPU), of which 71,455 may be planned",
        "bf16 activations are counted as fp32, kept and sent: an upper estimate",
        "computation at 0.4 (assumed) of the catalogue's 312 TFLOP/s bf16",
        "updates at 0.8 (assumed) of the catalogue's 2,039 GB/s of memory",
        "offload=cpu: 20 GB/s between a GPU and its host, updates there at 10 GB/s (assumed)",
        "ranks of a node send 225.00 GB/s (0.75 of the catalogue's 300)",
        "nodes of 8 send 17.500 GB/s (assumed: their network is not known)",
        "0.025 ms an operation and 0.005 ms a hop (assumed)",
        "assumed: the GPU is like an A100-SXM4-80GB; which GPU it is, is not known",
    ]
