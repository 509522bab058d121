"""A serial loop over replicas and microbatches, in double precision, and pipelines held against it.

Loaded by `conftest.py` after `pipelines`, and handed out as `serial_pipelines`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pipelines import CASES, STEPS, batch, build, copied, loss_of
from torch import Tensor, nn

from strategies import TrainSettings
from strategies.catalog import group_layout, microbatches
from strategies.training.optimizer import build_optimizer


class Serial:
    """The same on one process: replicas one after another, microbatch by microbatch."""

    def __init__(self, case: str, strategy: str, size: int) -> None:
        self.model, settings = CASES[case]
        self.settings = TrainSettings(
            strategy=strategy, **{"optimizer": "sgd:lr=0.1:momentum=0.9", **settings}
        )
        self.replicas, self.pieces = group_layout(strategy, size).replicas, microbatches(strategy)
        self.module = build(self.model).double()
        self.optimizer = build_optimizer(self.settings.optimizer, self.module.parameters())

    def step(self, step: int) -> dict[str, Any]:
        twins, losses = [], []
        for replica in range(self.replicas):
            twin = copy.deepcopy(self.module)
            losses.append(self._backward(twin, step, replica))
            twins.append(twin)
        self.optimizer.zero_grad()
        for name, parameter in self.module.named_parameters():
            shares = [twin.get_parameter(name).grad for twin in twins]
            if shares[0] is not None:
                parameter.grad = sum(shares) / self.replicas  # type: ignore[arg-type,operator]
        gradients = copied((n, p.grad) for n, p in self.module.named_parameters() if p.grad is not None)
        if self.settings.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.clip_norm)
            assert norm > 2 * self.settings.clip_norm
        self.optimizer.step()
        buffers = [copied(twin.named_buffers()) for twin in twins]
        for name, buffer in self.module.named_buffers():
            buffer.copy_(buffers[0][name])
        return {
            "losses": losses, "gradients": gradients, "buffers": buffers,
            "parameters": copied(self.module.named_parameters()),
        }  # fmt: skip

    def _backward(self, twin: nn.Module, step: int, replica: int) -> float:
        total, accumulation = 0.0, self.settings.accumulation
        for at in range(accumulation):
            inputs, targets = batch(self.model, step, at, replica)
            for piece, wanted in zip(inputs.chunk(self.pieces), targets.chunk(self.pieces), strict=True):
                loss = loss_of(self.model)(twin(piece), wanted) / (self.pieces * accumulation)
                loss.backward()
                total += loss.item()
        return total


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> None:
    """Each within `bound` of its L2 norm, in the same order."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert (ours[name].double() - value.double()).norm() <= bound * value.double().norm(), name


def assert_as_serial(results: list[Any], case: str, strategy: str) -> None:
    size = len(results)
    serial, groups = Serial(case, strategy, size), group_layout(strategy, size)
    found = [result[case] for result in results]
    for step in range(STEPS):
        expected = serial.step(step)
        for rank, steps in enumerate(found):
            assert_near(steps[step]["gradients"], expected["gradients"], 1e-12)
            assert steps[step]["loss"] == pytest.approx(expected["losses"][groups.replica(rank)], rel=1e-12)
    for rank, steps in enumerate(found):
        # AdamW divides by a root of gradients, some of which are rounding alone.
        bound = 1e-9 if "AdamW" in case else 1e-12
        assert_near(steps[-1]["parameters"], expected["parameters"], bound)
        assert_near(steps[-1]["buffers"], expected["buffers"][groups.replica(rank)], 1e-12)
    assert_all_have_the_same(serial, [steps[-1] for steps in found])


def assert_all_have_the_same(serial: Serial, found: list[dict[str, Any]]) -> None:
    """What ranks say of the whole is equal bit for bit, and of the optimizer's state complete."""
    theirs = {
        name: serial.optimizer.state[value]
        for name, value in serial.module.named_parameters()
        if value.requires_grad
    }
    for other in found:
        for name, value in found[0]["parameters"].items():
            assert torch.equal(other["parameters"][name], value), name
        assert list(other["state"]) == list(theirs)
        for name, state in theirs.items():
            assert other["state"][name].keys() == state.keys()
            for key, value in state.items():
                assert torch.equal(other["state"][name][key], found[0]["state"][name][key])
                torch.testing.assert_close(other["state"][name][key], value, rtol=1e-9, atol=1e-14)
