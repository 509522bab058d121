"""What a builder may do whose model is filled later, and that everything else is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from results.errors import BenchError
from workloads.recorded import DrawRecorder, InitialValues

CPU = torch.device("cpu")


class Held(nn.Module):
    """One parameter, which is frozen, and one buffer."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("count", torch.ones(2, dtype=torch.int64))


def recorded(make: Callable[[], nn.Module]) -> tuple[nn.Module, InitialValues]:
    with torch.device("meta"), DrawRecorder() as recorder:
        module = make()
    return module, recorder.values_of(module)


def test_the_last_write_counts_and_is_done_once() -> None:
    """Drawn twice, then filled: the values are those of the fill."""
    module, initial = recorded(lambda: Held(torch.empty(3, 2).normal_().uniform_().fill_(7)))
    weight, count = module.weight, module.count
    initial(weight, CPU)
    initial(count, CPU)
    assert (weight.tolist(), weight.requires_grad) == ([[7.0, 7.0]] * 3, False)
    assert (count.tolist(), count.dtype) == ([1, 1], torch.int64)
    weight.fill_(5)
    initial(weight, CPU)
    assert weight.tolist() == [[5.0, 5.0]] * 3


def halves() -> Tensor:
    values = torch.empty(4)
    values[:2].fill_(1)
    return values


REFUSED = {
    "a generator of its own for aten.normal_": lambda: torch.empty(4).normal_(generator=torch.Generator()),
    "gives weight no values of its own": lambda: torch.empty(4),
    "weight no values of its own": lambda: torch.empty(2, 3).normal_().t(),
    "by aten.mul_": lambda: torch.ones(4).mul_(2),
    "by aten.randn": lambda: torch.randn(4),
    "by aten.copy_": lambda: torch.ones(4).copy_(torch.zeros(4)),
    r"writes \(2,\) on meta": halves,
    r"writes \(4,\) on cpu": lambda: torch.ones(4, device="cpu"),
    r"writes \(2, 2\) on meta": lambda: torch.empty(2, 2).t().zero_(),
}


@pytest.mark.parametrize(("words", "make"), REFUSED.items(), ids=REFUSED)
def test_what_could_not_be_drawn_again_is_refused(words: str, make: Callable[[], Tensor]) -> None:
    with pytest.raises(BenchError, match=words):
        recorded(lambda: Held(make()))
