"""How long the benchmarks measure."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture
def quads() -> Callable[[int], int]:
    """How many quads to run where a goal's figure is of so many: all, or a tenth where PERF_BRIEF is set.

    A brief run shows that a benchmark works; its figures are not for docs/performance.md.
    """
    brief = bool(os.environ.get("PERF_BRIEF"))
    return lambda many: max(4, many // 10) if brief else many
