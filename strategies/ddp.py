"""torch's DistributedDataParallel: every rank a replica, gradients averaged in buckets during backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from results.spec import Spec
from strategies.gradient_exchange import ExchangeSettings
from strategies.parallel import ParallelModel


class DdpModel(ParallelModel):
    """A module under DistributedDataParallel with the options of its spec."""

    def __init__(
        self, module: nn.Module, spec: Spec, device: torch.device, exchange: ExchangeSettings
    ) -> None:
        super().__init__(module)
        self.module = self._ddp = DistributedDataParallel(
            module,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=exchange.group,
            bucket_cap_mb=spec.number("bucket_mb"),
            static_graph=spec.flag("static_graph"),
            gradient_as_bucket_view=spec.flag("bucket_view"),
            find_unused_parameters=spec.flag("find_unused"),
        )

    def exchange(self, *, now: bool) -> AbstractContextManager[None]:
        return nullcontext() if now else self._ddp.no_sync()
