"""A launch from inside, as far as it can be had without torchrun."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from builders import a_cell
from rank_builders import a_context, a_launch, a_rank

from harness.machine.code import code_version
from harness.machine.device import nccl_settings
from harness.worker.crew import _evidence, nccl_name, require_one_nccl, work
from harness.worker.rank.network import adapters, interface_towards, name_interface, named_interfaces
from results.errors import MachineError
from results.outcome import Evidence
from results.store import Study


def start_on_cuda(rank: int, folder: str) -> tuple[int, list[str]]:
    """On a fresh rank: a launch on a CUDA device without cells, over gloo as this machine lacks a device.

    torch sees a machine with a device. Returns the exit code, and what the log says.
    """
    dist.destroy_process_group()
    study = Study(Path(folder))
    launch = a_launch(device="cuda", evidence=Evidence.EMULATED, code=code_version())
    study.add_launch(launch)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    with (
        patch.dict("os.environ", meeting),
        patch("torch.cuda.set_device"),
        patch("torch.cuda.get_device_properties", lambda _: SimpleNamespace(name="NVIDIA H200", uuid="0")),
        patch("torch.accelerator.current_accelerator", lambda: torch.device("cuda")),
        patch("torch.accelerator.device_count", lambda: 1),
    ):
        code = work(study.launch_folder("l") / "launch.json", a_rank(), pinned=(), cores=(0,))
    log = (study.launch_folder("l") / "rank-00000.jsonl").read_text(encoding="utf-8")
    return code, [json.loads(line)["event"] for line in log.splitlines()]


def evidence_on_gpus(rank: int, uuids: tuple[str, ...], backend: str, visible: str) -> str:
    """On a rank whose GPU has a UUID: the evidence of its launch, or why it is refused."""
    launch = a_launch(len(uuids), device="cuda", backend=backend)
    own = SimpleNamespace(name="NVIDIA H200", uuid=uuids[rank])
    with (
        patch.dict("os.environ", CUDA_VISIBLE_DEVICES=visible),
        patch("torch.cuda.get_device_properties", lambda _: own),
    ):
        try:
            return _evidence(launch, a_rank(rank, len(uuids)), torch.device("cuda"), (0, 1))
        except MachineError as error:
            return str(error)


@pytest.mark.parametrize(
    ("uuids", "backend", "visible", "words"),
    [
        (("a", "b"), "gloo", "0,1", "measured"),
        (("a", "b"), "nccl", "0,1", "measured"),
        (("a", "a"), "gloo", "0", "emulated"),
        (("a", "a"), "nccl", "0", "NCCL takes one rank a GPU"),
        # CUDA shows a process only the first of these.
        (("a", "a"), "nccl", "MIG-1,MIG-2", "has 2 parts of a GPU (MIG)"),
    ],
)
def test_ranks_that_share_a_gpu_are_emulated_or_refused(uuids, backend, visible, words, ranks) -> None:
    assert all(words in found for found in ranks(2, evidence_on_gpus, uuids, backend, visible))


def test_nodes_with_different_versions_of_nccl_are_refused_before_they_connect() -> None:
    require_one_nccl([("node-a", "2.27.5"), ("node-a", "2.27.5"), ("node-b", "2.27.5")])
    with pytest.raises(MachineError, match=re.escape("2.27.5 (node-a, node-c), 2.29.2 (node-b); install")):
        require_one_nccl([("node-a", "2.27.5"), ("node-b", "2.29.2"), ("node-c", "2.27.5")])


def settings_set_late(rank: int, folder: str) -> Mapping[str, str] | None:
    """On a rank: the settings of its environment, after a library has set another one."""
    with patch.dict("os.environ", KMP_INIT_AT_FORK="FALSE"), a_context(rank, folder, {}) as around:
        return around.environment(a_cell(strategy="single", gpus=1)).settings


def test_settings_are_those_that_the_process_was_given(ranks, tmp_path) -> None:
    # As scikit-learn does when a workload imports it: whoever plans the next call does not see it.
    [settings] = ranks(1, settings_set_late, str(tmp_path))
    assert settings is not None
    assert "KMP_INIT_AT_FORK" not in settings


def test_nccl_has_another_name_where_torch_has_a_second_class_of_it(monkeypatch) -> None:
    monkeypatch.setattr(torch._C._distributed_c10d, "ProcessGroupNCCL2", object, raising=False)
    assert nccl_name() == "nccl-legacy"
    monkeypatch.delattr(torch._C._distributed_c10d, "ProcessGroupNCCL2")
    assert nccl_name() == "nccl"


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the group connects")
def test_nccl_is_the_class_that_connects_at_the_first_collective() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="ProcessGroupNCCL is only supported with GPUs"):
            dist.new_group(backend=nccl_name())
    finally:
        dist.destroy_process_group()


def test_gloo_and_nccl_use_the_interface_that_leads_to_the_master() -> None:
    loopback = interface_towards("127.0.0.1")
    assert loopback in psutil.net_if_addrs()
    assert interface_towards("no-such-host.invalid") is None

    def named(nodes: int, **environment: str) -> str | None:
        name_interface(environment, nodes)
        gloo, nccl = environment.get("GLOO_SOCKET_IFNAME"), environment.get("NCCL_SOCKET_IFNAME")
        assert nccl == (None if gloo is None else f"={gloo}")
        return gloo

    with (
        patch("harness.worker.rank.network.interface_towards", {"master": "eth7", "127.0.0.1": "lo"}.get),
        patch("psutil.net_if_addrs", lambda: {"lo": [], "eth7": []}),
    ):
        assert named(2, MASTER_ADDR="master") == "eth7"
        assert named(1, MASTER_ADDR="master") is None
        assert named(2, MASTER_ADDR="master", GLOO_SOCKET_IFNAME="ib0") == "ib0"
        # The address of the loopback is the same on every node.
        assert named(2, MASTER_ADDR="127.0.0.1") is None
        assert named(2, MASTER_ADDR="unknown") is None
        with patch.dict("os.environ", MASTER_ADDR="master"):
            before = nccl_settings()
            name_interface(os.environ, 2)
            # It is no condition: whoever plans does not see it.
            assert nccl_settings() == before
        with patch("psutil.net_if_addrs", lambda: {"ib0": []}):
            over = {"MASTER_ADDR": "master"}
            name_interface(over, 2)
            assert "NCCL_SOCKET_IFNAME" not in over


def test_a_host_with_several_adapters_leaves_them_to_nccl(tmp_path) -> None:
    """eth0 leads to the master; eth1 is one more adapter, usb0 the board's controller, br0 a bridge."""
    own = {
        "lo": "127.0.0.1",
        "eth0": "10.0.0.1",
        "eth1": "10.1.0.1",
        "usb0": "169.254.3.1",
        "br0": "172.17.0.1",
    }
    for name in ("eth0", "eth1", "eth2", "usb0"):
        (tmp_path / name / "device").mkdir(parents=True)

    def seen(down: tuple[str, ...]) -> tuple[set[str], dict[str, str]]:
        states = {name: SimpleNamespace(isup=name not in down) for name in (*own, "eth2")}
        addresses = {
            name: [SimpleNamespace(address="00:16:3e:00:00:01"), SimpleNamespace(address=address)]
            for name, address in own.items()
        }
        environment = {"MASTER_ADDR": "master"}
        with (
            patch("harness.worker.rank.network.interface_towards", {"master": "eth0", "127.0.0.1": "lo"}.get),
            patch("harness.worker.rank.network.NET", tmp_path),
            patch("psutil.net_if_stats", lambda: states),
            patch("psutil.net_if_addrs", lambda: addresses),
        ):
            name_interface(environment, 2)
            return adapters(), named_interfaces(environment)

    # Gloo takes one interface in any case.
    assert seen(()) == ({"eth0", "eth1"}, {"GLOO_SOCKET_IFNAME": "eth0"})
    one = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert seen(("eth1",)) == ({"eth0"}, one)


def interfaces_on_record(rank: int, folder: str) -> dict[str, str]:
    """On a rank: the interfaces in the environment of its records."""
    with patch.dict("os.environ", GLOO_SOCKET_IFNAME="eth7"), a_context(rank, folder, {}) as around:
        return around.environment(a_cell(strategy="single", gpus=1)).interfaces


def test_the_interface_that_was_named_is_on_the_record(ranks, tmp_path) -> None:
    [found] = ranks(1, interfaces_on_record, str(tmp_path))
    assert found["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_launch_on_cuda_comes_to_its_cells(ranks, tmp_path) -> None:
    [(code, events)] = ranks(1, start_on_cuda, str(tmp_path), fresh=True)
    assert code == 0
    assert events == ["joining", "ready", "finished"]
