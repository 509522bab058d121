"""Fixtures of bench's tests, and the package itself where it is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from packages import module_at

from strategies.catalog import STRATEGIES

PACKAGE = Path(__file__).parents[1]
TESTS = PACKAGE.parents[2] / "tests"
if find_spec("bench_horovod") is None:
    sys.path.insert(0, str(PACKAGE))
ranks = module_at(TESTS / "conftest.py").ranks
_WORKER = module_at(TESTS / "worker" / "conftest.py")
one_thread, proofs, whole_runs = _WORKER.one_thread, _WORKER.proofs, _WORKER.whole_runs


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    """The strategy in this process, for the tests of one module."""
    from bench_horovod.facts import Horovod

    if Horovod.name in STRATEGIES.offered:
        STRATEGIES.parse(Horovod.name)
    else:
        STRATEGIES.register(Horovod)
    yield
    STRATEGIES.forget(Horovod.name)
