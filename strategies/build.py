"""Lay a model out over the ranks by the name of a strategy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from results.layout import ModelLayout
from results.registry import load
from strategies.catalog import STRATEGIES
from strategies.collectives.link import Link
from strategies.devices import device_of
from strategies.gradient_exchange import PLAIN, ExchangeSettings
from strategies.refusal import require_possible
from strategies.training.layouts import found_layout
from strategies.training.parallel import Initial, ParallelModel, Setting
from strategies.training.replicas import require_one_order


def parallelize(
    module: nn.Module,
    strategy: str,
    *,
    device: torch.device,
    exchange: ExchangeSettings = PLAIN,
    layout: ModelLayout | None = None,
) -> ParallelModel:
    """Lay `module`, already on `device`, out over the ranks of the exchange's group as `strategy` says.

    `layout` names the parts of the model that a strategy cuts it at (None: its repeated blocks, as
    `found_layout` finds them).

    Collective: all ranks of the group call it. Raises SpecError for an unknown strategy, compressor or
    collective, and, with the message of a plan, for a combination that is refused or does not fit the number
    of ranks.
    """
    precision = "bf16" if STRATEGIES.facts(strategy).gathers_bf16 else "fp32"
    # The caller's own loop is not known, so no setting of it is refused.
    require_layout(strategy, device, exchange, precision=precision, optimizer="sgd:momentum=0")
    layout = found_layout(module) if layout is None else layout
    return lay_out(module, strategy, device=device, exchange=exchange, layout=layout)


def require_layout(strategy: str, device: torch.device, exchange: ExchangeSettings, **others: object) -> None:
    """Raise SpecError if a strategy, an exchange and `others`, fields of a cell, cannot be combined."""
    kind = device_of(device).kind
    link = Link(exchange.group) if STRATEGIES.facts(strategy).distributed else None
    require_possible(
        strategy=strategy,
        gpus=1 if link is None else link.size,
        device=kind,
        backend="gloo" if link is None else link.backend(kind),
        compression=exchange.compression,
        collective=exchange.collective,
        node_size=exchange.node_size,
        seed=exchange.seed,
        **others,
    )


def lay_out(
    module: nn.Module,
    strategy: str,
    *,
    device: torch.device,
    exchange: ExchangeSettings,
    layout: ModelLayout,
    initial: Initial | None = None,
) -> ParallelModel:
    """Lay `module` out as `parallelize` does, for settings that have been checked. A module on the meta
    device needs `initial`, which gives its values."""
    facts = STRATEGIES.facts(strategy)
    assert initial is None or facts.by_unit
    if not facts.distributed:
        alone: Callable[[nn.Module], ParallelModel] = load(facts.model)
        return alone(module)
    setting = Setting(
        facts=facts,
        device=device,
        exchange=exchange,
        layout=layout,
        groups=facts.groups(Link(exchange.group).size, exchange.node_size),
        # `initial` is None if the module was built with its values: nothing is to be filled.
        fill=lambda tensor: None if initial is None else initial(tensor, device),
    )
    require_one_order(module, Link(exchange.group), device)
    build: Callable[[nn.Module, Setting], ParallelModel] = load(facts.model)
    model, promise = build(module, setting), facts.promise
    model.period, model.shown_after = promise.every, promise.shown_after
    model.ramp_steps = max(model.ramp_steps, promise.after)
    return model
