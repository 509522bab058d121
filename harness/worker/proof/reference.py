"""A plain simulation of one distributed step on one device, which is the reference for the strategy under
test.

This module also says which computations of a cell can be repeated bit for bit, and how many terms are summed
in any order. It builds torch's own optimizer from the cell's text, by code that it does not share with the
strategies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from harness.worker.cell.sampler import Sampler
from harness.worker.cell.setup import CellSetup, seed_step
from harness.worker.proof.float8 import quantise_products
from harness.worker.rank.control import hash_number
from results.cell import Cell, Precision
from results.parts import ALIGNED_BYTES
from strategies.catalog import STRATEGIES
from strategies.devices import device_of
from strategies.optimizers import optimizer_call
from strategies.trainer import Trainer
from strategies.training.layouts import found_layout
from strategies.training.parallel import OptimizerState
from workloads.batch import Batch
from workloads.build import build_workload
from workloads.workload import Workload

UNIT_ROUNDOFF = 2.0**-24
SMALLEST_NORMAL = 2.0**-126
"""The number below which the rounding error of a share is absolute: half of 2^-149."""
UPDATE_TOLERANCE = 1e-3
"""The allowed relative L2 difference of two updates by the same gradients: an update is elementwise and in
single precision."""
NEIGHBOUR_TOLERANCE = 16 * UNIT_ROUNDOFF
"""The same on one CPU, where clipping may round its factor to one of two neighbours (2 units of roundoff)."""
CLIP_EPSILON = 1e-6
"""The number that torch's clipping adds to the norm."""
CLIP_PIECE = 2**18
"""Values that are converted to double precision at a time."""


HALF: Mapping[Precision, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.bfloat16}
)
"""The types of autocast."""
Beat = Callable[[], None]
"""Reports that the rank is still at work."""
Start = Callable[[], Iterable[tuple[str, Tensor]]]
"""Returns the parameters and buffers that a step begins with, anew for each replica."""
Repeat = Callable[[nn.Module, int], AbstractContextManager[None]]
"""Returns the context in which a module computes a replica's forward passes with the choices of its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Expected results of a step, and how far rounding may take a right step from them; in host memory."""

    gradients: dict[str, Tensor]
    sizes: dict[str, Tensor]
    """Sum of the absolute values of each element's shares; empty where no bound is made of it."""
    rounding: float
    """Allowed difference of two sums of the shares, relative to their size."""
    buffers: dict[str, Tensor]
    """Buffers of the first replica, after its micro-batches."""
    buffer_hashes: list[float]
    """Hash of each replica's buffers."""

    @property
    def bounds(self) -> dict[str, Tensor]:
        """Bound of a difference by rounding, element by element."""
        if not self.rounding:
            return {name: torch.zeros(()).expand_as(value) for name, value in self.gradients.items()}
        return {name: self.rounding * (size + SMALLEST_NORMAL) for name, size in self.sizes.items()}


class TooLongError(Exception):
    """Simulating a step of `replicas` replicas would take `seconds`, which is over the limit."""

    def __init__(self, seconds: float, replicas: int) -> None:
        super().__init__(seconds, replicas)
        self.seconds, self.replicas = seconds, replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The part of a cell that is simulated, and how."""

    step: int
    """Counted from 0: data and random state follow from it."""
    replicas: Sequence[int]
    averaged: int
    """Replicas that the strategy's gradients are the mean over."""
    scale: float = 1.0
    """Factor of the loss, as the trainer's scaler has it: small gradients lose digits in half precision."""
    unexpected: bool = False
    """Whether other micro-batches replace the drawn ones: see `Sampler.unexpected`."""
    in_fp32: bool = False
    """Whether everything is computed in fp32, whatever the precision of the cell."""
    by_blocks: bool = False
    """Whether each block adds up its own gradients of its inputs first: see `ReferenceModel.by_blocks`."""
    choices: Repeat = lambda module, replica: nullcontext()
    """Has the model repeat discrete choices; as it is, the model chooses by itself."""


