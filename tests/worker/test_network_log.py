"""Transports and warnings that are read from NCCL's log; the lines are from public logs."""

from __future__ import annotations

import pytest

from harness.machine.device import nccl_settings
from harness.worker.exchange.group import open_exchange
from harness.worker.rank.network import (
    SOCKETS,
    log_network,
    one_queue,
    read_transports,
    transports,
    unused_fabric,
)

RING = "n [0] NCCL INFO Pattern 4, crossNic 0, nChannels 24, bw 20.000000/20.000000, type {}, sameChannels 1"
P2P = "node:1:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # NCCL 2.18 to 2.30: the kind of the path is that of the ring's channels within a node.
        ([RING.format("NVL/PIX"), P2P, P2P.replace("00/0", "01/0")], ["NVLink (P2P/CUMEM)"]),
        ([RING.format("PHB/PIX"), P2P], ["PCIe (P2P/CUMEM)"]),
        ([P2P], ["NVLink or PCIe (P2P/CUMEM)"]),
        # 2.10, with bus numbers for devices.
        (
            ["n:3:70 [4] NCCL INFO Channel 03 : 4[901c0] -> 7[a01d0] via P2P/IPC/read"],
            ["NVLink or PCIe (P2P/IPC)"],
        ),
        (["Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"], ["shared memory of the host (SHM)"]),
        (["Channel 00 : 1[1a000] -> 2[af000] via direct shared memory"], ["shared memory of the host (SHM)"]),
        (
            [
                "n:1:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.1.0.3<0>",
                "n:1:9 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA",
                "n:1:9 [0] NCCL INFO Channel 00/0 : 15[7] -> 0[0] [receive] via NET/IB/0(1)/GDRDMA/Shared",
            ],
            ["InfiniBand (NET/IB, GPUDirect RDMA)"],
        ),
        (
            [
                "n:1:9 [0] NCCL INFO NET/IB : Using [0]rxe0:1/RoCE [RO]; OOB eth0:172.30.0.25<0>",
                "n:1:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0",
            ],
            ["RoCE (NET/IB)"],
        ),
        # The plugin of HPC-X, and that of AWS, old and new.
        (["Channel 00/0 : 0[0] -> 8[0] [send] via NET/IBext_v8/0"], ["InfiniBand (NET/IBext_v8)"]),
        (
            [
                "n:6158:9214 [2] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)",
                "n:30:70 [4] NCCL INFO Channel 03 : 4[0] -> 8[0] [receive] via NET/AWS Libfabric/3/GDRDMA",
            ],
            ["EFA (NET/AWS Libfabric, GPUDirect RDMA)"],
        ),
        (
            [
                "n [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 8 nics)",
                "n [0] NCCL INFO Channel 00/0 : 3[3] -> 14[6] [send] via NET/Libfabric/3/GDRDMA",
            ],
            ["EFA (NET/Libfabric, GPUDirect RDMA)"],
        ),
        (
            [
                "n [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0",
                RING.format("NVL/SYS"),
                P2P,
            ],
            ["NVLink (P2P/CUMEM)", "TCP sockets (NET/Socket)"],
        ),
        (["n [0] NCCL INFO Using network Socket", "n [0] NCCL INFO Connected all rings"], []),
    ],
)
def test_a_transport_is_read_from_the_channels_of_the_log(lines, expected) -> None:
    assert transports(lines) == expected


def test_a_log_is_asked_for_unless_the_user_has_one_and_is_no_condition_of_a_run(
    monkeypatch, tmp_path
) -> None:
    path = tmp_path / "nccl-00000.log"
    theirs = {"NCCL_DEBUG": "WARN"}
    assert log_network(theirs, path) is None
    assert theirs == {"NCCL_DEBUG": "WARN"}
    ours: dict[str, str] = {}
    assert log_network(ours, path) == path
    assert ours["NCCL_DEBUG_FILE"] == str(path)
    before = nccl_settings()
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    assert nccl_settings() == before
    assert read_transports(path) == []
    path.write_text(P2P + "\n", encoding="utf-8")
    assert read_transports(path) == ["NVLink or PCIe (P2P/CUMEM)"]


def test_a_fabric_that_is_up_beside_sockets_is_warned_of(tmp_path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"), ("mlx5_2", "4: ACTIVE")):
        folder = tmp_path / device / "ports" / "1"
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n", encoding="utf-8")
    said = unused_fabric([f"{SOCKETS} (NET/Socket)"], tmp_path)
    assert said.startswith(
        "NCCL exchanges over TCP sockets, and mlx5_0, mlx5_2 (RDMA, 2 active) stood unused"
    )
    assert unused_fabric(["InfiniBand (NET/IB)"], tmp_path) is None
    assert unused_fabric([f"{SOCKETS} (NET/Socket)"], tmp_path / "none") is None


def pairs(rank: int) -> list[bool]:
    """On a rank of two: whether a pair has several groups; first it has one, then two, then one again."""
    exchange = open_exchange()
    exchange.split_into([[0, 1]])
    found = [exchange.joins_a_pair_twice]
    exchange.split_into([[0, 1]])
    found.append(exchange.joins_a_pair_twice)
    exchange.reset()
    # Groups that have one rank in common join no pair.
    exchange.split_into([[0, 1]])
    exchange.split_into([[0], [1]])
    return [*found, exchange.joins_a_pair_twice]


def test_one_queue_for_two_groups_of_a_pair_is_warned_of(ranks) -> None:
    assert ranks(2, pairs) == [[False, True, False]] * 2
    one, many = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    [said] = one_queue(True, one)
    assert "CUDA_DEVICE_MAX_CONNECTIONS is 1" in said
    assert [one_queue(False, one), one_queue(True, many), one_queue(True, {})] == [[], [], []]
