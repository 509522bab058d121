"""The options of docs/ci/scrontab, read by Slurm itself."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

SCRONTAB = Path(__file__).parents[2] / "docs" / "ci" / "scrontab"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]


def test_slurm_takes_the_options_of_the_scrontab(lab: object) -> None:
    text = SCRONTAB.read_text()
    options = re.findall(r"^#SCRON (--\S+)$", text, re.MULTILINE)
    (command,) = re.findall(r"^0 3 \* \* \* (.+)$", text, re.MULTILINE)
    done = subprocess.run(
        ["sbatch", "--test-only", *options, f"--wrap={command}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"to start at .* on nodes n\d in partition main", done.stderr), done.stderr
    subprocess.run(["bash", "-n", "-c", command], check=True)
