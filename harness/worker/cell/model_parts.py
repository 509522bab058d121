"""Count the parts of a model that states none: parameters, activations and FLOPs of blocks, stem and head.

They are counted on the meta device, without memory and arithmetic. `count_flops` has torch count the FLOPs of
any workload, there or on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from results.cell import SYNTHETIC
from results.errors import BenchError, UsageError
from results.layout import ModelLayout
from results.parts import VALUE_BYTES, ModelParts, Part, Saved, Weight
from strategies.pipeline.chain import chained_layout
from strategies.training.flops import FlopCounter
from strategies.training.layouts import found_layout
from workloads.batch import Batch, placed, tensors
from workloads.build import build_workload
from workloads.data import POOL, DataRequest, open_batches
from workloads.datasets.facts import Own
from workloads.workload import Workload

_FEW, _MORE = 2, 4
"""Samples of the two batches whose difference is what each sample adds; BatchNorm needs two."""


@dataclass
class _Counted:
    """Figures of one batch for each block, the stem before them and the head after them."""

    saved: dict[int | str, int] = field(default_factory=dict)
    flops: dict[int | str, int] = field(default_factory=dict)
    inputs: dict[int | str, int] = field(default_factory=dict)
    dispatched: dict[int | str, int] = field(default_factory=dict)
    results: int = 0
    uncounted: str | None = None
    """Why the FLOPs are unknown."""


def built_on_meta(text: str, *, source_folder: Path | None = None) -> Workload:
    """Build a workload on the meta device. Raises BenchError for one that cannot be built there."""
    with _counting("it cannot be built"), torch.device("meta"):
        return build_workload(text, source_folder=source_folder)


def parts_of(workload: Workload) -> ModelParts:
    """Count the parts of a workload that was built on the meta device.

    Raises BenchError for one that cannot run there, or has no synthetic samples.
    """
    if workload.synthetic is None:
        raise BenchError("without synthetic samples its activations cannot be counted")
    with _counting("its parts cannot be counted"):
        module = workload.module.to("meta")
        layout, chained = _layout(workload, module)
        few, more = (_count(workload, module, layout, samples) for samples in (_FEW, _MORE))
        weights, shared = _weights(module, layout)

    def part(key: int | str) -> Part:
        each = max(0, more.saved.get(key, 0) - few.saved.get(key, 0)) // (_MORE - _FEW)
        taken = few.inputs.get(key, 0) // _FEW
        return Part(
            weights=tuple(weights.get(key, ())),
            saved=Saved(whole=each),
            # It is unknown which results a selective checkpoint keeps; at most, it keeps all.
            products=Saved(whole=max(0, each - taken)),
            saved_once=max(0, few.saved.get(key, 0) - _FEW * each),
            input=taken,
            dispatched=few.dispatched.get(key, 0) // _FEW,
            flops=few.flops.get(key, 0) // _FEW,
        )

    return ModelParts(
        stem=part("stem"),
        blocks=tuple(part(place) for place in range(len(layout.blocks))),
        head=part("head"),
        shared_values=shared,
        logits=few.results // _FEW,
        chained=chained,
        uncounted=few.uncounted,
    )


@contextmanager
def _counting(failure: str, device: str = "meta") -> Iterator[None]:
    """Raise a BenchError for whatever a user's model raises, on meta tensors in particular."""
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    except BenchError:
        raise
    except Exception as error:
        raise BenchError(f"{failure} on the {device} device: {error}") from error


def _layout(workload: Workload, module: nn.Module) -> tuple[ModelLayout, bool]:
    """Return the parts by name, and whether a pipeline can be made of them."""
    if workload.layout is not None:
        return workload.layout, workload.layout.can_be_cut
    batch = _drawn(workload, _FEW)
    if workload.loss is not None and isinstance(batch, tuple | list) and len(batch) == 2:
        try:
            return chained_layout(module, batch[0]), True
        except UsageError:
            pass
    return found_layout(module), False


def _drawn(workload: Workload, samples: int) -> Batch:
    assert workload.synthetic is not None
    # Drawn outside of the meta device: a generator lives on the CPU.
    return workload.synthetic(torch.Generator().manual_seed(0), samples)


