"""ZeRO stage 1 by torch: replicas with averaged gradients, of which each rank updates a part.

Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1, as torch's ZeroRedundancyOptimizer does it: whole
parameters are dealt out to the ranks, the largest first, each to the rank that has the fewest elements.

A rank sends in one step, with P bytes of parameters over p ranks: 2 (p - 1) / p P for DDP's all-reduce of the
gradients, as if all of them were needed everywhere, and (p - 1) / p P for the updated parameters, one
broadcast a rank. For many ranks that is three times the parameters, while a reduce-scatter and an all-gather
would send twice the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from results.errors import UsageError
from results.registry import Registry
from strategies.advice import WHOLE
from strategies.collectives.link import Link
from strategies.ddp.facts import Ddp
from strategies.ddp.model import DdpModel
from strategies.optimizers import optimizer_call
from strategies.training.gathered import gathered
from strategies.training.layouts import require_dense
from strategies.training.parallel import OptimizerState, Setting


class Zero1Model(DdpModel):
    """A module under DistributedDataParallel with torch's ZeroRedundancyOptimizer."""

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        """Raises UsageError for a model whose parameters torch does not deal out: with several data types, or
        with sparse gradients, whose state is not gathered."""
        require_dense(module, "zero1", WHOLE)
        types = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
        if len(types) > 1:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
            raise UsageError(f"zero1 takes parameters of one data type, not {names}: {WHOLE}")
        ddp = Registry("strategy", (Ddp,)).facts(f"{Ddp.name}:bucket_mb={setting.spec.number('bucket_mb')!r}")
        super().__init__(module, replace(setting, facts=ddp))
        self._device = setting.device
        self._link = Link(setting.exchange.group)

    def build_optimizer(self, text: str) -> torch.optim.Optimizer:
        """Build the optimizer that a spec text names, over this rank's part; the parameters move into
        buffers, one for each rank, which are broadcast."""
        updated = [parameter for parameter in self.parameters() if parameter.requires_grad]
        kind, arguments = optimizer_call(text, updated)
        optimizer = _PartOfOptimizer(
            updated,
            optimizer_class=kind,
            process_group=self._link.group,
            parameters_as_bucket_view=True,
            **arguments,
        )
        # A schedule that also moves the momentum (OneCycleLR) asks the optimizer's defaults for it.
        optimizer.defaults = {**optimizer.optim.defaults, **optimizer.defaults}
        return optimizer

    def local_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        own: torch.optim.Optimizer = cast(ZeroRedundancyOptimizer, optimizer).optim
        return own

    def named_state(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, OptimizerState]]:
        """Collective: the rank that updates a parameter sends its state to the others."""
        local = self.local_state(optimizer)
        named = list(self.bare.named_parameters())
        own = {name: local[parameter] for name, parameter in named if local.get(parameter)}
        return gathered(own, [name for name, _ in named], self._link, self._device)


class _PartOfOptimizer(ZeroRedundancyOptimizer):
    """torch's optimizer, whose `state_dict` would need a consolidation before."""

    def state_dict(self) -> dict[str, Any]:
        """Raises UsageError: no rank has the state of all parameters."""
        raise UsageError(
            "zero1 keeps a part of the optimizer's state on each rank: call trainer.save(folder), or "
            "trainer.state_dict() on every rank, instead of optimizer.state_dict()"
        )
