"""A workload: a model with its loss and its data.

This package builds workloads, and a user's own model file (`--workload py:MODULE:FUNCTION`) returns one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import IterableDataset

from results.errors import UsageError
from results.layout import ModelLayout
from workloads.batch import Batch
from workloads.batch import samples_of as first_dimension
from workloads.shape import METRICS

Pair = tuple[Tensor, Tensor]
"""Inputs and targets of samples; the first dimension of both is the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShare:
    """The part of the data for a replica, and its division into batches."""

    replica: int
    replicas: int
    micro_batch: int
    """The number of samples of a batch."""
    seed: int
    workers: int = 0
    """The number of processes that prepare batches; 0: the rank itself."""
    epoch: int = 0
    """The number of epochs before this one in a training run; 0 in a measured run."""


Data = Iterable[Any] | Callable[[DataShare], Iterable[Batch]]
"""A torch Dataset (`__getitem__` and `__len__`), an iterable of samples that can be read again, or a function
that opens an epoch of batches."""


def is_dataset(data: object) -> bool:
    """Return whether samples are read by index; the `__getitem__` of an IterableDataset only raises."""
    return not isinstance(data, IterableDataset) and hasattr(data, "__getitem__") and hasattr(data, "__len__")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """The input of a classifier of images: inputs float32 (n, *shape), targets int64 (n,)."""

    kind: ClassVar = "images"
    shape: tuple[int, ...]
    """(channels, px, px), or (pixels,) for a flattened image."""
    classes: int

    def synthetic(self, generator: torch.Generator, samples: int) -> Pair:
        """Draw normally distributed pixels with random classes, on the CPU."""
        images = torch.randn(samples, *self.shape, generator=generator, device="cpu")
        return images, torch.randint(self.classes, (samples,), generator=generator, device="cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInput:
    """The input of a model that predicts the next token: inputs and targets int64 (n, length), shifted by
    one."""

    kind: ClassVar = "tokens"
    length: int
    vocabulary: int

    def synthetic(self, generator: torch.Generator, samples: int) -> Pair:
        """Draw random tokens, each the target of the token before, on the CPU."""
        size = (samples, self.length + 1)
        tokens = torch.randint(self.vocabulary, size, generator=generator, device="cpu")
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with its loss and its data; the module is on the CPU, freshly initialised, or on the meta
    device and has `initial` values.

    Parts of the module in evaluation mode stay in it. A module without any part in training mode is put into
    that mode.
    """

    module: nn.Module
    loss: Callable[[Any, Any], Tensor] | None = None
    """A function from outputs of the module and targets of a batch, (inputs, targets), to the mean loss over
    its samples. None, without a step: the module gets the complete batch and returns its loss, or a mapping
    with it as `loss`."""
    step: Callable[[Callable[..., Any], Batch], Any] | None = None
    """Instead of a loss: a function that gets the module, to be called, and a batch, and returns the mean
    loss over its samples, or a mapping with it as `loss`."""
    synthetic: Callable[[torch.Generator, int], Batch] | None = None
    """Draws a batch of this number of random samples on the CPU, only from the generator."""
    data: Data | None = None
    """The workload's own data, for `--dataset own`: a torch Dataset or an iterable of samples, for which a
    loader is created, or a function that opens an epoch of batches for a `DataShare`. A sample must follow
    only from its index or position."""
    held_out: Data | None = None
    """Data that a training run validates on, in one of the three forms of `data`; a function returns the same
    number of batches for each replica. Other data sets than the workload's own hold out a part of their
    samples."""
    metrics: Mapping[str, Callable[[Any, Any], Tensor | float]] = field(default_factory=dict)
    """Functions by name that each validation computes: each takes outputs and targets and returns the mean
    over their samples. They need `loss`. A larger value is better, unless the name ends in `loss` or
    `error`."""
    schedule: Callable[[Optimizer, int], LRScheduler] | None = None
    """Takes an optimizer and the number of steps of a training run, and returns a schedule of
    torch.optim.lr_scheduler, except ReduceLROnPlateau, which needs a metric. Training steps it after each
    step."""
    samples_of: Callable[[Batch], int] | None = None
    """Returns the samples of a batch, for a `step` or a model that returns its loss; None: the first
    dimension of the first tensor in the batch that has one."""
    unit: Literal["images", "tokens", "samples"] = "samples"
    """The unit of throughput."""
    units_per_sample: int = 1
    layout: ModelLayout | None = None
    """The layout of the module; None: strategies find its repeated blocks; `ModelLayout()`: it has no
    blocks."""
    input: ImageInput | TokenInput | None = None
    """The shape of real data for the module; None: the workload runs only on synthetic data."""
    initial: Callable[[Tensor, torch.device], None] | None = None
    """Gives a parameter or buffer of a module on the meta device its values, on a device and in place; set by
    `build_workload`. None: the module has them."""

    def __post_init__(self) -> None:
        self._require_one_loss()
        for name, parameter in self.module.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise UsageError(
                    f"{name} has no shape yet: call the lazy modules once on a batch before the Workload is "
                    f"made, or use modules with sizes (nn.Linear instead of nn.LazyLinear)"
                )
        if self.synthetic is None and self.data is None:
            raise UsageError("a workload has synthetic(generator, samples), or data=, or both")
        taken = [name for name in self.metrics if name in METRICS or not re.fullmatch(r"[A-Za-z]\w*", name)]
        if taken:
            raise UsageError(
                f"metrics={{{taken[0]!r}: ...}}: use a name of letters, digits and _ other than "
                f"{', '.join(METRICS)}"
            )
        modes = {part: part.training for part in self.module.modules()}
        # A module's own method may freeze parts.
        self.module.train()
        for part, training in modes.items() if any(modes.values()) else ():
            part.training &= training

    def _require_one_loss(self) -> None:
        """Raise UsageError if the functions given do not belong together."""
        if self.loss is None:
            if self.metrics:
                raise UsageError("metrics= are of outputs and targets: a workload with them has a loss=")
            return
        if self.step is not None:
            raise UsageError("a workload has a loss(outputs, targets) or a step(model, batch), not both")
        if self.samples_of is not None:
            raise UsageError(
                "samples_of is for batches that a step(model, batch) or the model is given whole: a "
                "loss(outputs, targets) takes targets whose first dimension is the sample"
            )

    def count(self, batch: Batch) -> int:
        """Return the samples of a batch, or of its targets if there is a loss."""
        return first_dimension(batch) if self.samples_of is None else self.samples_of(batch)

    def loss_of(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Return the mean loss over the samples of a batch.

        Inputs, or without a loss the batch, are passed by keywords (a mapping), by position (a tuple or
        list), or as they are. The code has no checks, for checkers of a step; `strategies.training.loss` has
        the errors.
        """
        if self.step is not None:
            returned = self.step(model, batch)
        else:
            inputs = batch if self.loss is None else batch[0]
            if isinstance(inputs, Mapping):
                returned = model(**inputs)
            else:
                returned = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
            if self.loss is not None:
                returned = self.loss(returned, batch[1])
        loss: Tensor = returned["loss"] if isinstance(returned, Mapping) else returned
        return loss
