"""The examples of the library page run as they stand, on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from launching import until

PAGE = (Path(__file__).parents[2] / "docs/library.md").read_text()
EXAMPLES = re.findall(r"## (\w+):.*?```python\n(.*?)```", PAGE, re.DOTALL)


def test_every_door_has_an_example() -> None:
    assert [title for title, _ in EXAMPLES] == ["Trainer", "Run", "parallelize", "GradientExchange"]


def started(folder: Path) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*torchrun, "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end_of(process: subprocess.Popen[str]) -> str:
    """The output of the page."""
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output


@pytest.mark.slow
@pytest.mark.parametrize("title", ["Trainer", "parallelize", "GradientExchange"])
def test_an_example_runs_on_two_ranks_and_learns(tmp_path, title) -> None:
    (tmp_path / "train.py").write_text(dict(EXAMPLES)[title])
    must_have_learned(end_of(started(tmp_path)))


def must_have_learned(output: str) -> None:
    losses = re.findall(r"rank [01]: loss (\d+\.\d+)", output)
    assert len(losses) == 2
    # An untrained model is off by the outputs' own spread, about 0.3 squared and more.
    assert all(float(loss) < 0.05 for loss in losses), losses


@pytest.mark.slow
def test_a_run_that_is_killed_ends_with_the_same_model(tmp_path) -> None:
    """The whole script: killed after its first checkpoint, started again, and once without a kill."""
    code = dict(EXAMPLES)["Run"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
        (folder / "train.py").write_text(code)
    first = started(killed)
    until(lambda: (killed / "run/step-000000020").exists() or first.poll() is not None)
    for process in (first, *psutil.Process(first.pid).children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    first.communicate()
    assert not (killed / "model.pt").exists()
    end_of(started(killed))
    must_have_learned(end_of(started(whole)))
    ours, theirs = (torch.load(folder / "model.pt", weights_only=True) for folder in (killed, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    kept = {path.name for path in (killed / "run").iterdir()}
    assert {"step-000000400", "step-000000380", "step-000000360"} <= kept
    assert len(kept) <= 4
