"""How often a compiled cell is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from builders import a_cell
from torch import nn

from harness.worker.compilation import Compilation

CPU = torch.device("cpu")


@pytest.fixture
def compiled() -> Iterator[Callable[[nn.Module], list[int]]]:
    """Compiles a model as a trainer does, to no machine code. Gives a list of all compilations."""
    found: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        found.append(len(inputs))
        return graph.forward

    def prepare(model: nn.Module) -> list[int]:
        eager = model.forward
        model.forward = torch.compile(lambda inputs: eager(inputs), backend=backend)
        return found

    yield prepare
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize(("dropout", "proven", "times"), [(0.0, True, 1), (0.0, False, 1), (0.5, True, 3)])
def test_a_model_is_compiled_anew_for_its_proofs_only_if_it_draws_random_numbers(
    compiled: Callable[[nn.Module], list[int]], dropout: float, proven: bool, times: int
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(dropout) if dropout else nn.ReLU())
    compilations = compiled(model)
    compilation = Compilation(a_cell(compile=True), CPU)

    def step() -> None:
        model(torch.ones(3, 2)).sum().backward()

    # The proof, or the first steps of a run that leans on one; what is measured; the late proof.
    with compilation.reproducible(model) if proven else compilation.watched(model):
        step()
        step()
    step()
    with compilation.reproducible(model):
        step()
    assert len(compilations) == times
