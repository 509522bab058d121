"""Every feature can be deleted with its line and its tests: the core plans, runs and reports as before."""

from __future__ import annotations

from pathlib import Path

import pytest
from packages import module_at

from harness.features import FEATURES

without = module_at(Path(__file__).with_name("without.py"))

CELL = ("--workload", "mlp", "--strategy", "ddp", "--gpus", "2", "--device", "cpu", "--oversubscribe")
SHORT = ("--repeats", "1", "--budget", "1s", "--quads", "0", "--batch-size", "4")


@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(name, marks=[] if name == FEATURES[0] else [pytest.mark.slow], id=name)
        for name in FEATURES
    ],
)
def test_the_core_works_without_a_feature(feature, tmp_path) -> None:
    copy = without.copy_without(feature, tmp_path / "bench")
    matrix = without.call("-m", "harness.cli", "matrix", "--name", "study", *CELL, *SHORT, at=copy)
    assert matrix.returncode == 0, matrix.stderr
    assert (
        f"No module named 'harness.features.{feature}'"
        in without.call("-c", f"import harness.features.{feature}", at=copy).stderr
    )
    report = without.call("-m", "harness.cli", "report", "runs/study", at=copy)
    assert report.returncode == 0, report.stderr
    assert "In short" in (copy / "runs/study/report.html").read_text(encoding="utf-8")
    collected = without.call("-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", at=copy)
    assert collected.returncode == 0, collected.stdout[-3000:]
