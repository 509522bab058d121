"""Compressed against dense exchanges of 25.6 million gradients over a link of 1 Gbit/s, which is emulated.

Goal: top-k 1 % and PowerSGD of rank 4 take at most 1.25 of what their bytes and their own encoding allow. On
loopback they lose.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.launch.command import code_environment
from harness.launch.preflight import link_obstacle
from harness.machine.code import checkout

ROUNDS = 10
PAYLOAD_SHARE = 1448 / 1514
"""The share of payload in a full frame, the rest being the headers of Ethernet, IP and TCP."""
PROGRAM = Path(__file__).with_name("compressed_link.py")
ON_NODES = """
import os, sys
from harness.launch.nodes import outlast, start
from harness.launch.virtual_network import VirtualSwitch
rate, program, rounds = sys.argv[1:]
nodes = VirtualSwitch().connect(2, float(rate))
cores = sorted(os.sched_getaffinity(0))
ranks = [
    start(node, cores[rank :: 2], [sys.executable, program, str(rank), nodes[0].address, rounds])
    for rank, node in enumerate(nodes)
]
sys.exit(outlast(ranks, lambda: False))
"""


def over_link(mbit_per_s: float, rounds: int) -> dict[str, Any]:
    return _result([[sys.executable, "-c", ON_NODES, str(mbit_per_s), str(PROGRAM), str(rounds)]])


def over_loopback(rounds: int) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    taskset = [["taskset", "-c", ",".join(str(core) for core in cores[rank::2])] for rank in range(2)]
    rank = [sys.executable, str(PROGRAM)]
    return _result([[*taskset[r], *rank, str(r), "127.0.0.1", str(rounds)] for r in range(2)])


def _result(commands: list[list[str]]) -> dict[str, Any]:
    environment = {**code_environment(checkout()), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for command in commands
    ]
    printed = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running)
    return json.loads("".join(printed))


def _ratios(seconds: list[float], dense: list[float]) -> list[float]:
    return [ours / theirs for ours, theirs in zip(seconds, dense, strict=True)]


@pytest.mark.slow
@pytest.mark.long
def test_over_1_gbit_per_s(benchmark, amount) -> None:
    obstacle = link_obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    found = benchmark.pedantic(over_link, (1000.0, amount(ROUNDS, brief=1)), rounds=1)
    for compression, side in found.items():
        allowed = statistics.median(side["off"]) + side["bytes"] * 8 / (1e9 * PAYLOAD_SHARE)
        against = _ratios(side["on"], found["none"]["on"])
        side |= {"allowed_s": allowed, "of_allowed": statistics.median(side["on"]) / allowed}
        encoding = statistics.median(side["off"])
        print(
            f"\n{compression}: {statistics.median(side['on']):.3f} s ({min(side['on']):.3f} to "
            f"{max(side['on']):.3f}), {side['bytes'] / 1e6:.2f} MB, encoding {encoding:.3f} s, "
            f"{side['of_allowed']:.2f} of what is allowed; against dense {statistics.median(against):.3f} "
            f"({min(against):.3f} to {max(against):.3f})"
        )
    benchmark.extra_info.update({name: side["of_allowed"] for name, side in found.items()})


@pytest.mark.slow
@pytest.mark.long
def test_over_loopback(benchmark, amount) -> None:
    found = benchmark.pedantic(over_loopback, (amount(ROUNDS, brief=1),), rounds=1)
    for compression, side in found.items():
        against = _ratios(side["on"], found["none"]["on"])
        benchmark.extra_info[compression] = statistics.median(against)
        print(
            f"\n{compression}: {statistics.median(side['on']):.3f} s ({min(side['on']):.3f} to "
            f"{max(side['on']):.3f}); against dense {statistics.median(against):.2f} "
            f"({min(against):.2f} to {max(against):.2f})"
        )
