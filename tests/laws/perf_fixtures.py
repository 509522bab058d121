"""How much the benchmarks measure."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def amount() -> Callable[..., int]:
    """`amount(100, brief=2)` is 100, as docs/evidence.md has it, or 2 where PERF_BRIEF is set.

    A brief run shows that a benchmark works, and measures nothing.
    """
    is_brief = bool(os.environ.get("PERF_BRIEF"))
    return lambda full, *, brief: brief if is_brief else full
