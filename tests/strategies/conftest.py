"""Shared by the tests of training: one thread a rank, and many ranks as threads of this process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.worker.exchange.group import ExchangeGroup

TIMEOUT = timedelta(seconds=30)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class ThreadGroup(ExchangeGroup):
    """The worker's group over a Gloo of its own: real sockets, but ranks are threads."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._splits = store, 0
        super().__init__(rank, size, dist.ProcessGroupGloo(store, rank, size, TIMEOUT))

    def _open(self, part: Sequence[int]) -> ExchangeGroup | None:
        self._splits += 1
        if self.rank() not in part:
            return None
        store = dist.PrefixStore(f"{self._splits}", self._store)
        rank, size = list(part).index(self.rank()), len(part)
        backend: Any = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
        return ExchangeGroup(rank, size, backend, self.traffic, part)


@pytest.fixture
def threads() -> Callable[..., list[Any]]:
    """`threads(5, function, *arguments)` calls `function(group, *arguments)` on five ranks that are threads.

    Returns the results in the order of ranks. For what needs many ranks and little time; what a strategy
    does to a whole model is tested over processes (`ranks`).
    """

    def run(size: int, function: Callable[..., Any], *arguments: object) -> list[Any]:
        store = dist.HashStore()
        # Kept until all ranks have returned: one that ends closes its connections, while others may still
        # be connecting.
        groups: list[ThreadGroup] = []

        def rank(index: int) -> Any:
            group = ThreadGroup(store, index, size)
            groups.append(group)
            # Whether gradients are recorded is each thread's own setting.
            with torch.no_grad():
                return function(group, *arguments)

        with ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(rank, index) for index in range(size)]
            # The first to fail is the cause: the others time out waiting for it.
            for future in as_completed(futures):
                future.result()
        return [future.result() for future in futures]

    return run


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def replicas() -> ModuleType:
    """What data-parallel strategies are tested with: models, their training on ranks, the serial loop."""
    return _load("data_parallel")


@pytest.fixture(scope="session")
def resuming() -> ModuleType:
    """Runs that stop and go on: their training, and how two are compared."""
    return _load("resuming")


@pytest.fixture(scope="session")
def split_models() -> ModuleType:
    """What strategies that split a model are tested with: Transformers, their training, the plain loop."""
    return _load("split_models")


@pytest.fixture(scope="session")
def pipelines() -> ModuleType:
    """What pipelines are tested with: models that can be cut, and their training on ranks."""
    return _load("pipelines")


@pytest.fixture(scope="session")
def serial_pipelines(pipelines: ModuleType) -> ModuleType:
    """The same training on one process, and `assert_as_serial`."""
    return _load("serial_pipelines")


@pytest.fixture(scope="session")
def recorded_world() -> ModuleType:
    """One rank of a launch of any size, in this process: `recorded_world.opened(rank, size)`."""
    return _load("recorded_world")


@pytest.fixture(scope="session")
def recording() -> Callable[..., ExchangeGroup]:
    """`recording(3, 256)` is the group of rank 3 of 256, alone in this process: its `seen` lists what rank 3
    hands over, and nothing moves."""
    group: Callable[..., ExchangeGroup] = _load("recording").RecordingGroup
    return group
