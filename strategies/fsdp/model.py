"""torch's fully sharded data parallelism (FSDP2): parameters, gradients and optimizer state in shards.

Zhao et al. 2023, arXiv:2304.11277; stages 2 and 3 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054). Every
block of the model's layout is one unit: its parameters are gathered before its forward and backward pass,
and its gradients are averaged into shards. With `reshard=true` the gathered parameters are freed between the
two passes (ZeRO-3), with `reshard=false` they stay until the backward pass ends (ZeRO-2); `manual` chooses
block by block.

A rank sends in one step, with P bytes of parameters over p ranks: (p - 1) / p P for each gathering (two with
`reshard=true`, one without; the unit around the blocks is gathered once), and (p - 1) / p P for the
gradients. Gloo runs a reduce-scatter as an all-reduce, twice that. torch pads the
first dimension of every parameter to a multiple of p.

`hsdp` does this within each node, of p ranks, and sums the shards of the gradients across n nodes:
2 (n - 1) / n P / p more, the only bytes between nodes (Zhao et al., section 3.2.2). With `tp` the layers are
split first (`tensor_parallel`), and each part is then sharded over the ranks that have the same part.

On CPU torch waits for each gathering at its start, so that no gathering overlaps, unless `prefetch` is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from results.errors import UsageError
from results.layout import ModelLayout
from strategies.collectives.link import Link
from strategies.context.model import ContextSplit
from strategies.devices import device_of
from strategies.experts.model import ExpertSplit
from strategies.fsdp.block_choices import BlockChoice
from strategies.fsdp.facts import Fsdp2Facts
from strategies.fsdp.shards import DeviceGrid, Shards, local, require_shardable
from strategies.tensor_parallel.model import TensorSplit
from strategies.training.boxes import Owned
from strategies.training.checkpointing import checkpoint_blocks
from strategies.training.clipping import clip_shards
from strategies.training.loss import Batch, Loss
from strategies.training.parallel import OptimizerState, ParallelModel, Setting
from strategies.training.precision import require_bf16_parameters
from strategies.training.replicas import Buffers, take_from_first, take_values


class FsdpModel(ParallelModel):
    """A module under `fully_shard`, block by block, with the options of its spec."""

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        """Collective: all ranks take the parameters and buffers of rank 0, and shard them unit by unit.

        Raises UsageError for a model that torch cannot shard: parameters without a dimension, of several data
        types in one block, shared by blocks, or with sparse gradients; for a model that does not compute with
        `params=bf16`; and for one that cannot be split into `tp` parts.
        """
        super().__init__(module)
        facts, device, layout = cast(Fsdp2Facts, setting.facts), setting.device, setting.layout
        self._device = device
        self._link = self.decided_over = Link(setting.exchange.group)
        self._buffers = Buffers(module)
        require_shardable(module, layout)
        if facts.gathers_bf16:
            require_bf16_parameters(module, device)
        begin = partial(take_values, self._link, setting.fill)
        self._grid = DeviceGrid(self._link, setting.groups, device)
        self._split, slicings = None, self._grid.slicings
        if self._grid.tensor is not None:
            sequence = facts.splits_tokens
            self._split = TensorSplit(module, layout, self._grid.tensor, slicings, begin, sequence=sequence)
        self._context = None
        if facts.attention is not None:
            along = self._grid.along("context")
            self._context = ContextSplit(module, layout, along, facts.attention)
        experts = None
        if self._grid.expert is not None:
            experts = ExpertSplit(module, layout, self._grid.expert, slicings)
        choices = _choices(facts, layout)
        if recomputed := tuple(name for name, choice in choices.items() if choice.checkpoint):
            checkpoint_blocks(module, ModelLayout(blocks=recomputed))
        self._shards = Shards(module, choices, facts, self._grid, experts=experts, begin=begin)
        begin(self._buffers.now())
        if prefetch := setting.spec.integer("prefetch"):
            _prefetch(self._shards.blocks, prefetch, device)

    def owned(self) -> Iterator[Owned]:
        return self._shards.owned(self.bare.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Collective."""
        for name, parameter in self.bare.named_parameters():
            yield name, cast(Tensor, self._shards.whole(name, parameter.detach()))

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Collective."""
        for name, parameter in self.bare.named_parameters():
            if parameter.grad is not None:
                yield name, cast(Tensor, self._shards.whole(name, parameter.grad))

    def named_state(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, OptimizerState]]:
        """Collective."""
        for name, state in super().named_state(optimizer):
            yield name, {key: self._shards.whole(name, value) for key, value in sorted(state.items())}

    def part_of(self, batch: Batch, loss: Loss) -> tuple[Batch, Loss]:
        if self._context is None:
            return batch, loss
        return self._context.part(batch, loss), self._context.even(loss)

    def started(self) -> None:
        self._shards.unlike.begin()
        take_from_first(self._link, self._buffers.now())

    @contextmanager
    def exchange(self, *, now: bool) -> Iterator[None]:
        """Exchange in the last micro-batch; before it each rank adds up complete gradients.

        Raises UsageError at its end if ranks have gradients of different parameters, as `UnlikeGradients`
        does.
        """
        cast(FSDPModule, self.module).set_requires_gradient_sync(now)
        try:
            yield
            if now:
                self._shards.unlike.refuse(self._shards.named)
                if self._split is not None:
                    self._split.sum_gradients(self._shards_of_gradients(), self._device)
        finally:
            if self._context is not None:
                self._context.end()
            if now:
                self._shards.unlike.end()

    def _shards_of_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.bare.named_parameters():
            if parameter.grad is not None:
                yield name, cast(Tensor, local(parameter.grad))

    def clip_gradients(self, max_norm: float) -> Tensor:
        # Each shard with the number of ranks that have the same one.
        shards = [(value, self._shards.copies(name)) for name, value in self._shards_of_gradients()]
        return clip_shards(shards, max_norm, self._link, self._device)


def _choices(facts: Fsdp2Facts, layout: ModelLayout) -> dict[str, BlockChoice]:
    """Return the choices for each block, in the order of the forward pass. Raises UsageError."""
    chosen = facts.choices(len(layout.blocks))
    if len(chosen) != len(layout.blocks):
        raise UsageError(
            f"{facts.spec.text} chooses for {len(chosen)} blocks, and the model has {len(layout.blocks)}"
        )
    return dict(zip(layout.blocks, chosen, strict=True))


def _prefetch(units: Sequence[FSDPModule], depth: int, device: torch.device) -> None:
    """Gather the next `depth` blocks while one computes, forward and backward."""
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[place + 1 : place + 1 + depth]))
        unit.set_modules_to_backward_prefetch(list(units[max(0, place - depth) : place][::-1]))
        if device_of(device).kind == "cpu":
            # Only on accelerators does torch gather asynchronously by itself.
            unit._set_unshard_async_op(True)