def _count(workload: Workload, module: nn.Module, layout: ModelLayout, samples: int) -> _Counted:
    """Count the bytes that a forward pass keeps for its backward pass, each storage once, and its FLOPs."""
    batch = placed(_drawn(workload, samples), torch.device("meta"))
    counted, seen, held = _Counted(), set[int](), list[Tensor]()
    own = {t.untyped_storage()._cdata for t in chain(module.parameters(), module.buffers())}
    where: list[int | str] = ["stem"]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in seen:
            seen.add(storage._cdata)
            held.append(tensor)
            counted.saved[where[0]] = counted.saved.get(where[0], 0) + storage.nbytes()
        return tensor

    with (
        FlopCounter(module) as counter,
        saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        last = [0]

        def turn(to: int | str) -> None:
            total = counter.total
            counted.flops[where[0]] = counted.flops.get(where[0], 0) + total - last[0]
            last[0], where[0] = total, to

        with ExitStack() as hooks:
            for hook in _hooks(module, layout, turn, counted):
                hooks.enter_context(hook)
            workload.loss_of(module, batch)
        turn("head")
    counted.uncounted = counter.uncounted or counter.unread
    if counted.uncounted is not None:
        counted.flops = dict.fromkeys(range(len(layout.blocks)) if layout.blocks else ["head"], samples)
    return counted


def _hooks(
    module: nn.Module, layout: ModelLayout, turn: Callable[[int | str], None], counted: _Counted
) -> Sequence[Any]:
    """Register hooks that call `turn` with the part that forward enters; without blocks it is the head."""

    def enters(place: int) -> Callable[..., None]:
        def hook(part: nn.Module, positional: Any, named: Any) -> None:
            turn(place)
            given = next(iter(tensors((positional, named))), None)
            counted.inputs[place] = 0 if given is None else given.nbytes

        return hook

    def dispatches(place: int) -> Callable[..., None]:
        def hook(part: nn.Module, positional: Any) -> None:
            counted.dispatched[place] = counted.dispatched.get(place, 0) + positional[0].nbytes

        return hook

    def begins(part: nn.Module, positional: Any) -> None:
        turn("stem" if layout.blocks else "head")

    def ends(part: nn.Module, positional: Any, result: Any) -> None:
        counted.results = sum(tensor.nbytes for tensor in tensors(result) if tensor.dim() > 1)

    blocks = [module.get_submodule(name) for name in layout.blocks]
    return [
        module.register_forward_pre_hook(begins),
        module.register_forward_hook(ends),
        *(
            module.get_submodule(name).register_forward_pre_hook(dispatches(place))
            for place, block in enumerate(layout.blocks)
            for name in layout.experts
            if name.startswith(f"{block}.")
        ),
        *(
            block.register_forward_pre_hook(enters(place), with_kwargs=True)
            for place, block in enumerate(blocks)
        ),
        *(block.register_forward_hook(lambda *_: turn("head")) for block in blocks),
    ]


def _weights(module: nn.Module, layout: ModelLayout) -> tuple[Mapping[int | str, list[Weight]], int]:
    """Return the parameters of each part, each where it is registered first, and how many values of them the
    head shares with the stem."""
    found: dict[int | str, list[Weight]] = {}
    places: dict[str, int | str] = {f"{name}.": place for place, name in enumerate(layout.blocks)}
    ends = {id(each) for name in layout.head for each in module.get_submodule(name).parameters()}
    shared = 0
    for name, parameter in module.named_parameters():
        in_stem = any(name.startswith(f"{stem}.") for stem in layout.stem)
        around = "stem" if in_stem else "head"
        key = next((place for prefix, place in places.items() if name.startswith(prefix)), around)
        # A parameter of another type counts as the number of single-precision values that its bytes hold.
        values = parameter.nbytes // VALUE_BYTES
        rows = min((*parameter.shape, 1)[0], values)
        columns, trained = values // max(rows, 1), parameter.requires_grad
        experts = _experts_of(name, module, layout)
        found.setdefault(key, []).append(Weight(rows=rows, columns=columns, experts=experts, trained=trained))
        shared += values if in_stem and id(parameter) in ends else 0
    return found, shared


def _experts_of(name: str, module: nn.Module, layout: ModelLayout) -> int:
    """Return the number of experts whose matrices a parameter has; 0: it is not of experts."""
    layer = next((layer for layer in layout.experts if name.startswith(f"{layer}.")), None)
    return 0 if layer is None else cast(int, module.get_submodule(layer).count)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedFlops:
    """FLOPs of one micro-batch; 1 multiply-add = 2 FLOP."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def count_flops(
    text: str,
    *,
    micro_batch: int,
    source_folder: Path | None = None,
    own: bool = False,
    device: Literal["meta", "cpu"] = "meta",
) -> CountedFlops:
    """Count FLOPs of convolutions and matrix products, uncompiled, without recomputation, attention in full.

    `own` counts batches of the workload's own data, where it has synthetic samples as well. Raises BenchError
    if the model cannot run on the device: the meta device does not run a model that reads values of its
    tensors, as a user's model may.
    """
    with _counting(f"the FLOPs of {text} cannot be counted", device):
        with torch.device(device):
            workload = build_workload(text, source_folder=source_folder)
        return flops_of(workload, micro_batch, own=own, device=device)


def flops_of(
    workload: Workload, micro_batch: int, *, own: bool = False, device: str = "meta"
) -> CountedFlops:
    """Count the FLOPs of a workload that was built in a context of the device.

    Raises BenchError if the workload's batches differ in shape, or if an operator or a matrix is not counted.
    """
    batch = _batch_of_one_shape(workload, micro_batch, own or workload.synthetic is None, device)
    module = workload.module.to(device)
    # The backend is named, so that the count does not depend on which kernel torch prefers: a fused kernel's
    # backward computes the scores again, which would be counted, and the CPU's fused kernel is not counted.
    with sdpa_kernel(SDPBackend.MATH), FlopCounter(module) as counter:
        loss = workload.loss_of(module, batch)
        forward, unread = counter.total, counter.unread
        torch.autograd.backward(loss)
    if (uncounted := counter.uncounted or unread) is not None:
        raise BenchError(uncounted)
    return CountedFlops(forward=forward, backward=counter.total - forward)


def _batch_of_one_shape(workload: Workload, micro_batch: int, own: bool, device: str) -> Batch:
    """Return a batch. Raises BenchError if the first batches differ in shape."""
    # Drawn outside the meta context: a generator lives on the CPU.
    request = DataRequest(
        workload=workload,
        dataset=Own.name if own else SYNTHETIC,
        micro_batch=micro_batch,
        replica=0,
        replicas=1,
        seed=0,
        device=torch.device(device),
    )
    batch, *others = islice(open_batches(request), POOL if own or workload.input is None else 1)
    shapes = [tensor.shape for tensor in tensors(batch)]
    if any([tensor.shape for tensor in tensors(other)] != shapes for other in others):
        raise BenchError("the workload's batches differ in shape")
    return batch
