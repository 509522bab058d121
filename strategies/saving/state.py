"""All state that one rank of a training run resumes from: copied from a trainer, and loaded into one."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from results.checkpoint import LaidOut
from results.errors import UsageError
from strategies.catalog import COLLECTIVES, COMPRESSIONS, STRATEGIES
from strategies.collectives.link import Link
from strategies.devices import device_of
from strategies.training.boxes import Box, Owned
from strategies.training.parallel import ParallelModel, TrainSettings

Plain = dict[str, Any]
"""Data that torch loads with `weights_only`: numbers, strings, tensors, and lists and dictionaries of
them."""
_FORMAT = 1
_HOW = frozenset({"fused", "foreach", "capturable"})
"""Keys of a parameter group that choose its kernels, which depend on the trainer's device."""
_LENGTHS = ("T_max", "T_0", "total_iters", "total_steps", "step_size")


class Stateful(Protocol):
    """An attached object with state to resume from: a schedule, a loader's position."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


def require_attachable(name: str, each: Any, optimizer: Optimizer) -> None:
    """Raise UsageError, with advice, for an object that cannot be saved, and for a schedule that cannot
    work."""
    if not (callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))):
        raise UsageError(
            f"{name} ({type(each).__name__}) has no state_dict and load_state_dict, so that no run could "
            f"resume from it: for a loader use torchdata's StatefulDataLoader, else an object with both of "
            f"them"
        )
    if not isinstance(each, LRScheduler):
        return
    if each.optimizer is not optimizer:
        raise UsageError(
            f"{name} ({type(each).__name__}) belongs to another optimizer: make it with trainer.optimizer"
        )
    for part in getattr(each, "_schedulers", [each]):
        for length in _LENGTHS:
            if (steps := getattr(part, length, None)) is not None and steps < 1:
                raise UsageError(
                    f"{name} ({type(part).__name__}) has no steps ({length}={steps}): give it the number of "
                    f"times that its step() is called"
                )


class Resumable(Protocol):
    """An object that is saved and resumed: the parts of a Trainer that hold its state."""

    model: ParallelModel
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    settings: TrainSettings
    device: torch.device
    link: Link | None
    """The link to the ranks that train together; None on one rank."""
    steps: int
    """Number of updates so far."""
    attached: dict[str, Stateful]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The state of one rank at one moment, in host memory; no part of it is shared with the trainer."""

    parameters: dict[Box, Tensor]
    optimizer: dict[str, dict[Box, Tensor]]
    """Tensors with the layout of the parameters, by the optimizer's key (`exp_avg`)."""
    shared: Plain = field(default_factory=dict)
    """State that a run on another number of ranks can use: counts of the optimizer by parameter, buffers."""
    own: Plain = field(default_factory=dict)
    """State that only this rank can use: residuals and buckets, random states."""


def laid_out(trainer: Resumable) -> LaidOut:
    settings = trainer.settings
    return LaidOut(
        strategy=STRATEGIES.facts(settings.strategy).spec.text,
        compression=COMPRESSIONS.facts(settings.compression).spec.text,
        collective=COLLECTIVES.facts(settings.collective).spec.text,
        ranks=1 if trainer.link is None else trainer.link.size,
        node_size=settings.node_size,
    )


def optimizer_name(trainer: Resumable) -> str:
    """Return the name of the class that updates this rank's parameters."""
    return type(trainer.model.local_optimizer(trainer.optimizer)).__name__


def require_optimizer(trainer: Resumable, name: str) -> None:
    """Raise UsageError if the state belongs to another optimizer than the trainer's."""
    kind = optimizer_name(trainer)
    if kind != name:
        raise UsageError(
            f"the checkpoint was trained by {name}, and this trainer has {kind}: use the "
            f"same optimizer, or start from the parameters alone (export)"
        )


def require_groups(trainer: Resumable, state: RankState) -> None:
    """Raise UsageError if the trainer's optimizer has another number of groups of parameters."""
    groups, here = len(state.shared["groups"]), len(trainer.optimizer.param_groups)
    if groups != here:
        raise UsageError(
            f"the checkpoint's optimizer has {groups} groups of parameters and this one {here}: build the "
            f"same groups"
        )


def tensors_of(trainer: Resumable) -> Iterator[tuple[str, Box, Tensor]]:
    """Yield tensors with the layout of the parameters, rectangle by rectangle, each with its kind:
    `parameters`, or a key of the optimizer (`optimizer/exp_avg`). They are views, not copies."""
    state = trainer.model.local_state(trainer.optimizer)
    for owned in trainer.model.owned():
        kinds = {"parameters": owned.parameter.detach()}
        for key, value in state.get(owned.parameter, {}).items():
            if isinstance(value, Tensor) and _lies_alike(key, value, owned):
                kinds[f"optimizer/{key}"] = value
        for kind, value in kinds.items():
            yield from ((kind, box, view(value)) for box, view in owned.boxes)


