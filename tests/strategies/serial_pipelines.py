"""A serial loop over replicas and microbatches, in double precision, and pipelines compared with it."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from pipelines import CASES, LAYOUTS, STEPS, batch, build, copied, loss_of
from torch import Tensor, nn
from torch.nn import functional as F

from strategies import TrainSettings
from strategies.catalog import STRATEGIES, group_layout
from strategies.optimizers import build_optimizer
from strategies.pipeline.order import Shape, order
from strategies.pipeline.stages import Twin, cut_model
from workloads.gpt.model import token_loss


class Serial:
    """The same on one process: replicas one after another, microbatch by microbatch."""

    def __init__(self, case: str, strategy: str, size: int) -> None:
        self.model, settings = CASES[case]
        self.settings = TrainSettings(
            strategy=strategy, **{"optimizer": "sgd:lr=0.1:momentum=0.9", **settings}
        )
        self.replicas = group_layout(strategy, size).replicas
        self.pieces = STRATEGIES.facts(strategy).microbatches
        self.module = build(self.model).double()
        self.optimizer = build_optimizer(self.settings.optimizer, self.module.parameters())

    def step(self, step: int) -> dict[str, Any]:
        """Losses, mean gradients and buffers of the replicas' step; `update` ends it."""
        twins, losses = [], []
        for replica in range(self.replicas):
            twin = copy.deepcopy(self.module)
            losses.append(self._backward(twin, step, replica))
            twins.append(twin)
        gradients = {}
        for name, _ in self.module.named_parameters():
            shares = [twin.get_parameter(name).grad for twin in twins]
            if shares[0] is not None:
                gradients[name] = sum(shares) / self.replicas
        buffers = [copied(twin.named_buffers()) for twin in twins]
        for name, buffer in self.module.named_buffers():
            buffer.copy_(buffers[0][name])
        return {"losses": losses, "gradients": gradients, "buffers": buffers}

    def update(self, gradients: dict[str, Tensor]) -> None:
        """Move by the gradients that the ranks moved by: AdamW divides by their size, and would make whole
        steps of rounding where a gradient is only rounding."""
        for name, parameter in self.module.named_parameters():
            parameter.grad = gradients[name].clone() if name in gradients else None
        if self.settings.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.clip_norm)
            assert norm > 2 * self.settings.clip_norm
        self.optimizer.step()

    def _backward(self, twin: nn.Module, step: int, replica: int) -> float:
        total, accumulation = 0.0, self.settings.accumulation
        for at in range(accumulation):
            inputs, targets = batch(self.model, step, at, replica)
            for piece, wanted in zip(inputs.chunk(self.pieces), targets.chunk(self.pieces), strict=True):
                loss = loss_of(self.model)(twin(piece), wanted) / (self.pieces * accumulation)
                loss.backward()
                total += loss.item()
        return total


def mean_in_order(shape: Shape, replicas: int) -> dict[str, Tensor]:
    """Gradients of the first step of "tied": the sums of each rank are averaged over two replicas at most,
    and then the means of the table's two ends are added if they are on two ranks."""
    whole: dict[str, list[Tensor]] = defaultdict(list)
    every = [_sums_of_ranks(shape, replica) for replica in range(replicas)]
    for name, rank in every[0]:
        whole[name].append(sum(sums[name, rank] for sums in every) / replicas)
    return {name: sum(whole[name][1:], whole[name][0]) for name in dict(build("tied").named_parameters())}


def _sums_of_ranks(shape: Shape, replica: int) -> dict[tuple[str, int], Tensor]:
    """Each rank adds what the microbatches of its stages give, in its order."""
    module, last = build("tied").double(), shape.last
    cut = cut_model(
        module, Twin(module), LAYOUTS["tied"], ranks=shape.ranks, stages=last + 1, schedule=shape.schedule
    )
    values = dict(module.named_parameters())
    inputs, targets = (part.chunk(shape.pieces) for part in batch("tied", 0, 0, replica))
    gradients: list[dict[tuple[str, bool], Tensor]] = []
    for piece, wanted in zip(inputs, targets, strict=True):
        table = module.wte.weight.detach().clone().requires_grad_()
        x = module.stem(piece)
        for block in module.body:
            x = block(x)
        loss = token_loss(F.linear(module.norm(x), table), wanted) / shape.pieces
        found = torch.autograd.grad(loss, [*values.values(), table])
        named = [*((name, False) for name in values), ("wte.weight", True)]
        gradients.append(dict(zip(named, found, strict=True)))
    sums: dict[tuple[str, int], Tensor] = {}
    for rank in range(shape.ranks):
        for part, stage, at in order(shape, rank):
            for of in cut.modules(stage) if part in ("weights", "backward") else ():
                for name, _ in module.get_submodule(of).named_parameters(of):
                    share = gradients[at][name, name == "wte.weight" and stage == last]
                    sums[name, rank] = sums[name, rank] + share if (name, rank) in sums else share
    return sums


BOUND = 1e-12
"""About 10,000 units of rounding in double precision, of the size of what is summed."""


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names of those that differ by more than `BOUND` of the L2 norm of all.

    Rounding is a share of the terms of a sum, not of the sum. The gradient of a bias sums what arrives at
    its layer's outputs; the gradient of the weights sums the same times inputs of order 1. In front of a
    BatchNorm the first sum is zero but for rounding, whose size follows only from the norm of other
    gradients.
    """
    size = torch.stack([value.double().norm() for value in theirs.values()]).norm() if theirs else 0.0
    return [name for name, value in theirs.items() if (ours[name] - value).double().norm() > BOUND * size]


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """The same names in the same order, and none `apart`."""
    assert list(ours) == list(theirs)
    assert apart(ours, theirs) == []


def assert_as_serial(results: list[Any], case: str, strategy: str) -> None:
    size = len(results)
    serial, groups = Serial(case, strategy, size), group_layout(strategy, size)
    found = [result[case] for result in results]
    for step in range(STEPS):
        expected = serial.step(step)
        for rank, steps in enumerate(found):
            assert_near(steps[step]["gradients"], expected["gradients"])
            loss = expected["losses"][groups.replica(rank)]
            assert steps[step]["loss"] == pytest.approx(loss, rel=BOUND)
        serial.update(found[0][step]["gradients"])
    for rank, steps in enumerate(found):
        assert_near(steps[-1]["parameters"], copied(serial.module.named_parameters()))
        assert_near(steps[-1]["buffers"], expected["buffers"][groups.replica(rank)])
    assert_all_have_the_same(serial, [steps[-1] for steps in found])


def assert_all_have_the_same(serial: Serial, found: list[dict[str, Any]]) -> None:
    """The whole values on all ranks are equal bit for bit, and of the optimizer's state complete."""
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
                ours = other["state"][name][key]
                assert torch.equal(ours, found[0]["state"][name][key])
                # From the same gradients, element by element: what may differ is the factor that clips.
                assert (ours - value).norm() <= BOUND * value.norm(), (name, key)
