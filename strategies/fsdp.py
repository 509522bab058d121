"""torch's fully sharded data parallelism (FSDP2): parameters, gradients and optimizer state in shards.

Zhao et al. 2023, arXiv:2304.11277; stages 2 and 3 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054). Every
block of the model's layout is one unit: its parameters are gathered before its forward and backward pass,
and its gradients are averaged into shards. With `reshard=true` the whole parameters are given up between the
two passes (ZeRO-3), with `reshard=false` they stay until the backward pass is over (ZeRO-2).

What travels in one step of a rank, with P bytes of parameters over p ranks: (p - 1) / p P for each gathering
(two with `reshard=true`, one without; the unit around the blocks is gathered once), and (p - 1) / p P for the
gradients. Gloo has no reduce-scatter of its own and runs it as an all-reduce, twice that. torch pads the
first dimension of every parameter to a multiple of p.

On CPU torch waits for each gathering where it begins, so that nothing overlaps, unless `prefetch` is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from results.errors import UsageError
from results.layout import ModelLayout
from results.spec import Spec
from strategies.clipping import clip_shards
from strategies.collectives.link import Link
from strategies.parallel import OptimizerState, ParallelModel, Setting
from strategies.replicas import Buffers, take_from_first

_DTYPES = {"fp32": None, "bf16": torch.bfloat16}


class FsdpModel(ParallelModel):
    """A module under `fully_shard`, block by block, with the options of its spec."""

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        """Collective: all ranks take the parameters and buffers of rank 0.

        Raises UsageError for a model that torch cannot shard: parameters without a dimension, of several
        data types in one block, or with sparse gradients.
        """
        super().__init__(module)
        spec, device, exchange = setting.spec, setting.device, setting.exchange
        self._device = device
        self._link = self.decided_over = Link(exchange.group)
        self._buffers = Buffers(module)
        _require_shardable(module)
        for tensor in (*module.parameters(), *self._buffers.now()):
            take_from_first(self._link, [tensor])
        self._units = _shard(module, setting.layout, spec, _mesh(exchange.group, device))
        if spec.integer("prefetch"):
            _prefetch(self._units, spec.integer("prefetch"), device)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Collective."""
        for name, parameter in self.bare.named_parameters():
            yield name, cast(Tensor, self._whole(parameter.detach()))

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Collective."""
        for name, parameter in self.bare.named_parameters():
            if parameter.grad is not None:
                yield name, cast(Tensor, self._whole(parameter.grad))

    def named_state(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, OptimizerState]]:
        """Collective."""
        for name, state in super().named_state(optimizer):
            yield name, {key: self._whole(value) for key, value in sorted(state.items())}

    @torch.no_grad()
    def _whole(self, value: object) -> object:
        """A value that is laid out as the parameters are, gathered, and any other as it is; collective."""
        if not isinstance(value, DTensor):
            return value
        # Shards that are offloaded lie where no collective of the device's backend reaches them.
        local = value.to_local().to(self._device)
        # torch splits the first dimension into pieces of equal size, of which the last ones may be empty.
        rows = math.ceil(value.shape[0] / self._link.size)
        padded = local.new_zeros(rows, *value.shape[1:])
        padded[: local.shape[0]] = local
        gathered = self._link.all_gather(padded.flatten())
        return gathered.view(rows * self._link.size, *value.shape[1:])[: value.shape[0]]

    def started(self) -> None:
        take_from_first(self._link, self._buffers.now())

    def exchange(self, *, now: bool) -> AbstractContextManager[None]:
        """Until the last micro-batch gradients stay whole on every rank, and are added up there."""
        cast(FSDPModule, self.module).set_requires_gradient_sync(now)
        return nullcontext()

    def clip_gradients(self, max_norm: float) -> None:
        shards = [(_local(p.grad), 1) for p in self.parameters() if p.grad is not None]
        clip_shards(shards, max_norm, self._link, self._device)


def _require_shardable(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise UsageError(f"fsdp shards the first dimension, and {name} has none: use ddp or scratch-ddp")
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise UsageError(f"fsdp has no sparse gradients, as {name} asks for: use ddp or scratch-ddp")


def _mesh(group: dist.ProcessGroup | None, device: torch.device) -> DeviceMesh:
    """All ranks of the group in one dimension."""
    chosen = dist.group.WORLD if group is None else group
    assert chosen is not None
    return DeviceMesh.from_group(chosen, device.type)


def _shard(module: nn.Module, layout: ModelLayout, spec: Spec, mesh: DeviceMesh) -> list[FSDPModule]:
    """Shard each block, then what is around them; the blocks in the order of the forward pass."""
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": spec.flag("reshard"),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_DTYPES[spec.word("params")], reduce_dtype=torch.float32
        ),
    }
    if spec.word("offload") == "cpu":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    blocks = [module.get_submodule(name) for name in layout.blocks]
    try:
        units: list[FSDPModule] = [fully_shard(block, **options) for block in blocks]
        # What is around the blocks is needed again as soon as the backward pass begins.
        fully_shard(module, **options | {"reshard_after_forward": False})
    except (AssertionError, ValueError) as error:
        # What torch asks of a model, in its words: one data type a unit, say.
        raise UsageError(f"fsdp cannot shard this model: {error}; use ddp or scratch-ddp") from error
    return units


def _prefetch(units: Sequence[FSDPModule], depth: int, device: torch.device) -> None:
    """Gather the next `depth` blocks while one computes, forward and backward."""
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[place + 1 : place + 1 + depth]))
        unit.set_modules_to_backward_prefetch(list(units[max(0, place - depth) : place][::-1]))
        if device.type == "cpu":
            # torch gathers beside the computation by itself on accelerators alone.
            unit._set_unshard_async_op(True)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
