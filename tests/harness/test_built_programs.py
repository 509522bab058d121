"""Two runs of a cell whose model reads its width from a file in its folder."""

from __future__ import annotations

import json

import pytest

from results.store import Study

MODEL = """
import json
from pathlib import Path

from torch import nn
from workloads import Workload


def build():
    width = json.loads((Path(__file__).parent / "width.json").read_text())
    module = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))

    def synthetic(generator, samples):
        import torch

        inputs = torch.randn(samples, 4, generator=generator)
        return inputs, inputs[:, :1]

    return Workload(module=module, loss=nn.functional.mse_loss, synthetic=synthetic)
"""


@pytest.mark.slow
def test_a_run_of_another_program_is_proven_anew_and_not_pooled(bench, tmp_path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    words = (
        "matrix --workload py:model:build --gpus 1 --strategy single --batch-size 4 --device cpu --budget 0"
    )
    for repeats, width in enumerate((6, 9), start=1):
        (tmp_path / "width.json").write_text(json.dumps(width))
        more = ("--block-steps", "2", "--repeats", str(repeats), "--no-report", "--out", "s")
        bench(*words.split(), *more, cwd=tmp_path)
    first, second = sorted(Study(tmp_path / "s").results(), key=lambda run: run.started_at or "")
    assert [run.parameters for run in (first, second)] == [37, 55]
    assert [run.proof is not None and run.proof.method for run in (first, second)] == [
        "serial-simulation"
    ] * 2
    said = bench("status", "s", cwd=tmp_path)
    assert "width.json" in said.stdout
