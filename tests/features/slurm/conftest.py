"""Shared by the tests on a real Slurm: `bench` on its cluster."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def bench(lab, bench_in, tmp_path) -> Any:
    return bench_in(tmp_path, lab)
