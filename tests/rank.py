"""One rank of a pool of `conftest.py`: joins the group, then runs the functions it is sent until told to end.

Run by path, not imported: test files are no packages, and what is below is given as globals.
"""

from __future__ import annotations

import gc
import importlib.util
import pickle
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from types import ModuleType

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

CONNECTION: Connection = globals()["CONNECTION"]
RANK: int = globals()["RANK"]
SIZE: int = globals()["SIZE"]
STORE: str = globals()["STORE"]


@cache
def _load(path: str) -> ModuleType:
    name = f"sent_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _answer(request: bytes) -> bytes:
    try:
        path, name, arguments = pickle.loads(request)
        function: Callable[..., object] = getattr(_load(path), name)
        return pickle.dumps((True, function(RANK, *arguments)))
    except Exception:
        # The border of the pool: the test sees the traceback.
        return pickle.dumps((False, traceback.format_exc()))


def _leave_groups() -> None:
    """Leave all groups but the default one.

    Threads of a Gloo group poll as long as it lives, and torch keeps it until it is destroyed.
    """
    # A rank that leaves closes its connections: others may still be at work in a group.
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    # What a test has built may hold its group in a circle.
    gc.collect()


def _serve() -> None:
    # What the server has imported stays: a collection need not go through it, nor copy its pages.
    gc.freeze()
    torch.set_num_threads(1)
    # At its first use torch keeps the functions that a device context affects. A test that has replaced one
    # by then (tests/laws/streams.py) would take it from all later tests of this process.
    _device_constructors()
    dist.init_process_group(
        "gloo", init_method=f"file://{STORE}", rank=RANK, world_size=SIZE, timeout=timedelta(seconds=60)
    )
    while request := CONNECTION.recv_bytes():
        CONNECTION.send_bytes(_answer(request))
        # Fresh ranks may have left the default group too.
        if dist.is_initialized():
            _leave_groups()
    dist.destroy_process_group()


_serve()
