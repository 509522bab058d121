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

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from results.errors import UsageError
from results.groups import Dimension, GroupLayout
from results.layout import ModelLayout
from strategies.advice import ANY_PARAMETER, WHOLE
from strategies.collectives.link import Link
from strategies.context.model import ContextSplit
from strategies.devices import device_of
from strategies.fsdp.block_choices import BlockChoice
from strategies.fsdp.facts import Fsdp2Facts
from strategies.tensor_parallel.model import TensorSplit
from strategies.training.boxes import Box, Owned, View, rows_of
from strategies.training.checkpointing import checkpoint_blocks
from strategies.training.clipping import clip_shards
from strategies.training.layouts import homes_of, layout_module, require_dense, require_unhooked
from strategies.training.loss import Batch, Loss
from strategies.training.missing_gradients import UnlikeGradients
from strategies.training.parallel import OptimizerState, ParallelModel, Setting
from strategies.training.precision import require_bf16_parameters
from strategies.training.replicas import Begin, Buffers, take_from_first, take_values

_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""Gathered parameters in bf16, sums of gradients in full precision."""


_EXCHANGES = {"_all_gather_comm": "gathers", "_reduce_scatter_comm": "averages the gradients of"}


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
        _require_shardable(module, layout)
        if facts.gathers_bf16:
            require_bf16_parameters(module, device)
        begin = partial(take_values, self._link, setting.fill)
        self._grid = DeviceGrid(self._link, setting.groups, device)
        self._split = None
        if self._grid.tensor is not None:
            sequence = facts.splits_tokens
            self._split = TensorSplit(module, layout, self._grid.tensor, begin, sequence=sequence)
        self._context = None
        if facts.attention is not None:
            along = self._grid.along("context")
            self._context = ContextSplit(module, layout, along, facts.attention)
        choices = _choices(facts, layout)
        if recomputed := tuple(name for name, choice in choices.items() if choice.checkpoint):
            checkpoint_blocks(module, ModelLayout(blocks=recomputed))
        self._units = _shard(module, choices, facts, self._grid.mesh, partial(self._begin_unit, begin))
        begin(self._buffers.now())
        self._named = dict(module.named_parameters())
        calls = list(_calls({**dict(zip(choices, self._units, strict=True)), "": cast(FSDPModule, module)}))
        self._unlike = UnlikeGradients(self._link, device, [what for _, _, what in calls])
        for place, (group, name, _) in enumerate(calls):
            _Guard(group, name, self._unlike, place)
        if prefetch := setting.spec.integer("prefetch"):
            _prefetch(self._units, prefetch, device)

    def _begin_unit(self, begin: Begin, unit: str) -> None:
        """Give values to the parameters that are not sharded yet; split layers already have theirs."""
        named = self.module.get_submodule(unit).named_parameters(prefix=unit)
        begin(
            parameter
            for name, parameter in named
            if not isinstance(parameter, DTensor) and not (self._split and self._split.cuts(name))
        )

    def owned(self) -> Iterator[Owned]:
        for unit in (*self._units, cast(FSDPModule, self.module)):
            # A forward pass without a backward pass leaves the parameters whole.
            unit.reshard()
        for name, parameter in self.bare.named_parameters():
            yield Owned(parameter, tuple(self._boxes(name, cast(DTensor, parameter))))

    def _boxes(self, name: str, parameter: DTensor) -> Iterator[tuple[Box, View]]:
        """Yield the places of this rank's shard: torch splits the first dimension into pieces of equal size,
        and the last pieces may be empty."""
        link, length = self._grid.shard, parameter.shape[0]
        size = math.ceil(length / link.size)
        rows = range(min(length, link.rank * size), min(length, (link.rank + 1) * size))
        if self._split is None:
            boxes = iter([rows_of(name, tuple(parameter.shape), rows)] if rows else [])
        else:
            boxes = self._split.boxes(name, parameter, rows)
        for box, view in boxes:
            yield box, partial(_view_of_local, view)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Collective."""
        for name, parameter in self.bare.named_parameters():
            yield name, cast(Tensor, self._whole(name, parameter.detach()))

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Collective."""
        for name, parameter in self.bare.named_parameters():
            if parameter.grad is not None:
                yield name, cast(Tensor, self._whole(name, parameter.grad))

    def named_state(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, OptimizerState]]:
        """Collective."""
        for name, state in super().named_state(optimizer):
            yield name, {key: self._whole(name, value) for key, value in sorted(state.items())}

    @torch.no_grad()
    def _whole(self, name: str, value: object) -> object:
        """Gather a value that has the layout of the parameter `name`; return any other value as it is.
        Collective."""
        if not isinstance(value, DTensor):
            return value
        whole = _gathered(value, self._grid.shard, self._device)
        return whole if self._split is None else self._split.whole(name, whole)

    def part_of(self, batch: Batch, loss: Loss) -> Batch:
        return batch if self._context is None else self._context.part(batch, loss)

    def started(self) -> None:
        self._unlike.begin()
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
                self._unlike.refuse(self._named)
                if self._split is not None:
                    self._split.sum_gradients(self._shards_of_gradients(), self._device)
        finally:
            if self._context is not None:
                self._context.end()
            if now:
                self._unlike.end()

    def _shards_of_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.bare.named_parameters():
            if parameter.grad is not None:
                yield name, _local(parameter.grad)

    def clip_gradients(self, max_norm: float) -> Tensor:
        replicas, split = self._grid.groups.replicate, self._split
        # Each shard with the number of ranks that have the same one.
        shards = [
            (gradient, replicas * (1 if split is None else split.copies(name)))
            for name, gradient in self._shards_of_gradients()
        ]
        return clip_shards(shards, max_norm, self._link, self._device)


class DeviceGrid:
    """This rank's links in each dimension of a group layout, and torch's mesh of ranks that share shards."""

    def __init__(self, everyone: Link, groups: GroupLayout, device: torch.device) -> None:
        """Collective over `everyone`, which must be all ranks of the default group."""
        self.everyone = everyone
        self.groups = groups
        self.shard = self.along("shard", "context")
        self.replicate = self.along("replicate") if groups.replicate > 1 else None
        self.tensor = self.along("tensor") if groups.tensor > 1 else None
        self.mesh = self._mesh(device.type)

    def along(self, *dimensions: Dimension) -> Link:
        """Return the link to the ranks that differ only in these dimensions; collective."""
        parts = self.groups.groups(*dimensions)
        return self.everyone if len(parts) == 1 else self.everyone.split(parts)

    def _mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of the ranks that have shards of the same tensors: (shard,), or (replicate,
        shard)."""
        if self.replicate is None:
            return DeviceMesh.from_group(self.shard.group, device_type)
        alike = self.groups.groups("replicate", "shard", "context")
        own = next(ranks for ranks in alike if self.everyone.rank in ranks)
        return DeviceMesh.from_group(
            [self.replicate.group, self.shard.group],
            device_type,
            mesh=torch.tensor(own).view(self.groups.replicate, self.groups.shard_ranks),
            mesh_dim_names=("replicate", "shard"),
        )


