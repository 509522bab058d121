"""A step of scratch-ddp against one of torch's DDP, on two ranks: goal a median ratio of at most 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from scipy.stats import binom

QUADS = 60


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """The distribution-free 95 % interval of the median: order statistics by the binomial.

    Le Boudec, Performance Evaluation of Computer and Communication Systems, theorem 2.1.
    """
    ordered, beyond = sorted(values), int(binom.ppf(0.025, len(values), 0.5))
    return ordered[max(beyond - 1, 0)], ordered[min(len(values) - beyond, len(values) - 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "batch", "steps"), [("resnet18-32px", 8, 2), ("gpt-nano", 4, 2)])
def test_scratch_ddp_against_torchs_ddp(
    benchmark: BenchmarkFixture, workload: str, batch: int, steps: int, quads: Callable[[int], int]
) -> None:
    many = quads(QUADS)
    script = Path(__file__).with_name("scratch_ddp.py")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        str(script), workload, str(batch), str(steps), str(many),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = benchmark.pedantic(
        subprocess.run, (command,), {"capture_output": True, "text": True, "env": environment}, rounds=1
    )
    assert done.returncode == 0, done.stderr
    ratios = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    assert len(ratios) == many
    low, high = interval_of_median(ratios)
    found = {"median_ratio": float(np.median(ratios)), "low_95": low, "high_95": high, "quads": many}
    benchmark.extra_info.update(found)
    print(f"\n{workload}: {found}")
