"""Living workers against one torchrun a cell: goal at least 5 times faster where start-up dominates."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

CELLS = 12


def _wall_s(folder: Path, cells: int, isolation: str) -> float:
    """Cells of the MLP on two ranks, six one-step blocks each, with or without shared launches."""
    batches = ",".join(str(8 * (place + 1)) for place in range(cells))
    command = [
        str(Path(sys.executable).with_name("bench")), "matrix", "--workload", "mlp", "--gpus", "2",
        "--strategy", "ddp", "--batch-size", batches, "--repeats", "1", "--device", "cpu", "--budget", "0",
        "--block-steps", "1", "--quads", "0", "--no-report", "--isolation", isolation, "--out", isolation,
    ]  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return time.monotonic() - began


def _startup_s(folder: Path) -> float:
    """From the start of torchrun to its workers being ready, over all launches."""
    attempts = [json.loads(path.read_text()) for path in folder.glob("launches/*/attempt.json")]
    return sum(attempt["startup_ns"] for attempt in attempts) / 1e9


@pytest.mark.slow
@pytest.mark.long
def test_cells_with_living_workers_and_with_a_launch_each(benchmark, amount, tmp_path) -> None:
    cells = amount(CELLS, brief=1)
    living = benchmark.pedantic(_wall_s, (tmp_path, cells, "launch"), rounds=1)
    separate = _wall_s(tmp_path, cells, "cell")
    found = {
        "living_s": round(living, 1),
        "separate_s": round(separate, 1),
        "ratio": round(separate / living, 2),
        "living_startup_s": round(_startup_s(tmp_path / "launch"), 1),
        "separate_startup_s": round(_startup_s(tmp_path / "cell"), 1),
    }
    benchmark.extra_info.update(found)
    print(f"\n{found}")
