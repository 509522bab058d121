"""Programs as users of other libraries write them, on two ranks under bench: `make programs` runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.features.programs.file import LOGS
from harness.features.programs.reading import waits_of
from harness.features.programs.records import PROGRAM_RUN
from results.run import RunResult
from results.spec import split
from results.store import Study

FOREIGN = Path(__file__).with_name("foreign")
ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-programs/bin/python"
LOG_LINE = """
from types import SimpleNamespace as Fields
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools import logging, utils

logging.init_logger()
parts = ("max_active_gib", "max_active_pct", "max_reserved_gib", "max_reserved_pct")
memory = Fields(**dict.fromkeys(parts, 0.5), num_alloc_retries=0, num_ooms=0)
monitor = Fields(get_peak_stats=lambda: memory, reset_peak_stats=lambda: None)
for color in (utils.Color(), utils.NoColor()):
    known = Fields(num_flops_per_token=1, ntokens_since_last_log=8, time_last_log=0.0, gpu_peak_flops=1e12,
        data_loading_times=[0.1], has_quantization=False, color=color, device_memory_monitor=monitor,
        parallel_dims=Fields(non_data_parallel_size=1), config=Fields(log_freq=1),
        logger=Fields(log=lambda metrics, step: None))
    MetricsProcessor.log(known, 7, 10.25, 11.0, 2.5)
"""
"""Has torchtitan's own code write its line of step 7 with loss 10.25, with colours and without."""
pytestmark = [
    pytest.mark.skipif("FOREIGN" not in os.environ, reason="make programs runs them"),
    pytest.mark.slow,
]
Run = Callable[..., tuple[Study, dict[str, RunResult]]]


@pytest.fixture
def run(bench, tmp_path) -> Run:
    """`run(name, strategies)`: the study of a program on two ranks, and its runs by strategy."""

    def run(name: str, strategies: str, *options: str) -> tuple[Study, dict[str, RunResult]]:
        words = ["--workload", f"program:{name}.yaml", "--strategy", strategies, *options]
        few = ["--gpus", "2", "--repeats", "1", "--budget", "0", "--device", "cpu", "--out", tmp_path / "o"]
        done = bench("matrix", *words, *map(str, few), cwd=FOREIGN)
        study = Study(tmp_path / "o")
        runs = {_line(study.cell(run.cell_id).strategy): run for run in study.results()}
        assert set(runs) == set(strategies.split(",")), done.stdout + done.stderr
        return study, runs

    return run


def _line(strategy: str) -> str:
    """The name of a line of the file: `ddp` of `program:ddp@5eed25`."""
    return str(split(strategy)[1]).partition("@")[0]


def _ends(study: Study, run: RunResult) -> list[tuple[int, str]]:
    """How many steps each rank's program has taken, and why it ended."""
    paths = sorted(study.run_folder(run.cell_id, run.run_id).glob("program-*/steps.jsonl"))
    ends = [json.loads(path.read_text().splitlines()[-1])["end"] for path in paths]
    return [(end["steps"], end["exit"]) for end in ends]


@pytest.mark.parametrize("name", ["hf_trainer", "lightning_fit", "accelerate_loop", "plain_ddp"])
def test_a_program_is_measured_and_leaves_after_one_step_on_all_ranks(run, name):
    study, runs = run(name, "ddp,fsdp", *([] if name == "plain_ddp" else ["--accumulation", "2"]))
    for one in runs.values():
        assert (one.outcome, one.reason, one.ranks_present) == ("ok", None, 2)
        first, second = _ends(study, one)
        assert first == second
        assert first[0] > one.warmup_steps + one.steps
        assert first[1] == "stop"
        # Only the loop of accelerate prints no loss. Where there is one, the program's own count agreed.
        assert (one.loss_last is None) == (name == "accelerate_loop")


def test_the_rank_that_sleeps_in_its_backward_is_the_slow_one(run):
    study, runs = run("plain_ddp", "ddp+slow1,fsdp+slow1")
    for one in runs.values():
        paths = sorted(study.run_folder(one.cell_id, one.run_id).glob("program-*.json"))
        waits = waits_of([PROGRAM_RUN.read(path) for path in paths], ranks=2, step_ns=one.step_ns.value)
        assert waits.slow == 1
        assert waits.by_rank_ns[0] - waits.by_rank_ns[1] > 50e6


def test_lightning_says_why_its_own_fsdp_does_not_run_on_cpus(run):
    _, runs = run("lightning_fit", "fsdp1")
    assert runs["fsdp1"].outcome == "crashed"
    assert "requires a GPU accelerator" in runs["fsdp1"].reason


def test_an_inference_counts_by_bench_step_though_its_ranks_never_meet(run):
    _, runs = run("inference", "replicas")
    one = runs["replicas"]
    assert (one.outcome, one.loss_last, one.unit) == ("ok", None, "images")


@pytest.mark.skipif(not (ROOT / ".venv-engines/bin/deepspeed").exists(), reason="DeepSpeed is not installed")
def test_deepspeed_without_zero_is_measured_and_with_zero_refused_by_name(run):
    _, runs = run("deepspeed_engine", "ddp,zero1")
    assert runs["ddp"].outcome == "ok"
    assert runs["zero1"].outcome == "skipped"
    assert "deepspeed.runtime.zero" in runs["zero1"].reason


def test_the_pattern_named_torchtitan_matches_the_lines_that_torchtitan_writes():
    done = subprocess.run([PYTHON, "-c", LOG_LINE], capture_output=True, text=True, check=True)
    found = [match for line in done.stdout.splitlines() if (match := re.search(LOGS["torchtitan"], line))]
    assert [match.groupdict() for match in found] == [{"step": "7", "loss": "10.25000"}] * 2
