"""Living ranks for tests of several processes: a gloo group of each size, started once and shared."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import pickle
import runpy
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PRELOADED = ["torch", "torch._dynamo", "pytest", "hypothesis", "harness.worker.run"]
"""Imported once, by the server that ranks are forked from."""
GRACE_S = 5.0
"""For the other ranks to answer after one has failed: they may wait for it in a collective."""


class Pool:
    """`size` processes in one gloo group, each with one thread."""

    def __init__(self, size: int, store: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._connections, self._processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            given = {"CONNECTION": there, "RANK": rank, "SIZE": size, "STORE": str(store)}
            script = str(Path(__file__).with_name("rank.py"))
            process = context.Process(
                target=runpy.run_path, args=(script,), kwargs={"init_globals": given}, daemon=True
            )
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def run(
        self, function: Callable[..., object], *arguments: object, timeout_s: float, dying: tuple[int, ...]
    ) -> list[Any]:
        """`function(rank, *arguments)` of every rank. Fails with the traceback of the rank that failed."""
        # By file and name: test modules are no importable packages.
        request = pickle.dumps((function.__code__.co_filename, function.__name__, arguments))
        for connection in self._connections:
            connection.send_bytes(request)
        answers, errors = self._collect(timeout_s, dying)
        if errors or len(answers) < len(self._connections):
            pytest.fail("\n".join(errors) or f"only the ranks {sorted(answers)} answered in {timeout_s} s")
        return [answers[rank] for rank in range(len(answers))]

    def _collect(self, timeout_s: float, dying: tuple[int, ...]) -> tuple[dict[int, Any], list[str]]:
        answers: dict[int, Any] = {}
        errors: list[str] = []
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        end = time.monotonic() + timeout_s
        while pending and (ready := wait(list(pending), timeout=max(0, end - time.monotonic()))):
            for connection in ready:
                rank = pending.pop(connection)
                good, value = _received(connection, may_die=rank in dying)
                if good:
                    answers[rank] = value
                else:
                    errors.append(f"rank {rank}: {value}")
                    end = min(end, time.monotonic() + GRACE_S)
        return answers, errors

    def end(self, *, patience_s: float) -> None:
        """Let the ranks leave the group; kill those that have not after `patience_s`."""
        if patience_s:
            for connection in self._connections:
                connection.send_bytes(b"")
        end = time.monotonic() + patience_s
        for process in self._processes:
            process.join(max(0, end - time.monotonic()))
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()


def _received(connection: Any, *, may_die: bool) -> tuple[bool, Any]:
    try:
        good, value = pickle.loads(connection.recv_bytes())
    except EOFError:
        return (True, None) if may_die else (False, "the process has ended")
    return good, value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests for processes that run beside each other: a group runs in one process.

    A file is a group, so that what its tests share is made once, unless a test is marked as of another (a
    long file is spread like that); the tests of Slurm are one, since each
    process would start a cluster of its own. The longest groups come first.
    """

    def place(item: pytest.Item) -> tuple[int, str]:
        if "running_lab" in getattr(item, "fixturenames", ()):
            return 0, "slurm"
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return {"harness": 1, "worker": 2, "strategies": 3}.get(folder, 4), str(item.path)

    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(place(item)[1]))
    items.sort(key=lambda item: place(item)[0])


def pytest_collection_finish() -> None:
    """What is imported and collected stays: no collection of garbage during the tests goes through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """`ranks(2, function, *arguments)` runs a module-level function on two ranks, and gives their results.

    A rank is called `function(rank, *arguments)`, with the default process group open; arguments and
    results are pickled. What raises, or takes longer than `timeout_s`, fails the test and ends the pool; the
    next test gets a new one. The ranks in `dying` may end without a result, and give None. `fresh` ranks have
    run nothing before, and end with the test.
    """
    pools: dict[int, Pool] = {}

    def run(
        size: int,
        function: Callable[..., object],
        *arguments: object,
        timeout_s: float = 60,
        dying: tuple[int, ...] = (),
        fresh: bool = False,
    ) -> list[Any]:
        known = None if fresh else pools.pop(size, None)
        pool = known or Pool(size, tmp_path_factory.mktemp("ranks") / "store")
        whole = False
        try:
            results = pool.run(function, *arguments, timeout_s=timeout_s, dying=dying)
            whole = not dying and not fresh
        finally:
            if whole:
                pools[size] = pool
            else:
                pool.end(patience_s=0)
        return results

    yield run
    for pool in pools.values():
        pool.end(patience_s=5)


@pytest.fixture(scope="session")
def other_rounding() -> ModuleType:
    """What sums in another order on ranks, as another CPU would."""
    path = Path(__file__).with_name("other_rounding.py")
    spec = importlib.util.spec_from_file_location("other_rounding", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
