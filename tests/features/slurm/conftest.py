"""Shared by the tests on a real Slurm: `bench` on its cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def bench(lab: Any, bench_in: Callable[..., Any], tmp_path: Path) -> Any:
    return bench_in(tmp_path, lab)
