"""Helpers for tests of strategies that split a model: tiny Transformers in double precision, their training
on ranks, and a plain loop over the replicas.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from rank_builders import a_trainer
from torch import Tensor, nn

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from strategies import Trainer
from strategies.catalog import group_layout
from strategies.snapshot import Snapshot
from workloads.gpt import GPTShape
from workloads.gpt.model import build_gpt
from workloads.llama import LlamaShape
from workloads.llama.model import build_llama
from workloads.workload import Workload

CPU = torch.device("cpu")
STEPS = 2
"""The second one has a state of the optimizer, and what strategies learn in the first."""
GPT = GPTShape(layers=2, width=16, heads=4, context=8, vocabulary=17, seq=8)
LLAMA = LlamaShape(
    layers=2, width=16, heads=4, kv_heads=4, hidden=24, context=8, vocabulary=17, seq=8, tied=False
)
SAMPLES = 2
TOLERANCE = 1e-12
"""A share of the L2 norm: sums in another order, in double precision."""

SGD = "sgd:lr=0.1:momentum=0.9"
ADAMW = "adamw:lr=0.01:weight_decay=0.1"
OPTIMIZERS = {
    SGD: lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    ADAMW: lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}
Step = dict[str, Any]


def build(model: str) -> Workload:
    """A fresh model; `grouped` has two heads of keys for four of queries, and one matrix for its embedding
    and its head; of `frozen` some parameters, split and whole, are not trained."""
    torch.manual_seed(0)
    match model:
        case "llama":
            workload = build_llama(LLAMA)
        case "grouped":
            workload = build_llama(replace(LLAMA, kv_heads=2, tied=True))
        case _:
            workload = build_gpt(GPT)
    module = workload.module.double()
    with torch.no_grad():
        # Biases that are zero, and norms that are one, would hide how they are split.
        for parameter in module.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    if model == "frozen":
        for name in ("wte", "h.0.attn.c_attn", "h.1.mlp.c_proj"):
            module.get_submodule(name).requires_grad_(False)
    return workload


def batch(step: int, micro: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + replica)
    tokens = torch.randint(GPT.vocabulary, (SAMPLES, GPT.seq + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def replica_of(rank: int, size: int, settings: dict[str, Any]) -> int:
    return group_layout(settings["strategy"], size, settings.get("node_size")).replica(rank)


def batches_of(step: int, replica: int, settings: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    return (batch(step, micro, replica) for micro in range(settings.get("accumulation", 1)))


def trainer_of(model: str, settings: dict[str, Any], group: ExchangeGroup) -> Trainer:
    workload = build(model)
    if group.rank():
        # Every rank is to take the first one's values.
        with torch.no_grad():
            for parameter in workload.module.parameters():
                parameter += group.rank()
    return a_trainer(workload.module, workload.loss, layout=workload.layout, group=group, **settings)


def copied(pairs: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in pairs}


def train(rank: int, model: str, settings: dict[str, Any]) -> list[Step]:
    """On a rank: each step's gradients, parameters, state and loss."""
    group = open_exchange()
    trainer = trainer_of(model, settings, group)
    replica = replica_of(rank, group.size(), settings)
    found = []
    for step in range(STEPS):
        loss = trainer.compute_gradients(batches_of(step, replica, settings))
        gradients = copied(trainer.model.named_gradients())
        trainer.update()
        state = {
            f"{name}.{key}": torch.as_tensor(value)
            for name, values in trainer.model.named_state(trainer.optimizer)
            for key, value in values.items()
        }
        found.append(
            {
                "loss": loss.item(),
                "gradients": gradients,
                "parameters": copied(trainer.model.named_parameters()),
                "state": copied(state.items()),
            }
        )
    return found


class Serial:
    """The same in a plain loop: replicas one after another, their gradients averaged."""

    def __init__(self, model: str, replicas: int, settings: dict[str, Any]) -> None:
        self._workload, self._replicas, self._settings = build(model), replicas, settings
        self.module = self._workload.module
        self._optimizer = OPTIMIZERS[settings["optimizer"]](self.module.parameters())

    def gradients(self, step: int) -> tuple[dict[str, Tensor], list[float]]:
        """The averages, and each replica's loss."""
        twins = [_replica(self._workload, step, replica, self._settings) for replica in range(self._replicas)]
        found = {}
        for name, _ in self.module.named_parameters():
            shares = [twin[name] / self._replicas for twin, _ in twins if name in twin]
            if shares:
                found[name] = sum(shares[1:], shares[0])
        return found, [loss for _, loss in twins]

    def update(self, gradients: dict[str, Tensor]) -> Step:
        """Parameters and state after an update by the gradients that the ranks moved by: AdamW divides by
        their size, and would make steps of rounding where a gradient is only rounding."""
        for name, parameter in self.module.named_parameters():
            parameter.grad = gradients[name].clone() if name in gradients else None
        if "clip_norm" in self._settings:
            nn.utils.clip_grad_norm_(self.module.parameters(), self._settings["clip_norm"])
        self._optimizer.step()
        state = {
            f"{name}.{key}": value
            for name, parameter in self.module.named_parameters()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }
        return {"parameters": copied(self.module.named_parameters()), "state": copied(state.items())}


