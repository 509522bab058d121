"""The strategies of the call in docs/models.md train its model that can be cut, and are proven."""

from __future__ import annotations

import csv
import re
import shlex
import shutil
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
LEAST = ("--device", "cpu", "--oversubscribe", "--repeats", "1", "--budget", "0", "--quads", "0")


@pytest.mark.slow
def test_the_model_that_can_be_cut_is_cut_and_proven(bench, tmp_path) -> None:
    guide = (DOCS / "models.md").read_text()
    [call] = re.findall(r"^bench (matrix --workload py:mytransformer:build .*)$", guide, re.MULTILINE)
    shutil.copy(DOCS / "examples" / "mytransformer.py", tmp_path)
    done = bench(*shlex.split(call), *LEAST, "--out", "study")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "study/runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert {run["strategy"] for run in runs} == {"pipeline:1f1b", "tp", "scratch-fsdp"}
    assert {(run["outcome"], run["proof"]) for run in runs} == {("ok", "serial-simulation")}
