"""A plain simulation of one distributed step on one device: what the strategy under test must come to.

Which computations of a cell can be repeated bit for bit, and how many terms are summed in any order.

torch's own optimizer of a cell, from its text by code that shares nothing with the strategies'.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from harness.worker.cell.plain_optimizer import plain_optimizer
from harness.worker.cell.sampler import Sampler
from harness.worker.cell.setup import CellSetup, seed_step
from harness.worker.proof.exactness import sizes_matter, summed_terms
from harness.worker.rank.control import hash_number
from harness.worker.cell.agreement import hash_number
from harness.worker.cell.sampler import Sampler
from harness.worker.cell.seeds import seed_step
from harness.worker.cell.setup import CellSetup
from results.cell import Cell, Precision
from results.parts import ALIGNED_BYTES
from strategies.catalog import STRATEGIES
from strategies.devices import device_of
from strategies.training.found_layout import found_layout
from strategies.training.optimizer import optimizer_call
from strategies.training.parallel import OptimizerState
from strategies.training.trainer import Trainer
from workloads.batch import Batch
from workloads.build import build_workload
from workloads.workload import Workload

UNIT_ROUNDOFF = 2.0**-24
SMALLEST_NORMAL = 2.0**-126
"""Below it the error of a share is absolute: half of 2^-149."""


HALF: Mapping[Precision, torch.dtype] = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})
"""The types of autocast."""
Beat = Callable[[], None]
"""Says that work goes on."""
Start = Callable[[], Iterable[tuple[str, Tensor]]]
"""Gives the parameters and buffers that a step begins with, anew for each replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a step must give, and how far rounding may take it from that; all of it in host memory."""

    gradients: dict[str, Tensor]
    sizes: dict[str, Tensor]
    """Of each element: the sum of its shares' absolute values; empty where no bound is made of it."""
    rounding: float
    """How far two sums of the shares may be apart, in parts of their size."""
    buffers: dict[str, Tensor]
    """The first replica's, after its micro-batches."""
    buffer_hashes: list[float]
    """Of each replica."""

    @property
    def bounds(self) -> dict[str, Tensor]:
        """Elementwise bound of a difference by rounding."""
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
    """What is simulated of a cell."""

    step: int
    """Counted from 0: data and random state follow from it."""
    replicas: Sequence[int]
    averaged: int
    """Replicas that the strategy's gradients are the mean over."""
    scale: float = 1.0
    """Of the loss, as the trainer's scaler has it: small gradients lose digits in half precision."""
    unexpected: bool = False
    """Whether other micro-batches take the place of those that are drawn: see `Sampler.unexpected`."""
    in_fp32: bool = False
    """Whether everything is computed in fp32, whatever the precision of the cell."""
    by_blocks: bool = False
    """Whether each block adds up its own gradients of its inputs first: see `ReferenceModel.by_blocks`."""


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

    Between steps it rests, and has no memory of the device: what the cell's own step takes is not beside it.
    """

    def __init__(self, setup: CellSetup) -> None:
        """This rank's random state stays as it is."""
        before = torch.get_rng_state()
        # Not by `setup`, which builds the model that is trained: its initial values are held to these.
        torch.manual_seed(setup.cell.seed)
        self.workload = build_workload(setup.cell.workload, source_folder=setup.source_folder)
        torch.set_rng_state(before)
        self.module = self.workload.module.to(setup.device)
        if setup.cell.memory_format == "channels_last":
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._resting: list[tuple[torch.UntypedStorage, int]] = []

    @torch.no_grad()
    def load(self, start: Iterable[tuple[str, Tensor]]) -> None:
        """Take these parameters and buffers, all of them, at addresses that are aligned as theirs, and no
        gradient."""
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
        """If `wanted`, autograd adds up the gradients of a block's inputs within the block first.

        A tensor that several blocks use has a gradient of as many terms. Autograd adds them one by one in the
        order of the backward pass, and block by block under FSDP, whose hooks wrap the inputs of a block.
        Both sums are right, and their last bits differ.
        """
        hooks = [
            self.module.get_submodule(name).register_forward_pre_hook(_own_inputs, with_kwargs=True)
            for name in (self.blocks if wanted else ())
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def moved(self, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`start`, with copies of the parameters that forward passes have changed since it was loaded: a
        teacher that follows its student is moved by the model itself."""
        named = ((name, parameter.detach()) for name, parameter in self.module.named_parameters())
        changed = ((name, value) for name, value in named if not torch.equal(value.cpu(), start[name]))
        return {**start, **{name: host_copy(value) for name, value in changed}}

    def wake(self) -> None:
        """Take the memory that a rest gave up; what is in it means nothing until `load`."""
        for storage, size in self._resting:
            storage.resize_(size)
        self._resting = []

    def rest(self) -> None:
        """Give up the memory of parameters, buffers and gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None
        for _, value in reference_state(self.module):
            storage = value.untyped_storage()
            # What shares its memory with other tensors, or has it from elsewhere, keeps it.
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
    """One step of the named replicas, one after another, on `model`, each from the state that `start` gives.

    Deliberately plain: what is under test (Trainer, strategies) is not used. `beat` is called after each
    micro-batch. Raises TooLongError if, by the first replica, the step would take more than `longest_s`.
    """
    replicas, averaged = what.replicas, what.averaged
    sums: dict[str, Tensor] = {}
    sizes: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    buffer_hashes: list[float] = []
    began = time.perf_counter()
    for replica in replicas:
        model.load(start())
        with model.by_blocks(what.by_blocks):
            own = _replica_step(setup, model.workload, what, replica, beat)
        _add(sums, {name: gradient / len(replicas) for name, gradient in own.gradients.items()})
        _add(sizes, {name: size / len(replicas) for name, size in own.sizes.items()})
        buffer_hashes.append(hash_number(own.module.named_buffers()))
        if replica == replicas[0]:
            device_of(setup.device).synchronize()
            seconds = len(replicas) * (time.perf_counter() - began)
            if seconds > longest_s:
                raise TooLongError(seconds, len(replicas))
            buffers = {name: buffer.to("cpu", copy=True) for name, buffer in own.module.named_buffers()}
    return Reference(
        gradients={name: gradient.cpu() for name, gradient in sums.items()},
        sizes={name: size.cpu() for name, size in sizes.items()},
        rounding=_rounding(summed_terms(setup.cell, averaged)),
        buffers=buffers,
        buffer_hashes=buffer_hashes,
    )


ROUNDOFF: Mapping[Precision, float] = MappingProxyType(
    {"fp32": UNIT_ROUNDOFF, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}
)
"""What one rounding may change, in parts of a number."""


def rounded_otherwise(start: Mapping[str, Tensor], precision: Precision) -> Iterator[tuple[str, Tensor]]:
    """The same state, of which every number is off by one rounding, up or down by the same draw each time.

    The factor is a double: one plus half a unit in the last place of a number is one in its own type.
    """
    generator = torch.Generator().manual_seed(0)
    for name, value in start.items():
        if value.is_floating_point():
            up = torch.randint(2, value.shape, generator=generator, dtype=torch.int8) * 2 - 1
            value = (value.double() * (1 + ROUNDOFF[precision] * up.double())).to(value.dtype)
        yield name, value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """A replica after the micro-batches of its step."""

    module: nn.Module
    gradients: dict[str, Tensor]
    sizes: dict[str, Tensor]
    """Of each element: the sum of its micro-batches' absolute values; empty unless asked for."""


def _replica_step(setup: CellSetup, workload: Workload, what: Simulated, replica: int, beat: Beat) -> _Share:
    """The gradients of a replica's own micro-batches, added up one after another as autograd does."""
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
    gradients: dict[str, Tensor] = {}
    sizes: dict[str, Tensor] = {}
    for batch in _passes(batches, cell):
        # Not by the trainer's own code, which may be wrong.
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
    return _Share(module=workload.module, gradients=gradients, sizes=sizes)


def _passes(batches: Iterator[Batch], cell: Cell) -> Iterator[Batch]:
    """What goes through forward and backward at once, one after another."""
    pieces = STRATEGIES.facts(cell.strategy).microbatches
    for batch in batches:
        leaves, form = pytree.tree_flatten(batch)
        for piece in zip(*(leaf.chunk(pieces) for leaf in leaves), strict=True) if pieces > 1 else (leaves,):
            yield pytree.tree_unflatten(piece, form)


def _add(sums: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        sums[name] = sums[name] + value if name in sums else value


def _rounding(terms: int) -> float:
    """How far two averages of so many terms may be apart, in parts of the mean absolute value."""
    if terms <= 2:
        return 0.0
    # Of each term: its share is rounded, by a factor that may be rounded itself, and terms - 1 sums are.
    roundings = terms + 1
    return 2 * roundings * UNIT_ROUNDOFF / (1 - roundings * UNIT_ROUNDOFF)


History = dict[str, OptimizerState]
"""An optimizer's state, whole, by parameter."""


def optimizer_history(trainer: Trainer, beat: Beat, *, kept: bool = True) -> History:
    """What the trainer's optimizer knows of earlier steps, in host memory; nothing if it is not `kept`, one
    parameter at a time, with a `beat` after each. Collective if the strategy shards. On CPU not copied."""
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
    """What a plain optimizer step leaves, in host memory."""

    parameters: dict[str, Tensor]
    history: History


def replay_update(
    setup: CellSetup,
    model: ReferenceModel,
    start: Mapping[str, Tensor],
    gradients: dict[str, Tensor],
    history: History,
) -> Replay:
    """A plain optimizer step of `model` from `start` by `gradients`, with that history, none of which it
    changes."""
    model.load(start.items())
    parameters = dict(model.module.named_parameters())
    optimizer = plain_optimizer(setup.cell.optimizer, parameters.values())
    for name, state in history.items():
        optimizer.state[parameters[name]] = {
            key: _own(key, value, setup.device) for key, value in state.items()
        }
    for name, gradient in gradients.items():
        parameters[name].grad = gradient.to(setup.device, copy=True)
    if setup.cell.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters.values(), setup.cell.clip_norm)
    if finite(gradients):
        optimizer.step()
    states = ((name, optimizer.state.get(parameter)) for name, parameter in parameters.items())
    return Replay(
        parameters={name: parameter.detach().cpu() for name, parameter in parameters.items()},
        history={name: _on_host(state) for name, state in states if state},
    )


def _own(key: str, value: object, device: torch.device) -> object:
    """A copy of a value of the state, where the optimizer looks for it."""
    if not isinstance(value, Tensor):
        return value
    # The count of steps stays on the host, as in torch.optim.Optimizer.load_state_dict.
    return value.to("cpu" if key == "step" else device, copy=True)


def _off(value: Tensor) -> int:
    """Bytes from a multiple of `ALIGNED_BYTES`."""
    return value.data_ptr() % ALIGNED_BYTES if value.device.type == "cpu" else 0


def host_copy(value: Tensor) -> Tensor:
    """A copy in host memory, as far from a multiple of `ALIGNED_BYTES` as `value` is.

    A strategy may put parameters one after another (`zero1`), and the CPU's product of a matrix and a vector
    rounds by where the matrix begins.
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
    """A gradient as an ordinary tensor: that of a sparse embedding is not one."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def finite(gradients: Mapping[str, Tensor]) -> bool:
    """False for a step whose scaled gradients overflowed, which the loss scaler leaves out."""
    return all(bool(dense(gradient).isfinite().all()) for gradient in gradients.values())


def exact_arithmetic(cell: Cell) -> bool:
    """Whether two computations of the same micro-batch give the same bits: not where several ranks compute
    it together, in pieces of its matrices or its samples."""
    return cell.device == "cpu" and cell.precision == "fp32" and not cell.compile and cell.model_parallel == 1


def exact_update(cell: Cell) -> bool:
    """Whether two updates by the same gradients give the same bits: a norm over shards is summed in another
    order than one over whole gradients."""
    return exact_arithmetic(cell) and not (
        cell.clip_norm is not None and STRATEGIES.facts(cell.strategy).shards
    )


def summed_terms(cell: Cell, replicas: int) -> int:
    """What is added up in an order of the strategy's own: whole replicas, or each micro-batch of each."""
    return replicas * cell.accumulation if STRATEGIES.facts(cell.strategy).sums_micro_batches else replicas


def sizes_matter(cell: Cell, replicas: int) -> bool:
    """Whether a comparison is bounded by the absolute values of what is summed: that of a lossy exchange is,
    and that of a sum of more than two terms, element by element."""
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
"""By name: the class, and every argument as docs/options.md states its default."""


def plain_optimizer(text: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What `text` (`sgd:lr=0.1`, say) means. One that is not in `STATED`, as another package may register,
    is built by its own facts."""
    name, *options = text.split(":")
    if name not in STATED:
        kind, arguments = optimizer_call(text, ())
        return kind(parameters, **arguments)
    kind, stated = STATED[name]
    given = {key: float(value) for key, _, value in (option.partition("=") for option in options)}
    return kind(parameters, **{**stated, **given})
