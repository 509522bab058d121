"""The work of a rank: copy an array repeatedly while all other ranks copy their arrays."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from typing import Any

import torch

from harness.worker.rank.context import Run

ROUNDS = 20


def copy_memory(run: Run, values: Mapping[str, Any]) -> None:
    """Copy the array of the order, and add the times to the record of this rank; collective."""
    run.begin("build")
    source = torch.ones(values["mib"] * 2**20, dtype=torch.uint8)
    target = source.clone()
    run.begin("measure")
    copy_ns = []
    for _ in range(ROUNDS):
        run.around.log.heartbeat()
        run.around.control.barrier()
        began = time.perf_counter_ns()
        target.copy_(source)
        copy_ns.append(time.perf_counter_ns() - began)
    run.found["measured"] = {"host": platform.node(), "copied_bytes": source.nbytes, "copy_ns": copy_ns}
