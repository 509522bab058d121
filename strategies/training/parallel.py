"""A model as a strategy lays it out: the base class of all strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from results.cell import (
    BASELINE_STRATEGY,
    DEFAULT_COLLECTIVE,
    UNCOMPRESSED,
    Cell,
    Checkpointing,
    MemoryFormat,
    Precision,
)
from results.groups import GroupLayout
from results.layout import ModelLayout
from results.spec import Spec
from strategies.advice import SPARSE_GRADIENTS
from strategies.collectives.link import Link
from strategies.compression.base import State
from strategies.facts import StrategyFacts
from strategies.gradient_exchange import AuditableExchange, ExchangeSettings
from strategies.optimizers import build_optimizer
from strategies.training.boxes import Owned, whole
from strategies.training.layouts import require_dense
from strategies.training.loss import Batch, Loss, loss_of
from strategies.training.observer import Phase, StepObserver
from strategies.training.precision import autocast

OptimizerState = dict[str, object]
"""The state of one parameter, by the optimizer's keys (such as `exp_avg`): complete tensors, and numbers."""


Initial = Callable[[Tensor, torch.device], None]
"""Gives a parameter or buffer of a module on the meta device its initial values, on a device and in place."""


@dataclass(frozen=True, slots=True)
class Blank:
    """A module on the meta device, with the function that gives its initial values."""

    module: nn.Module
    initial: Initial


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The arguments of a strategy, except the model."""

    facts: StrategyFacts
    device: torch.device
    exchange: ExchangeSettings
    layout: ModelLayout
    groups: GroupLayout
    """The groups of the ranks of the exchange's group."""
    fill: Callable[[Tensor], None]
    """Gives a parameter or buffer of a module that was built on the meta device its initial values on
    `device`, in place. A strategy whose facts are `by_unit` calls it for each tensor before it uses its
    values."""

    @property
    def spec(self) -> Spec:
        """The spec of the strategy, with its options."""
        return self.facts.spec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """The settings of a step; fields have the names and meanings of a cell's."""

    strategy: str = BASELINE_STRATEGY
    compression: str = UNCOMPRESSED
    collective: str = DEFAULT_COLLECTIVE
    node_size: int | None = None
    """Consecutive ranks that form a node (None: all of them), for `hierarchical` and `hsdp`."""
    optimizer: str = "sgd"
    accumulation: int = 1
    precision: Precision = "fp32"
    clip_norm: float | None = None
    activation_checkpointing: Checkpointing = False
    compile: bool = False
    memory_format: MemoryFormat = "contiguous"
    seed: int = 0
    """Seed of the random numbers of compressors, the same on all ranks."""

    @classmethod
    def of(cls, cell: Cell) -> TrainSettings:
        return cls(**{name: getattr(cell, name) for name in cls.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTask:
    """The arguments of computing gradients, for any strategy."""

    loss: Loss
    """The loss of a micro-batch."""
    accumulation: int
    precision: Precision
    device: torch.device
    scaler: torch.amp.GradScaler
    observer: StepObserver
    recomputes: bool
    """Whether blocks are computed again in the backward pass."""

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of forward and loss. If blocks are computed again, the half precision copies of
        a block's weights are freed after its forward pass."""
        return autocast(self.precision, self.device, caches=not self.recomputes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTransport:
    """An exchange over other connections than the cell's group, which can be neither counted nor timed."""

    what: str
    """The reason, as a clause."""
    payload_bytes: int
    """Bytes of the buffers that a rank hands over in one step, computed."""
    operations: int


class ParallelModel:
    """A model that one strategy has laid out over the ranks of a group.

    This base class is the layout of one device (`single`); a strategy overrides the methods in which it
    differs. Outside of `compute_gradients` no operation is in flight.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        """The module called in the forward pass: the bare model, or the strategy's wrapper of it."""
        self.bare = module
        """The model of the user, from which names of parameters and buffers are taken."""
        names = {id(value): name for name, value in (*module.named_parameters(), *module.named_buffers())}
        # A tensor of several names has a key for each, and is known by the first.
        shown = module.state_dict(keep_vars=True).items()
        self.state_keys = {key: names[id(value)] for key, value in shown if id(value) in names}
        """The keys of the bare module's `state_dict` before it was split, each with the name of its
        tensor."""
        self.gradient_exchange: AuditableExchange | None = None
        """The exchange of gradients (or of differences), if it is ours and not the wrapper's."""
        self.period = 1
        """Steps of one cycle of the strategy (8 for `local-sgd:8`). `lay_out` takes it from the promise."""
        self.shown_after = 1
        """Steps that show all of what the promise says, from the promise too."""
        self.ramp_steps = 0
        """Number of first steps that differ from all later steps; at least `after` of the promise."""
        self.decided_over: Link | None = None
        """The link over which ranks agree that gradients overflowed; None: all see the same gradients."""
        self.forward_alone = True
        """Whether all ranks together can call `module` for a forward pass without a backward pass."""
        self.own_transport: OwnTransport | None = None
        """The exchange of gradients, if it is not over the cell's group."""
        self.settings: TrainSettings | None = None
        """The settings of the Trainer's step; None in a caller's own loop."""
        self.bubble_ideal: float | None = None
        """The minimum share of a step in which a pipeline's stages idle, by the schedule; None without
        stages."""
        self.observe_part: Callable[[int, str], AbstractContextManager[object]] = lambda stage, part: (
            nullcontext()
        )
        """The context in which a pipeline's stage computes one part of a pass: `forward`, `loss`, and
        `backward` or `input` and `weights`."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that this rank updates."""
        return self.bare.parameters()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield complete detached parameters by the names of the bare model; a sharding strategy gathers
        them."""
        for name, parameter in self.bare.named_parameters():
            yield name, parameter.detach()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield complete gradients after the exchange; parameters without a gradient are left out."""
        for name, parameter in self.bare.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of this rank's replica by the names of the bare model; gathered from its
        stages."""
        yield from self.bare.named_buffers()

    def build_optimizer(self, text: str) -> torch.optim.Optimizer:
        """Build the optimizer that a spec text names, over the parameters that this rank updates."""
        return build_optimizer(text, self.parameters())

    def owned(self) -> Iterator[Owned]:
        """Yield the parameters of this rank, each once, with their places in the bare model's parameters, for
        checkpoints. All ranks together have every element of the complete model."""
        for name, parameter in self.bare.named_parameters():
            yield whole(name, parameter)

    def local_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the part of an optimizer of `build_optimizer` that updates parameters on this rank."""
        return optimizer

    def local_state(self, optimizer: torch.optim.Optimizer) -> MutableMapping[Tensor, OptimizerState]:
        """Return this rank's part of the state of an optimizer of `build_optimizer`, by parameter; not
        copied."""
        return self.local_optimizer(optimizer).state

    def named_state(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, OptimizerState]]:
        """Yield for each parameter its name in the bare model and its complete state in an optimizer of
        `build_optimizer`.

        Tensors that had to be gathered are new; all others alias those of the optimizer. Parameters without
        state are left out. Collective if the strategy splits parameters or state.
        """
        for name, parameter in self.bare.named_parameters():
            state = optimizer.state.get(parameter)
            if state:
                yield name, state

    def named_outer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield for each trained parameter its name in the bare model and its momentum in the outer step of
        the promise (`OuterStep`), not copied and equal on all ranks; nothing if it promises none."""
        return iter(())

    def compute_gradients(self, batches: Iterator[Batch], task: GradientTask) -> Tensor:
        """Run forward and backward of the micro-batches of one step, and exchange the gradients at the end.

        Each parameter then has the gradient of the mean loss over all samples of all replicas, times the
        scaler's factor. Returns this rank's mean loss, detached, unscaled.
        """
        total: Tensor | None = None
        for index in range(task.accumulation):
            task.observer.begins(Phase.DATA)
            batch, loss_of_part = self.part_of(next(batches), task.loss)
            with self.exchange(now=index == task.accumulation - 1):
                task.observer.begins(Phase.FORWARD)
                if index == 0:
                    self.started()
                with task.autocast():
                    loss = loss_of(self.module, batch, loss_of_part) / task.accumulation
                task.observer.begins(Phase.BACKWARD)
                task.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def part_of(self, batch: Batch, loss: Loss) -> tuple[Batch, Loss]:
        """Return the part of its replica's batch that this rank computes, and the loss of that part."""
        return batch, loss

    def exchange(self, *, now: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch, which exchanges gradients if `now`, and else only adds them
        up."""
        return nullcontext()

    def started(self) -> None:
        """Prepare a step. It is called when the first forward pass of the step begins, and its messages count
        as a part of that pass."""

    def updated(self) -> None:
        """Act on an update; it is called after the optimizer has updated the parameters."""

    def settle(self) -> None:
        """Make the parameters of all replicas equal, if they differ between two exchanges; collective."""

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients down so that their global norm is at most `max_norm`; returns the norm they
        had, a scalar. Raises UsageError for sparse gradients."""
        if any(value.grad is not None and value.grad.is_sparse for value in self.parameters()):
            require_dense(self.bare, "the norm that clip_norm bounds", f"{SPARSE_GRADIENTS} or no clip_norm")
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def strategy_state(self) -> State:
        """Return a copy of this rank's state that a step changes, other than module, optimizer and scaler,
        such as residuals and buckets. It is a part of `Trainer.state_dict`."""
        return {} if self.gradient_exchange is None else {"exchange": self.gradient_exchange.state_dict()}

    @property
    def resumes_otherwise(self) -> str | None:
        """Why a resumed run may not continue bit for bit, as a clause; None if it does."""
        return None

    def load_strategy_state(self, state: Mapping[str, object]) -> None:
        """Resume from a `strategy_state` of the same rank."""
        if self.gradient_exchange is not None:
            self.gradient_exchange.load_state_dict(cast(State, state["exchange"]))

    def start_from(self, steps: int) -> None:
        """Resume from parameters that have been replaced, equally on all ranks, after `steps` steps, with
        initial residuals and buckets. Collective."""
