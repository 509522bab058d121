"""Pipeline parallelism: the blocks of a model in stages, through which microbatches follow each other.

The schedules come from torch.distributed.pipelining: GPipe (Huang et al. 2018, arXiv:1811.06965), 1F1B
(Narayanan et al. 2019, PipeDream-Flush in arXiv:2006.09503) and interleaved 1F1B (Narayanan et al. 2021,
arXiv:2104.04473, section 2.2), where each of p ranks has v stages that lie p apart. `order.py` has the
others: looped-bfs and zero-bubble, with the stages of interleaved 1F1B, and zbv and dualpipev, whose first
and last stage are on rank 0.

Messages of one step of a copy, with m microbatches a micro-batch and S stages: the activations of each
microbatch over each edge between two ranks (S - 1, and one less in a V), and their gradients back; the
gradient of a parameter that the first and the last stage share, summed over their two ranks; eight bytes of
the loss. With several copies of the pipeline the gradients of each stage are averaged over them once, after
the last microbatch.

With `shard` each stage is in shards (`shards.py`), and with `tp` and `cp` several ranks compute a stage: they
have the stages of one pipeline each, which exchange within layers.

A rank keeps only the parameters, gradients and optimizer state of its stages. Until the model is laid out,
every rank has all of it.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from results.errors import UsageError
from results.groups import GroupLayout
from results.layout import ModelLayout
from strategies.advice import SPLIT
from strategies.collectives.link import Link
from strategies.context.model import ContextSplit
from strategies.experts.model import ExpertSplit
from strategies.fsdp.shards import DeviceGrid, local, require_shardable
from strategies.gradient_exchange import ExchangeSettings, GradientExchange
from strategies.pipeline.facts import Pipeline
from strategies.pipeline.order import LOOPED
from strategies.pipeline.shards import ShardedStages
from strategies.pipeline.stages import StageFunction, StageModule, Twin, cut_model, prune, require_cuttable
from strategies.tensor_parallel.model import TensorSplit
from strategies.tensor_parallel.sequence import SequenceSplit
from strategies.training.boxes import Owned
from strategies.training.clipping import clip_shards
from strategies.training.gathered import gathered
from strategies.training.loss import Batch, BatchLoss
from strategies.training.missing_gradients import MissingGradients
from strategies.training.observer import Phase
from strategies.training.parallel import GradientTask, OptimizerState, ParallelModel, Setting
from strategies.training.replicas import Buffers, take_from_first, take_values
from strategies.training.slicing import Slicings

_KINDS: Mapping[str, type[Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class PipelineModel(ParallelModel):
    """The stages of one rank, their schedule, and the groups of ranks that share their parameters."""

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        """Collective: all ranks take the parameters and buffers of rank 0, and keep only their stages.

        Raises UsageError, with advice, for a model that cannot be cut into this number of stages.
        """
        super().__init__(module)
        facts, groups, layout = cast(Pipeline, setting.facts), setting.groups, setting.layout
        self._kind, self._device, self._pieces = facts.schedule, setting.device, facts.microbatches
        self.forward_alone = False
        idle = facts.bubble(groups.ranks)
        self.bubble_ideal = idle / (1 + idle)
        require_cuttable(module, layout)
        if groups.shard_ranks > 1:
            require_shardable(module, layout)
        self._twin = Twin(module)
        self._cut = cut_model(
            module,
            self._twin,
            layout,
            ranks=groups.pipeline,
            stages=facts.chunks * groups.pipeline,
            schedule=facts.schedule,
        )
        self._last = self._cut.rank_of(self._cut.stages - 1)
        self.decided_over = everyone = Link(setting.exchange.group)
        take_values(everyone, setting.fill, (*module.parameters(), *module.buffers()))
        self._pipeline = everyone.split(groups.groups("pipeline"), duplex=True)
        self._connect(circular=facts.schedule in LOOPED)
        copies = groups.groups("replicate", "shard", "context")
        self._copies = everyone.split(copies) if len(copies) < groups.ranks else None
        self._parts = self._pipeline
        """The link of the ranks that have parts of one set of parameters."""
        self._grid: DeviceGrid | None = None
        self._split: TensorSplit | None = None
        self._experts: ExpertSplit | None = None
        self._slicings = Slicings()
        self._context: ContextSplit | None = None
        if facts.width > 1:
            self._divide_stages(DeviceGrid(everyone, groups, self._device), facts, layout)
        self._buffer_names = [name for name, _ in module.named_buffers()]
        self._lengths = {name: len(value) if value.dim() else 1 for name, value in module.named_parameters()}
        """The number of rows of each parameter of the complete model."""
        self._keep_own_stages(everyone, facts, groups)
        self._missing = MissingGradients(
            everyone, self._device, reason="every stage updates all that it trains"
        )
        self._step = _Step(self._pieces, self._cut.stages - 1)
        self._schedule: Any = None
        self._made_for: object = None

    def _connect(self, *, circular: bool) -> None:
        """Send one value between neighbours in both directions, in one order on all ranks of the pipeline.

        NCCL creates the communicator of two ranks at their first message, and both hosts wait for it. In a
        step one of them could wait behind a message that the other receives later.
        """
        link, value = self._pipeline, torch.zeros(1, device=self._device)
        edges = [(rank, rank + 1) for rank in range(link.size - 1)]
        if circular and link.size > 2:
            edges.append((link.size - 1, 0))
        for edge in edges:
            for source, to in (edge, edge[::-1]):
                if link.rank == source:
                    link.send(value, to).wait()
                elif link.rank == to:
                    link.receive(value, source).wait()

    def _divide_stages(self, grid: DeviceGrid, facts: Pipeline, layout: ModelLayout) -> None:
        """Split the layers, and the sequences, of the complete model over the ranks of a stage."""
        self._slicings = grid.slicings
        self._grid, self._parts = grid, grid.along("pipeline", "shard", "context", "tensor")
        if grid.tensor is not None:
            # All ranks have all values by now.
            self._split = TensorSplit(
                self.bare,
                layout,
                grid.tensor,
                self._slicings,
                lambda tensors: None,
                sequence=facts.splits_tokens,
            )
        if grid.expert is not None:
            self._experts = ExpertSplit(self.bare, layout, grid.expert, self._slicings)
            for name in layout.experts:
                self._experts.split(name, lambda tensors: None)
        if facts.attention is not None:
            self._context = ContextSplit(self.bare, layout, grid.along("context"), facts.attention)

    def _keep_own_stages(self, everyone: Link, facts: Pipeline, groups: GroupLayout) -> None:
        """Prune the model to this rank's stages, and shard these. If two ranks share a parameter, each has a
        copy, with the same gradient and so the same update."""
        owners = self._cut.ranks_of(self.bare)
        rank = self._pipeline.rank
        named = dict(self.bare.named_parameters())
        self._own = {name: value for name, value in named.items() if rank in owners[value]}
        """Parameters by their names in the complete model: a shared one may have another name in its
        stages."""
        self._copied = {name for name, value in named.items() if len(owners[value]) > 1}
        # All ranks create the groups, also ranks without a copy.
        self._ends = everyone.split(_ends(groups)) if self._copied else None
        stages = self._cut.stages_of(rank)
        prune(self.bare, {name for stage in stages for name in self._cut.modules(stage)})
        # A block whose forward function is wrapped holds itself.
        del named, owners
        gc.collect()
        self._buffers = Buffers(self.bare)
        self._shards = self._sharded(facts, stages)
        # Gradients are averaged by the exchange that also serves a user's own loop.
        self._mean: GradientExchange | None = None
        if self._copies is not None and self._shards is None:
            settings = ExchangeSettings(group=self._copies.group)
            self._mean = GradientExchange(settings, device=self._device)

    def _sharded(self, facts: Pipeline, stages: Sequence[int]) -> ShardedStages | None:
        """Shard this rank's stages, whose parameters are others then; None if the grid has no shards."""
        if self._grid is None or self._grid.groups.shard_ranks == 1:
            return None
        blocks = [self._cut.layout.blocks[at] for stage in stages for at in self._cut.runs[stage]]
        places = {value: name for name, value in self.bare.named_parameters()}
        shards = ShardedStages(self.bare, blocks, facts, self._grid, self._experts)
        self._own = {name: self.bare.get_parameter(places[value]) for name, value in self._own.items()}
        return shards

    def owned(self) -> Iterator[Owned]:
        if self._shards is not None:
            return self._shards.owned(self._own.items())
        return self._slicings.owned(self._own.items())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield complete parameters. Collective over the pipeline, as the next three methods, and over the
        shards of its stages.

        They raise CopiesDifferError if the copies of a shared parameter, its gradient or its state differ
        between both ends of the pipeline.
        """
        for name, values in self._whole({name: {"": value} for name, value in self._own.items()}):
            yield name, cast(Tensor, values[""])

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        trained = ((name, parameter.grad) for name, parameter in self._own.items())
        own = {name: {"": gradient} for name, gradient in trained if gradient is not None}
        for name, values in self._whole(own):
            yield name, cast(Tensor, values[""])

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        own = {name: {"": buffer} for name, buffer in self.bare.named_buffers()}
        for name, values in gathered(own, self._buffer_names, self._pipeline, self._device):
            yield name, cast(Tensor, values[""])

    def named_state(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, OptimizerState]]:
        states = ((name, optimizer.state.get(parameter)) for name, parameter in self._own.items())
        return self._whole({name: state for name, state in states if state})

    def _whole(self, own: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, OptimizerState]]:
        """Gather values of parameters over the stages, and then over their shards."""
        names = list(self._lengths)
        shards = {name: {key: local(value) for key, value in values.items()} for name, values in own.items()}
        for name, values in gathered(shards, names, self._pipeline, self._device, copied=self._copied):
            yield name, {key: self._joined(name, value) for key, value in values.items()}

    def _joined(self, name: str, value: object) -> object:
        """Return the complete value of a parameter from this rank's part; a number of steps as it is."""
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if self._shards is not None:
            return self._shards.of_local(name, value, self._lengths[name])
        return self._slicings.whole(name, value)

    def compute_gradients(self, batches: Iterator[Batch], task: GradientTask) -> Tensor:
        """Compute gradients as the base class does; every rank draws the micro-batches of its replica.

        The last stage broadcasts the mean loss to all, eight bytes, for which no rank waits, as the last
        stage ends first.

        Raises UsageError if a trained parameter had no gradient, as `MissingGradients` does.
        """
        self._step.begins(task, self.observe_part)
        for index in range(task.accumulation):
            task.observer.begins(Phase.DATA)
            inputs, targets = self._own_tokens(*self._step.tensors(next(batches)))
            # Before its first computation a rank mostly waits; then the stages report the phases.
            task.observer.begins(Phase.FORWARD)
            if index == 0:
                self.started()
            self._run(inputs, targets)
        self._exchange_gradients()
        loss = self._step.loss
        self._pipeline.broadcast(loss, self._last)
        return loss

    def _own_tokens(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the part of a micro-batch that this rank computes, and note where its tokens are."""
        if self._context is not None:
            named, targets = self._context.part((inputs, targets), self._step.loss_of)
            self._step.loss_of = self._context.even(self._step.loss_of)
            (_, inputs), *positions = named.items()
            self._step.positions = dict(positions)
        return inputs, targets

    def started(self) -> None:
        if self._copies is not None:
            take_from_first(self._copies, self._buffers.now())
        if self._shards is not None:
            self._shards.begin()

    def _run(self, inputs: Tensor, targets: Tensor) -> None:
        """Run forward and backward of one micro-batch by the schedule. The stages of a schedule have buffers
        for inputs of one shape and type, so micro-batches of another shape or type get a new schedule."""
        wanted = inputs.shape, inputs.dtype, self._step.task.precision
        if self._schedule is None or self._made_for != wanted:
            self._schedule, self._made_for = self._new_schedule(inputs), wanted
        schedule: Any = self._schedule
        # Up to torch 2.12 a stage refuses strides other than those of its first inputs.
        fed = [inputs.contiguous()] if self._pipeline.rank == 0 else []
        asked = {"target": targets} if self._pipeline.rank == self._last else {}
        try:
            with _own_errors():
                schedule.step(*fed, return_outputs=False, **asked)
        finally:
            if self._context is not None:
                self._context.end()

    def _exchange_gradients(self) -> None:
        """Average first over the copies, so that both ends of a pipeline round equally."""
        if self._shards is not None:
            self._shards.reduce()
        self._missing.refuse(
            [name for name, value in self._own.items() if value.requires_grad and value.grad is None]
        )
        if self._mean is not None:
            self._mean.average(self.bare.parameters())
        if self._split is not None:
            self._split.sum_gradients(self._own_gradients(), self._device)
        for name, gradient in self._own_gradients():
            if name in self._copied:
                assert self._ends is not None
                self._ends.all_reduce(gradient)

    def _own_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parts of gradients."""
        for name, value in self._own.items():
            if value.grad is not None:
                yield name, cast(Tensor, local(value.grad))

    def _new_schedule(self, inputs: Tensor) -> Any:
        rows, rest = divmod(inputs.shape[0], self._pieces)
        if rest:
            raise UsageError(
                f"the micro-batch ({inputs.shape[0]} samples) must be a multiple of microbatches "
                f"({self._pieces})"
            )
        piece = self._twin.tensor((rows, *inputs.shape[1:]), inputs.dtype)
        # Without these shapes torch would run the model to learn them, and send them to the next stage.
        edges = self._twin.edges(self._cut, piece, self._step.context)
        sequence = None if self._split is None else self._split.sequence
        if sequence is not None:
            edges[1:-1] = [self._twin.tokens_of(edge, sequence.ranks) for edge in edges[1:-1]]
        stages = [
            _ObservedStage(
                StageModule(
                    self._pieces_of(stage, sequence),
                    self._step.context,
                    [self.bare.get_submodule(name) for name in self._cut.modules(stage)],
                ),
                stage,
                self._cut.stages,
                self._device,
                input_args=edges[stage],
                output_args=edges[stage + 1],
                group=self._pipeline.group,
                # Without a gradient of the input torch finds none of the weights, if it divides the backward
                # pass: this stage computes all of it at once. The first stage does so anyway.
                dw_builder=None if stage == 0 or edges[stage].requires_grad else _nothing_left,
                step=self._step,
            )
            for stage in self._cut.stages_of(self._pipeline.rank)
        ]
        settings: dict[str, Any] = {"loss_fn": self._step.scaled_loss, "scale_grads": False}
        one = self._kind in ("gpipe", "1f1b")
        return _KINDS[self._kind](stages[0] if one else stages, self._pieces, **settings)

    def _pieces_of(self, stage: int, sequence: SequenceSplit | None) -> list[StageFunction]:
        """Return the functions that a stage calls; with the first one `sequence` begins the stage."""
        pieces = [self._step.placed(piece) for piece in self._cut.pieces(self.bare, stage)]
        begins = [] if sequence is None else [partial(sequence.begin_stage, first=stage == 0)]
        return [*begins, *pieces]

    def clip_gradients(self, max_norm: float) -> Tensor:
        gradients = [(value, self._copies_of(name)) for name, value in self._own_gradients()]
        return clip_shards(gradients, max_norm, self._parts, self._device)

    def _copies_of(self, name: str) -> int:
        """Return the number of ranks of a pipeline that have the same part of a parameter."""
        tensor = 1 if self._grid is None else self._grid.groups.tensor
        return (1 + (name in self._copied)) * self._slicings.copies(name, tensor)


def _ends(groups: GroupLayout) -> list[list[int]]:
    """Return the first and the last rank of each pipeline, and the ranks between: every rank has a group."""
    pipelines = groups.groups("pipeline")
    between = [ranks[1:-1] for ranks in pipelines if len(ranks) > 2]
    return [[ranks[0], ranks[-1]] for ranks in pipelines] + between


class _Step:
    """The step under way, for its stages and its schedule."""

    def __init__(self, pieces: int, last: int) -> None:
        self._pieces, self._last = pieces, last
        self.positions: dict[str, Tensor] = {}
        """The places of this rank's tokens, by the name of the argument; empty: the rank has all tokens."""

    def begins(
        self, task: GradientTask, observe: Callable[[int, str], AbstractContextManager[object]]
    ) -> None:
        self.task, self.observe = task, observe
        self.loss = torch.zeros((), dtype=torch.float64, device=task.device)
        """The mean loss, added up over this rank's microbatches so far; only the last stage has losses."""
        # A scaler has no factor before it has scaled a value, and every rank needs the factor.
        task.scaler.scale(torch.zeros((), device=task.device))

    def tensors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return inputs and targets. Raises UsageError for a batch or a loss of another form."""
        loss = self.task.loss
        if loss is not None and not isinstance(loss, BatchLoss) and isinstance(batch, tuple | list):
            if len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
                self.loss_of = loss
                return batch[0], batch[1]
        raise UsageError(
            "pipeline feeds a tensor of inputs to its first stage, and gives the results of its last one to "
            "the loss: it takes batches of two tensors, (inputs, targets), and a loss(outputs, targets), not "
            f"a step; {SPLIT}"
        )

    def placed(self, piece: StageFunction) -> StageFunction:
        """Return a piece of the model that gets the places of its tokens, if it takes them."""
        called = type(piece).forward if isinstance(piece, nn.Module) else piece
        names = inspect.signature(called).parameters
        return lambda x: piece(x, **{name: at for name, at in self.positions.items() if name in names})

    def context(self) -> AbstractContextManager[object]:
        return self.task.autocast()

    def scaled_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return a microbatch's share of the step's mean loss, times the scaler's factor."""
        with self.observe(self._last, "loss"), self.context():
            loss = self.loss_of(outputs, targets) / (self.task.accumulation * self._pieces)
        self.loss += loss.detach()
        return self.task.scaler.scale(loss)


def _nothing_left() -> Callable[[], None]:
    """Return the rest of a backward pass that is already complete."""
    return lambda: None


class _ObservedStage(PipelineStage):
    """A stage that reports its phases to the observer, whose waiting time counts to the phase before, and
    has what it computes observed, without its waiting time."""

    def __init__(self, *arguments: Any, step: _Step, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._step = step

    def forward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        self._step.task.observer.begins(Phase.FORWARD)
        with self._step.observe(self.stage_index, "forward"):
            return super().forward_one_chunk(*arguments, **named)

    def backward_one_chunk(self, *arguments: Any, **named: Any) -> None:
        self._step.task.observer.begins(Phase.BACKWARD)
        with self._step.observe(
            self.stage_index, "backward" if named.get("full_backward", True) else "input"
        ):
            super().backward_one_chunk(*arguments, **named)

    def backward_weight_one_chunk(self, *arguments: Any, **named: Any) -> None:
        with self._step.observe(self.stage_index, "weights"):
            super().backward_weight_one_chunk(*arguments, **named)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise the error of a stage (out of memory, for instance), which torch wraps in another error."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, Exception):
            raise error.__cause__ from None
        raise
