"""Data parallelism on raw collectives: every rank a replica, gradients averaged in buckets during backward.

It does in Python what torch's DistributedDataParallel does with `gradient_as_bucket_view`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import cast

from torch import nn

from results.cell import UNCOMPRESSED
from strategies.closed_form.terms import MIB
from strategies.collectives.link import Link
from strategies.compression.base import State
from strategies.gradient_exchange import GradientExchange
from strategies.scratch_ddp.reducer import Bucketing, GradientReducer
from strategies.training.parallel import ParallelModel, Setting
from strategies.training.replicas import Buffers, take_from_first, take_values


class ScratchDdpModel(ParallelModel):
    """A module whose replicas start alike and whose gradients are exchanged by a `GradientReducer`.

    The module has no wrapper. At the beginning of each step all ranks take the buffers of rank 0; within a
    step each replica has its own buffers, such as BatchNorm statistics, and its own dropout.
    """

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        """Collective: all ranks take the parameters and buffers of rank 0."""
        super().__init__(module)
        spec, device, exchange = setting.spec, setting.device, setting.exchange
        self._link = Link(exchange.group)
        self._buffers = Buffers(module)
        take_values(self._link, setting.fill, (*module.parameters(), *self._buffers.now()))
        self.gradient_exchange = gradients = GradientExchange(exchange, device=device)
        self.ramp_steps = gradients.ramp_steps
        self._reducer = GradientReducer(
            {name: value for name, value in module.named_parameters() if value.requires_grad},
            gradients,
            self._link,
            Bucketing(
                first_bytes=int(spec.number("first_bucket_mb") * MIB),
                bytes=int(spec.number("bucket_mb") * MIB),
                find_unused=spec.flag("find_unused"),
                # Compressors see matrices, and residuals are compared with gradients, row by row.
                as_parameters=exchange.compression == UNCOMPRESSED,
            ),
        )

    def started(self) -> None:
        take_from_first(self._link, self._buffers.now())

    def exchange(self, *, now: bool) -> AbstractContextManager[None]:
        return self._reducer.exchanging() if now else nullcontext()

    def strategy_state(self) -> State:
        return {**super().strategy_state(), "reducer": self._reducer.state_dict()}

    def load_strategy_state(self, state: Mapping[str, object]) -> None:
        super().load_strategy_state(state)
        self._reducer.load_state_dict(cast(State, state["reducer"]))
