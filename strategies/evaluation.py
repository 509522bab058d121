"""Evaluation of a model during training, on samples that it is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from results.errors import UsageError
from strategies.advice import SPLIT
from strategies.saving.whole import as_exported
from strategies.trainer import Trainer
from strategies.training.loss import Batch, BatchLoss, Loss, loss_of
from strategies.training.precision import autocast

Metric = Callable[[Any, Any], Tensor | float]
"""A function from outputs and targets of a batch to a number, the mean over its samples."""


def evaluate(
    trainer: Trainer, batches: Iterable[Batch], *, metrics: Mapping[str, Metric] | None = None
) -> dict[str, float]:
    """Return the figures over the batches of all ranks, the same on each rank; collective, with the same
    number of batches on every rank.

    `val_loss` is the mean over the samples of all ranks. `val_accuracy` is the share of targets that are the
    largest of their outputs, where `loss(outputs, targets)` has integer targets and outputs with one more
    dimension, the classes, at the end (images, tokens). A target that is not a class, such as -100, is not
    counted, nor is the `ignore_index` of a loss that is a module or a `functools.partial`.

    Each of `metrics` is the mean over the samples too; they need a `loss(outputs, targets)`.

    Every rank evaluates the model that `Trainer.export` writes: with the buffers of rank 0, or the mean of
    the replicas if they differ (`local-sgd`). The model is in evaluation mode, and computes in the precision
    of its steps; afterwards its values and modes are restored.

    Raises UsageError for a pipeline, which has no separate forward pass, and if no rank has a batch.
    """
    if not trainer.model.forward_alone:
        raise UsageError(
            f"{trainer.settings.strategy} has no forward pass without the backward pass, to validate with; "
            f"{SPLIT}"
        )
    own = dict(metrics or {})
    sums = torch.zeros(4 + len(own), dtype=torch.float64, device=trainer.device)
    counted = _Counted(own)
    loss = counted.counting(trainer.loss)
    with torch.no_grad(), as_exported(trainer), evaluation_mode(trainer.model.bare):
        for batch in batches:
            counted.begin()
            with autocast(trainer.settings.precision, trainer.device):
                value = loss_of(trainer.model.module, batch, loss)
            leaves = pytree.tree_leaves(batch)
            samples = next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)
            sums += counted.row(value.detach().double(), samples)
    if trainer.link is not None:
        trainer.link.all_reduce(sums)
    lost, samples, correct, targets, *found = sums.tolist()
    if not samples:
        raise UsageError("no samples to validate on: hold out more")
    figures = {"val_loss": lost / samples}
    figures |= {name: value / samples for name, value in zip(own, found, strict=True)}
    return figures | {"val_accuracy": correct / targets} if targets else figures


class _Counted:
    """Counts the targets of a batch, and the ones that the model predicts correctly."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self.values: list[Tensor | float] = []
        """The metrics of the current batch."""
        self.correct: Tensor | int = 0
        self.targets: Tensor | int = 0

    def begin(self) -> None:
        """Begin a batch."""
        self.correct = self.targets = 0
        self.values = [0.0] * len(self._metrics)

    def row(self, loss: Tensor, samples: int) -> Tensor:
        """Return (4 + metrics,) numbers of the batch in double precision, which add up over batches."""
        means = (value * samples for value in self.values)
        numbers = (loss * samples, samples, self.correct, self.targets, *means)
        return torch.stack(
            [torch.as_tensor(each, dtype=torch.float64, device=loss.device).reshape(()) for each in numbers]
        )

    def counting(self, loss: Loss) -> Loss:
        if loss is None or isinstance(loss, BatchLoss):
            if self._metrics:
                raise UsageError(
                    f"metrics ({', '.join(self._metrics)}) are of outputs and targets: give a "
                    f"loss(outputs, targets)"
                )
            return loss
        of_targets = loss
        ignored = getattr(loss, "ignore_index", getattr(loss, "keywords", {}).get("ignore_index", -1))

        def watched(outputs: Any, targets: Any) -> Tensor:
            self.values = [metric(outputs, targets) for metric in self._metrics.values()]
            if _are_classes(outputs, targets):
                counted = (targets >= 0) & (targets < outputs.shape[-1]) & (targets != ignored)
                self.correct = self.correct + ((outputs.argmax(dim=-1) == targets) & counted).sum()
                self.targets = self.targets + counted.sum()
            return of_targets(outputs, targets)

        return watched


def _are_classes(outputs: Any, targets: Any) -> bool:
    return (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and outputs.is_floating_point()
        and targets.dtype in (torch.int64, torch.int32)
        and outputs.shape[:-1] == targets.shape
        and outputs.dim() > 0
    )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode within the context; afterwards each module has its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
