"""A model that a strategy cannot train is refused by the user's own names, and with the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import a_cell
from rank_builders import CPU, a_rank

from harness.worker.cell.setup import CellSetup
from harness.worker.proof import causes
from harness.worker.proof.causes import named_causes
from results.errors import UsageError
from results.outcome import Outcome

WholeRuns = Callable[..., list[dict[str, Any]]]


def refused(whole_runs: WholeRuns, model: str, strategy: str) -> str:
    """Return why both ranks refuse a model."""
    workload = {"workload": f"py:unusual_models:{model}", "micro_batch": 4, "optimizer": "sgd"}
    found = whole_runs(2, workload | {"strategy": strategy})
    assert [one["outcome"] for one in found] == [Outcome.SKIPPED] * 2, [one["reason"] for one in found]
    reasons = {one["reason"] for one in found}
    assert len(reasons) == 1
    return reasons.pop()


@pytest.mark.parametrize("strategy", ["fsdp", "manual:reshard.checkpoint*3"])
def test_a_parameter_without_a_dimension_is_refused_with_two_ways_out(whole_runs, strategy) -> None:
    reason = refused(whole_runs, "scalar", strategy)
    assert "temperature" in reason
    assert "torch.tensor([" in reason
    assert "use scratch-fsdp" in reason


def line_of(text: str) -> str:
    """Return the place of a line of the models, as a refusal names it."""
    lines = (Path(__file__).parent / "unusual_models.py").read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if text in line)
    return f"(unusual_models.py, line {number})"


@pytest.mark.parametrize("strategy", ["fsdp", "scratch-fsdp", "scratch-fsdp:stage=2"])
@pytest.mark.parametrize(
    ("model", "names", "text"),
    [
        ("outside", "layers.1.up.weight", "self.layers[1].up(x)"),
        ("written", "layers.0.down.weight", "self.down.weight.mul_(0.9)"),
        ("penalized", "computes gradients", "torch.autograd.grad("),
    ],
)
def test_what_sharding_cannot_train_is_refused_by_its_name_and_line(
    whole_runs, model, names, text, strategy
) -> None:
    reason = refused(whole_runs, model, strategy)
    assert names in reason
    assert line_of(text) in reason
    assert reason.endswith("use ddp or scratch-ddp")


def test_a_block_that_counts_its_tokens_in_its_input_is_refused_by_its_name(whole_runs) -> None:
    reason = refused(whole_runs, "counted_in_inputs", "tp:sequence=true")
    assert "layers.0" in reason
    assert "sequence=true" in reason


def test_a_search_for_a_cause_says_that_it_works_and_ends_in_time(monkeypatch) -> None:
    cell = a_cell(workload="py:unusual_models:dropped", strategy="scratch-fsdp", gpus=2, micro_batch=4)
    setup = CellSetup(cell=cell, rank=a_rank(0, 2), device=CPU, source_folder=Path(__file__).parent)
    beats: list[None] = []

    def search() -> None:
        with named_causes(setup, lambda: beats.append(None)):
            raise RuntimeError("Timed out waiting 60000ms for recv operation to complete")

    with pytest.raises(UsageError, match="is not called equally often in every step"):
        search()
    # Once for each device, and for each module of a forward pass, of which there are 8.
    assert len(beats) > causes.SEEDS
    beats.clear()
    monkeypatch.setattr(causes, "LONGEST_S", 0.0)
    with pytest.raises(RuntimeError, match="Timed out"):
        search()
    assert 0 < len(beats) < causes.SEEDS


def test_the_ways_out_are_proven(proofs) -> None:
    for model, strategy in (
        ("outside_in_one_unit", "fsdp"),
        ("outside_in_one_unit", "scratch-fsdp"),
        ("written", "ddp"),
        ("penalized", "scratch-ddp"),
        ("scalar", "scratch-fsdp"),
        ("hooked", "scratch-fsdp"),
        ("gated_and_said", "tp"),
    ):
        cell = {"workload": f"py:unusual_models:{model}", "strategy": strategy, "micro_batch": 4}
        found = proofs(2, cell | {"optimizer": "sgd"})[0]
        assert found["passed"], (model, strategy, found["detail"])


def test_a_layer_of_several_matrices_that_the_layout_does_not_declare_is_named(whole_runs) -> None:
    reason = refused(whole_runs, "gated", "tp")
    assert "LinearSplit(name='layers.0.both', by='outputs', parts=2)" in reason


def test_a_hook_on_a_parameter_that_a_strategy_replaces_is_refused(whole_runs) -> None:
    reason = refused(whole_runs, "hooked", "fsdp")
    assert "layers.1.up.weight" in reason
    assert line_of("register_hook(") in reason
    assert "use scratch-fsdp" in reason


@pytest.mark.parametrize("strategy", ["ddp", "scratch-fsdp", "zero1"])
def test_ranks_that_register_parameters_in_other_orders_are_refused_by_name(whole_runs, strategy) -> None:
    reason = refused(whole_runs, "shuffled", strategy)
    assert "rank 0 registers north.weight (float32 [8, 8])" in reason
    assert "rank 1 registers south.weight (float32 [8, 8])" in reason


@pytest.mark.parametrize("strategy", ["scratch-fsdp", "scratch-fsdp:stage=1:offload=cpu"])
def test_complex_parameters_are_sharded(proofs, strategy) -> None:
    cell = {"workload": "py:unusual_models:spectral", "strategy": strategy, "micro_batch": 4}
    for more in ({"optimizer": "adamw"}, {"optimizer": "sgd", "clip_norm": 0.01, "accumulation": 2}):
        found = proofs(2, cell | more)[0]
        assert found["passed"], found["detail"]


@pytest.mark.parametrize("strategy", ["fsdp", "scratch-fsdp", "scratch-fsdp:stage=2"])
def test_blocks_that_steps_leave_out_by_chance_are_refused_at_once_by_the_line_that_calls_them(
    whole_runs, strategy
) -> None:
    reason = refused(whole_runs, "dropped", strategy)
    assert reason.startswith("layers.")
    assert line_of("x = layer(x) if torch.rand") in reason
    assert "find_unused=true" in reason
