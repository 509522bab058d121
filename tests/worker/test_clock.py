"""The phases of a step add up to the step, by hand-worked marks of the clock."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_builders import CPU, Moments
from torch import nn

from harness.worker.measure import clock
from harness.worker.measure.clock import StepClock, joined_steps
from results.record import StepColumns
from strategies import Phase, Trainer, TrainSettings


def trained_under_a_clock(accumulation: int, steps: int) -> StepColumns:
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    chosen = TrainSettings(optimizer="sgd:lr=0.5:momentum=0", accumulation=accumulation)
    trainer = Trainer(module, lambda y, t: y.mean(), device=CPU, settings=chosen)
    trainer.observer = watch = StepClock(CPU)
    data = iter([(torch.tensor([[1.0]]), torch.zeros(1))] * steps * accumulation)
    for _ in range(steps):
        trainer.step(data)
    return watch.drain()


def test_phases_of_two_steps_last_until_the_next_one_begins(monkeypatch) -> None:
    # data, forward, backward, optimizer, end; 50 ns between the steps belong to neither.
    monkeypatch.setattr(clock, "time", Moments(100, 110, 140, 240, 245, 295, 300, 320, 370, 378))
    columns = trained_under_a_clock(accumulation=1, steps=2)
    assert columns == StepColumns(
        step_ns=[145, 83],
        data_ns=[10, 5],
        forward_ns=[30, 20],
        backward_ns=[100, 50],
        optimizer_ns=[5, 8],
        # w = 1, and after one update 1 - 0.5 * 1.
        loss=[1.0, 0.5],
    )


def test_phases_of_two_micro_batches_are_added_up(monkeypatch) -> None:
    # data 10, forward 30, backward 100; data 1, forward 20, backward 200; optimizer 7.
    monkeypatch.setattr(clock, "time", Moments(100, 110, 140, 240, 241, 261, 461, 468))
    columns = trained_under_a_clock(accumulation=2, steps=1)
    assert columns == StepColumns(
        step_ns=[368], data_ns=[11], forward_ns=[50], backward_ns=[300], optimizer_ns=[7], loss=[1.0]
    )


@settings(max_examples=50)
@given(
    gaps=st.lists(st.integers(0, 10**12), min_size=8, max_size=8),
    start=st.integers(0, 10**15),
)
def test_phases_always_add_up_to_the_step(gaps, start) -> None:
    moments = [start + sum(gaps[:index]) for index in range(len(gaps))]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clock, "time", Moments(*moments))
        columns = trained_under_a_clock(accumulation=2, steps=1)
    parts = (columns.data_ns, columns.forward_ns, columns.backward_ns, columns.optimizer_ns)
    assert columns.step_ns == [sum(part[0] for part in parts)] == [sum(gaps[:7])]


def test_a_drained_clock_is_empty_and_goes_on() -> None:
    watch = StepClock(CPU)
    assert watch.drain() == StepColumns()
    watch.begins(Phase.DATA)
    watch.step_done(torch.tensor(2.0))
    assert watch.drain().loss == [2.0]
    assert watch.drain() == StepColumns()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite_is_none(value) -> None:
    watch = StepClock(CPU)
    for loss in (1.0, value):
        watch.begins(Phase.DATA)
        watch.step_done(torch.tensor(loss))
    assert watch.drain().loss == [1.0, None]


def test_a_loss_has_no_more_digits_than_identify_it() -> None:
    watch, losses = StepClock(CPU), torch.randn(1000).exp()
    for loss in losses:
        watch.begins(Phase.DATA)
        watch.step_done(loss)
    kept = watch.drain().loss
    assert torch.equal(torch.tensor(kept), losses)
    # Nine digits, a point, perhaps `0.00` before them, and a comma; written out they are 18 and more.
    assert len(msgspec.json.encode(kept)) < 12 * 1000


def test_joined_columns_keep_their_order() -> None:
    def one(value: int) -> StepColumns:
        return StepColumns(
            step_ns=[value], data_ns=[0], forward_ns=[0], backward_ns=[0], optimizer_ns=[0], loss=[None]
        )

    assert joined_steps(joined_steps(StepColumns(), one(3)), one(1)).step_ns == [3, 1]


def test_the_clock_of_a_cpu_is_the_hosts() -> None:
    assert StepClock(CPU).name == "monotonic"
