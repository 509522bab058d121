"""`bench --help` answers at once: goal at most 0.2 s."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture


@pytest.mark.slow
def test_help(benchmark: BenchmarkFixture) -> None:
    command = [str(Path(sys.executable).with_name("bench")), "--help"]
    done = benchmark(subprocess.run, command, capture_output=True, text=True)
    assert "matrix" in done.stdout