class _Guard:
    """Checks with all ranks that they make the same operation of a unit, and then calls torch's operation.

    After the first step each rank compares its operations with its own first step.
    """

    def __init__(self, group: Any, name: str, unlike: UnlikeGradients, place: int) -> None:
        """`name` is the attribute of torch's `group` of parameters that is called; `place` is its number."""
        self._group, self._name, self._unlike, self._place = group, name, unlike, place
        self._call = getattr(group, name)
        self.allocate = self._call.allocate
        setattr(group, name, self)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *others: Any, **named: Any) -> Any:
        self._unlike.meet(self._place, input_tensor.numel())
        return self._call(output_tensor, input_tensor, *others, **named)


def _calls(units: Mapping[str, FSDPModule]) -> Iterator[tuple[Any, str, str]]:
    """Yield the attributes by which torch's groups of parameters exchange, and a description of each."""
    for unit, module in units.items():
        # Attributes of torch 2.11 to 2.13; without them a step in which ranks differ fails in the backend.
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for name, does in _EXCHANGES.items():
                if hasattr(group, name):
                    yield group, name, f"{does} {unit or 'what is around the blocks'}"


def _gathered(value: DTensor, link: Link, device: torch.device) -> Tensor:
    """Gather the shards of all ranks of `link`; collective."""
    # The device's backend cannot send offloaded shards from host memory.
    local = value.to_local().to(device)
    # torch splits the first dimension into pieces of equal size; the last ones may be empty.
    rows = math.ceil(value.shape[0] / link.size)
    padded = local.new_zeros(rows, *value.shape[1:])
    padded[: local.shape[0]] = local
    gathered = link.all_gather(padded.flatten())
    return gathered.view(rows * link.size, *value.shape[1:])[: value.shape[0]]


