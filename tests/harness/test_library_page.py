"""The examples of the library page run as they stand, on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/library.md").read_text()
EXAMPLES = re.findall(r"## (\w+):.*?```python\n(.*?)```", PAGE, re.DOTALL)


def test_every_door_has_an_example() -> None:
    assert [title for title, _ in EXAMPLES] == ["Trainer", "parallelize", "GradientExchange"]


@pytest.mark.slow
@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_an_example_runs_on_two_ranks_and_learns(tmp_path: Path, title: str, code: str) -> None:
    (tmp_path / "train.py").write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"rank [01]: loss (\d+\.\d+)", done.stdout)
    assert len(losses) == 2
    # An untrained model is off by the outputs' own spread, about 0.3 squared and more.
    assert all(float(loss) < 0.05 for loss in losses), losses
