"""Real runs of two ranks with a regression planted in the strategy: `bench compare` names each."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from harness.cli import run
from results.cell import Cell, StepPolicy
from results.plan import Plan, Request
from results.record import RankRecord
from results.store import Study
from strategies.scratch_ddp.model import ScratchDdpModel
from strategies.scratch_ddp.reducer import GradientReducer

CELL = Cell(
    workload="mlp",
    dataset="synthetic",
    strategy="scratch-ddp:bucket_mb=0.25:first_bucket_mb=0.25",
    gpus=2,
    micro_batch=4,
    device="cpu",
    backend="gloo",
    optimizer="sgd",
    steps=StepPolicy(block_steps=5, warmup_max_steps=5, min_blocks=2, max_blocks=2, quads=0),
)
FIELDS = {name: getattr(CELL, name) for name in ("workload", "strategy", "micro_batch", "optimizer", "steps")}


def overlap_lost(rank: int, size: int) -> AbstractContextManager[object]:
    """No bucket starts when it is full: all are left to the end of the exchange, which is right and slow."""
    return patch.object(GradientReducer, "ready", lambda self, index: None)


def one_more_collective(rank: int, size: int) -> AbstractContextManager[object]:
    original = ScratchDdpModel.started

    def wrong(self: ScratchDdpModel) -> None:
        original(self)
        self._link.all_reduce(torch.zeros(16))

    return patch.object(ScratchDdpModel, "started", wrong)


@pytest.fixture
def study(whole_runs, tmp_path) -> Callable[[str, Callable[..., object] | None], str]:
    """`study("after", broken)` runs the cell with something broken and gives the folder of its study."""

    def make(name: str, broken: Callable[..., object] | None = None) -> str:
        made = Study(tmp_path / name)
        request = Request(workloads=("mlp",), gpus=(2,), strategies=(CELL.strategy,), device="cpu")
        made.add_plan(
            Plan(
                study=name,
                created_at="2026-01-02T03:04:05.000Z",
                request=request,
                cells=(CELL,),
                series=(),
                skips=(),
            )
        )
        for record in whole_runs(2, FIELDS, broken=broken):
            made.add_rank_record(RankRecord(**record))
        return str(tmp_path / name)

    return make


def compared(before: str, after: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and the findings that show a change, by metric."""
    capsys.readouterr()
    code = run(["compare", before, after, "--format", "json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    kept = ("unchanged", "shown", "inconclusive")
    return code, {found["metric"]: found for found in findings if found["verdict"] not in kept}


@pytest.mark.slow
def test_what_is_planted_in_the_exchange_is_named(study, capsys) -> None:
    before = study("before")
    assert compared(before, study("same"), capsys) == (0, {})
    code, lost = compared(before, study("lost", overlap_lost), capsys)
    assert (code, lost.keys()) == (1, {"early_buckets", "backward_left"})
    found = lost["early_buckets"]
    assert found["verdict"] == "regressed"
    assert found["base"][0] > 0
    assert found["new"] == [0.0]
    assert found["reason"].startswith("buckets that started before the last gradient now wait for it")
    code, more = compared(before, study("more", one_more_collective), capsys)
    assert (code, more.keys()) == (1, {"payload_bytes", "operations"})
    for found in more.values():
        assert found["verdict"] == "regressed"
        assert "number 1 of the step" in found["reason"]
        assert "allreduce 0-1 64 B in NEW" in found["reason"]
