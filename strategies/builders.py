"""From a strategy's name to a model laid out by it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from results.layout import ModelLayout
from results.spec import Spec
from strategies.catalog import STRATEGIES
from strategies.ddp import DdpModel
from strategies.gradient_exchange import PLAIN, ExchangeSettings
from strategies.local_sgd import LocalSgdModel
from strategies.parallel import ParallelModel
from strategies.scratch_ddp import ScratchDdpModel


def parallelize(
    module: nn.Module,
    strategy: str,
    *,
    device: torch.device,
    exchange: ExchangeSettings = PLAIN,
    layout: ModelLayout | None = None,
) -> ParallelModel:
    """Lay `module`, already on `device`, out over the ranks of the exchange's group as `strategy` says.

    `layout` names the blocks that a sharding strategy takes one after another.

    Collective: all ranks of the group call it. Raises SpecError for a strategy, a compressor or a
    collective that does not exist.
    """
    spec = STRATEGIES.parse(strategy)
    if spec.name == "fsdp":
        # torch's part of it takes more than a second to import, and most launches have no use for it.
        from strategies.fsdp import FsdpModel

        return FsdpModel(module, spec, device, exchange, layout or ModelLayout())
    return _REPLICATED[spec.name](module, spec, device, exchange)


Builder = Callable[[nn.Module, Spec, torch.device, ExchangeSettings], ParallelModel]


def _single(module: nn.Module, spec: Spec, device: torch.device, exchange: ExchangeSettings) -> ParallelModel:
    return ParallelModel(module)


_REPLICATED: dict[str, Builder] = {
    "single": _single,
    "ddp": DdpModel,
    "scratch-ddp": ScratchDdpModel,
    "local-sgd": LocalSgdModel,
}
