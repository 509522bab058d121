"""From a strategy's name to a model laid out by it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from results.layout import ModelLayout
from results.registry import load
from strategies.catalog import STRATEGIES
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
    facts = STRATEGIES.facts(strategy)
    if not facts.distributed:
        alone: Callable[[nn.Module], ParallelModel] = load(facts.model)
        return alone(module)
    setting = Setting(
        facts=facts,
        device=device,
        exchange=exchange,
        layout=layout or ModelLayout(),
        groups=facts.groups(Link(exchange.group).size, exchange.node_size),
    )
    build: Callable[[nn.Module, Setting], ParallelModel] = load(facts.model)
    return build(module, setting)
