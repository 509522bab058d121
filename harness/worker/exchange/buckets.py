"""Count the buckets that begin to be exchanged before the last gradient is computed, without a clock.

The order in which a backward pass computes gradients follows from its graph, and so does the place at which a
strategy begins to exchange: the counts are equal in every repetition of the same code. A strategy that has
lost its overlap begins all buckets after the last gradient, even where a rank's only core hides that in time.

A bucket is what a strategy announces (`Link.announce_bucket`) as it begins to exchange it. What torch
exchanges by itself (DistributedDataParallel, FSDP2) announces nothing: there each sum that is issued in the
backward pass counts as a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from results.groups import GroupLayout
from results.record import Buckets
from strategies.trainer import Trainer
from strategies.training.loss import seen
from strategies.training.observer import Phase, StepObserver

_SUMS = ("allreduce", "reduce", "_reduce_scatter_base")


class _GradientsToCome:
    """Counts the gradients of the backward pass under way that have not been computed yet."""

    def __init__(self) -> None:
        self.number: int | None = None
        """None before the first loss."""
        self._handles: list[RemovableHandle] = []

    def watch(self, loss: Tensor) -> None:
        """Count down as the gradients of `loss` come, each before any hook of a strategy sees it."""
        self.forget()
        leaves = _leaves(loss)
        self.number = len(leaves)
        self._handles = [leaf.register_prehook(self._came) for leaf in leaves]

    def _came(self, _: tuple[Tensor, ...]) -> None:
        assert self.number is not None
        self.number -= 1

    def forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _leaves(loss: Tensor) -> list[Node]:
    """The nodes of the graph of `loss` at which gradients are added up."""
    found: set[Node] = set()
    ahead = [] if loss.grad_fn is None else [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead += [before for before, _ in node.next_functions if before is not None]
    return [node for node in found if type(node).__name__ == "AccumulateGrad"]


class _Tally:
    """Counts for each step how many buckets began, and how many of them early."""

    def __init__(self) -> None:
        self.started = [0]
        self.early = [0]

    def add(self, *, early: bool) -> None:
        self.started[-1] += 1
        self.early[-1] += early

    def step_done(self) -> None:
        self.started.append(0)
        self.early.append(0)


class BucketCounter:
    """Counts the buckets of a trainer's steps, which it observes; it passes all calls on to `observer`."""

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer
        self._phase: Phase | None = None
        self._to_come = _GradientsToCome()
        self._announced, self._sums = _Tally(), _Tally()

    @contextmanager
    def counting(self, trainer: Trainer) -> Iterator[None]:
        """Count the steps that `trainer` takes in this context."""
        before, loss = trainer.observer, trainer.loss
        trainer.observer, trainer.loss = self, seen(loss, lambda value, _: self._to_come.watch(value))
        try:
            yield
        finally:
            trainer.observer, trainer.loss = before, loss
            self._to_come.forget()

    def begins(self, phase: Phase) -> None:
        self._phase = phase
        self._observer.begins(phase)

    def step_done(self, loss: Tensor) -> None:
        self._phase = None
        self._announced.step_done()
        self._sums.step_done()
        self._observer.step_done(loss)

    def announced(self) -> None:
        """Count a bucket that a strategy begins to exchange."""
        self._announced.add(early=bool(self._to_come.number))

    def issued(self, name: str) -> None:
        """Count an operation of the exchange, by its name."""
        if self._phase is Phase.BACKWARD and name in _SUMS:
            self._sums.add(early=bool(self._to_come.number))

    def counted(self, groups: GroupLayout) -> tuple[Buckets | None, str | None]:
        """Return the buckets of the steps so far, and the reason where something is not known."""
        announces = any(self._announced.started)
        if groups.tensor > 1 and not announces:
            return None, "tensor parallelism sums activations in the backward pass too"
        tally = self._announced if announces else self._sums
        started, early = tally.started[:-1], tally.early[:-1]
        if groups.pipeline > 1:
            return Buckets(started=started), "a pipeline's stages have several backward passes at once"
        if self._to_come.number is None:
            return Buckets(started=started), "the strategy computes its loss by itself"
        return Buckets(started=started, early=early), None
