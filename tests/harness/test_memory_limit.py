"""A model larger than one rank's share: where replicas do not fit, shards do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from results.outcome import Outcome
from results.run import RunResult
from results.store import Study

# Minutes where the ranks share few cores.
pytestmark = [pytest.mark.slow, pytest.mark.long]

MODELS = """
import torch
from torch import nn
from results.layout import ModelLayout
from workloads import Workload

LAYERS = 14


def deep():
    def synthetic(generator, samples):
        x = torch.randn(samples, 1024, generator=generator)
        return x, x.flip(0)

    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(LAYERS)]
    layout = ModelLayout(blocks=tuple(str(layer) for layer in range(LAYERS)))
    loss = nn.functional.mse_loss
    return Workload(module=nn.Sequential(*layers), loss=loss, synthetic=synthetic, layout=layout)
"""
MIB = 2**20
PARAMETER_BYTES = 4 * 14 * (1024 * 1024 + 1024)
"""56 MiB of float32."""
# With gradients and AdamW's two moments 4 x 56 = 224 MiB, and ddp 56 more for its buckets. A rank of 2
# that shards has 112 MiB of all that, and before it was sharded the whole model beside the first shards, up
# to 84 MiB; some gathered layers of 4 MiB, torch's sharding itself and stacks of threads come on top.
LIMIT_MB = 200


@pytest.fixture(scope="module")
def limited(tmp_path_factory) -> Study:
    folder = tmp_path_factory.mktemp("limited")
    (folder / "models.py").write_text(MODELS)
    arguments = [
        "matrix", "--workload", "py:models:deep", "--strategy", "ddp,zero3", "--gpus", "2",
        "--optimizer", "adamw", "--batch-size", "2", "--device", "cpu", "--oversubscribe", "--repeats", "1",
        "--memory-limit-mb", str(LIMIT_MB), "--budget", "0", "--block-steps", "1", "--warmup-steps", "1",
        "--quads", "0", "--no-report", "--out", "study",
    ]  # fmt: skip
    bench = str(Path(sys.executable).with_name("bench"))
    done = subprocess.run([bench, *arguments], cwd=folder, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 1, done.stderr
    return Study(folder / "study")


def _run(study: Study, strategy: str) -> RunResult:
    (run,) = [run for run in study.collect() if study.cell(run.cell_id).strategy == strategy]
    return run


def test_what_keeps_whole_replicas_runs_out_of_memory(limited) -> None:
    run = _run(limited, "ddp")
    assert run.outcome is Outcome.OUT_OF_MEMORY, run.reason
    assert "can't allocate memory" in run.reason


def test_shards_of_it_train_under_the_same_limit_and_are_proven(limited) -> None:
    run = _run(limited, "fsdp")
    assert run.outcome is Outcome.OK, run.reason
    assert (run.proof.method, run.proof.passed) == ("serial-simulation", True)
    # A rank's part of the state, and with libraries that were loaded meanwhile less than a replica's.
    assert run.rss_over_idle_bytes is not None
    assert PARAMETER_BYTES < run.rss_over_idle_bytes < 4 * PARAMETER_BYTES
    assert LIMIT_MB * MIB < 4 * PARAMETER_BYTES
