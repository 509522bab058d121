"""The examples of docs/examples, installed as a package, used from the command line as any other name is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packages import first_on_the_path, install

from results.outcome import Outcome
from results.run import RunResult
from results.store import Study

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
POINTS = {
    "bench.strategies": {"gossip": "gossip.facts:Gossip"},
    "bench.compressors": {"threshold": "threshold_compressor:ThresholdFacts"},
    "bench.workloads": {"vit-nano": "vit:VIT"},
    "bench.launchers": {"ssh": "ssh_launcher:SshLauncher"},
    "bench.sections": {"days": "days_section:days_section"},
}
STEPS = ("--repeats", "1", "--budget", "0", "--block-steps", "2", "--quads", "0", "--device", "cpu")
VIT = """include:
- {workload: vit-nano, strategy: ddp, gpus: 2, batch_size: 8}
"""
"""A study file: the model, and whatever the options ask for."""
WORK = (
    "matrix",
    "vit.yaml",
    "--workload",
    "mlp",
    "--batch-size",
    "32",
    "--oversubscribe",
    "--out",
    "study",
    *STEPS,
)


@pytest.fixture
def installed(tmp_path) -> Path:
    """A separate folder on the path, with the examples and the metadata of their package."""
    folder = tmp_path / "site"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    install(folder, "bench-examples", POINTS)
    return folder


def bench(folder: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("bench")), *arguments],
        env={**os.environ, "PYTHONPATH": first_on_the_path(folder), "COLUMNS": "400"},
        capture_output=True,
        text=True,
        cwd=folder.parent,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def results(folder: Path) -> dict[tuple[str, str], RunResult]:
    """The only run of each cell, by strategy and compression."""
    study = Study(folder.parent / "study")
    found = {}
    for result in study.collect():
        cell = study.cell(result.cell_id)
        found[cell.strategy, cell.compression] = result
    return found


def test_all_are_listed_with_their_package(installed) -> None:
    said = " ".join(bench(installed, "list").split())
    for name in ("gossip", "threshold", "vit-nano"):
        assert f" {name} " in said
    assert said.count("(of bench-examples 1.0)") == 3
    assert "ssh is of bench-examples" in said
    assert "days is of bench-examples" in said


def test_what_makes_no_sense_is_refused_with_the_reason(installed) -> None:
    cells = ("--workload", "vit-nano", "--strategy", "ddp,gossip", "--compression", "threshold:0.3")
    said = bench(
        *(installed, "matrix", *cells, "--gpus", "1,2", "--device", "cpu", "--oversubscribe"),
        *("--dry-run", "-v"),
    )
    assert "gossip needs at least 2 ranks" in said
    assert "it sends parameters to its neighbours alone" in said
    assert "vit-nano-ddp-threshold-0.3-g002" in said


@pytest.mark.slow
def test_a_strategy_a_compressor_and_a_model_are_proven_and_pooled_by_their_source(installed) -> None:
    (installed.parent / "vit.yaml").write_text(VIT)
    chosen = ("--strategy", "scratch-ddp,gossip", "--compression", "none,threshold:0.3", "--gpus", "2")
    bench(installed, *WORK, *chosen)
    found = results(installed)
    assert found.keys() == {
        ("scratch-ddp", "none"),
        ("scratch-ddp", "threshold:0.3"),
        ("gossip", "none"),
        ("ddp", "none"),
    }
    for (strategy, compression), result in found.items():
        assert result.outcome is Outcome.OK
        assert result.proof.passed
        assert result.environment is not None
        names = {f"strategy {strategy}", f"compression {compression.split(':')[0]}"}
        # The model is the one with ddp.
        names |= {"workload vit-nano"} if strategy == "ddp" else set()
        used = {name: code.rsplit(" ", 1)[0] for name, code in result.environment.code.packages.items()}
        assert used == {
            name: "bench-examples 1.0"
            for name in ("strategy gossip", "compression threshold", "workload vit-nano")
            if name in names
        }
    page = (installed.parent / "study" / "report.html").read_text()
    assert 'id="days"' in page
    assert "Runs by day" in page
    # Without the package its cells are read and reported.
    elsewhere = installed.rename(installed.with_name("elsewhere"))
    assert "code of strategy gossip bench-examples 1.0 " in bench(installed, "status", "study", code=1)
    assert "gossip is not projected" in bench(installed, "project", "study", "--to", "4")
    (installed.parent / "study" / "cells.csv").unlink()
    bench(installed, "report", "study")
    assert ",gossip," in (installed.parent / "study" / "cells.csv").read_text()
    elsewhere.rename(installed)
    # Other source: what used a name of the package is left to do, and nothing else.
    file = installed / "threshold_compressor.py"
    file.write_text(file.read_text() + "# edited\n")
    bench(installed, "status", "study", code=1)
    bench(installed, *WORK, *chosen)
    again = [result.cell_id for result in Study(installed.parent / "study").collect()]
    twice = {cell for cell in again if again.count(cell) == 2}
    assert twice == {result.cell_id for key, result in found.items() if key != ("scratch-ddp", "none")}