def _require_shardable(module: nn.Module, layout: ModelLayout) -> None:
    _require_units(module, layout)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise UsageError(
                f"fsdp shards the first dimension, and {name} is a single number: make it a vector of one "
                f"(torch.tensor([2.0])), or {ANY_PARAMETER}"
            )
    require_dense(module, "fsdp", WHOLE)
    require_unhooked(module.named_parameters(), "fsdp")


def _require_units(module: nn.Module, layout: ModelLayout) -> None:
    """Raise UsageError if a block shares a parameter, or has trained ones of several data types."""
    types: dict[str, set[torch.dtype]] = {}
    for parameter, homes in homes_of(module, layout).items():
        if len(homes) > 1:
            name = next(name for name, value in module.named_parameters() if value is parameter)
            places = " and ".join(home or "what is around the blocks" for home in sorted(homes, reverse=True))
            raise UsageError(f"fsdp shards each block by itself, and {places} share {name}: {WHOLE}")
        if parameter.requires_grad:
            types.setdefault(next(iter(homes)), set()).add(parameter.dtype)
    for home, kinds in types.items():
        if len(kinds) > 1:
            named = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
            raise UsageError(
                f"fsdp shards trained parameters of one data type together, and "
                f"{home or 'what is around the blocks'} has {named}: {WHOLE}"
            )


def _choices(facts: Fsdp2Facts, layout: ModelLayout) -> dict[str, BlockChoice]:
    """Return the choices for each block, in the order of the forward pass. Raises UsageError."""
    chosen = facts.choices(len(layout.blocks))
    if len(chosen) != len(layout.blocks):
        raise UsageError(
            f"{facts.spec.text} chooses for {len(chosen)} blocks, and the model has {len(layout.blocks)}"
        )
    return dict(zip(layout.blocks, chosen, strict=True))


def _shard(
    module: nn.Module,
    choices: Mapping[str, BlockChoice],
    facts: Fsdp2Facts,
    mesh: DeviceMesh,
    begin_unit: Callable[[str], None],
) -> list[FSDPModule]:
    """Shard each block in the order of the forward pass, then the unit around the blocks.

    `begin_unit` gives each unit its values just before, so that only one unit is complete at a time.
    """
    policy = _BF16 if facts.gathers_bf16 else MixedPrecisionPolicy()
    # The unit around the blocks is needed again as soon as the backward pass begins.
    around = BlockChoice(reshard=False, offload=facts.offloads)
    try:
        units: list[FSDPModule] = []
        for name, choice in choices.items():
            block = layout_module(module, name)
            begin_unit(name)
            units.append(fully_shard(block, **_options(choice, mesh), mp_policy=policy))
        begin_unit("")
        fully_shard(module, **_options(around, mesh), mp_policy=policy)
    except (AssertionError, ValueError) as error:
        # torch's own requirements of a model, such as one data type a unit.
        raise UsageError(f"fsdp cannot shard this model: {error}; {WHOLE}") from error
    return units


def _options(choice: BlockChoice, mesh: DeviceMesh) -> dict[str, Any]:
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": choice.reshard}
    if choice.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return options


def _prefetch(units: Sequence[FSDPModule], depth: int, device: torch.device) -> None:
    """Gather the next `depth` blocks while one computes, forward and backward."""
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[place + 1 : place + 1 + depth]))
        unit.set_modules_to_backward_prefetch(list(units[max(0, place - depth) : place][::-1]))
        if device_of(device).kind == "cpu":
            # Only on accelerators does torch gather asynchronously by itself.
            unit._set_unshard_async_op(True)


def _view_of_local(view: View, values: Tensor) -> Tensor:
    return view(_local(values))


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
