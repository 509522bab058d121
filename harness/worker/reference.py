"""A plain simulation of one distributed step on one device: what the strategy under test must come to."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from harness.worker.agreement import hash_number
from harness.worker.parts import Parts
from results.cell import Cell
from strategies.catalog import microbatches, sums_micro_batches
from strategies.optimizer import build_optimizer
from strategies.parallel import Batch, OptimizerState
from strategies.precision import autocast
from strategies.trainer import Trainer
from workloads.workload import Workload

UNIT_ROUNDOFF = 2.0**-24
SMALLEST_NORMAL = 2.0**-126
"""Below it the error of a share is absolute: half of 2^-149."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a step must give, and how far rounding may take it from that."""

    gradients: dict[str, Tensor]
    sizes: dict[str, Tensor]
    """Of each element: the sum of its shares' absolute values."""
    rounding: float
    """How far two sums of the shares may be apart, in parts of their size."""
    buffers: dict[str, Tensor]
    """The first replica's, after its micro-batches."""
    buffer_hashes: list[float]
    """Of each replica."""

    @property
    def bounds(self) -> dict[str, Tensor]:
        """Elementwise bound of a difference by rounding."""
        return {name: self.rounding * (size + SMALLEST_NORMAL) for name, size in self.sizes.items()}


class TooLongError(Exception):
    """A step of all replicas would take `seconds`, more than it may."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


def simulate_step(
    parts: Parts,
    start: dict[str, Tensor],
    step: int,
    *,
    replicas: Sequence[int],
    longest_s: float = math.inf,
) -> Reference:
    """One step of the named replicas, one after another, on this device, from the state `start`.

    Deliberately plain: what is under test (Trainer, strategies) is not used. Raises TooLongError if, by
    the first replica, the step would take more than `longest_s`.
    """
    sums: dict[str, Tensor] = {}
    sizes: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    buffer_hashes: list[float] = []
    began = time.perf_counter()
    for replica in replicas:
        own = _replica_step(parts, start, step, replica)
        for name, gradient in own.gradients.items():
            share, size = gradient / len(replicas), own.sizes[name] / len(replicas)
            sums[name] = sums[name] + share if name in sums else share
            sizes[name] = sizes[name] + size if name in sizes else size
        buffer_hashes.append(hash_number(own.module.named_buffers()))
        if replica == replicas[0]:
            if parts.device.type == "cuda":
                torch.cuda.synchronize(parts.device)
            seconds = len(replicas) * (time.perf_counter() - began)
            if seconds > longest_s:
                raise TooLongError(seconds)
            buffers = {name: buffer.clone() for name, buffer in own.module.named_buffers()}
    return Reference(
        gradients=sums,
        sizes=sizes,
        rounding=_rounding(summed_terms(parts.cell, len(replicas))),
        buffers=buffers,
        buffer_hashes=buffer_hashes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """A replica after the micro-batches of its step."""

    module: nn.Module
    gradients: dict[str, Tensor]
    sizes: dict[str, Tensor]
    """Of each element: the sum of its micro-batches' absolute values."""


def _replica_step(parts: Parts, start: dict[str, Tensor], step: int, replica: int) -> _Share:
    """The gradients of a replica's own micro-batches, added up one after another as autograd does."""
    cell = parts.cell
    workload = _reference_model(parts, start)
    batches = itertools.islice(parts.batches(workload, replica), step * cell.accumulation, None)
    seed_step(cell.seed, step, replica)
    passes = cell.accumulation * microbatches(cell.strategy)
    gradients: dict[str, Tensor] = {}
    sizes: dict[str, Tensor] = {}
    for inputs, targets in _passes(batches, cell):
        with autocast(cell.precision, parts.device):
            loss = workload.loss(workload.module(inputs), targets) / passes
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in workload.module.named_parameters():
            if parameter.grad is not None:
                gradient, parameter.grad = dense(parameter.grad), None
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
                sizes[name] = sizes[name] + gradient.abs() if name in sizes else gradient.abs()
    return _Share(module=workload.module, gradients=gradients, sizes=sizes)


def _passes(batches: Iterator[Batch], cell: Cell) -> Iterator[Batch]:
    """What goes through forward and backward at once, one after another."""
    pieces = microbatches(cell.strategy)
    for inputs, targets in itertools.islice(batches, cell.accumulation):
        yield from zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True)


def summed_terms(cell: Cell, replicas: int) -> int:
    """What is added up in an order of the strategy's own: whole replicas, or each micro-batch of each."""
    return replicas * cell.accumulation if sums_micro_batches(cell.strategy) else replicas


def _rounding(terms: int) -> float:
    """How far two averages of so many terms may be apart, in parts of the mean absolute value."""
    if terms <= 2:
        return 0.0
    # Of each term: its share is rounded, by a factor that may be rounded itself, and terms - 1 sums are.
    roundings = terms + 1
    return 2 * roundings * UNIT_ROUNDOFF / (1 - roundings * UNIT_ROUNDOFF)


History = dict[str, OptimizerState]
"""An optimizer's state, whole, by parameter."""


def optimizer_history(trainer: Trainer) -> History:
    """What the trainer's optimizer knows of earlier steps, not copied; collective if the strategy shards."""
    return dict(trainer.model.named_state(trainer.optimizer))


def replay_update(
    parts: Parts, start: dict[str, Tensor], gradients: dict[str, Tensor], history: History
) -> dict[str, Tensor]:
    """The parameters after a plain optimizer step from `start` by `gradients`, with that history."""
    workload = _reference_model(parts, start)
    parameters = dict(workload.module.named_parameters())
    optimizer = build_optimizer(parts.cell.optimizer, parameters.values())
    for name, state in history.items():
        # A copy: the step writes to it.
        optimizer.state[parameters[name]] = copy.deepcopy(state)
    for name, gradient in gradients.items():
        parameters[name].grad = gradient.clone()
    if parts.cell.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters.values(), parts.cell.clip_norm)
    if finite(gradients):
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def _reference_model(parts: Parts, start: dict[str, Tensor]) -> Workload:
    before = torch.get_rng_state()
    workload = parts.workload()
    torch.set_rng_state(before)
    module = workload.module.to(parts.device).train()
    if parts.cell.memory_format == "channels_last":
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.no_grad():
        for name, value in state_of(module):
            value.copy_(start[name])
    return workload


def state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        yield name, parameter.detach()
    yield from module.named_buffers()


def seed_step(seed: int, step: int, replica: int) -> None:
    """Set the random state of one replica's step: what dropout draws follows from these three numbers.

    Python's and numpy's generators as well, which a user's model may draw from.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{replica}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "big"))
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[:4], "big"))


def dense(gradient: Tensor) -> Tensor:
    """A gradient as an ordinary tensor: that of a sparse embedding is not one."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def finite(gradients: Mapping[str, Tensor]) -> bool:
    """False for a step whose scaled gradients overflowed, which the loss scaler leaves out."""
    return all(bool(gradient.isfinite().all()) for gradient in gradients.values())
