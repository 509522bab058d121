"""Traced steps: all ranks take them, the chosen ones keep a trace with every phase of exactly those steps."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_builders import CPU
from torch import nn

from harness.worker.exchange.group import open_exchange
from harness.worker.measure.clock import StepClock
from harness.worker.measure.profiler import traced_steps, write_trace
from harness.worker.rank.control import Control, parameters_hash
from strategies import Trainer, TrainSettings

PHASES = ("data", "forward", "backward", "optimizer")


def traced(rank: int, folder: str, strategy: str, chosen: tuple[int, ...]) -> dict[str, Any]:
    """On a rank: how many batches its traced steps took, and what became of the trainer."""
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Linear(3, 1),
        nn.functional.mse_loss,
        device=CPU,
        settings=TrainSettings(strategy=strategy),
        group=open_exchange(),
    )
    clock = trainer.observer = StepClock(CPU)
    before = parameters_hash(trainer)
    drawn = [(torch.full((2, 3), rank + 1.0), torch.ones(2, 1)) for _ in range(50)]
    batches = iter(drawn)
    profiler = traced_steps(trainer, batches, Control(CPU), keep=rank in chosen)
    if profiler is not None:
        assert write_trace(profiler, Path(folder, f"trace-{rank}.json.gz")) == {}
    return {
        "steps": len(drawn) - len(list(batches)),
        "clock is back": trainer.observer is clock,
        "clock saw": len(clock.drain().step_ns),
        "trained": parameters_hash(trainer) != before,
        "hash": parameters_hash(trainer),
    }


def ranges(path: Path) -> list[dict[str, Any]]:
    """The ranges of a trace in the order in which they begin."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return sorted((event for event in events if event.get("ph") == "X"), key=lambda event: event["ts"])


def names(path: Path) -> Counter[str]:
    """How often each range is in a trace."""
    return Counter(event["name"] for event in ranges(path))


def test_the_chosen_rank_keeps_three_steps_and_all_take_them(ranks, tmp_path) -> None:
    found = ranks(2, traced, str(tmp_path), "ddp", (1,))
    # One warm-up step and three that are kept.
    assert [rank["steps"] for rank in found] == [4, 4]
    for rank in found:
        assert rank["trained"]
        assert rank["clock is back"]
        assert rank["clock saw"] == 0
    assert found[0]["hash"] == found[1]["hash"]
    assert [path.name for path in tmp_path.iterdir()] == ["trace-1.json.gz"]
    counts = names(tmp_path / "trace-1.json.gz")
    phases = [event for event in ranges(tmp_path / "trace-1.json.gz") if event["name"] in PHASES]
    assert [event["name"] for event in phases] == [*PHASES] * 3
    # One after another: a phase ends where the next one begins.
    assert all(first["ts"] + first["dur"] <= second["ts"] for first, second in pairwise(phases))
    assert sum(count for name, count in counts.items() if name.startswith("ProfilerStep#")) == 3
    assert counts["gloo:all_reduce"] == 3


def test_a_trace_has_a_whole_period_of_its_strategy(ranks, tmp_path) -> None:
    found = ranks(2, traced, str(tmp_path), "local-sgd:5", (0, 1))
    assert [rank["steps"] for rank in found] == [1 + 5, 1 + 5]
    for rank in (0, 1):
        counts = names(tmp_path / f"trace-{rank}.json.gz")
        assert counts["forward"] == 5
        # Five steps in a row hold exactly one average.
        assert counts["gloo:all_reduce"] == 1


def test_a_trace_that_cannot_be_written_is_a_reason_not_an_error(tmp_path) -> None:
    def export(path: str) -> None:
        Path(path).write_text("{}")

    profiler: Any = SimpleNamespace(export_chrome_trace=export)
    path = tmp_path / "trace-00000.json.gz"
    assert write_trace(profiler, path) == {}
    assert gzip.decompress(path.read_bytes()) == b"{}"
    why = write_trace(profiler, path)["trace"]
    assert why == f"StoreError: {path} exists and is never overwritten"


def test_an_error_of_a_step_is_an_error() -> None:
    model = SimpleNamespace(period=1)
    trainer: Any = SimpleNamespace(model=model, observer=None, step=next, device=CPU)
    control: Any = SimpleNamespace(barrier=lambda: None, synchronize=lambda: None)
    with pytest.raises(StopIteration):
        traced_steps(trainer, iter([]), control, keep=False)
