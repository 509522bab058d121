"""Nights on Slurm: the options of docs/ci/scrontab, read by Slurm itself, and two nights that overlap."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

SCRONTAB = Path(__file__).parents[3] / "docs" / "ci" / "scrontab"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]


def test_slurm_takes_the_options_of_the_scrontab(lab) -> None:
    text = SCRONTAB.read_text()
    options = re.findall(r"^#SCRON (--\S+)$", text, re.MULTILINE)
    (command,) = re.findall(r"^0 3 \* \* \* (.+)$", text, re.MULTILINE)
    done = subprocess.run(
        ["sbatch", "--test-only", *options, f"--wrap={command}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"to start at .* on nodes n\d in partition main", done.stderr), done.stderr
    subprocess.run(["bash", "-n", "-c", command], check=True)


@pytest.mark.needs("gate")
def test_a_night_whose_jobs_are_live_keeps_the_next_one_away(bench, lab) -> None:
    (bench.folder / "nightly.yaml").write_text("workload: mlp\ngpus: 1\nrepeats: 1\n")
    night = ("matrix", "nightly.yaml", "--fresh", "--launcher", "slurm")
    lab.command("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        first = bench(*night)
        assert first.code == 0, first.stderr
        second = bench(*night)
    finally:
        lab.command("scontrol", "update", "PartitionName=main", "State=UP")
    assert second.code == 4, second.stderr
    (kept,) = (bench.folder / "runs").glob("nightly-*")
    assert f"the night {kept.name} still has live jobs" in second.stderr
    added = bench("history", "add")
    assert added.code == 1
    assert "add it when they have ended" in added.stderr
    assert bench("cancel", kept).code == 0
