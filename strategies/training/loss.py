"""The loss of a batch: how a model is called, and how its result becomes a loss.

A part of a model may add the gradient of another loss in its backward pass, as the router of a mixture of
experts does. The stage of a pipeline that has it need not have the model's loss, so that autograd gives it
no factor. A part with an attribute `loss_factor` is given it before each step: the number by which the loss
of one forward pass is multiplied for the mean over the passes of a step, and for small gradients in half
precision. A part that is used without a Trainer has the factor that it begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from results.errors import UsageError

Batch = Any
"""A tensor, or tensors in dictionaries, tuples and lists; the first dimension of each is the sample."""
Model = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """A loss that gets the model and a complete batch: `BatchLoss(lambda model, batch: ...)`."""

    step: Callable[[Model, Batch], Any]
    """Returns the mean loss over the batch's samples, or a mapping with it as `loss`. It calls the model
    itself, once, and none of its methods, as a strategy wraps the call."""


Loss = Callable[[Any, Any], Tensor] | BatchLoss | None
"""A function from outputs and targets to the mean loss over the samples; a `BatchLoss`; None: the model
returns its loss, or a mapping with it as `loss`."""

FORMS = (
    "a loss(outputs, targets) takes batches of (inputs, targets); for others use a step(model, batch), or "
    "leave the loss out where the model itself returns it"
)


def loss_of(model: Model, batch: Batch, loss: Loss) -> Tensor:
    """Return the mean loss over the samples of `batch`, a tensor of one number.

    The model gets the inputs of a batch (inputs, targets); without a loss it gets the batch. A mapping is
    passed by keywords, a tuple or a list by position. Raises UsageError for a batch or a result of another
    form.
    """
    if isinstance(loss, BatchLoss):
        return _number(loss.step(model, batch), "step(model, batch)")
    if loss is None:
        return _number(_called(model, batch), "the model, which has to give the loss itself,")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UsageError(f"the batch is {_described(batch)}: {FORMS}")
    inputs, targets = batch
    return _number(loss(_called(model, inputs), targets), "loss(outputs, targets)")


def parts_with_losses(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a module that add the gradient of another loss, and take a `loss_factor`."""
    return [part for part in module.modules() if hasattr(part, "loss_factor")]


def seen(loss: Loss, see: Callable[[Tensor, Any], None]) -> Loss:
    """Wrap `loss`: it calls `see` with each value and the targets, or the batch if the loss gets the
    batch."""
    if loss is None or isinstance(loss, BatchLoss):

        def step(model: Model, batch: Batch) -> Tensor:
            value = loss_of(model, batch, loss)
            see(value, batch)
            return value

        return BatchLoss(step)
    of_targets = loss

    def watched(outputs: Any, targets: Any) -> Tensor:
        value = of_targets(outputs, targets)
        see(value, targets)
        return value

    return watched


def _called(model: Model, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def _number(returned: Any, who: str) -> Tensor:
    found = returned.get("loss") if isinstance(returned, Mapping) else returned
    if isinstance(found, Tensor) and found.numel() == 1:
        return found
    raise UsageError(
        f"{who} returned {_described(returned)}, not the mean loss over the samples: a tensor of one number, "
        f"or a mapping with it as 'loss'"
    )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(repr(key) for key in value) or 'nothing in it'}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
