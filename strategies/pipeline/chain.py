"""Find a layout for a model without one: a forward pass on the meta device (without memory and arithmetic)
shows whether the model is a chain of modules that contains a run of repeated blocks."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from results.errors import UsageError
from results.layout import ModelLayout
from strategies.advice import SPLIT
from strategies.pipeline.stages import Call, Twin
from strategies.training.layouts import found_layout

_TYPES: Mapping[torch.dtype, Literal["float32", "int64"]] = {torch.int64: "int64"}


class _Broken(Exception):
    """The reason why a model is not a chain."""


def chained_layout(module: nn.Module, inputs: object) -> ModelLayout:
    """Return the layout of a model that is `head_k(... block_n(... block_1(... stem_1(inputs))))`, all of
    them modules that take one tensor and return one.

    `inputs` are the inputs of a batch, the sample first. Raises UsageError, with the reason, for a model that
    is not such a chain in training, or is a different one in evaluation mode.
    """
    try:
        return _layout(module, inputs)
    except _Broken as broken:
        raise UsageError(
            f"pipeline cuts a model between its blocks, and finds no place in this one: {broken}; give it a "
            f"layout and the methods stem and head, or {SPLIT}"
        ) from broken


def _layout(module: nn.Module, inputs: object) -> ModelLayout:
    if not isinstance(inputs, Tensor) or not (inputs.is_floating_point() or inputs.dtype in _TYPES):
        given = str(inputs.dtype) if isinstance(inputs, Tensor) else type(inputs).__name__
        raise _Broken(f"its inputs are a {given}, not a tensor of float or int64")
    blocks = found_layout(module).blocks
    if not blocks:
        raise _Broken("it has no repeated blocks with submodules in an nn.ModuleList or nn.Sequential")
    twin, units = Twin(module), list(_units(module, blocks))
    order = _order(twin, units, inputs, training=True)
    try:
        evaluated = _order(twin, units, inputs, training=False)
    except _Broken as broken:
        raise _Broken(f"in evaluation mode {broken}") from broken
    if evaluated != order:
        raise _Broken("its forward pass calls other modules in evaluation mode than in training")
    stem, run, head = _divided(order, blocks)
    return ModelLayout(
        blocks=run,
        stem=stem,
        head=head,
        sample=tuple(inputs.shape[1:]),
        sample_type=_TYPES.get(inputs.dtype, "float32"),
        chained=True,
    )


def _units(module: nn.Module, blocks: Collection[str], path: str = "") -> Iterator[str]:
    """Yield the blocks, and the largest modules that contain no block."""
    for name, part in module.named_children():
        full = f"{path}{name}"
        if full not in blocks and any(block.startswith(f"{full}.") for block in blocks):
            yield from _units(part, blocks, f"{full}.")
        else:
            yield full


def _order(twin: Twin, units: Sequence[str], inputs: Tensor, *, training: bool) -> list[str]:
    """Return the names of the units in the order in which a forward pass calls them, if it is a chain of
    them."""
    try:
        calls, output = twin.calls(units, inputs, training=training)
    except Exception as error:  # on the meta device a user's model may raise any exception
        raise _Broken(f"its forward pass fails on the meta device: {error}") from error
    return _linked(calls, output)


def _linked(calls: Sequence[Call], output: object) -> list[str]:
    """Return the names of the calls, if each takes the unchanged result of the call before it."""
    order: list[str] = []
    for call in calls:
        if not isinstance(call.result, Tensor) or not _alone(call):
            raise _Broken(f"{call.name} takes or returns something other than one tensor")
        if order and not call.takes(calls[len(order) - 1]):
            raise _Broken(f"its forward pass computes something between {order[-1]} and {call.name}")
        order.append(call.name)
    if not calls or not calls[0].first:
        raise _Broken("its forward pass changes the inputs before its first module takes them")
    if calls[-1].result is not output or calls[-1].changed:
        raise _Broken(f"its forward pass computes something after {order[-1]}")
    return order


def _alone(call: Call) -> bool:
    """Return whether a module gets one tensor, and only default values otherwise."""
    try:
        bound = inspect.signature(call.module.forward).bind(*call.positional, **call.named)
    except (TypeError, ValueError):
        return False
    (_, first), *others = bound.arguments.items() or [("", None)]
    defaults: dict[str, Any] = {
        name: parameter.default for name, parameter in bound.signature.parameters.items()
    }
    return isinstance(first, Tensor) and all(value is defaults[name] for name, value in others)


def _divided(
    order: Sequence[str], blocks: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the modules before the blocks, the blocks, and the modules after them; an end without a module
    gets a block."""
    places = [place for place, name in enumerate(order) if name in blocks]
    if not places:
        raise _Broken("its forward pass calls none of its blocks as a module")
    first, last = places[0], places[-1] + 1
    for name in order[first:last]:
        if name not in blocks:
            raise _Broken(f"{name} is called between its blocks")
        if order.count(name) > 1:
            raise _Broken(f"the block {name} is called more than once")
    first, last = max(first, 1), min(last, len(order) - 1)
    return tuple(order[:first]), tuple(order[first:last]), tuple(order[last:])
