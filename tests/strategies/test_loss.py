"""The loss of a batch of any form, and the errors of batches and results of other forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from results.errors import UsageError
from strategies import BatchLoss
from strategies.training.loss import loss_of, seen
from workloads import Workload

X, Y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])


def product(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


def own(**batch: Tensor) -> dict[str, Tensor]:
    """A model that gives its loss."""
    return {"logits": batch["a"], "loss": product(batch["a"], batch["b"])}


def same(x: Tensor) -> Tensor:
    return x


def two(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    return {"loss": model(batch["inner"][0], b=batch["inner"][1]), "other": X}


# 1 * 3 + 2 * 5 = 13, by every form that a batch may have.
@pytest.mark.parametrize(
    ("model", "batch", "loss"),
    [
        (same, (X, Y), product),
        (same, [X, Y], product),
        (lambda a, b: a * b, ((X, Y), None), lambda outputs, targets: outputs.sum()),
        (lambda *, a: a, ({"a": X}, Y), product),
        (own, {"a": X, "b": Y}, None),
        (product, (X, Y), None),
        (product, {"inner": [X, Y]}, BatchLoss(two)),
    ],
)
def test_the_loss_of_a_batch_is_that_of_its_form(model, batch, loss) -> None:
    assert loss_of(model, batch, loss) == 13
    met: list[tuple[float, Any]] = []
    watched = seen(loss, lambda value, given: met.append((value.item(), given)))
    assert loss_of(model, batch, watched) == 13
    [(value, given)] = met
    assert value == 13
    assert given is (batch if loss is None or isinstance(loss, BatchLoss) else batch[1])
    step = {"step": loss.step} if isinstance(loss, BatchLoss) else {"loss": loss}
    workload = Workload(module=torch.nn.Identity(), synthetic=lambda generator, samples: batch, **step)
    assert workload.loss_of(model, batch) == 13


FORMS = "a loss(outputs, targets) takes batches of (inputs, targets); for others use a step(model, batch)"


@pytest.mark.parametrize(
    ("model", "batch", "loss", "words"),
    [
        (same, {"image": X, "label": Y}, product, f"is a mapping with 'image', 'label': {FORMS}"),
        (same, (X, Y, Y), product, f"the batch is a tuple of 3: {FORMS}"),
        (same, X, product, f"the batch is a tensor of shape (2,): {FORMS}"),
        (same, (X, Y), lambda o, t: o * t, "loss(outputs, targets) returned a tensor of shape (2,), not"),
        (lambda a: {"logits": a, "loss": None}, {"a": X}, None, "a mapping with 'logits', 'loss', not"),
        (same, {"x": X}, BatchLoss(lambda model, batch: 0.5), "step(model, batch) returned a float, not"),
    ],
)
def test_another_form_is_refused_in_words_of_the_contract(model, batch, loss, words) -> None:
    with pytest.raises(UsageError) as raised:
        loss_of(model, batch, loss)
    assert words in str(raised.value)


def test_a_workload_has_a_loss_or_a_step() -> None:
    with pytest.raises(UsageError, match="not both"):
        Workload(module=torch.nn.Identity(), loss=product, step=two, synthetic=lambda generator, samples: X)