@torch.no_grad()
def state_of(trainer: Resumable, wanted: Collection[tuple[str, str]] | None = None) -> RankState:
    """Return a copy of the state, with only the tensors whose kind and rectangle are `wanted` (None: all).

    Collective if a strategy forms its buckets anew. Raises UsageError if the state of an attached object
    cannot be loaded without running code.
    """
    model = trainer.model
    strategy = model.strategy_state()
    tensors: dict[str, dict[Box, Tensor]] = {"parameters": {}}
    for kind, box, value in tensors_of(trainer):
        if wanted is None or (kind, box.text) in wanted:
            tensors.setdefault(kind, {})[box] = _copy(value)
    return RankState(
        parameters=tensors.pop("parameters"),
        optimizer={kind.removeprefix("optimizer/"): boxes for kind, boxes in tensors.items()},
        shared={
            "counts": _counts(trainer),
            "buffers": {name: _copy(value) for name, value in model.bare.named_buffers()},
            "outer": _outer_momentum(trainer),
            "groups": [
                {key: _plain(value) for key, value in group.items() if key != "params"}
                for group in trainer.optimizer.param_groups
            ],
            "scaler": trainer.scaler.state_dict(),
            "steps": trainer.steps,
            "attached": {name: _attached(name, each) for name, each in trainer.attached.items()},
        },
        own={"strategy": _plain(strategy), "random": _random_state(trainer)},
    )


def _outer_momentum(trainer: Resumable) -> Plain:
    """Return the momentum of an outer step by parameter, on the first rank: it is equal on all of them."""
    if trainer.link is not None and trainer.link.rank:
        return {}
    return {name: _copy(momentum) for name, momentum in trainer.model.named_outer_state()}


def _counts(trainer: Resumable) -> dict[str, Plain]:
    """Return the optimizer's values by parameter that do not have the layout of the parameters."""
    state = trainer.model.local_state(trainer.optimizer)
    counts: dict[str, Plain] = {}
    for owned in trainer.model.owned():
        kept = {
            key: _plain(value)
            for key, value in state.get(owned.parameter, {}).items()
            if not (isinstance(value, Tensor) and _lies_alike(key, value, owned))
        }
        counts |= {box.name: kept for box, _ in owned.boxes if kept}
    return counts


def _lies_alike(key: str, value: Tensor, owned: Owned) -> bool:
    # The count of steps of a parameter without dimensions has the parameter's shape too.
    return value.shape == owned.parameter.shape and key != "step"


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True).contiguous()


def _plain(value: Any) -> Any:
    """Return a copy, with tensors in host memory."""
    if isinstance(value, Tensor):
        return _copy(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(each) for each in value) if type(value) in (list, tuple) else value
    return value


def _attached(name: str, each: Stateful) -> Any:
    state = each.state_dict()
    try:
        return unpickled(dumped(state))
    except Exception as error:  # pickle may raise any exception
        raise UsageError(
            f"the state of {name!r} cannot be saved, as loading it would run code: have its state_dict "
            f"return numbers, strings, tensors, and lists and dictionaries of them ({error})"
        ) from error


