"""Runs in processes of their own, forked from a rank that has imported what they need and nothing more.

fork(2) copies the calling thread alone: a lock that another one holds stays locked in the child for ever, and
neither process groups, CUDA nor the threads of OpenMP and autograd outlive it (torch's notes on
multiprocessing). So a rank forks while it has one thread and no device, and each child opens groups anew.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import torch

from harness.machine.kernel import die_with_parent
from results.cell import Cell
from results.launch import Slot
from strategies.catalog import STRATEGIES
from workloads.build import import_builder

STOPPED = 64
"""The exit code of a child after which no other run is to follow, though nothing is wrong with its rank."""


def import_for(cells: Sequence[Cell], source_folder: str | None) -> None:
    """Import what runs of these cells would import one by one, user code too."""
    # Every optimizer imports it when it is made; 2 s.
    import_module("torch._dynamo")
    for cell in cells:
        # What cannot be imported, or calls sys.exit meanwhile, fails in the run, which records it.
        with suppress(Exception, SystemExit):
            import_module(STRATEGIES.facts(cell.strategy).model.partition(":")[0])
            import_builder(cell.workload, source_folder=Path(source_folder) if source_folder else None)


def fork_obstacle() -> str | None:
    """Why this process cannot be forked any more; None if it can."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"it has {threads} threads before the first run: user code starts them when it is imported"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "user code uses CUDA when it is imported"
    return None


def run_of_this_process(slots: Sequence[Slot]) -> Slot | int:
    """Fork a child for each slot, one after another, and wait for its end.

    Returns in each child the slot that it runs, and in this process an exit code: that of the first child
    which did not end well, else 0. A child that a signal ends takes this process with it, so that torchrun
    tells the signal.
    """
    parent = os.getpid()
    for slot in slots:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            die_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            return slot
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(parent, -code)
        if code:
            return 0 if code == STOPPED else code
    return 0
