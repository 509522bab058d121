"""How often a compiled cell is compiled."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import a_cell
from torch import Tensor, nn

from harness.worker.proof.compilation import Compilation
from harness.worker.rank.context import Run


@pytest.mark.parametrize(("dropout", "proven", "times"), [(0.0, True, 1), (0.0, False, 1), (0.5, True, 3)])
def test_a_model_is_compiled_anew_for_its_proofs_only_if_it_draws_random_numbers(
    dropout, proven, times
) -> None:
    compilations = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        compilations.append(graph)
        random.random()
        return graph.forward

    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(dropout) if dropout else nn.ReLU())
    eager = model.forward
    model.forward = torch.compile(lambda inputs: eager(inputs), backend=backend)
    compilation = Compilation(a_cell(compile=True), torch.device("cpu"))
    # The proof, or the first steps of a run that leans on one; what is measured; the late proof.
    with compilation.reproducible(model) if proven else compilation.watched(model):
        for _ in range(2):
            model(torch.ones(3, 2)).sum().backward()
    model(torch.ones(3, 2)).sum().backward()
    with compilation.reproducible(model):
        model(torch.ones(3, 2)).sum().backward()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert len(compilations) == times


def test_a_rank_says_that_it_works_when_a_graph_is_compiled_also_after_a_proof() -> None:
    beats: list[str] = []
    cell = a_cell(compile=True)
    around: Any = SimpleNamespace(log=SimpleNamespace(heartbeat=lambda: beats.append(part)))
    run = Run(around, SimpleNamespace(), cell)
    model = torch.compile(nn.Dropout(0.5), backend="eager")
    compilation = Compilation(cell, torch.device("cpu"))
    with run._beats_of_compiler():
        part = "proof"
        with compilation.reproducible(model):
            model(torch.ones(3))
        part = "measure"
        model(torch.ones(3))
    part = "afterwards"
    torch._dynamo.reset()
    model(torch.ones(3))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert beats == ["proof"] * 2 + ["measure"] * 2