def dumped(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def unpickled(data: bytes) -> Any:
    """Load data. Raises pickle.UnpicklingError for anything other than plain data."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _random_state(trainer: Resumable) -> Plain:
    state: Plain = {"torch": torch.get_rng_state(), "python": random.getstate()}
    on_device = device_of(trainer.device).random_state()
    if on_device is not None:
        state["device"] = on_device.cpu()
    if "numpy" in sys.modules:
        import numpy as np

        kind, keys, *rest = np.random.get_state(legacy=True)
        state["numpy"] = [str(kind), torch.from_numpy(np.asarray(keys).astype("int64")), *map(float, rest)]
    return state


def _restore_random(trainer: Resumable, state: Plain) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "device" in state:
        device_of(trainer.device).set_random_state(state["device"])
    if "numpy" in state:
        import numpy as np

        kind, keys, position, has_gauss, cached = state["numpy"]
        drawn = (kind, keys.numpy().astype("uint32"), int(position), int(has_gauss), cached)
        np.random.set_state(drawn)


@torch.no_grad()
def restore(trainer: Resumable, state: RankState, *, exact: bool) -> None:
    """Resume from `state`, in place: with `exact` as the same rank of the same layout, else without `own`."""
    model, shared = trainer.model, state.shared
    require_groups(trainer, state)
    if exact:
        # Loaded first, because forming the buckets may take a training step.
        model.load_strategy_state(state.own["strategy"])
    _restore_tensors(trainer, state)
    _restore_optimizer(trainer, state)
    if shared["scaler"] and trainer.scaler.is_enabled():
        trainer.scaler.load_state_dict(shared["scaler"])
    trainer.steps = shared["steps"]
    if not exact:
        model.start_from(trainer.steps)
        for name, momentum in model.named_outer_state():
            if name in shared.get("outer", {}):
                momentum.copy_(shared["outer"][name])
    for name, each in trainer.attached.items():
        if name in shared["attached"]:
            each.load_state_dict(shared["attached"][name])
    if exact:
        _restore_random(trainer, state.own["random"])


def _restore_tensors(trainer: Resumable, state: RankState) -> None:
    for owned in trainer.model.owned():
        for box, view in owned.boxes:
            view(owned.parameter).copy_(state.parameters[box])
    buffers = state.shared["buffers"]
    for name, buffer in trainer.model.bare.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


def _restore_optimizer(trainer: Resumable, state: RankState) -> None:
    optimizer, local = trainer.optimizer, trainer.model.local_optimizer(trainer.optimizer)
    for group, kept in zip(optimizer.param_groups, state.shared["groups"], strict=True):
        group.update({key: value for key, value in _plain(kept).items() if key not in _HOW})
    kept_state = trainer.model.local_state(optimizer)
    kept_state.clear()
    fused = {id(each): group.get("fused") for group in local.param_groups for each in group["params"]}
    for owned in trainer.model.owned():
        if id(owned.parameter) in fused and (found := _state_of(owned, state)):
            if fused[id(owned.parameter)] and "step" in found:
                # torch's fused updates need it there, as in torch.optim.Optimizer.load_state_dict.
                found["step"] = found["step"].to(owned.parameter.device, torch.float32)
            kept_state[owned.parameter] = found


def _state_of(owned: Owned, state: RankState) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, values in state.optimizer.items():
        there = [(box, view) for box, view in owned.boxes if box in values]
        if there:
            tensor = torch.zeros_like(owned.parameter, dtype=values[there[0][0]].dtype)
            for box, view in there:
                view(tensor).copy_(values[box])
            found[key] = tensor
    counted = next((box.name for box, _ in owned.boxes if box.name in state.shared["counts"]), None)
    if counted is not None:
        found |= _plain(state.shared["counts"][counted])
    return found


def to_plain(state: RankState, trainer: Resumable, rank: int) -> Plain:
    """Return the state as one dictionary that torch saves, and loads with `weights_only`."""
    return {
        "format": _FORMAT,
        "laid_out": _layout_of(trainer, rank),
        "trained_by": optimizer_name(trainer),
        "parameters": {box.text: value for box, value in state.parameters.items()},
        "optimizer": {
            key: {box.text: value for box, value in values.items()} for key, values in state.optimizer.items()
        },
        "shared": state.shared,
        "own": state.own,
    }


def _layout_of(trainer: Resumable, rank: int) -> list[Any]:
    where = laid_out(trainer)
    return [where.strategy, where.compression, where.collective, where.ranks, where.node_size, rank]


def from_plain(plain: Mapping[str, Any], trainer: Resumable, rank: int) -> RankState:
    """Read the dictionary of `to_plain`. Raises UsageError for another layout, rank, optimizer or model."""
    mine = _layout_of(trainer, rank)
    if plain.get("format") != _FORMAT or list(plain["laid_out"]) != mine:
        raise UsageError(
            f"the state is of {plain.get('laid_out')}, and this is {mine}: a state_dict is for the same rank "
            f"of the same strategy; to resume as another, use save(folder) and resume(folder)"
        )
    require_optimizer(trainer, plain.get("trained_by", optimizer_name(trainer)))
    boxes = {box.text: box for owned in trainer.model.owned() for box, _ in owned.boxes}
    require_alike({text: tuple(value.shape) for text, value in plain["parameters"].items()}, boxes)
    return RankState(
        parameters={boxes[text]: value for text, value in plain["parameters"].items()},
        optimizer={
            key: {boxes[text]: value for text, value in values.items()}
            for key, values in plain["optimizer"].items()
        },
        shared=plain["shared"],
        own=plain["own"],
    )


def require_alike(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Box]) -> None:
    """Raise UsageError if the saved parameters are not of this model."""
    for text, box in wanted.items():
        if found.get(text) != box.sizes:
            kept = f"has it as {list(found[text])}" if text in found else "has none"
            raise UsageError(
                f"the state belongs to another model: this one has {text} {list(box.sizes)}, and the state "
                f"{kept}; build the model that was saved"
            )
    for text in found:
        if text not in wanted:
            raise UsageError(
                f"the state belongs to another model: it has {text}, which this one lacks; build the "
                f"model that was saved"
            )
