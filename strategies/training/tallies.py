"""Parts of a model that move by what they have counted in a step of all ranks, without a gradient.

An example is the bias by which a router balances its experts. Such a part has a buffer `tally` (n,), which
its forward passes add to, and a method `settle(total)`, which gets the sum of the tallies after each update,
moves the part and makes the tally zero. The sum is over all ranks: where several compute the same tokens, it
is a multiple of the sum over the replicas, so that `settle` may use only its proportions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from results.errors import UsageError
from strategies.collectives.link import Link
from strategies.facts import StrategyFacts


class Tallies:
    """The tallies of the parts of one model, which the ranks may share out among them."""

    def __init__(
        self, module: nn.Module, facts: StrategyFacts, link: Link | None, device: torch.device
    ) -> None:
        """Find the parts of the complete `module`. Raises UsageError if replicas take steps by themselves."""
        self._link, self._device = link, device
        self._sizes = {name: len(part.tally) for name, part in _parts(module).items()}
        if self._sizes and not facts.promise.averages_all_gradients(facts.promise.after):
            raise UsageError(
                f"{next(iter(self._sizes))} moves by a count over all replicas after each step, and with "
                f"{facts.spec.text} they take steps apart: use another strategy"
            )

    @torch.no_grad()
    def settle(self, module: nn.Module) -> None:
        """Sum the tallies over the ranks, and move the parts that this rank has in `module`; collective."""
        if not self._sizes:
            return
        own = _parts(module)
        zeros = {
            name: torch.zeros(size, dtype=torch.int64, device=self._device)
            for name, size in self._sizes.items()
        }
        total = torch.cat([own[name].tally if name in own else zero for name, zero in zeros.items()])
        if self._link is not None:
            self._link.all_reduce(total)
        for name, each in zip(self._sizes, torch.split(total, list(self._sizes.values())), strict=True):
            if name in own:
                own[name].settle(each)


def _parts(module: nn.Module) -> dict[str, Any]:
    named = module.named_modules()
    return {name: part for name, part in named if isinstance(getattr(part, "tally", None), Tensor)}