def _replica(
    workload: Workload, step: int, replica: int, settings: dict[str, Any]
) -> tuple[dict[str, Tensor], float]:
    twin = copy.deepcopy(workload.module)
    twin.zero_grad()
    accumulation, total = settings.get("accumulation", 1), 0.0
    for inputs, targets in batches_of(step, replica, settings):
        loss = workload.loss(twin(inputs), targets) / accumulation
        loss.backward()
        total += loss.item()
    return {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}, total


def assert_as_serial(results: list[list[Step]], model: str, settings: dict[str, Any]) -> None:
    """Every rank has, whole and under the same names, what the plain loop has, within `TOLERANCE`."""
    size = len(results)
    replicas = group_layout(settings["strategy"], size, settings.get("node_size")).replicas
    serial = Serial(model, replicas, settings)
    for step in range(STEPS):
        gradients, losses = serial.gradients(step)
        updated = serial.update(results[0][step]["gradients"])
        for rank, result in enumerate(results):
            ours = result[step]
            # That of a bias of keys is zero but for rounding: differences count beside the largest norm.
            largest = max(float(value.norm()) for value in gradients.values())
            _assert_near(ours["gradients"], gradients, (rank, step, "gradients"), least=largest)
            for what in ("parameters", "state"):
                _assert_near(ours[what], updated[what], (rank, step, what))
            loss = losses[replica_of(rank, size, settings)]
            assert abs(ours["loss"] - loss) <= TOLERANCE * loss


def _assert_near(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], where: object, *, least: float = 0.0
) -> None:
    """Each within `TOLERANCE` of its norm, or of `least`."""
    assert ours.keys() == theirs.keys(), where
    for name, value in ours.items():
        assert value.shape == theirs[name].shape, (where, name)
        size = max(float(theirs[name].norm()), least)
        assert (value - theirs[name]).norm() <= TOLERANCE * size, (where, name)


def kept(rank: int, model: str, settings: dict[str, Any]) -> tuple[dict[str, int], int]:
    """On a rank: elements that it keeps of each parameter, and of the optimizer's state."""
    group = open_exchange()
    trainer = trainer_of(model, settings, group)
    trainer.step(batches_of(0, replica_of(rank, group.size(), settings), settings))
    state = trainer.model.local_state(trainer.optimizer)
    return (
        {name: _elements(parameter) for name, parameter in trainer.model.bare.named_parameters()},
        sum(
            _elements(v)
            for values in state.values()
            for v in values.values()
            if torch.is_tensor(v) and v.dim()
        ),
    )


def traffic(rank: int, model: str, settings: dict[str, Any]) -> tuple[int, int]:
    """On a rank: payload bytes and operations of the second step."""
    group = open_exchange()
    trainer = trainer_of(model, settings, group)
    replica = replica_of(rank, group.size(), settings)
    trainer.step(batches_of(0, replica, settings))
    before = group.traffic.payload_bytes, group.traffic.operations
    trainer.step(batches_of(1, replica, settings))
    return group.traffic.payload_bytes - before[0], group.traffic.operations - before[1]


def _elements(value: Any) -> int:
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local.numel()


def undone(rank: int, model: str, settings: dict[str, Any]) -> tuple[bool, bool, bool]:
    """On a rank: whether steps without exchange differ, leave no trace once they are put back, and whether
    nothing holds the model when its trainer is gone."""
    group = open_exchange()
    trainer = trainer_of(model, settings, group)
    replica = replica_of(rank, group.size(), settings)
    trainer.step(batches_of(0, replica, settings))
    snapshot, ends = Snapshot(trainer), []
    for enabled in (True, False, True):
        group.traffic.enabled = enabled
        for step in (1, 2):
            trainer.step(batches_of(step, replica, settings))
        # Whole parameters are put together over the exchange.
        group.traffic.enabled = True
        ends.append(copied(trainer.model.named_parameters()))
        snapshot.restore()
    differ, same = (any(not torch.equal(ends[0][name], end[name]) for name in end) for end in ends[1:])
    model_of_it = weakref.ref(trainer.model.bare)
    del trainer, snapshot
    group.reset()
    gc.collect()
    return differ, not same, model_of_it() is None
