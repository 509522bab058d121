"""Fully sharded data parallelism on raw collectives: flat shards, gathered ahead, averaged during backward.

The three stages of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054). A unit is a block of the model's layout,
or the rest around the blocks, with the parameters that several blocks share. Each rank owns a shard of every
unit's flat vectors, n elements over p ranks rounded up, with the optimizer's state for it.

A rank sends in one step, with P bytes of parameters over p ranks: (p - 1) / p P for gathering, at stage 3 the
same again for the blocks in backward; and (p - 1) / p P for the averages, always in single precision. With
accumulation stage 2 averages in every micro-batch, and stage 3 also gathers in every one.

`params=bf16` gathers, and computes in, bfloat16. Gradients are in bfloat16 until they are averaged: at stage
1, which averages once a step, micro-batches are added up in bfloat16. At stage 3, under autocast and without
`params=bf16`, the complete parameters that autocast has cast for the forward pass stay until backward.
`offload=cpu` keeps shards, their gradients and the optimizer's state in host memory, and copies them during
the computation; on CPU they are there anyway, and the path of a GPU (pinned memory, a stream of copies) has
only been run on a simulated device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import Tensor, nn

from results.errors import UsageError
from results.layout import ModelLayout
from strategies.collectives.link import Link
from strategies.scratch_fsdp.facts import ScratchFsdp
from strategies.scratch_fsdp.flat import FlatParameters, Sharding
from strategies.scratch_fsdp.host_shards import HostShards
from strategies.scratch_fsdp.units import Unit, UnitSchedule
from strategies.training.boxes import Owned
from strategies.training.clipping import clip_shards
from strategies.training.layouts import homes_of, layout_module
from strategies.training.loss import Batch
from strategies.training.parallel import GradientTask, OptimizerState, ParallelModel, Setting
from strategies.training.precision import require_bf16_parameters
from strategies.training.replicas import Buffers, take_from_first, take_values


class ScratchFsdpModel(ParallelModel):
    """A module whose parameters are gathered only while they are used; its optimizer sees the shards."""

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        """Collective: all ranks take the parameters and buffers of rank 0.

        Raises UsageError for a model that does not compute with `params=bf16`.
        """
        super().__init__(module)
        facts = cast(ScratchFsdp, setting.facts)
        if facts.gathers_bf16:
            require_bf16_parameters(module, setting.device)
        self._device = setting.device
        self._link = self.decided_over = Link(setting.exchange.group)
        self._buffers = Buffers(module)
        take_values(self._link, setting.fill, self._buffers.now())
        sharding = Sharding(
            link=self._link,
            device=setting.device,
            computed_in=torch.bfloat16 if facts.gathers_bf16 else None,
            host=HostShards(setting.device) if facts.offloads else None,
            fill=setting.fill,
        )
        around, *blocks = _units(module, setting.layout, sharding)
        sharding.settle()
        self._flats = [flat for unit in (around, *blocks) for flat in unit.flats]
        places = {piece.name: (flat, piece) for flat in self._flats for piece in flat.pieces}
        self._places = [places[name] for name, _ in module.named_parameters()]
        """The vector and piece of every parameter, in the order of the bare model."""
        self._schedule = UnitSchedule(
            around, blocks, sharding, stage=facts.stage, prefetch=facts.spec.integer("prefetch")
        )
        for part in module.modules():
            part.register_state_dict_pre_hook(_refuse_state)  # type: ignore[no-untyped-call]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The shards."""
        return (flat.shard for flat in self._flats)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Collective."""
        for name, values in self._gathered(lambda flat: {"values": flat.shard.detach()}):
            yield name, cast(Tensor, values["values"])

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Collective."""
        for name, values in self._gathered(
            lambda flat: {} if flat.shard.grad is None else {"values": flat.shard.grad}
        ):
            yield name, cast(Tensor, values["values"])

    def named_state(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, OptimizerState]]:
        """Collective."""
        return self._gathered(lambda flat: optimizer.state.get(flat.shard, {}))

    def _gathered(
        self, kept: Callable[[FlatParameters], Mapping[str, object]]
    ) -> Iterator[tuple[str, OptimizerState]]:
        """Yield for each parameter its part of the values that `kept` returns for its flat vector: values
        with the layout of the shard are gathered, others stay as they are.

        Parameters whose vector has no values are left out. Collective.
        """
        whole: dict[FlatParameters, OptimizerState] = {}
        for flat, piece in self._places:
            if flat not in whole:
                whole[flat] = {key: flat.gathered(value) for key, value in sorted(kept(flat).items())}
            if whole[flat]:
                yield piece.name, {key: flat.part(value, piece) for key, value in whole[flat].items()}
            if piece is flat.pieces[-1]:
                whole[flat] = {}

    def compute_gradients(self, batches: Iterator[Batch], task: GradientTask) -> Tensor:
        with self._schedule.step():
            return super().compute_gradients(batches, task)

    def exchange(self, *, now: bool) -> AbstractContextManager[None]:
        return self._schedule.micro_batch(last=now)

    def started(self) -> None:
        take_from_first(self._link, self._buffers.now())

    def updated(self) -> None:
        self._schedule.outdate()

    def load_strategy_state(self, state: Mapping[str, object]) -> None:
        super().load_strategy_state(state)
        # The shards have been restored as well.
        self._schedule.outdate()

    def start_from(self, steps: int) -> None:
        self._schedule.outdate()

    def owned(self) -> Iterator[Owned]:
        return (flat.owned() for flat in self._flats)

    def clip_gradients(self, max_norm: float) -> Tensor:
        shards = [(shard.grad, 1) for shard in self.parameters() if shard.grad is not None]
        return clip_shards(shards, max_norm, self._link, self._device)


def _refuse_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise UsageError(
        "the module of scratch-fsdp holds no whole parameters between steps: call trainer.full_state_dict() "
        "on every rank instead of module.state_dict()"
    )


def _units(module: nn.Module, layout: ModelLayout, sharding: Sharding) -> list[Unit]:
    """Return the unit around the blocks, then the blocks; a parameter that several blocks share is in the
    unit around them."""
    blocks = [(name, layout_module(module, name)) for name in layout.blocks]
    homes = homes_of(module, layout)
    members: dict[str, dict[str, nn.Parameter]] = defaultdict(dict)
    for name, parameter in module.named_parameters():
        own = homes[parameter]
        members[own.pop() if len(own) == 1 else ""][name] = parameter
    return [Unit(part, _flats(members[name], sharding)) for name, part in (("", module), *blocks)]


def _flats(named: Mapping[str, nn.Parameter], sharding: Sharding) -> list[FlatParameters]:
    """Build a flat vector for each data type, of trained and of frozen parameters."""
    kinds: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = defaultdict(dict)
    for name, parameter in named.items():
        kinds[parameter.dtype, parameter.requires_grad][name] = parameter
    return [FlatParameters(members, sharding) for members in kinds.values()]
