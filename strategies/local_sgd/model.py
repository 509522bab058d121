"""Local SGD: ranks train independently, and after every H-th step the parameters become their mean.

Stich 2019, arXiv:1805.09767. With `warmup=N` the first N steps exchange gradients as data parallelism does,
which is post-local SGD (Lin et al. 2020, arXiv:1808.07217). These gradients are uncompressed and summed by
the backend's own collective, whatever compression and collective the later differences have.

What is exchanged. Let a be the parameters after the last average, the same on all p ranks, and x_r the
present parameters of rank r. The next ones are a + sum over r of (x_r - a) / p. This is the mean of the x_r,
but what ranks send are differences: these can be compressed, and the residual of one is added to the next
(Basu et al. 2019, arXiv:1906.02367). All ranks get the same sum and add it to the same a, so that they end
with the same bits.

Rounding. Without compression a result y is within u |y| + gamma(p + 1) sum |x_r - a| / p of the mean, with
u = 2^-24 in single precision and gamma(n) = n u / (1 - n u): hardly more than the rounding of y itself, as
replicas stay close to each other. A value that no replica changed keeps its bits; three thirds of x need not
be x. On two ranks the sum has only one order, so that any loop that follows the formula gets the same bits;
(x_0 + x_1) / 2, which is rounded fewer times, sometimes differs in the last place.

Outer step. With `outer=nesterov` (DiLoCo: Douillard et al. 2023, arXiv:2311.08105) the mean g of the a - x_r
is a gradient, and a takes a step of torch's SGD with Nesterov momentum instead of becoming the mean: with
momentum m, 0 at first, its factor b and the rate l, m <- b m + g, and then a <- a - l (g + b m). All ranks
have the same m and g, so that they end with the same bits, and send nothing more. The warm-up leaves m as it
is.

What is not averaged. Each rank keeps its own optimizer state (such as momentum), as in both papers.

Buffers. BatchNorm's running statistics follow their own replica's data. Whenever replicas are averaged
(and after each step of the warm-up) floating-point buffers become their mean, uncompressed, and all others
are taken from rank 0: counters, and masks, which have infinities.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from strategies.collectives.link import Link
from strategies.compression.base import State
from strategies.compression.memory import BucketMemory
from strategies.exchange.buckets import Bucket, buckets_of
from strategies.exchange.lane import Pending
from strategies.gradient_exchange import ExchangeSettings, GradientExchange
from strategies.promise import OuterStep
from strategies.training.parallel import ParallelModel, Setting
from strategies.training.replicas import take_from_first, take_values


class LocalSgdModel(ParallelModel):
    """Replicas that are averaged every `period` steps; the first `warmup` steps average gradients.

    Two more copies of the parameters are in memory: the parameters of the last average, and the buckets. An
    outer step has a third, its momentum.
    """

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        """Collective: all ranks take the parameters and buffers of rank 0."""
        super().__init__(module)
        promise, device, exchange = setting.facts.promise, setting.device, setting.exchange
        self._device = device
        self._link = Link(exchange.group)
        self._plain = ExchangeSettings(group=exchange.group)
        self.gradient_exchange = differences = GradientExchange(exchange, device=device)
        self._warmup = promise.after
        self.ramp_steps = self._warmup + promise.every * differences.ramp_steps
        self._steps = 0
        self._alone = 0
        """Steps since the replicas were last equal."""
        take_values(self._link, setting.fill, (*module.parameters(), *module.buffers()))
        trained = {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}
        self._parameters = _Mean(trained, differences, promise.outer)
        statistics = {
            name: value
            for name, value in module.named_buffers()
            if value.is_floating_point() and bool(value.isfinite().all())
        }
        self._statistics = _Mean(statistics, GradientExchange(self._plain, device=device))

    @property
    def _warming_up(self) -> bool:
        return self._steps < self._warmup

    @contextmanager
    def exchange(self, *, now: bool) -> Iterator[None]:
        """In the warm-up, average the gradients; afterwards a replica uses the gradients of its samples
        only."""
        yield
        if now and self._warming_up:
            self._average_gradients()

    def updated(self) -> None:
        if self._warming_up:
            self._parameters.start_from(dict(self.named_parameters()))
            self._average_buffers()
        else:
            self._alone += 1
            if self._alone == self.period:
                self.settle()
        self._steps += 1

    def settle(self) -> None:
        """Average now, unless the replicas are equal. The next average is then a full period later."""
        if self._alone:
            self._parameters.average(dict(self.named_parameters()))
            self._average_buffers()
            self._alone = 0

    def named_outer_state(self) -> Iterator[tuple[str, Tensor]]:
        return self._parameters.momenta()

    def strategy_state(self) -> State:
        outer = self._parameters.momentum.state_dict()
        return {
            **super().strategy_state(),
            "steps": self._steps,
            "alone": self._alone,
            "parameters": self._parameters.last.state_dict(),
            "statistics": self._statistics.last.state_dict(),
            **({"outer": outer} if outer["parts"] else {}),
        }

    def load_strategy_state(self, state: Mapping[str, object]) -> None:
        super().load_strategy_state(state)
        self._steps, self._alone = cast(int, state["steps"]), cast(int, state["alone"])
        self._parameters.last.load_state_dict(cast(State, state["parameters"]))
        self._statistics.last.load_state_dict(cast(State, state["statistics"]))
        if "outer" in state:
            self._parameters.momentum.load_state_dict(cast(State, state["outer"]))

    def start_from(self, steps: int) -> None:
        self._steps, self._alone = steps, 0
        self._parameters.start_from(dict(self.named_parameters()))
        self._statistics.start_from(dict(self.bare.named_buffers()))

    def _average_gradients(self) -> None:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        # A parameter that no replica used gets no gradient: with a gradient of 0, momentum and decay would
        # move it.
        used = torch.tensor([float(p.grad is not None) for p in parameters], device=self._device)
        self._link.largest(used)
        # An exchange only for this step: its buckets become the gradients, and are freed with them.
        GradientExchange(self._plain, device=self._device).average(parameters)
        for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
            if not anywhere:
                parameter.grad = None

    def _average_buffers(self) -> None:
        buffers = dict(self.bare.named_buffers())
        self._statistics.average(buffers)
        others = [value for name, value in buffers.items() if name not in self._statistics.names]
        take_from_first(self._link, others)


class _Mean:
    """Named tensors that each rank changes independently, and that are averaged over the ranks, or take an
    outer step from the last average.

    Each call gets the tensors anew, as a module may have replaced a buffer.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], exchange: GradientExchange, outer: OuterStep | None = None
    ) -> None:
        """`tensors` are equal on all ranks."""
        self.names = frozenset(tensors)
        self._exchange, self._outer = exchange, outer
        self._buckets = list(buckets_of(tensors))
        self.momentum = BucketMemory()
        """The momentum of the outer step, if there is one."""
        for bucket in self._buckets if outer is not None else ():
            self.momentum.of(bucket)
        self.last = BucketMemory()
        """The tensors as they were when they were last equal on all ranks."""
        self.start_from(tensors)

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Take `tensors`, which are equal on all ranks, as the start of the next average."""
        for bucket in self._buckets:
            last = self.last.of(bucket)
            for piece in bucket.pieces:
                piece.of(last).copy_(tensors[piece.name])

    def momenta(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the momentum of each tensor by its name; nothing without an outer step."""
        for _, pieces, momentum in self.momentum.vectors():
            yield from ((piece.name, piece.of(momentum)) for piece in pieces)

    def average(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace `tensors` by their mean over the ranks, or by the end of the outer step, in place;
        collective."""
        pending = [self._start(bucket, tensors) for bucket in self._buckets]
        for bucket, under_way in zip(self._buckets, pending, strict=True):
            under_way.wait()
            last = self._moved(bucket)
            for piece in bucket.pieces:
                tensors[piece.name].copy_(piece.of(last))

    def _moved(self, bucket: Bucket) -> Tensor:
        """Move the last average by the mean of the differences, which `bucket` has, and return it."""
        last = self.last.of(bucket)
        if self._outer is None:
            return last.add_(bucket.values)
        gradient, factor = bucket.values.neg_(), self._outer.momentum
        momentum = self.momentum.of(bucket).mul_(factor).add_(gradient)
        return last.add_(gradient.add_(momentum, alpha=factor), alpha=-self._outer.lr)

    def _start(self, bucket: Bucket, tensors: Mapping[str, Tensor]) -> Pending:
        last = self.last.of(bucket)
        for piece in bucket.pieces:
            torch.sub(tensors[piece.name], piece.of(last), out=piece.of(bucket.values))
        bucket.values.div_(self._exchange.size)
        return self._exchange.start(bucket)
