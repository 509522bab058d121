"""Expert parallelism: each rank of a group has some of the experts of a layer, and gets their tokens.

Lepikhin et al. 2020, arXiv:2006.16668, section 3. The ranks of a group have different tokens. Before the
experts of a layer each rank sends every row to the rank that has its expert, and receives the result from
there; the backward pass does the opposite. The ranks first exchange the numbers of rows, which differ, and
the host waits for these. The gradient of an expert is thus the sum over the tokens of all ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from results.errors import UsageError
from results.layout import ModelLayout
from strategies.collectives.link import Link
from strategies.tensor_parallel.sequence import Move, exchanged
from strategies.training.checkpointing import wrap_forward
from strategies.training.layouts import layout_module, require_unhooked
from strategies.training.replicas import Begin
from strategies.training.slicing import Slicing, Slicings

_OTHERWISE = "use a strategy without ep"


class ExpertSplit:
    """The layers of experts of a module, of which each rank of a link has an equal part of the experts."""

    def __init__(self, module: nn.Module, layout: ModelLayout, link: Link, slicings: Slicings) -> None:
        """Have the layers exchange their rows, in place; `split` gives each rank its experts.

        Raises UsageError for a model without layers of experts, or whose experts do not divide.
        """
        if not layout.experts:
            raise UsageError(
                f"expert parallelism needs a model whose layout names its layers of experts: {_OTHERWISE}"
            )
        self._module, self._link, self._slicings = module, link, slicings
        self.layers: dict[str, int] = {}
        """The number of a rank's experts of each layer, by the layer's name."""
        for name in layout.experts:
            if not any(name.startswith(f"{block}.") for block in layout.blocks):
                raise UsageError(f"{name} is in none of the blocks that the layout names: {_OTHERWISE}")
            experts = layout_module(module, name)
            own = self.layers[name] = _own_experts(name, experts, link.size)
            wrap_forward(experts, partial(partial, self._forward, own))

    def within(self, block: str) -> list[str]:
        """Return the names of the layers in a block."""
        return [name for name in self.layers if name.startswith(f"{block}.")]

    def split(self, name: str, begin: Begin) -> None:
        """Leave this rank its experts of a layer, after `begin` has given each matrix of all of them its
        values; it does nothing the second time."""
        experts = layout_module(self._module, name)
        for key, parameter in list(experts.named_parameters()):
            if self._slicings.cut(f"{name}.{key}"):
                return
            begin([parameter])
            slicing = Slicing(link=self._link, dim=0)
            self._slicings.add(f"{name}.{key}", slicing)
            owner, _, attribute = key.rpartition(".")
            setattr(experts.get_submodule(owner), attribute, slicing.parameter(parameter))
        own = self.layers[name]
        cast(Any, experts).deal(self._link.rank * own, own)

    def _forward(
        self, own: int, forward: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor
    ) -> Tensor:
        """Have the rows (tokens, width) of all experts, with the number of each, (E,), computed where the
        experts are; `own` is the number of this rank's experts."""
        ranks = self._link.size
        received = self._link.all_to_all(counts.view(ranks, own))
        sent, came = torch.stack([counts.view(ranks, own).sum(1), received.sum(1)]).tolist()
        there: Move = partial(_moved, sent=sent, came=came)
        back: Move = partial(_moved, sent=came, came=sent)
        arrived = exchanged(rows, self._link, there, back)
        # The rows of one rank lie together; the experts take those of one expert together.
        experts = torch.arange(own, device=rows.device).repeat(ranks)
        order = experts.repeat_interleave(received.flatten(), output_size=len(arrived)).argsort(stable=True)
        results = forward(arrived[order], received.sum(0))
        return exchanged(results[order.argsort()], self._link, back, there)


def _moved(rows: Tensor, link: Link, *, sent: list[int], came: list[int]) -> Tensor:
    return link.all_to_all_rows(rows, sent, came)


def _own_experts(name: str, experts: nn.Module, ranks: int) -> int:
    """Return the number of a rank's experts of a layer. Raises UsageError if they do not divide."""
    count = getattr(experts, "count", None)
    if not isinstance(count, int) or count < 1 or not callable(getattr(experts, "deal", None)):
        raise UsageError(
            f"{name} lacks an attribute count, the number of its experts, or a method deal(first, count), "
            f"which leaves it count experts from first on: add both, or {_OTHERWISE}"
        )
    if count % ranks:
        raise UsageError(f"{count} experts of {name} do not divide by ep={ranks}: {_OTHERWISE}")
    for key, parameter in experts.named_parameters(name):
        if parameter.shape[0] % count:
            raise UsageError(
                f"{key} has {parameter.shape[0]} rows, which {count} experts do not divide into equal "
                f"matrices: {_OTHERWISE}"
            )
    require_unhooked(experts.named_parameters(name), "expert parallelism")
    return count // ranks
