"""A batch that the host's memory has no room for: its outcome, and what it says of larger ones."""

from __future__ import annotations

import pytest

from results.store import Study

pytestmark = pytest.mark.slow

MEMORY = '''
import resource
from pathlib import Path
import torch
from torch import nn
from workloads import Workload

MIB = 2**20


class Hungry(nn.Linear):
    """Takes 64 MiB a sample for a moment."""

    def forward(self, x):
        torch.empty(x.shape[0] * 64 * MIB, dtype=torch.uint8)
        return super().forward(x)


def build():
    """From here on the process gets 400 MiB more: enough for 4 samples at once, and not for 8."""
    status = Path("/proc/self/status").read_text()
    used_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (used_kib * 1024 + 400 * MIB, hard))

    def synthetic(generator, samples):
        return torch.randn(samples, 4, generator=generator), torch.randn(samples, 1, generator=generator)

    return Workload(module=Hungry(4, 1), loss=nn.functional.mse_loss, synthetic=synthetic)
'''


def test_a_batch_that_is_too_large_leaves_out_larger_ones_unless_they_are_asked_for(bench, tmp_path) -> None:
    (tmp_path / "hungry.py").write_text(MEMORY)
    options = (
        *("--workload", "py:hungry:build", "--gpus", "1", "--strategy", "single", "--repeats", "1"),
        *("--device", "cpu", "--budget", "0", "--block-steps", "2", "--quads", "1", "--out", "study"),
    )

    def run(batches: str, *more: str) -> dict[int, tuple[str, str]]:
        done = bench("matrix", *options, "--batch-size", batches, *more)
        assert done.returncode == 1, done.stderr
        study = Study(tmp_path / "study")
        return {
            study.cell(result.cell_id).micro_batch: (str(result.outcome), str(result.reason))
            for result in study.results()
        }

    found = run("4,8", "--no-report")
    assert found[4] == ("ok", "None")
    assert found[8][0] == "out_of_memory"
    assert "you tried to allocate 536870912 bytes" in found[8][1]
    # 8 samples are known to be too many now, and so are 16.
    assert run("4,8,16") == found
    shown = bench("status", "study").stdout
    assert "skipped" in shown
    assert "inferred out of memory: " in shown
    assert "inferred out of memory" in (tmp_path / "study" / "report.html").read_text()
    found = run("4,8,16", "--no-prune", "--no-report")
    assert found[16][0] == "out_of_memory"
    assert "you tried to allocate 1073741824 bytes" in found[16][1]
    assert "skipped" not in bench("status", "study").stdout
