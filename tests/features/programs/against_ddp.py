"""Compare the step times of a plain script and of its model under bench's ddp, in interleaved pairs.

    python tests/features/programs/against_ddp.py [PAIRS]

Two ranks on CPU, which need some 80 ms a step on 2 cores of an AMD EPYC; docs/evidence.md has the result.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from results.statistics import differences
from results.store import Study

FOREIGN = Path(__file__).with_name("foreign")
WIDTH, BATCH = 2048, 64
MODEL = f"""
import torch
from torch import nn
from workloads import Workload

def build():
    torch.manual_seed(0)
    layers = [nn.Linear({WIDTH}, {WIDTH}), nn.ReLU(), nn.Linear({WIDTH}, {WIDTH}), nn.ReLU()]
    layers.append(nn.Linear({WIDTH}, 10))
    def synthetic(generator, samples):
        inputs = torch.randn(samples, {WIDTH}, generator=generator)
        return inputs, torch.randint(10, (samples,), generator=generator)
    return Workload(module=nn.Sequential(*layers), loss=nn.functional.cross_entropy, synthetic=synthetic)
"""
PROGRAM = f"""
script: {FOREIGN / "plain_ddp.py"}
arguments: --batch {{batch_size}} --width {WIDTH} --one-batch
batch: {BATCH}
strategies: {{ddp: ""}}
"""


def main(pairs: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="against-ddp-"))
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    (folder / "plain.yaml").write_text(PROGRAM, encoding="utf-8")
    bench = str(Path(sys.executable).with_name("bench"))
    sides = {"own": "py:model:build", "program": "program:plain.yaml"}
    for number in range(1, pairs + 1):
        for side in list(sides)[:: 1 if number % 2 else -1]:
            words = ["matrix", "--workload", sides[side], "--strategy", "ddp", "--gpus", "2", "--out", side]
            few = ["--batch-size", str(BATCH), "--budget", "4s", "--quads", "0", "--repeats", str(number)]
            subprocess.run(
                [bench, *words, *few, "--device", "cpu"], cwd=folder, check=True, capture_output=True
            )
    kept = (sorted(Study(folder / side).results(), key=lambda run: run.run_id) for side in sides)
    own, program = ([run.step_ns.value for run in each if run.step_ns] for each in kept)
    ratios = differences(np.log(np.array(program) / np.array(own)).tolist(), "")
    low, middle, high = (np.exp(each) for each in (ratios.low, ratios.value, ratios.high))
    print(f"{pairs} pairs of {np.median(own) / 1e6:.1f} ms: {middle:.4f} ({low:.4f} to {high:.4f}, 95 %)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
