"""The Trainer: one training step, the same code for a user's loop and for the harness that measures it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import CheckpointError

from results.errors import UsageError
from results.layout import ModelLayout
from strategies.build import lay_out, require_layout
from strategies.catalog import STRATEGIES
from strategies.collectives.link import Link
from strategies.devices import Event, StreamedDevice, device_of
from strategies.gradient_exchange import ExchangeSettings
from strategies.saving.checkpoints import Checkpoints, Resumed, Saving
from strategies.saving.state import Stateful, from_plain, require_attachable, restore, state_of, to_plain
from strategies.saving.whole import whole_state, write_whole
from strategies.training.checkpointing import checkpoint_blocks
from strategies.training.float8 import scale_products
from strategies.training.layouts import found_layout
from strategies.training.loss import Batch, Loss, parts_with_losses
from strategies.training.observer import Phase, SilentObserver, StepObserver
from strategies.training.parallel import Blank, GradientTask, Initial, TrainSettings
from strategies.training.precision import ScaledFeedback, loss_scaler, set_float32_math
from strategies.training.tallies import Tallies

_OF_THE_STEP = (
    *("optimizer", "accumulation", "precision", "clip_norm"),
    *("activation_checkpointing", "compile", "memory_format"),
)
"""Settings that affect neither the layout of a model nor the exchange of its gradients."""


LOOK_EVERY = 100
"""Steps between two losses that the host reads, on a device that runs asynchronously."""


class BatchesEndedError(UsageError, StopIteration):
    """A rank has no batch for a step. A rank that has one waits for this rank, until its process ends."""


class Trainer:
    """Trains one model by one strategy, step after step.

    Example, one process; under torchrun the same with `strategy="ddp"`::

        trainer = Trainer(model, loss, device=device, settings=TrainSettings(optimizer="adamw"))
        for _ in range(1000):
            trainer.step(batches)  # an iterator of (inputs, targets) on the device
    """

    def __init__(
        self,
        module: nn.Module | Blank,
        loss: Loss,
        *,
        device: torch.device,
        settings: TrainSettings,
        layout: ModelLayout | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        """Move `module` to `device` and lay it out; collective if the strategy is.

        A `Blank` is for strategies whose facts are `by_unit`: they give it values unit by unit.

        A part of `module` that is in evaluation mode, such as a BatchNorm with fixed statistics, stays in it.
        A module without any part in training mode, as `from_pretrained` returns it, is put into that mode.

        `loss` is a function from (outputs, targets) to the mean loss over a batch's samples, a `BatchLoss`,
        which gets the model and the batch, or None where the model itself returns it
        (`strategies.training.loss`). `layout` names the parts of the model, for strategies that cut it and
        for activation checkpointing (None: its repeated blocks, as `found_layout` finds them); `group`
        exchanges the gradients (None: the default group). Raises SpecError, with the message of a plan, for
        settings that cannot be combined.
        """
        exchange = ExchangeSettings(
            group=group,
            compression=settings.compression,
            collective=settings.collective,
            node_size=settings.node_size,
            seed=settings.seed,
        )
        of_the_step = {name: getattr(settings, name) for name in _OF_THE_STEP}
        require_layout(settings.strategy, device, exchange, **of_the_step)
        self.settings = settings
        self.device = device
        self.observer: StepObserver = SilentObserver()
        """The observer of every step from now on; may be replaced between steps."""
        self.loss = loss
        """The loss of a micro-batch; may be replaced between steps."""
        self.gradient_norm: Tensor | None = None
        """The global norm of the last step's gradients, averaged and not yet clipped: a scalar. None without
        `clip_norm`; a huge `clip_norm` measures it and clips nothing."""
        self.steps = 0
        """Number of updates so far, including updates that were left out because of an overflow."""
        self.attached: dict[str, Stateful] = {}
        """The objects given to `attach`."""
        self._checkpoints: Checkpoints | None = None
        self._warned_of_loss = False
        self._under_way: tuple[tuple[int, Tensor], Event] | None = None
        """The loss that was last copied to the host, with its step, and the event after the copy."""
        set_float32_math(settings.precision)
        initial: Initial | None = None
        if isinstance(module, Blank):
            initial, module = module.initial, module.module
        else:
            module = module.to(device)
            if settings.memory_format == "channels_last":
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        _begin_training(module)
        self.parameter_bytes = sum(parameter.nbytes for parameter in module.parameters())
        """Bytes of the complete model, of which this rank may have a part."""
        layout = found_layout(module) if layout is None else layout
        if settings.precision == "float8":
            scale_products(module, layout, device_of(device).without_float8())
        if settings.activation_checkpointing:
            selective = settings.activation_checkpointing == "selective"
            checkpoint_blocks(module, layout, selective=selective)
        facts = STRATEGIES.facts(settings.strategy)
        self._recomputes = bool(settings.activation_checkpointing) or any(
            facts.checkpoints(block) for block in range(len(layout.blocks))
        )
        self.link = Link(group) if facts.distributed else None
        """The link to the ranks that train together; None with `single`."""
        self._tallies = Tallies(module, facts, self.link, device)
        self.model = lay_out(
            module,
            settings.strategy,
            device=device,
            exchange=exchange,
            layout=layout,
            initial=initial,
        )
        self.model.settings = settings
        if settings.compile:
            _compile(self.model.bare)
        self.optimizer = self.model.build_optimizer(settings.optimizer)
        self.scaler = loss_scaler(settings.precision, device, self.model.decided_over)
        if self.scaler.is_enabled():
            # The scaler itself unscales, and leaves out a step whose gradients overflow. A fused update that
            # did so would still be called, counted as a step, and create state.
            self.optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        self._feedback = ScaledFeedback(self.model.gradient_exchange, self.scaler)
        self._parts_with_losses = parts_with_losses(self.model.bare)
        self._passes = settings.accumulation * facts.microbatches

    def step(self, batches: Iterator[Batch]) -> Tensor:
        """One update from `accumulation` micro-batches. Returns this rank's mean loss, on the device.

        The first loss that is not finite causes a RuntimeWarning. On a GPU the host reads only the loss of
        each hundredth step, a hundred steps later, so that it does not wait. It does not read losses for an
        observer, which receives all of them.

        Raises BatchesEndedError, which is a StopIteration, on a rank whose batches have ended.
        """
        loss = self.compute_gradients(batches)
        self.update()
        self.observer.step_done(loss)
        if isinstance(self.observer, SilentObserver) and not self._warned_of_loss:
            self._look_at(loss)
        return loss

    def _look_at(self, loss: Tensor) -> None:
        kind, seen = device_of(self.device), (self.steps, loss)
        if isinstance(kind, StreamedDevice):
            if self.steps % LOOK_EVERY:
                return
            copied = (self.steps, kind.begin_copy_to_host(loss))
            last, self._under_way = self._under_way, (copied, kind.current_stream().record_event())
            if last is None:
                return
            seen, event = last
            # The device passed this event long ago, so that the host does not wait.
            event.synchronize()
        step, value = seen
        if not math.isfinite(value.item()):
            self._warned_of_loss = True
            warnings.warn(
                f"the loss of step {step} is not finite (NaN or infinity), and later ones will hardly be "
                f"finite again: "
                f"resume from an earlier checkpoint with a lower rate, or clip (clip_norm=1)",
                RuntimeWarning,
                stacklevel=3,
            )

    def compute_gradients(self, batches: Iterator[Batch]) -> Tensor:
        """Do the first half of a step: compute and exchange the gradients."""
        task = GradientTask(
            loss=self.loss,
            accumulation=self.settings.accumulation,
            precision=self.settings.precision,
            device=self.device,
            scaler=self.scaler,
            observer=self.observer,
            recomputes=self._recomputes,
        )
        self._feedback.begin()
        if self._parts_with_losses:
            factor = self.scaler.scale(torch.ones((), device=self.device)) / self._passes
            for part in self._parts_with_losses:
                part.loss_factor = factor
        try:
            return self.model.compute_gradients(batches, task)
        except StopIteration as error:
            who = "this process" if self.link is None else f"rank {self.link.rank} of {self.link.size}"
            raise BatchesEndedError(
                f"the batches of {who} ended after {self.steps} steps, and a step takes "
                f"{self.settings.accumulation}: give every rank the same number of batches, or end the loop "
                f"on every rank after the steps of the rank with the fewest"
            ) from error
        except CheckpointError as error:
            raise UsageError(
                "with activation checkpointing a block's forward runs again in backward, and this time it "
                "computed other tensors: let the model keep nothing between the two runs (a cache: "
                f"use_cache=False), or leave activation checkpointing out. torch says: {error}"
            ) from error

    def update(self) -> None:
        """Do the second half of a step: unscale and clip the gradients, update, and free the gradients."""
        self.observer.begins(Phase.OPTIMIZER)
        if self.settings.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            self.gradient_norm = self.model.clip_gradients(self.settings.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._feedback.end()
        self.model.updated()
        self._tallies.settle(self.model.bare)
        self.optimizer.zero_grad()
        self.steps += 1

    def attach(self, **objects: Stateful) -> None:
        """Name objects whose state belongs to the run: a schedule of torch.optim.lr_scheduler, a loader.

        They have `state_dict` and `load_state_dict`, and are saved and loaded with the trainer; the loop
        still steps a schedule. Raises UsageError for an object without these methods, and for a schedule of
        another optimizer or without steps.
        """
        for name, each in objects.items():
            require_attachable(name, each, self.optimizer)
        self.attached |= objects

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all state that this rank resumes from, in host memory, for `torch.save`, and
        `torch.load` with `weights_only`. Collective with `ddp` after its first step.

        It differs from rank to rank, and is loaded by the same rank of a trainer with the same strategy.
        """
        return to_plain(state_of(self), self, 0 if self.link is None else self.link.rank)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict` of the same rank: bit for bit on the same machine, as buckets are formed
        by a rehearsal. Collective. Raises UsageError for the state of another rank, strategy, optimizer
        or model."""
        rank = 0 if self.link is None else self.link.rank
        restore(self, from_plain(state, self, rank), exact=True)
        if self._checkpoints is not None:
            self._checkpoints.start_from_loaded()

    def save(
        self,
        folder: Path | str,
        *,
        keep: int | None = None,
        metric: float | None = None,
        metric_name: str | None = None,
        asynchronous: bool = False,
    ) -> Saving:
        """Write a checkpoint `step-...` into `folder`, which all ranks can reach; collective.

        It is complete when all files are on the disk. Then all checkpoints are removed except the last `keep`
        (None: all stay) and the best: the one with the least `metric`, among checkpoints with the
        `metric_name` of the newest that has a metric. With `asynchronous` training continues when the state
        has been copied to host memory, and `wait` of the result, or the next save, waits for the disk.

        A full disk, a folder that ranks do not share, or parameters, moments or statistics that are not
        finite cause a CheckpointWarning and no checkpoint; the last one stays. Raises UsageError if the
        folder's newest checkpoint is of another run.
        """
        return self._saved().save(
            Path(folder), keep=keep, metric=metric, metric_name=metric_name, asynchronous=asynchronous
        )

    def resume(self, folder: Path | str, *, step: int | Literal["best"] | None = None) -> Resumed | None:
        """Resume from the newest complete checkpoint in `folder`, or the one of `step`. Returns None without
        one.

        Collective. On the same number of ranks with the same strategy and settings it continues bit for bit
        on CPU; what differs is reported in a CheckpointWarning. On another number of ranks, or by another
        strategy, parameters and the optimizer's state are equal, and residuals and random states start anew.
        A trainer that has already taken steps resumes only from a checkpoint with its own layout. Before the
        call, `attach` under the same names what was attached when the checkpoint was saved. Raises UsageError
        for a checkpoint of another model or optimizer, StoreError where no checkpoint is complete.
        """
        return self._saved().resume(Path(folder), step)

    def _saved(self) -> Checkpoints:
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(self)
        return self._checkpoints

    def full_state_dict(self, *, rank: int | None = None) -> dict[str, Tensor]:
        """Return the complete model in host memory, for `bare_module.load_state_dict(...)`; collective.

        The names, also of shared parameters, are the names of the module's `state_dict` before it was laid
        out. Only rank `rank` gets the values, and the others an empty dictionary; with None every rank gets a
        copy. If replicas differ between two averages (`local-sgd`) it has their mean, and training continues
        unchanged.
        """
        return whole_state(self, rank)

    def export(self, path: Path | str) -> None:
        """Write `full_state_dict` to a `.pt` or `.safetensors` file, and replace an older one; collective.

        Rank 0 writes, and all ranks return when the file is complete. Raises UsageError for another suffix or
        without the package safetensors, StoreError if the file cannot be written, on all ranks.
        """
        write_whole(self, Path(path))


def _compile(module: nn.Module) -> None:
    """Compile a model in place, within the wrapper of its strategy.

    The compiler knows that DDP calls the model, and cuts the graph at DDP's buckets, so that the exchange
    still overlaps with backward. A function of ours calls the model: the compiler skips frames of torch
    itself, and a bare `nn.Sequential` would be such a frame.
    """
    eager = module.forward

    def forward(*inputs: object, **named: object) -> object:
        return eager(*inputs, **named)

    module.forward = torch.compile(forward)


def _begin_training(module: nn.Module) -> None:
    """Put `module` into training mode, except parts that are in evaluation mode, unless all of them are."""
    frozen = [part for part in module.modules() if not part.training]
    # A module's own method may freeze parts.
    module.train()
    if len(frozen) < sum(1 for _ in module.modules()):
        for part in frozen:
            part.training = False
