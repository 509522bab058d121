"""Count the buckets of a step, and how much of the backward pass is left when each begins, without a clock.

The order in which a backward pass computes gradients follows from its graph, and so does the place at which a
strategy begins to exchange: the counts are equal in every repetition of the same code. A strategy that has
lost its overlap begins all buckets after the last gradient, even where a rank's only core hides that in time.
The order does not say how much of the backward pass is left to hide an exchange behind: for that, the counter
counts the nodes of its graph that have not begun yet as each bucket begins.

A bucket is what a strategy announces (`Link.announce_bucket`) as it begins to exchange it. What torch
exchanges by itself (DistributedDataParallel, FSDP2) announces nothing: there each sum that is issued in the
backward pass counts as a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from results.groups import GroupLayout
from results.record import Buckets
from strategies.trainer import Trainer
from strategies.training.loss import seen
from strategies.training.observer import Phase, StepObserver

_SUMS = ("allreduce", "reduce", "_reduce_scatter_base")


_OPAQUE = {
    "CompiledFunctionBackward": "a compiled backward pass is a single node",
    "CheckpointFunctionBackward": "reentrant checkpointing runs backward passes inside of a node",
}
"""Nodes whose work is not in the graph, with the reason why the share that is left is then unknown."""


class _BackwardPass:
    """Counts the gradients and the nodes of the backward pass under way that are still to come."""

    def __init__(self) -> None:
        self.gradients: int | None = None
        """None before the first loss."""
        self.opaque: str | None = None
        """Why the nodes of a backward pass so far do not show its work; None if they do."""
        self._nodes = self._all = 0
        self._handles: list[RemovableHandle] = []

    @property
    def left(self) -> float:
        """The share of the nodes that have not begun yet."""
        return self._nodes / self._all if self._all else 0.0

    def watch(self, loss: Tensor) -> None:
        """Count down as the nodes of `loss` begin, each before any hook of a strategy sees its gradient."""
        self.forget()
        nodes = {node: type(node).__name__ for node in _nodes(loss)}
        leaves = [node for node, name in nodes.items() if name == "AccumulateGrad"]
        self.gradients, self._nodes, self._all = len(leaves), len(nodes), len(nodes)
        self.opaque = next((_OPAQUE[name] for name in nodes.values() if name in _OPAQUE), self.opaque)
        self._handles = [
            *(node.register_prehook(self._begins) for node in nodes),
            *(leaf.register_prehook(self._came) for leaf in leaves),
        ]

    def _begins(self, _: tuple[Tensor, ...]) -> None:
        self._nodes -= 1

    def _came(self, _: tuple[Tensor, ...]) -> None:
        assert self.gradients is not None
        self.gradients -= 1

    def forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _nodes(loss: Tensor) -> set[Node]:
    """The nodes of the graph of `loss`."""
    found: set[Node] = set()
    ahead = [] if loss.grad_fn is None else [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead += [before for before, _ in node.next_functions if before is not None]
    return found


class BucketCounter:
    """Counts the buckets of a trainer's steps, which it observes; it passes all calls on to `observer`."""

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer
        self._phase: Phase | None = None
        self._backward = _BackwardPass()
        self._announced: list[list[tuple[bool, float]]] = [[]]
        """For each step and bucket, whether it began early, and the share of backward that was left."""
        self._sums: list[list[tuple[bool, float]]] = [[]]

    @contextmanager
    def counting(self, trainer: Trainer) -> Iterator[None]:
        """Count the steps that `trainer` takes in this context."""
        before, loss = trainer.observer, trainer.loss
        trainer.observer, trainer.loss = self, seen(loss, lambda value, _: self._backward.watch(value))
        try:
            yield
        finally:
            trainer.observer, trainer.loss = before, loss
            self._backward.forget()

    def begins(self, phase: Phase) -> None:
        self._phase = phase
        self._observer.begins(phase)

    def step_done(self, loss: Tensor) -> None:
        self._phase = None
        self._announced.append([])
        self._sums.append([])
        self._observer.step_done(loss)

    def announced(self) -> None:
        """Count a bucket that a strategy begins to exchange."""
        self._announced[-1].append((bool(self._backward.gradients), self._backward.left))

    def issued(self, name: str) -> None:
        """Count an operation of the exchange, by its name."""
        if self._phase is Phase.BACKWARD and name in _SUMS:
            self._sums[-1].append((bool(self._backward.gradients), self._backward.left))

    def counted(self, groups: GroupLayout) -> tuple[Buckets | None, dict[str, str]]:
        """Return the buckets of the steps so far, and the reasons for what is not known, by name."""
        announces = any(self._announced)
        if groups.tensor > 1 and not announces:
            return None, {"buckets": "tensor parallelism sums activations in the backward pass too"}
        steps = (self._announced if announces else self._sums)[:-1]
        early = [sum(map(itemgetter(0), step)) for step in steps]
        left = [[share for _, share in step] for step in steps]
        started = list(map(len, steps))
        if groups.pipeline > 1:
            reason = "a pipeline's stages have several backward passes at once"
            return Buckets(started=started), {"buckets": reason}
        if self._backward.gradients is None:
            return Buckets(started=started), {"buckets": "the strategy computes its loss by itself"}
        if self._backward.opaque is not None:
            return Buckets(started=started, early=early), {"backward_left": self._backward.opaque}
        return Buckets(started=started, early=early, left=left), {}
