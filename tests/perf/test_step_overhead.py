"""What the harness adds to a step: goal a median ratio of at most 1.01, its upper 95 % bound at most 1.03."""

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

QUADS = 100


def upper_bound_of_median(values: list[float]) -> float:
    """One end of the distribution-free 95 % interval of the median: the order statistic by the binomial.

    Le Boudec, Performance Evaluation of Computer and Communication Systems, theorem 2.1.
    """
    from scipy.stats import binom

    ranks = int(binom.ppf(0.975, len(values), 0.5))
    return sorted(values)[min(ranks, len(values) - 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "steps"), [("gpt-nano", 3), ("mlp", 3)])
def test_step_inside_the_harness_against_a_bare_loop(
    benchmark: BenchmarkFixture, workload: str, steps: int, quads: Callable[[int], int]
) -> None:
    many = quads(QUADS)
    script = Path(__file__).with_name("step_overhead.py")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        str(script), workload, str(steps), str(many),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = benchmark.pedantic(
        subprocess.run, (command,), {"capture_output": True, "text": True, "env": environment}, rounds=1
    )
    assert done.returncode == 0, done.stderr
    ratios = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    assert len(ratios) == many
    found = {
        "median_ratio": float(np.median(ratios)),
        "upper_95_bound_of_median": upper_bound_of_median(ratios),
        "quads": many,
    }
    benchmark.extra_info.update(found)
    print(f"\n{workload}: {found}")
