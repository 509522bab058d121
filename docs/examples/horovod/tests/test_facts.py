"""Planning knows ids, messages, memory and refusals of `horovod` without Horovod, from its package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from bench_horovod.facts import Horovod
from builders import a_cell
from packages import first_on_the_path, install, module_at

from results.parts import ModelParts
from strategies.predictions import footprint, traffic
from strategies.refusal import refusal
from workloads.catalog import WORKLOADS, facts

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parents[2]
PROJECT = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
MLP = facts(WORKLOADS.parse("mlp")).parts
assert isinstance(MLP, ModelParts)


def test_ids_and_canonical_texts_are_those_of_the_day_they_were_frozen() -> None:
    frozen = json.loads((ROOT / "tests/frozen/ids.json").read_text())["strategy"]
    golden, found = (
        {text: at for text, at in texts.items() if text.partition(":")[0] == "horovod"}
        for texts in (frozen, module_at(ROOT / "tests/frozen/test_ids.py").ids_by_axis()["strategy"])
    )
    assert len(golden) == 4
    assert found == golden


@pytest.mark.parametrize(
    ("options", "width", "operations"),
    [("", 4, 1), (":compression=fp16", 2, 1), (":fusion_mb=0.25", 4, 9)],
)
def test_a_step_sends_each_gradient_once(options, width, operations) -> None:
    (found,) = traffic(a_cell(strategy=f"horovod{options}", gpus=4), MLP)
    assert found.payload_bytes == width * 535_818
    # A buffer of a quarter MiB takes 65,536 of them.
    assert found.operations == operations


def test_a_rank_has_the_buffer_of_fused_gradients_at_most_as_large_as_the_gradients() -> None:
    small, large = (
        footprint(a_cell(strategy=f"horovod:fusion_mb={size}", gpus=4), MLP).buckets for size in (0.25, 1024)
    )
    assert (small, large) == (2**18, 4 * 535_818)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gpus": 1}, "horovod needs at least 2 ranks"),
        ({"compression": "bf16"}, "its compression is an option of it"),
    ],
)
def test_a_cell_that_makes_no_sense_is_refused(fields, words) -> None:
    assert words in str(refusal(a_cell(strategy="horovod", **fields)))


@pytest.fixture
def installed(tmp_path) -> Path:
    """A folder on the path that has the package as its pyproject.toml describes it."""
    folder = tmp_path / "site"
    install(folder, PROJECT["name"], PROJECT["entry-points"], version=PROJECT["version"])
    (folder / "bench_horovod").symlink_to(PACKAGE / "bench_horovod")
    return folder


def bench(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "from harness.cli import main; main()", *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{first_on_the_path(folder)}", "COLUMNS": "400"},
        capture_output=True,
        text=True,
        cwd=folder.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_package_adds_the_strategy_and_says_what_builds_horovod(installed) -> None:
    rows = json.loads(bench(installed, "list", "--json", "strategies"))["strategies"]
    meaning = next(row["meaning"] for row in rows if row["name"] == "horovod")
    missing = Horovod.engine.missing
    assert meaning == f"{Horovod.help} (of bench-horovod 1.0)" + (f" ({missing})" if missing else "")
    words = ("--workload", "mlp", "--strategy", "ddp,horovod", "--gpus", "2", "--device", "cpu")
    said = bench(installed, "matrix", *words, "--oversubscribe", "--dry-run")
    assert (f"horovod cannot run here: {missing}" if missing else "mlp-horovod-g002") in said
    assert missing is None or missing.endswith("install it: bash docs/examples/horovod/build.sh")
    assert (ROOT / "docs/examples/horovod/build.sh").is_file()