class _Inputs(torch.autograd.Function):
    """Returns its inputs. Its backward pass gets the sum of what the uses of each output gave."""

    @staticmethod
    def forward(ctx: object, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def _own_inputs(module: nn.Module, args: object, kwargs: object) -> Any:
    """A forward pre-hook: all tensors that need a gradient go through one `_Inputs`."""
    leaves, form = pytree.tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if places and torch.is_grad_enabled():
        inputs = (leaves[place] for place in places)
        outputs = _Inputs.apply(*inputs)  # type: ignore[no-untyped-call]
        for place, output in zip(places, outputs, strict=True):
            leaves[place] = output
    return pytree.tree_unflatten(leaves, form)


class ReferenceModel:
    """A model of the cell for simulations: built once, on this device, and given its state by `load`.

    Between steps it rests without memory of the device, so that the cell's own step has all of it.
    """

    def __init__(self, setup: CellSetup) -> None:
        """Build the model; this rank's random state stays as it is."""
        before = torch.get_rng_state()
        # Seeded here, not by `setup`: the proof compares this model's initial values with the trained one's.
        torch.manual_seed(setup.cell.seed)
        self.workload = build_workload(setup.cell.workload, source_folder=setup.source_folder)
        torch.set_rng_state(before)
        self.module = self.workload.module.to(setup.device)
        if setup.cell.memory_format == "channels_last":
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if setup.cell.precision == "float8":
            layout = self.workload.layout
            quantise_products(self.module, self.blocks, () if layout is None else layout.splits)
        self._resting: list[tuple[torch.UntypedStorage, int]] = []

    @torch.no_grad()
    def load(self, start: Iterable[tuple[str, Tensor]]) -> None:
        """Take all parameters and buffers, at addresses that are aligned as theirs, and forget gradients."""
        self.wake()
        parameters, missing = dict(self.module.named_parameters()), dict(reference_state(self.module))
        for name, value in start:
            missing.pop(name).copy_(value)
            parameter = parameters.get(name)
            if parameter is not None and parameter.device.type == "cpu" and _off(parameter) != _off(value):
                parameter.data = host_copy(value)
        assert not missing, f"no state of {', '.join(missing)}"
        for parameter in parameters.values():
            parameter.grad = None

    @property
    def blocks(self) -> tuple[str, ...]:
        layout = self.workload.layout
        return (found_layout(self.module) if layout is None else layout).blocks

    @contextmanager
    def by_blocks(self, wanted: bool) -> Iterator[None]:
        """If `wanted`, have autograd add up the gradients of a block's inputs within the block first.

        A tensor that several blocks use has a gradient of as many terms. Autograd adds them one by one in the
        order of the backward pass, and block by block under FSDP, whose hooks wrap the inputs of a block.
        Both sums are right, and their last bits differ.
        """
        with ExitStack() as hooks:
            for name in self.blocks if wanted else ():
                block = self.module.get_submodule(name)
                hooks.enter_context(block.register_forward_pre_hook(_own_inputs, with_kwargs=True))
            yield

    def moved(self, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `start` with copies of the parameters that forward passes have changed since it was loaded.

        A teacher that follows its student is moved by the model itself.
        """
        named = ((name, parameter.detach()) for name, parameter in self.module.named_parameters())
        changed = ((name, value) for name, value in named if not torch.equal(value.cpu(), start[name]))
        return {**start, **{name: host_copy(value) for name, value in changed}}

    def wake(self) -> None:
        """Take the memory that `rest` gave up; its values mean nothing until `load`."""
        for storage, size in self._resting:
            storage.resize_(size)
        self._resting = []

    def rest(self) -> None:
        """Give up the memory of parameters, buffers and gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None
        for _, value in reference_state(self.module):
            storage = value.untyped_storage()
            # A tensor that shares its memory with others, or whose memory cannot be resized, keeps it.
            if storage.resizable() and storage.nbytes() == value.nbytes > 0:
                self._resting.append((storage, storage.nbytes()))
                storage.resize_(0)


def simulate_step(
    setup: CellSetup,
    model: ReferenceModel,
    start: Start,
    what: Simulated,
    *,
    longest_s: float = math.inf,
    beat: Beat = lambda: None,
) -> Reference:
    """Simulate one step of the named replicas, one after another, each from the state that `start` returns.

    The code is deliberately plain: it does not use what is under test (Trainer, strategies). `beat` is called
    after each micro-batch. Raises TooLongError if the time of the first replica, multiplied by the number of
    replicas, exceeds `longest_s`.
    """
    replicas = what.replicas
    sums: dict[str, Tensor] = {}
    sizes: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    buffer_hashes: list[float] = []
    began = time.perf_counter()
    for replica in replicas:
        model.load(start())
        with model.by_blocks(what.by_blocks), what.choices(model.module, replica):
            own, own_sizes = _replica_step(setup, model.workload, what, replica, beat)
        _add(sums, {name: gradient / len(replicas) for name, gradient in own.items()})
        _add(sizes, {name: size / len(replicas) for name, size in own_sizes.items()})
        buffer_hashes.append(hash_number(model.module.named_buffers()))
        if replica == replicas[0]:
            device_of(setup.device).synchronize()
            seconds = len(replicas) * (time.perf_counter() - began)
            if seconds > longest_s:
                raise TooLongError(seconds, len(replicas))
            buffers = {name: buffer.to("cpu", copy=True) for name, buffer in model.module.named_buffers()}
    # Each term is rounded when it is scaled, by a factor that may be rounded itself, and in terms - 1 sums.
    terms = summed_terms(setup.cell, what.averaged)
    roundoff = (terms + 1) * UNIT_ROUNDOFF
    return Reference(
        gradients={name: gradient.cpu() for name, gradient in sums.items()},
        sizes={name: size.cpu() for name, size in sizes.items()},
        rounding=2 * roundoff / (1 - roundoff) if terms > 2 else 0.0,
        buffers=buffers,
        buffer_hashes=buffer_hashes,
    )


ROUNDOFF: Mapping[Precision, float] = MappingProxyType(
    {"fp32": UNIT_ROUNDOFF, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11, "float8": 2.0**-8}
)
"""Largest change of a number by one rounding, relative to it."""


def rounded_otherwise(start: Mapping[str, Tensor], precision: Precision) -> Iterator[tuple[str, Tensor]]:
    """Yield the same state with every number off by one rounding, up or down by the same draw each time.

    The factor is a double: one plus half a unit in the last place of a number is one in its own type.
    """
    generator = torch.Generator().manual_seed(0)
    for name, value in start.items():
        if value.is_floating_point():
            up = torch.randint(2, value.shape, generator=generator, dtype=torch.int8) * 2 - 1
            value = (value.double() * (1 + ROUNDOFF[precision] * up.double())).to(value.dtype)
        yield name, value


def _replica_step(
    setup: CellSetup, workload: Workload, what: Simulated, replica: int, beat: Beat
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Add up the gradients of a replica's own micro-batches one after another, as autograd does.

    Returns them, and of each element the sum of its micro-batches' absolute values, if a bound is made of it.
    """
    cell = setup.cell
    sampler = Sampler(cell, workload, setup.device, setup.source_folder)
    first = what.step * cell.accumulation
    batches = sampler.batches(replica, first, cell.accumulation)
    if what.unexpected:
        batches = sampler.unexpected(batches, replica, first)
    sized = sizes_matter(cell, what.averaged)
    seed_step(cell.seed, what.step, replica)
    passes = cell.accumulation * STRATEGIES.facts(cell.strategy).microbatches
    half = None if what.in_fp32 else HALF.get(cell.precision)
    _give_factor(workload.module, torch.tensor(what.scale / passes, device=setup.device))
    gradients: dict[str, Tensor] = {}
    sizes: dict[str, Tensor] = {}
    for batch in _passes(batches, cell):
        # Autocast is written out here, because the trainer's own code may be wrong.
        with nullcontext() if half is None else torch.autocast(setup.device.type, dtype=half):
            loss = workload.loss_of(workload.module, batch) / passes
        (loss * what.scale).backward()  # type: ignore[no-untyped-call]
        for name, parameter in workload.module.named_parameters():
            if parameter.grad is not None:
                gradient, parameter.grad = dense(parameter.grad) / what.scale, None
                _add(gradients, {name: gradient})
                if sized:
                    _add(sizes, {name: gradient.abs()})
        beat()
    return gradients, sizes


def _give_factor(module: nn.Module, factor: Tensor) -> None:
    """Tell the parts that add the gradient of another loss the factor of the loss of a forward pass."""
    for part in module.modules():
        if hasattr(part, "loss_factor"):
            part.loss_factor = factor


def _passes(batches: Iterator[Batch], cell: Cell) -> Iterator[Batch]:
    """Yield the pieces of each batch that go through forward and backward at once."""
    pieces = STRATEGIES.facts(cell.strategy).microbatches
    for batch in batches:
        leaves, form = pytree.tree_flatten(batch)
        for piece in zip(*(leaf.chunk(pieces) for leaf in leaves), strict=True) if pieces > 1 else (leaves,):
            yield pytree.tree_unflatten(piece, form)


def _add(sums: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        sums[name] = sums[name] + value if name in sums else value


History = dict[str, OptimizerState]
"""The complete state of an optimizer, by parameter."""


def optimizer_history(trainer: Trainer, beat: Beat, *, kept: bool = True) -> History:
    """Return the state of the trainer's optimizer in host memory, or nothing if it is not `kept`.

    It is gathered one parameter at a time, with a `beat` after each, and on CPU not copied. Collective if the
    strategy shards.
    """
    history: History = {}
    for name, state in trainer.model.named_state(trainer.optimizer):
        if kept:
            history[name] = _on_host(state)
        beat()
    return history


def _on_host(state: OptimizerState) -> OptimizerState:
    return {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Result of a plain optimizer step, in host memory."""

    parameters: dict[str, Tensor]
    history: History
    tolerance: float
    """Allowed relative difference of what an update by the same gradients leaves; 0: all bits are equal."""


def replay_update(
    setup: CellSetup,
    model: ReferenceModel,
    start: Mapping[str, Tensor],
    gradients: dict[str, Tensor],
    history: History,
) -> Replay:
    """Take a plain optimizer step of `model` from `start`; gradients and history stay as they are."""
    model.load(start.items())
    parameters = dict(model.module.named_parameters())
    optimizer = plain_optimizer(setup.cell.optimizer, parameters.values())
    for name, state in history.items():
        # The count of steps stays on the host, as in torch.optim.Optimizer.load_state_dict.
        optimizer.state[parameters[name]] = {
            key: value.to("cpu" if key == "step" else setup.device, copy=True)
            if isinstance(value, Tensor)
            else value
            for key, value in state.items()
        }
    for name, gradient in gradients.items():
        parameters[name].grad = gradient.to(setup.device, copy=True)
    known = setup.cell.clip_norm is None or clip_plainly(setup.cell, list(parameters.values()))
    if finite(gradients):
        optimizer.step()
    states = ((name, optimizer.state.get(parameter)) for name, parameter in parameters.items())
    return Replay(
        parameters={name: parameter.detach().cpu() for name, parameter in parameters.items()},
        history={name: _on_host(state) for name, state in states if state},
        tolerance=_update_tolerance(setup.cell, factor_known=known),
    )


def clip_plainly(cell: Cell, parameters: Sequence[nn.Parameter]) -> bool:
    """Clip complete gradients, and return whether the strategy must have scaled them by the same factor.

    If it has sums in double precision, two orders of a sum of n squares, none of them negative, differ by at
    most n units of roundoff of 2^-53. Below 10^7 values both factors then nearly always round to the same
    number in single precision.
    """
    assert cell.clip_norm is not None
    facts = STRATEGIES.facts(cell.strategy)
    if not facts.norm_in_double:
        torch.nn.utils.clip_grad_norm_(parameters, cell.clip_norm)
        return not facts.shards
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares, terms = _squares(gradients)
    norm, terms = math.sqrt(squares), terms + cell.gpus + 8
    factor, low, high = (
        min(1.0, cell.clip_norm / (norm * (1 + way * terms * 2.0**-53) + CLIP_EPSILON)) for way in (0, 1, -1)
    )
    for gradient in gradients:
        gradient.mul_(factor)
    in_single = all(torch.finfo(gradient.dtype).bits <= 32 for gradient in gradients)
    return in_single and len(set(torch.tensor([low, high], dtype=torch.float32).tolist())) == 1


def _squares(gradients: Iterable[Tensor]) -> tuple[float, int]:
    """Return the sum of the squares of all values, in double precision, and their number."""
    squares, terms = 0.0, 0
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        values = torch.view_as_real(values) if values.is_complex() else values
        for piece in torch.split(values.flatten(), CLIP_PIECE):
            squares += float(piece.double().square().sum())
        terms += values.numel()
    return squares, terms


def _update_tolerance(cell: Cell, *, factor_known: bool) -> float:
    if not exact_arithmetic(cell):
        return UPDATE_TOLERANCE
    if factor_known:
        return 0.0
    return NEIGHBOUR_TOLERANCE if STRATEGIES.facts(cell.strategy).norm_in_double else UPDATE_TOLERANCE


def _off(value: Tensor) -> int:
    """Return the offset of the tensor's address from a multiple of `ALIGNED_BYTES`, in bytes."""
    return value.data_ptr() % ALIGNED_BYTES if value.device.type == "cpu" else 0


def host_copy(value: Tensor) -> Tensor:
    """Copy to host memory, to an address with the same offset from a multiple of `ALIGNED_BYTES` as `value`
    has.

    A strategy may put parameters one after another (`zero1`), and the rounding of the CPU's product of a
    matrix and a vector depends on the address of the matrix.
    """
    off = _off(value) // value.itemsize
    if not off or not value.is_contiguous():
        return value.to("cpu", copy=True)
    return torch.empty(off + value.numel(), dtype=value.dtype)[off:].view(value.shape).copy_(value)


def reference_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        yield name, parameter.detach()
    yield from module.named_buffers()


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient as an ordinary tensor: the gradient of a sparse embedding is sparse."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def finite(gradients: Mapping[str, Tensor]) -> bool:
    """Return False for a step whose scaled gradients overflowed, which the loss scaler leaves out."""
    return all(bool(dense(gradient).isfinite().all()) for gradient in gradients.values())


def exact_arithmetic(cell: Cell) -> bool:
    """Return whether two computations of the same micro-batch give the same bits.

    They do not if several ranks compute it together, average its gradients in half precision, or add up in
    another order in a layer.
    """
    facts = STRATEGIES.facts(cell.strategy)
    local = cell.device == "cpu" and cell.precision == "fp32" and not cell.compile
    return local and not (computes_together(cell) or facts.averages_half or facts.own_layers)


def computes_together(cell: Cell) -> bool:
    """Return whether several ranks compute a micro-batch together: in pieces of its matrices or its samples,
    or because the experts of one rank compute tokens of other ranks."""
    layout = STRATEGIES.facts(cell.strategy).groups(cell.gpus, cell.node_size)
    return cell.model_parallel > 1 or layout.expert > 1


def exact_update(cell: Cell) -> bool:
    """Return whether two updates by the same gradients give the same bits.

    A norm over shards is summed in another order than one over whole gradients.
    """
    return exact_arithmetic(cell) and not (
        cell.clip_norm is not None and STRATEGIES.facts(cell.strategy).shards
    )


def summed_terms(cell: Cell, replicas: int) -> int:
    """Return how many terms the strategy adds up in its own order: replicas, or each micro-batch of each."""
    return replicas * cell.accumulation if STRATEGIES.facts(cell.strategy).sums_micro_batches else replicas


def sizes_matter(cell: Cell, replicas: int) -> bool:
    """Return whether the bound of a comparison is made of the absolute values of the summed terms.

    It is for a lossy exchange, and, element by element, for a sum of more than two terms.
    """
    return cell.compresses or (exact_arithmetic(cell) and summed_terms(cell, replicas) > 2)


STATED: Mapping[str, tuple[type[torch.optim.Optimizer], Mapping[str, Any]]] = MappingProxyType(
    {
        "sgd": (
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False},
        ),
        "adamw": (
            torch.optim.AdamW,
            {"lr": 3e-4, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False},
        ),
    }
)
"""Class of each optimizer by name, and every argument with the default that docs/options.md states."""


def plain_optimizer(text: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build the optimizer that `text` means (`sgd:lr=0.1`, for example).

    One that is not in `STATED`, as another package may register, is built by its own facts.
    """
    name, *options = text.split(":")
    if name not in STATED:
        kind, arguments = optimizer_call(text, ())
        return kind(parameters, **arguments)
    kind, stated = STATED[name]
    given = {key: float(value) for key, _, value in (option.partition("=") for option in options)}
    return kind(parameters, **{**stated, **given})
