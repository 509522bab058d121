"""Units of a module under `fully_shard`, and the links of the grid over which they are sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from strategies.facts import StrategyFacts
from strategies.fsdp.block_choices import BlockChoice
from strategies.tensor_parallel.model import TensorSplit
from strategies.training.boxes import Box, Owned, View, rows_of
from strategies.training.layouts import homes_of, layout_module, require_dense, require_unhooked
from strategies.training.missing_gradients import UnlikeGradients
from strategies.training.replicas import Begin

_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""Gathered parameters in bf16, sums of gradients in full precision."""
_EXCHANGES = {"_all_gather_comm": "gathers", "_reduce_scatter_comm": "averages the gradients of"}


class Shards:
    """A module under `fully_shard`, block by block."""

    def __init__(
        self,
        module: nn.Module,
        choices: Mapping[str, BlockChoice],
        facts: StrategyFacts,
        grid: DeviceGrid,
        *,
        split: TensorSplit | None = None,
        begin: Begin = lambda tensors: None,
    ) -> None:
        """`choices` has one choice for each block, in the order of the forward pass; `begin` gives parameters
        their values, unit by unit, before they are sharded; `split` has split layers before. Collective."""
        self.root = cast(FSDPModule, module)
        self._grid, self._split = grid, split
        self.blocks = _shard(module, choices, facts, grid.mesh, partial(self._begin_unit, begin))
        self.named = dict(module.named_parameters())
        calls = list(_calls({**dict(zip(choices, self.blocks, strict=True)), "": self.root}))
        self.unlike = UnlikeGradients(grid.stage, grid.device, [what for _, _, what in calls])
        for place, (group, name, _) in enumerate(calls):
            _Guard(group, name, self.unlike, place)

    def _begin_unit(self, begin: Begin, unit: str) -> None:
        """Give values to the parameters that are not sharded yet; split layers already have theirs."""
        named = cast(nn.Module, self.root).get_submodule(unit).named_parameters(prefix=unit)
        begin(
            parameter
            for name, parameter in named
            if not isinstance(parameter, DTensor) and not (self._split and self._split.cuts(name))
        )

    def owned(self, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[Owned]:
        """Yield parameters, given with their names in the complete model, with the places of their shards."""
        for unit in (*self.blocks, self.root):
            # A forward pass without a backward pass leaves the parameters whole.
            unit.reshard()
        for name, parameter in named:
            boxes = self._boxes(name, cast(DTensor, parameter))
            yield Owned(parameter, tuple((box, partial(_view_of_local, view)) for box, view in boxes))

    def _boxes(self, name: str, parameter: DTensor) -> Iterator[tuple[Box, View]]:
        """Yield the places of this rank's shard: torch splits the first dimension into pieces of equal size,
        and the last pieces may be empty."""
        link, length = self._grid.shard, parameter.shape[0]
        size = math.ceil(length / link.size)
        rows = range(min(length, link.rank * size), min(length, (link.rank + 1) * size))
        if self._split is None:
            return iter([rows_of(name, tuple(parameter.shape), rows)] if rows else [])
        return self._split.boxes(name, parameter, rows)

    @torch.no_grad()
    def whole(self, name: str, value: object) -> object:
        """Gather a value that has the layout of the parameter `name`; return any other value as it is.
        Collective."""
        if not isinstance(value, DTensor):
            return value
        return self.of_local(name, value.to_local(), value.shape[0])

    @torch.no_grad()
    def of_local(self, name: str, local: Tensor, length: int) -> Tensor:
        """Gather the shards of a parameter of `length` rows; `local` is this rank's. Collective."""
        whole = _gathered(local, length, self._grid.shard, self._grid.device)
        return whole if self._split is None else self._split.whole(name, whole)

    def copies(self, name: str) -> int:
        """Return the number of ranks of a stage that have the same shard of a parameter."""
        return self._grid.groups.replicate * (1 if self._split is None else self._split.copies(name))


class DeviceGrid:
    """This rank's links in each dimension of a group layout, and torch's mesh of ranks that share shards."""

    def __init__(self, everyone: Link, groups: GroupLayout, device: torch.device) -> None:
        """Collective over `everyone`, which must be all ranks of the default group."""
        self.everyone = everyone
        self.groups, self.device = groups, device
        self.shard = self.along("shard", "context")
        self.replicate = self.along("replicate") if groups.replicate > 1 else None
        self.tensor = self.along("tensor") if groups.tensor > 1 else None
        self.stage = self.along("replicate", "shard", "context", "tensor")
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
        for group in groups_of(module._get_fsdp_state()):
            for name, does in _EXCHANGES.items():
                if hasattr(group, name):
                    yield group, name, f"{does} {unit or 'what is around the blocks'}"


def groups_of(state: Any) -> list[Any]:
    """Return torch's groups of parameters of one unit."""
    # Attributes of torch 2.11 to 2.13; without them a step in which ranks differ fails in the backend.
    several = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in several if group is not None]


def _gathered(local: Tensor, length: int, link: Link, device: torch.device) -> Tensor:
    """Gather the shards of all ranks of `link`; collective."""
    # The device's backend cannot send offloaded shards from host memory.
    local = local.to(device)
    # torch splits the first dimension into pieces of equal size; the last ones may be empty.
    rows = math.ceil(length / link.size)
    padded = local.new_zeros(rows, *local.shape[1:])
    padded[: local.shape[0]] = local
    gathered = link.all_gather(padded.flatten())
    return gathered.view(rows * link.size, *local.shape[1:])[:length]


def require_shardable(module: nn.Module, layout: ModelLayout) -> None:
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


def _shard(
    module: nn.Module,
    choices: Mapping[str, BlockChoice],
    facts: StrategyFacts,
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


def _view_of_local(view: View, values: Tensor) -> Tensor:
    return view(cast(Tensor, local(values)))


def local(value: object) -> object:
    """Return this rank's shard of a value that is sharded; any other value as it is."""
    return value.to_local() if isinstance(value, DTensor) else value
