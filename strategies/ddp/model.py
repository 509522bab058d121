"""torch's DistributedDataParallel: every rank a replica, gradients averaged in buckets during backward."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from results.errors import UsageError
from results.registry import load
from strategies.advice import SPARSE_GRADIENTS
from strategies.collectives.link import Link
from strategies.compression.base import State
from strategies.compression.catalog import COMPRESSIONS
from strategies.ddp.facts import TORCHS_BUCKET_MB
from strategies.ddp.hook import BucketLayout, Hook, SharedAverage, TorchPowerSgd
from strategies.gradient_exchange import ExchangeSettings, GradientExchange
from strategies.training.layouts import require_dense, sparse_parts
from strategies.training.parallel import ParallelModel, Setting

_WITHOUT_GRADIENT = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
"""torch's message that lists parameters by their index among the trained ones."""


class DdpModel(ParallelModel):
    """A module under DistributedDataParallel with the options of its spec.

    If the exchange is the backend's plain all-reduce, torch itself does it, in C++. Otherwise torch fills the
    buckets, and a communication hook exchanges them.
    """

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        """Raises UsageError for sparse gradients that a hook would have to exchange."""
        super().__init__(module)
        spec, device, exchange = setting.spec, setting.device, setting.exchange
        if not exchange.is_plain:
            require_dense(module, "the exchange of ddp by a compressor or a collective", SPARSE_GRADIENTS)
        bucket_mb = spec.number("bucket_mb")
        self.module = self._ddp = DistributedDataParallel(
            module,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=exchange.group,
            # If given any number, even torch's default, torch makes the first bucket as large as the others.
            bucket_cap_mb=None if bucket_mb == TORCHS_BUCKET_MB else bucket_mb,
            static_graph=spec.flag("static_graph"),
            gradient_as_bucket_view=spec.flag("bucket_view"),
            find_unused_parameters=spec.flag("find_unused"),
        )
        self._hook: Hook | None = None
        if not exchange.is_plain:
            self._hook = self._build_hook(exchange, device)
            # torch checks the name of the second parameter, and refuses annotations that are strings.
            self._ddp.register_comm_hook(self._hook, lambda hook, bucket: hook.run(bucket))

    def _build_hook(self, exchange: ExchangeSettings, device: torch.device) -> Hook:
        layout, link = BucketLayout(self.bare), Link(exchange.group)
        compressor = COMPRESSIONS.facts(exchange.compression)
        if compressor.ddp_hook:
            kind: type[TorchPowerSgd] = load(compressor.ddp_hook)
            theirs = kind(compressor.spec.count, layout, group=exchange.group, seed=exchange.seed)
            self.gradient_exchange, self.ramp_steps = theirs, theirs.ramp_steps
            return Hook(theirs, link, device)
        ours = GradientExchange(exchange, device=device)
        self.gradient_exchange, self.ramp_steps = ours, ours.ramp_steps
        return Hook(SharedAverage(ours, layout), link, device)

    def strategy_state(self) -> State:
        """Return the state of the base class with torch's buckets. Collective after the first step, when
        torch forms its buckets anew."""
        return {**super().strategy_state(), "buckets": self._buckets()}

    @property
    def resumes_otherwise(self) -> str | None:
        what = "static_graph=true" if self._ddp.static_graph else "sparse gradients"
        if self._ddp.static_graph or sparse_parts(self.bare):
            return f"ddp with {what} forms its buckets anew, and may round the first sums differently"
        return None

    def load_strategy_state(self, state: Mapping[str, object]) -> None:
        """Resume from a `strategy_state` of the same rank; collective if this model has taken no step.

        torch forms its buckets anew after the first step, in the order in which gradients came. A model that
        has taken no step rehearses that order, so that its next step has the buckets of the state. With
        sparse gradients or `static_graph` it does not, and the sums of its first step may be rounded
        differently.
        """
        buckets = cast("list[list[str]]", state["buckets"])
        if buckets != self._buckets() and self.resumes_otherwise is None:
            self._rehearse([name for names in buckets for name in names])
        super().load_strategy_state(state)

    def _buckets(self) -> list[list[str]]:
        """The names of the parameters in torch's buckets."""
        # The buckets of the next step: torch forms them anew when the second step begins.
        self._ddp.reducer._rebuild_buckets()
        names = {id(value): name for name, value in self.bare.named_parameters()}
        # torch names the parameters of a bucket only in these buckets of zeros; the zeros are not needed.
        buckets = self._ddp.reducer._get_zeros_like_grad_buckets()
        return [[names[id(value)] for value in bucket.parameters()] for bucket in buckets]

    def _rehearse(self, order: Sequence[str]) -> None:
        """Run a backward pass that gives torch gradients of zero in this order; collective."""
        named = dict(self.bare.named_parameters())
        gradients = {value: value.grad for value in named.values()}
        self._ddp.module = _Rehearsal([named[name] for name in order])
        # The rehearsal has no buffers, which torch would look for.
        broadcasts, self._ddp.broadcast_buffers = self._ddp.broadcast_buffers, False
        try:
            with torch.enable_grad():
                self._ddp(torch.zeros((), device=next(iter(gradients)).device)).backward()
        finally:
            self._ddp.module, self._ddp.broadcast_buffers = self.bare, broadcasts
            for value, gradient in gradients.items():
                value.grad = gradient

    def exchange(self, *, now: bool) -> AbstractContextManager[None]:
        return self._exchanging() if now else self._ddp.no_sync()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Raise UsageError at the end if a parameter has no gradient; ranks that have one wait for this
        rank."""
        try:
            yield
            self._ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if self._hook is not None:
                self._hook.raise_failure()
            if found := _WITHOUT_GRADIENT.search(str(error)):
                trained = [name for name, value in self.bare.named_parameters() if value.requires_grad]
                names = [trained[int(index)] for index in found[1].split()]
                raise UsageError(
                    f"no gradient came for {', '.join(names[:3])} ({len(names)} of {len(trained)} "
                    f"parameters): freeze what is not used, or use ddp:find_unused=true"
                ) from None
            raise


class _Rehearsal(nn.Module):
    """A module whose backward pass gives parameters a gradient of zero, one after another."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._given = tuple(parameters)

    def forward(self, start: Tensor) -> Tensor:
        # Backward begins with the last operation.
        for parameter in reversed(self._given):
            start = start + (parameter * 0).sum()
        return start
