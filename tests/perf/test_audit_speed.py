"""Speed of `bench audit` on a large table.

The target is 15 s of CPU for 100,000 rows; the figure is kept in the benchmark's record, not asserted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture

HEADS = "model,hardware,precision,params,gpus,batch_per_gpu,tokens/s,step_ms,seq_len,notes\n"
AUDIT = """
import json, resource, sys, time
from harness.cli import run
code = run(["audit", sys.argv[1], "--json"])
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"code": code, "cpu_s": time.process_time(), "peak_rss_bytes": used.ru_maxrss * 1024}))
"""


def row(number: int) -> str:
    """One of the eight sizes of a model that loses 2 % of each GPU at each doubling; 8192 tokens a GPU."""
    doublings = number % 8
    gpus = 2**doublings
    step_ms = 200 * 1.02**doublings + number % 13 / 100
    tokens_per_s = 4 * gpus * 2048 / step_ms * 1e3
    cells = f"m{number // 8},a100_80gb,bf16,1.2B,{gpus},4,{tokens_per_s:.0f},{step_ms:.2f},2048"
    return f"{cells},host {number % 97}; GBS {4 * gpus}\n"


def test_auditing_a_large_table(
    benchmark: BenchmarkFixture, amount: Callable[..., int], tmp_path: Path
) -> None:
    rows = amount(100_000, brief=4_000)
    path = tmp_path / "table.csv"
    path.write_text(HEADS + "".join(map(row, range(rows))))

    def audit() -> dict[str, float]:
        command = [sys.executable, "-c", AUDIT, str(path)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        told, figures = map(json.loads, answer.stdout.splitlines())
        assert (told["rows"], told["findings"]) == (rows, [])
        assert told["seen"]["work"] == told["seen"]["scaling"] == rows
        return dict(figures)

    figures = benchmark.pedantic(audit, rounds=1)
    assert figures["code"] == 0
    benchmark.extra_info |= {"rows": rows, **figures}
