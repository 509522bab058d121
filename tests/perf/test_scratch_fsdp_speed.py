"""A step of scratch-fsdp against one of torch's FSDP2, on two ranks: goal a mean ratio of at most 1."""

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
from scipy.stats import t

QUADS = 40
BATCH = 4
STEPS = {"nano": 4, "wide": 1}
"""Of a block."""


def interval_of_mean(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of the mean by Student's t distribution, for independent values."""
    wide = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    mean = float(np.mean(values))
    return mean - wide, mean + wide


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ours", "theirs"),
    [
        ("nano", "scratch-fsdp", "fsdp"),
        ("nano", "scratch-fsdp", "fsdp:prefetch=1"),
        ("nano", "scratch-fsdp:prefetch=0", "fsdp"),
        ("nano", "scratch-fsdp:stage=2", "zero2"),
        ("wide", "scratch-fsdp", "fsdp"),
    ],
)
def test_scratch_fsdp_against_torchs_fsdp(
    benchmark: BenchmarkFixture, model: str, ours: str, theirs: str, quads: Callable[[int], int]
) -> None:
    many = quads(QUADS)
    script = Path(__file__).with_name("scratch_fsdp_speed.py")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        str(script), model, ours, theirs, str(BATCH), str(STEPS[model]), str(many),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = benchmark.pedantic(
        subprocess.run, (command,), {"capture_output": True, "text": True, "env": environment}, rounds=1
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert len(answer["ratios"]) == many
    low, high = interval_of_mean(answer["ratios"])
    found = {
        "mean_ratio": float(np.mean(answer["ratios"])),
        "low_95": low,
        "high_95": high,
        "step_ms": answer["step_ms"],
        "quads": many,
    }
    benchmark.extra_info.update(found)
    print(f"\n{model}, {ours} against {theirs}: {found}")
