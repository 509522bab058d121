"""From a strategy's name to a model laid out by it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed import ProcessGroup

from results.spec import Spec
from strategies.catalog import STRATEGIES
from strategies.ddp import DdpModel
from strategies.parallel import ParallelModel


def parallelize(
    module: nn.Module, strategy: str, *, device: torch.device, group: ProcessGroup | None = None
) -> ParallelModel:
    """Lay `module`, already on `device`, out over `group` (None: the default group) as `strategy` says.

    Collective: all ranks of the group call it. Raises SpecError for a strategy that does not exist.
    """
    spec = STRATEGIES.parse(strategy)
    return _BUILDERS[spec.name](module, spec, device, group)


Builder = Callable[[nn.Module, Spec, torch.device, ProcessGroup | None], ParallelModel]


def _single(module: nn.Module, spec: Spec, device: torch.device, group: ProcessGroup | None) -> ParallelModel:
    return ParallelModel(module)


def _ddp(module: nn.Module, spec: Spec, device: torch.device, group: ProcessGroup | None) -> ParallelModel:
    return DdpModel(module, spec, device=device, group=group)


_BUILDERS: dict[str, Builder] = {"single": _single, "ddp": _ddp}
