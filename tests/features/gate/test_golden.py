"""Files of the gate, of every version, read to the same objects for ever."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from golden_laws import GoldenLaws

from harness.features.gate.records.baseline import (
    BASELINE,
    THRESHOLDS,
    Acceptance,
    Baseline,
    MetricNoise,
    Subject,
    Thresholds,
)
from harness.features.gate.records.paired import (
    PAIR,
    PAIRED_CALL,
    Pair,
    PairedBlock,
    PairedCall,
    PairedCell,
    PairedSide,
)

CELL_ID = "gpt-nano-ddp-bucket-mb-1.0-topk-0.01-g002-b4-33362b4af6a1228a"
KEPT = Baseline(
    name="main",
    study="nightly",
    measured_at="2026-01-02T03:04:05.000Z",
    commit="abc1234",
    dirty=False,
    subjects=(
        Subject(
            key="mlp-ddp-g002-b32-0123456789abcdef",
            label="mlp, ddp, 2 x 32",
            facts={"torch": "2.13.0"},
            timed={"step_time": (1.5e6, 1.6e6)},
            exact={"payload_bytes": (4096,), "parameters_hash": ("feed",)},
            collectives=("allreduce 0-1 4096 B",),
            runs=2,
            run_ids=("20260102T030405Z-0123ab",),
            disturbed=1,
            failed="crashed: rank 1",
        ),
    ),
    fail_above={"step_time": 0.03},
    accepted=(
        Acceptance(
            subject="mlp, ddp, 2 x 32",
            reason="a second buffer",
            at="2026-01-02T03:04:05.000Z",
            commit="abc1234",
            changes={"payload_bytes": "2,048 to 4,096"},
        ),
    ),
)
MARGINS = Thresholds(
    machine="NVIDIA H200",
    measured_at="2026-01-02T03:04:05.000Z",
    seconds=120.5,
    cell="mlp, ddp, 2 x 128",
    noise={"step_time": MetricNoise(runs=12, between=0.01, within=0.001)},
    fail_above={"step_time": 0.05},
)
ONE_PAIR = Pair(
    number=3,
    first="new",
    alternation="launches",
    started_at="2026-01-02T03:04:05.000Z",
    ended_at="2026-01-02T03:05:05.000Z",
    cells=(
        PairedCell(
            base_cell=CELL_ID,
            base_run="20260102T030405Z-0a1b2c",
            new_cell=CELL_ID,
            new_run="20260102T030406Z-3d4e5f",
            blocks=(PairedBlock(side="new", steps=25, ns=250_000_000, foreign=0.05),),
        ),
    ),
    launched_with=2,
    repeat=2,
    forked=True,
)
CALL_OF_PAIRS = PairedCall(
    base=PairedSide(revision="main", commit="abc1234", python="/usr/bin/python3", options=("--gpus", "2")),
    new=PairedSide(
        revision=".", commit=None, python="/usr/bin/python3", options=(), files="0a1b2c3d4e5f6071"
    ),
    changes={"payload_bytes": "the second buffer is new"},
    fail_above={"peak_memory": 0.1},
    across=("torch",),
    looks=2,
    others_above=0.5,
)


class TestGolden(GoldenLaws):
    golden = Path(__file__).with_name("golden")
    expected: ClassVar = {
        "baseline-1": (BASELINE, KEPT),
        "thresholds-1": (THRESHOLDS, MARGINS),
        "pair-1": (PAIR, ONE_PAIR),
        "paired-call-1": (PAIRED_CALL, CALL_OF_PAIRS),
    }
