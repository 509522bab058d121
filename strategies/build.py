"""From a strategy's name to a model laid out by it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import nn

from results.layout import ModelLayout
from strategies.catalog import STRATEGIES, group_layout
from strategies.collectives.link import Link
from strategies.exchange.gradient_exchange import PLAIN, ExchangeSettings
from strategies.training.parallel import ParallelModel, Setting


def parallelize(
    module: nn.Module,
    strategy: str,
    *,
    device: torch.device,
    exchange: ExchangeSettings = PLAIN,
    layout: ModelLayout | None = None,
) -> ParallelModel:
    """Lay `module`, already on `device`, out over the ranks of the exchange's group as `strategy` says.

    `layout` names the parts of the model that a strategy cuts it at.

    Collective: all ranks of the group call it. Raises SpecError for a strategy, a compressor or a
    collective that does not exist, and for a number of ranks that the strategy does not divide into groups.
    """
    spec = STRATEGIES.parse(strategy)
    if spec.name == "single":
        return ParallelModel(module)
    setting = Setting(
        spec=spec,
        device=device,
        exchange=exchange,
        layout=layout or ModelLayout(),
        groups=group_layout(strategy, Link(exchange.group).size, exchange.node_size),
    )
    return _builder(spec.name)(module, setting)


Builder = Callable[[nn.Module, Setting], ParallelModel]


def _builder(name: str) -> Builder:
    # Late: torch's own sharding takes more than a second to import, and most launches have no use for it.
    module, kind = _HOMES[name]
    builder: Builder = getattr(import_module(f"strategies.{module}"), kind)
    return builder


_HOMES = {
    "ddp": ("ddp.model", "DdpModel"),
    "scratch-ddp": ("scratch_ddp.model", "ScratchDdpModel"),
    "local-sgd": ("local_sgd.model", "LocalSgdModel"),
    "fsdp": ("fsdp.model", "FsdpModel"),
    "hsdp": ("fsdp.model", "FsdpModel"),
    "manual": ("fsdp.model", "FsdpModel"),
    "zero1": ("zero1.model", "Zero1Model"),
    "scratch-fsdp": ("scratch_fsdp.model", "ScratchFsdpModel"),
    "pipeline": ("pipeline.model", "PipelineModel"),
    "tp": ("tensor_parallel.model", "TensorParallelModel"),
}
