"""Units of a module under `fully_shard`, and the links of the grid over which they are sharded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
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
from strategies.experts.model import ExpertSplit
from strategies.facts import StrategyFacts
from strategies.fsdp.block_choices import BlockChoice
from strategies.training.boxes import Box, Owned, View
from strategies.training.layouts import homes_of, layout_module, require_dense, require_unhooked
from strategies.training.missing_gradients import UnlikeGradients
from strategies.training.replicas import Begin
from strategies.training.slicing import Slicings

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
        experts: ExpertSplit | None = None,
        begin: Begin = lambda tensors: None,
    ) -> None:
        """`choices` has one choice for each block, in the order of the forward pass; `begin` gives parameters
        their values, unit by unit, before they are sharded; layers in the grid's slicings are split
        already, and `experts` splits those of a block before it is sharded. Collective."""
        self.root = cast(FSDPModule, module)
        self._grid = grid
        self._layers = () if experts is None else tuple(experts.layers)
        """The layers of experts of the complete model."""
        self._of_experts: dict[str, FSDPModule] = {}
        """The units inside of blocks that are layers of experts."""
        try:
            self.blocks = self._shard(choices, facts, experts, begin)
        except (AssertionError, ValueError) as error:
            # torch's own requirements of a model, such as one data type a unit.
            raise UsageError(f"fsdp cannot shard this model: {error}; {WHOLE}") from error
        self.named = dict(module.named_parameters())
        blocks = dict(zip(choices, self.blocks, strict=True))
        calls = list(_calls({**self._of_experts, **blocks, "": self.root}))
        self.unlike = UnlikeGradients(grid.stage, grid.device, [what for _, _, what in calls])
        for place, (group, name, _) in enumerate(calls):
            _Guard(group, name, self.unlike, place)

    def _shard(
        self,
        choices: Mapping[str, BlockChoice],
        facts: StrategyFacts,
        experts: ExpertSplit | None,
        begin: Begin,
    ) -> list[FSDPModule]:
        """Shard each block in the order of the forward pass, then the unit around the blocks.

        Each unit gets its values just before, so that only one unit is complete at a time.
        """
        policy = _BF16 if facts.gathers_bf16 else MixedPrecisionPolicy()
        # The unit around the blocks is needed again as soon as the backward pass begins.
        around = BlockChoice(reshard=False, offload=facts.offloads)
        module = cast(nn.Module, self.root)
        units: list[FSDPModule] = []
        for unit, choice in {**choices, "": around}.items():
            if experts is not None:
                for name in experts.within(unit):
                    experts.split(name, begin)
                    self._of_experts[name] = self._shard_experts(name, choice, policy)
            self._begin_unit(begin, unit)
            block = layout_module(module, unit) if unit else module
            units.append(fully_shard(block, **_options(choice, self._grid.mesh), mp_policy=policy))
        return units[:-1]

    def _shard_experts(self, name: str, choice: BlockChoice, policy: MixedPrecisionPolicy) -> FSDPModule:
        """Shard a layer of experts over the ranks that have the same experts."""
        layer, groups = layout_module(cast(nn.Module, self.root), name), self._grid.groups
        sharded = fully_shard(layer, **_options(choice, self._grid.expert_mesh), mp_policy=policy)
        # The gradient is a sum over the tokens of all replicas, however many ranks have its shards.
        sharded.set_gradient_divide_factor(groups.replicate * groups.shard_ranks)
        # Gloo can only divide after the sum. torch would divide twice where nothing is summed.
        sharded.set_force_sum_reduction_for_comms(self._grid.expert_shard.size > 1)
        return sharded

    def _begin_unit(self, begin: Begin, unit: str) -> None:
        """Give values to the parameters that are not sharded yet; split layers already have theirs."""
        named = cast(nn.Module, self.root).get_submodule(unit).named_parameters(prefix=unit)
        begin(
            parameter
            for name, parameter in named
            if not isinstance(parameter, DTensor) and not self._grid.slicings.cut(name)
        )

    def owned(self, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[Owned]:
        """Yield parameters, given with their names in the complete model, with the places of their shards."""
        for unit in (*self._of_experts.values(), *self.blocks, self.root):
            # A forward pass without a backward pass leaves the parameters whole.
            unit.reshard()
        for name, parameter in named:
            boxes = self._boxes(name, cast(DTensor, parameter))
            yield Owned(parameter, tuple((box, partial(_view_of_local, view)) for box, view in boxes))

    def _boxes(self, name: str, parameter: DTensor) -> Iterator[tuple[Box, View]]:
        """Yield the places of this rank's shard: torch splits the first dimension into pieces of equal size,
        and the last pieces may be empty."""
        link, length = self._link(name), parameter.shape[0]
        size = math.ceil(length / link.size)
        rows = range(min(length, link.rank * size), min(length, (link.rank + 1) * size))
        return self._grid.slicings.boxes(name, parameter, rows)

    def _link(self, name: str) -> Link:
        """Return the link to the ranks among which a parameter is sharded."""
        of_experts = any(name.startswith(f"{layer}.") for layer in self._layers)
        return self._grid.expert_shard if of_experts else self._grid.shard

    @torch.no_grad()
    def whole(self, name: str, value: object) -> object:
        """Gather a value that has the layout of the parameter `name`; return any other value as it is.
        Collective."""
        if not isinstance(value, DTensor):
            return value
        return self.of_local(name, value.to_local(), value.shape[0])

    @torch.no_grad()
    def of_local(self, name: str, local: Tensor, length: int) -> Tensor:
        """Gather the shards of a parameter of `length` rows on this rank; `local` is this rank's shard.
        Collective."""
        whole = _gathered(local, length, self._link(name), self._grid.device)
        return self._grid.slicings.whole(name, whole)

    def copies(self, name: str) -> int:
        """Return the number of ranks of a stage that have the same shard of a parameter."""
        return self._grid.groups.replicate * self._grid.slicings.copies(name, self._grid.groups.tensor)


class DeviceGrid:
    """This rank's links in each dimension of a group layout, and torch's mesh of ranks that share shards."""

    def __init__(self, everyone: Link, groups: GroupLayout, device: torch.device) -> None:
        """Collective over `everyone`, which must be all ranks of the default group."""
        self.everyone = everyone
        self.groups, self.device = groups, device
        self.slicings = Slicings()
        """Parameters of which each rank has a part, that is then sharded."""
        self.shard = self.along("shard", "context")
        self.replicate = self.along("replicate") if groups.replicate > 1 else None
        self.tensor = self.along("tensor") if groups.tensor > 1 else None
        self.stage = self.along("replicate", "shard", "context", "tensor")
        self.mesh = self.expert_mesh = self._mesh("shard", self.shard)
        self.expert, self.expert_shard = None, self.shard
        """The links to the ranks that have other experts, and to those among which the same are sharded."""
        if groups.expert > 1:
            # Rows of tokens are exchanged while shards are.
            self.expert = everyone.split(groups.peers("expert"))
            self.expert_shard = everyone.split(groups.peers("expert-shard"))
            self.expert_mesh = self._mesh("expert-shard", self.expert_shard)

    def along(self, *dimensions: Dimension) -> Link:
        """Return the link to the ranks that differ only in these dimensions; collective."""
        parts = self.groups.groups(*dimensions)
        return self.everyone if len(parts) == 1 else self.everyone.split(parts)

    def _mesh(self, dimension: Dimension, shard: Link) -> DeviceMesh:
        """Return the mesh of the ranks that have shards of the same tensors: (shard,), or (replicate, shard);
        `shard` is the link along the dimension of shards."""
        if self.replicate is None:
            return DeviceMesh.from_group(shard.group, self.device.type)
        [own] = (ranks for ranks in self.groups.peers(dimension) if self.everyone.rank in ranks)
        copies = self.groups.groups("replicate")
        of_shards = [next(ranks for ranks in copies if rank in ranks) for rank in own]
        return DeviceMesh.from_group(
            [self.replicate.group, shard.group],
            self.device.type,
            mesh=torch.tensor(of_shards).T.contiguous(),
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
