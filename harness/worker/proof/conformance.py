"""Compare what a cell asks for with what its steps did.

Samples, tokens and updates are counted where they are used: in the loss, and after each optimizer step. A
schedule and activation checkpointing show in the first steps, and a collective in the recorded operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.worker.cell.sampler import own_synthetic
from harness.worker.rank.control import Control
from results.cell import DEFAULT_COLLECTIVE, Cell
from results.groups import GroupLayout
from results.parts import ModelParts
from results.record import Operations
from strategies.catalog import COLLECTIVES, STRATEGIES
from strategies.closed_form.terms import Term
from strategies.predictions import traffic
from strategies.trainer import Trainer
from strategies.training.loss import Loss, seen
from strategies.training.observer import Phase
from workloads.batch import Batch, tensors
from workloads.catalog import WORKLOADS, facts
from workloads.datasets.facts import DATASETS, Own
from workloads.workload import TokenInput, Workload

MISSES, EXCEEDS = 0.8, 1.25
"""Limits of what a rank sends and holds, as factors of the closed form."""
COMPLETE = 0.95
"""The lower limit of the bytes that a rank sends, unless an engine trains, for which they are estimated. Who
leaves out the exchange of every 15th step sends less."""
FEW_BYTES = 2**16
"""Bytes that are allowed in addition to the closed form: ranks also send numbers that they agree on."""


@dataclass(slots=True, kw_only=True)
class Uses:
    """Samples and updates of this rank, from the beginning or between two moments.

    They are counted at two places that every step must pass: the loss and the optimizer.
    """

    samples: int = 0
    """Samples that a loss was computed of; 0 on a rank that computes no loss, as a pipeline's first stage."""
    targets: int = 0
    """Elements of their targets: tokens, where the workload takes tokens."""
    updates: int = 0
    """Steps that the optimizer made."""

    def since(self, before: Uses) -> Uses:
        return Uses(
            samples=self.samples - before.samples,
            targets=self.targets - before.targets,
            updates=self.updates - before.updates,
        )

    def counted(self, loss: Loss, count: Callable[[Batch], int]) -> Loss:
        """Wrap a trainer's loss to count the samples of the targets or batches that it is given."""
        return seen(loss, partial(self._used, count))

    def _used(self, count: Callable[[Batch], int], value: Tensor, given: Batch) -> None:
        self.samples += count(given)
        self.targets += sum(tensor.numel() for tensor in tensors(given))

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps of `optimizer`, except those that a loss scaler leaves out."""
        optimizer.register_step_post_hook(self._updated)

    def _updated(self, *_: object) -> None:
        self.updates += 1


def missed_uses(
    cell: Cell, workload: Workload, steps: int, uses: Uses, control: Control, groups: GroupLayout
) -> str | None:
    """Return in a sentence how the uses of some rank in `steps` steps differ from the cell's, or None.

    Collective, with the same answer on all ranks. A replica's samples are counted by at least one of its
    ranks. Without a loss scaler every step makes one update; with it some may be left out, not all.
    """
    rows = control.of_all([uses.samples, uses.targets, uses.updates])
    return _missed_samples(cell, workload, steps, rows, groups) or _missed_updates(cell, steps, rows)


def _missed_samples(
    cell: Cell, workload: Workload, steps: int, rows: Sequence[Sequence[float]], groups: GroupLayout
) -> str | None:
    samples = steps * cell.batch_per_replica
    asked = [(0, "samples", samples)]
    # A step, or a model that gives its loss, is given inputs and targets together; batches of a user's own
    # may have targets of any shape.
    own = own_synthetic(cell) or DATASETS.facts(cell.dataset).takes == Own.takes
    if isinstance(workload.input, TokenInput) and workload.loss is not None and not own:
        asked.append((1, "tokens", samples * workload.input.length // groups.context))
    for column, unit, expected in asked:
        counting = {groups.replica(rank) for rank, row in enumerate(rows) if row[column]}
        for rank, row in enumerate(rows):
            expects = row[column] or groups.replica(rank) not in counting
            if expects and row[column] != expected:
                return (
                    f"rank {rank} used {row[column]:.0f} {unit} in {steps} measured steps, "
                    f"and its replica's batches hold {expected}"
                )
    return None


def _missed_updates(cell: Cell, steps: int, rows: Sequence[Sequence[float]]) -> str | None:
    for rank, (_, _, updates) in enumerate(rows):
        if not updates and cell.precision == "fp16":
            return (
                f"none of {steps} measured steps made an update: the gradients of every step "
                f"overflowed at every factor of the loss scaler; use --precision bf16"
            )
        if updates > steps or (updates < steps and cell.precision != "fp16"):
            return f"rank {rank} made {updates:.0f} updates in {steps} measured steps"
    return None


class Watched:
    """Observes the steps of a trainer: micro-batches in flight, and activations that are computed again."""

    def __init__(self) -> None:
        self.in_flight = 0
        """Largest number of microbatches between their forward and their backward pass."""
        self.recomputed: bool | None = None
        """Whether a part of a trained block was called in a backward pass; None without such blocks."""
        self._phase: Phase | None = None
        self._under_way = 0

    def begins(self, phase: Phase) -> None:
        self._phase = phase
        if phase is Phase.DATA:
            # A micro-batch says that it begins its forward pass, and then each of its stages does so.
            self._under_way = -1
        elif phase is Phase.FORWARD:
            self._under_way += 1
        elif phase is Phase.BACKWARD:
            self._under_way -= 1
        self.in_flight = max(self.in_flight, self._under_way)

    def step_done(self, loss: Tensor) -> None:
        pass

    @contextmanager
    def watching(self, trainer: Trainer, blocks: Iterable[str]) -> Iterator[None]:
        """Observe the steps that are taken in this context; `blocks` are names of modules of the bare
        model."""
        modules = dict(trainer.model.bare.named_modules())
        # A repeated forward pass calls the modules within a block that trains a parameter.
        inside = [modules[name] for name in blocks if name in modules]
        trained = [block for block in inside if any(each.requires_grad for each in block.parameters())]
        parts = [part for block in trained for part in block.modules() if part is not block]
        handles = [part.register_forward_pre_hook(self._called) for part in parts]
        before, trainer.observer = trainer.observer, self
        try:
            yield
        finally:
            trainer.observer = before
            for handle in handles:
                handle.remove()

    def _called(self, *_: object) -> None:
        # A block may use the weights of a module that it never calls.
        self.recomputed = bool(self.recomputed) or self._phase is Phase.BACKWARD

    def missed(self, cell: Cell, rank: int, groups: GroupLayout) -> str | None:
        """Return which part of `cell` the steps of this rank did not do, as a sentence, or None."""
        strategy = STRATEGIES.facts(cell.strategy)
        pipeline = next(ranks for ranks in groups.groups("pipeline") if rank in ranks)
        asked = strategy.in_flight(cell, pipeline.index(rank))
        if asked is not None and self.in_flight != asked:
            return (
                f"{cell.strategy} has up to {asked} microbatches in flight on rank {rank}, and its steps had "
                f"{self.in_flight}"
            )
        if cell.activation_checkpointing and self.recomputed is False:
            return f"activation checkpointing was asked for, and rank {rank} computed no activation again"
        return None


def other_collective(cell: Cell, node_size: int, operations: Operations) -> str | None:
    """Return why recorded operations cannot belong to the collective of `cell`, as a sentence, or None."""
    asked = COLLECTIVES.facts(cell.collective)
    whole = f"0-{cell.gpus - 1}"
    if asked.sends and cell.backend == "gloo" and "send" not in operations.names:
        return f"{cell.collective} sends messages between two ranks, and none was recorded"
    if asked.by_nodes and 1 < node_size < cell.gpus and set(operations.groups) == {whole}:
        return f"{cell.collective} exchanges within nodes, and every recorded operation is of all ranks"
    return None


def sent_nothing(cell: Cell, replicas: int, least_bytes: float) -> str | None:
    """Return in a sentence that the steps of a block sent nothing though replicas average, or None.

    `least_bytes` is what the busiest rank sent in a step of the block in which it sent least.
    """
    promise = STRATEGIES.facts(cell.strategy).promise
    alone = all(set(promise.partners(each, replicas)) <= {each} for each in range(replicas))
    if least_bytes or alone or promise.unproven is not None:
        return None
    return (
        f"{cell.strategy} promises to average {promise.of} over replicas, and in a block of timed steps no "
        f"rank sent a byte: send them over `setting.exchange.group`, in timed steps as in others"
    )


def unknown_traffic(cell: Cell, *, several_nodes: bool) -> str | None:
    """Return why no closed form says what the steps of `cell` send, as a clause; None if one does."""
    known_parts = isinstance(facts(WORKLOADS.parse(cell.workload)).parts, ModelParts)
    reasons = {
        f"what {cell.compression} sends depends on the gradients": cell.compresses,
        f"it states no calls of {cell.collective}": cell.collective != DEFAULT_COLLECTIVE,
        f"some may be sent in {cell.precision}": cell.precision != "fp32",
        f"it holds for Gloo, not for {cell.backend}": cell.backend != "gloo",
        "it holds for one node": several_nodes,
        f"{cell.workload} has no known parts": not known_parts,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def other_traffic(cell: Cell, least_bytes: float, payload_bytes: float, operations: float) -> str | None:
    """Return in a sentence how far the traffic of the busiest rank is from the strategy's closed form, or
    None if it is near.

    `payload_bytes` and `operations` are means over all steps, and `sent_nothing` says what `least_bytes` is.
    There must be a closed form (`unknown_traffic`).
    """
    parts = facts(WORKLOADS.parse(cell.workload)).parts
    assert isinstance(parts, ModelParts)
    terms = traffic(cell, parts)
    sent, number = sum(term.payload_bytes for term in terms), sum(term.operations for term in terms)
    # The closed form leaves out buffers, a norm, and agreements of ranks in a few bytes.
    misses = COMPLETE if STRATEGIES.facts(cell.strategy).engine is None else MISSES
    enough = misses * sent <= least_bytes and MISSES * number <= operations
    if enough and payload_bytes <= EXCEEDS * sum(map(_most_bytes, terms)) + FEW_BYTES:
        return None
    found = f"{payload_bytes:,.0f} bytes in {operations:g}"
    if least_bytes < payload_bytes:
        found += f", in one block {least_bytes:,.0f} bytes"
    return (
        f"by its `terms` {cell.strategy} sends {sent:,.0f} bytes in {number:g} operations of a step, and its "
        f"steps sent {found}: the exchange or the `terms` are wrong"
    )


def _most_bytes(term: Term) -> float:
    """Return the most bytes that a rank may send: all tokens of its group may choose its experts."""
    return term.payload_bytes * (term.ranks if term.dimension == "expert" else 1)


def whole_state(cell: Cell, trainer: Trainer) -> str | None:
    """Return in a sentence how much more optimizer state this rank holds than the strategy leaves to a rank.

    Return None if it holds no more, for strategies of other packages, and if the parts of the model are not
    known; for a replica on several ranks the closed form describes one rank.
    """
    strategy, parts = STRATEGIES.facts(cell.strategy), facts(WORKLOADS.parse(cell.workload)).parts
    own = type(strategy).__module__.startswith("strategies.")
    if not own or not isinstance(parts, ModelParts) or cell.model_parallel > 1:
        return None
    moments = strategy.moments(cell, parts)
    # An update takes memory in addition to the state, and the first moment is before there is any.
    expected = min((moment.optimizer for moment in moments if moment.optimizer), default=0)
    states = trainer.model.local_state(trainer.optimizer).values()
    values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    held = sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in values)
    # The closed form leaves out the count of steps of each parameter.
    if held <= EXCEEDS * expected + 8 * len(values):
        return None
    return f"{cell.strategy} leaves a rank {expected:,} bytes of optimizer state, and a rank holds {held:,}"
