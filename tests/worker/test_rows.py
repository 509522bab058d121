"""A rank records the rows of its experts in the measured steps, and counts each of them once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.worker.cell.rows import ExpertCounts
from results.record import ExpertRows
from workloads.rows import RowCount

CPU = torch.device("cpu")


class Halves(nn.Module):
    """Its first expert has a quarter of the rows, its second one the others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.counted = RowCount(2, first=6)

    def forward(self, rows: Tensor) -> Tensor:
        few = torch.full((1,), len(rows) // 4, device=rows.device)
        self.counted.add(torch.cat([few, len(rows) - few]))
        return torch.tanh(self.linear(rows))


def test_rows_between_two_readings_are_those_of_the_steps_between_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Halves())
    model(torch.ones(8, 4))
    counts = ExpertCounts(model, CPU)
    model(torch.ones(8, 4))
    before = counts.read()
    for _ in range(2):
        model(torch.ones(12, 4))
    assert counts.since(before) == [ExpertRows(module="1", first=6, rows=[6, 18])]
    assert ExpertCounts(nn.Linear(4, 4), CPU).since({}) == []


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_that_backward_computes_again_are_not_counted_again(compiled) -> None:
    torch._dynamo.reset()
    model = Halves()
    counts = ExpertCounts(model, CPU)
    if compiled:
        # One graph, which contains the count.
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        checkpoint(model, torch.ones(8, 4), use_reentrant=False).sum().backward()
    assert counts.read() == {"": [6, 18, 0]}


def test_a_run_records_the_rows_of_its_measured_steps(whole_runs) -> None:
    """2 blocks of 5 steps of 2 micro-batches: of 2 samples' 128 tokens the busiest expert is to have 3 times
    the mean of 32, of which it drops one, and the others in turn what is left."""
    records = whole_runs(
        2,
        {
            "workload": "moe-nano:capacity=2:routing=skewed:skew=3",
            "strategy": "fsdp",
            "micro_batch": 2,
            "accumulation": 2,
            "optimizer": "sgd",
            "activation_checkpointing": True,
        },
    )
    for record in records:
        assert record["reason"] is None
        assert len(record["steps"].step_ns) == 10
        modules = [one.module for one in record["experts"]]
        assert modules == [f"layers.{layer}.mlp.experts" for layer in range(4)]
        for one in record["experts"]:
            assert (one.first, len(one.rows), sum(one.rows)) == (0, 8, 10 * 2 * (128 * 2 - 32))
            assert (one.rows[0], one.dropped) == (10 * 2 * 2 * 32, 10 * 2 * 32)
            assert max(one.rows[1:]) < one.rows[0] / 2
            # Three products of 128 by 128 values.
            assert one.row_flops == 3 * 2 * 128 * 128
