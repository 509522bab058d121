"""The experts of tokens in the proof: what the ranks chose is repeated, and a wrong choice is caught."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from planting import GRADIENT, Fields, Planted, after, wrapped
from torch import Tensor, nn

from harness.worker.proof.choices import Choices, recorded
from harness.worker.proof.comparison import ProofFinding
from results.cell import Cell
from strategies.catalog import group_layout
from strategies.trainer import Trainer
from workloads import Choice
from workloads.moe.model import Experts, SparseMLP

MIXTURE: Fields = {"workload": "py:proof_models:mixture", "micro_batch": 2, "optimizer": "sgd:lr=0.05"}
HALF: Fields = MIXTURE | {"strategy": "tp", "precision": "bf16"}
CHOICES = r"layers\.\d\.mlp\.choice in pass 1 of replica 0 chooses .* for token \d+ of sample \d"


def _cell(strategy: str, **fields: Any) -> Cell:
    groups = group_layout(strategy, fields["gpus"])
    base = {"dataset": "synthetic", "device": "cpu", "backend": "gloo"} | MIXTURE
    return Cell(strategy=strategy, model_parallel=groups.model_parallel, **base | fields)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choice = Choice(1)

    def forward(self, scores: Tensor) -> Tensor:
        return self.choice(scores)


def _repeated(
    cell: Cell, every: list[dict[str, list[Tensor]]], scores: Tensor
) -> tuple[list[int], list[ProofFinding]]:
    """Return what a layer chooses by scores (samples, tokens, n) in the simulation, and what is found."""
    findings: list[ProofFinding] = []
    layer = Layer()
    choices = Choices(cell, group_layout(cell.strategy, cell.gpus), every, findings)
    with choices.repeated(layer, 0):
        chosen = layer(scores)
    return chosen.flatten().tolist(), findings


@pytest.mark.parametrize(
    ("strategy", "by_rank"),
    [
        # Two samples of eight tokens, 0 to 7 and 8 to 15, as the ranks have them.
        ("single", [range(16)]),
        ("tp", [range(16), range(16)]),
        ("tp:sequence=true", [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),
        ("fsdp:cp=2", [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),
        ("fsdp:attention=gathered:cp=2", [(0, 1, 6, 7, 8, 9, 14, 15), (2, 3, 4, 5, 10, 11, 12, 13)]),
        (
            "fsdp:attention=gathered:cp=2:sequence=true:tp=2",
            [(0, 1, 8, 9), (6, 7, 14, 15), (2, 3, 10, 11), (4, 5, 12, 13)],
        ),
        # Other data: the second half of the ranks is another replica.
        ("fsdp:cp=2", [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15), [0] * 8, [0] * 8]),
    ],
)
def test_each_token_gets_the_choice_of_its_rank(strategy, by_rank) -> None:
    # Token i chooses i of 16, and the simulation by itself 0 in each; all scores are equal.
    every = [{"choice": [torch.tensor(own, dtype=torch.int32)[:, None]]} for own in by_rank]
    cell = _cell(strategy, gpus=len(by_rank), micro_batch=2)
    assert _repeated(cell, every, torch.zeros(2, 8, 16)) == (list(range(16)), [])


def test_microbatches_of_a_pipeline_and_repeated_passes_are_in_order() -> None:
    layer, findings = Layer(), []
    passes = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    cell = _cell("pipeline:1f1b:microbatches=3", gpus=2, micro_batch=3)
    with recorded(layer, cell) as own:
        for scores in passes:
            x = scores[None].clone().requires_grad_()
            # As activation checkpointing does.
            x.register_hook(lambda gradient, x=x: layer(x) * 0 + gradient)
            layer(x)
            x.sum().backward()
    assert torch.cat(own["choice"]).tolist() == [[1], [0], [1]]
    choices = Choices(cell, group_layout(cell.strategy, 2), [{}, own], findings)
    with choices.repeated(layer, 0):
        assert [layer(torch.zeros(1, 2)).item() for _ in range(3)] == [1, 0, 1]
    assert findings == []
    with choices.repeated(layer, 0):
        layer(torch.zeros(1, 2))
    assert [one.what for one in findings] == ["rank 1 chose 3 times in choice, and the simulation 1"]


def test_nothing_is_recorded_under_the_compiler() -> None:
    layer = Layer()
    with recorded(layer, _cell("ddp", gpus=2, micro_batch=1, compile=True)) as own:
        layer(torch.zeros(1, 2))
    assert own == {}


@pytest.mark.parametrize(
    ("fields", "near"),
    [
        ({"strategy": "ddp"}, 0),
        ({"strategy": "tp"}, 2**-14),
        ({"strategy": "tp", "precision": "bf16"}, 2**-4),
        ({"strategy": "ddp", "precision": "bf16"}, 2**-4),
    ],
)
def test_a_choice_may_differ_by_what_rounding_does_to_the_scores(fields, near) -> None:
    cell = _cell(gpus=2, micro_batch=1, **fields)
    # Four scores of 1 and -1 have the deviation 1. Token 1 chose the second place.
    for distance, passes in ((0.99 * near, True), (1.01 * near + 1e-6, False)):
        scores = torch.tensor([[1.0, 1.0, -1.0, -1.0]] * 3)[None]
        scores[0, 1, 1] -= distance
        own = {"choice": [torch.tensor([[0], [1], [0]], dtype=torch.int32)]}
        chosen, findings = _repeated(cell, [own, own], scores)
        assert chosen == [0, 1, 0]
        assert (not findings) == passes
        assert passes or findings[0].what.startswith(
            "choice in pass 1 of replica 0 chooses [1] for token 1 of sample 0, with scores that are up to "
        )


def test_ranks_of_one_layer_must_choose_alike() -> None:
    own, other = ({"choice": [torch.tensor([[0], [at]], dtype=torch.int32)]} for at in range(2))
    _, [finding] = _repeated(_cell("tp", gpus=2, micro_batch=1), [own, other], torch.zeros(1, 2, 2))
    assert finding.what == "ranks that compute the same tokens chose otherwise in choice"


@contextmanager
def _only_where_it_trains(change: Callable[[], Planted]) -> Iterator[None]:
    def wrong(original: Any, self: Trainer, batches: Any) -> Tensor:
        with change():
            return original(self, batches)

    with wrapped(Trainer, "compute_gradients", wrong):
        yield


def _chooses(change: Callable[[Tensor, Tensor], Tensor]) -> Planted:
    def wrong(original: Any, self: Choice, scores: Tensor) -> Tensor:
        return change(original(self, scores), scores)

    return _only_where_it_trains(lambda: wrapped(Choice, "forward", wrong))


def _sent_to_the_neighbour_of_the_expert(rank: int, size: int) -> Planted:
    return _chooses(lambda chosen, scores: (chosen + 1) % scores.shape[-1])


def _one_token_sent_to_the_worst_expert(rank: int, size: int) -> Planted:
    def change(chosen: Tensor, scores: Tensor) -> Tensor:
        chosen = chosen.clone()
        chosen[5, 1] = scores[5].argmin()
        return chosen

    return _chooses(change)


def _nearest_sent_elsewhere(rank: int, size: int) -> Planted:
    """Tokens whose second and third best expert are nearer than half of what bf16 is allowed go to the
    third."""

    def change(chosen: Tensor, scores: Tensor) -> Tensor:
        best = scores.float().topk(3)
        near = best.values[:, 1] - best.values[:, 2] < 2**-5 * scores.float().std()
        return torch.stack([chosen[:, 0], torch.where(near, best.indices[:, 2], chosen[:, 1])], dim=1)

    return _chooses(change)


def _weights_not_normalised(rank: int, size: int) -> Planted:
    def change(trainer: Trainer) -> None:
        for part in trainer.model.bare.modules():
            if isinstance(part, SparseMLP):
                part.shape = replace(part.shape, renormalised=False)

    return after(Trainer, "__init__", change)


def _returned_to_the_neighbours_place(rank: int, size: int) -> Planted:
    def wrong(original: Any, self: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        return original(self, rows, counts).roll(1, 0)

    return _only_where_it_trains(lambda: wrapped(Experts, "forward", wrong))


def _gradient_of_an_idle_expert_kept(rank: int, size: int) -> Planted:
    last: dict[str, Tensor] = {}

    def change(original: Any, self: Trainer, batches: Any) -> Tensor:
        loss = original(self, batches)
        for name, value in self.model.bare.named_parameters():
            if ".experts." in name:
                each = value.grad.view(32, -1)
                idle = ~each.any(1, keepdim=True)
                each.copy_(torch.where(idle, last.get(name, each), each))
                last[name] = each.clone()
        return loss

    return wrapped(Trainer, "compute_gradients", change)


@pytest.mark.parametrize("fields", [MIXTURE, HALF], ids=["exact", "bf16"])
@pytest.mark.parametrize(
    ("mutation", "words"),
    [
        (_sent_to_the_neighbour_of_the_expert, CHOICES),
        (_one_token_sent_to_the_worst_expert, CHOICES),
        # In equal arithmetic the choices of later layers are wrong too.
        (_weights_not_normalised, f"{GRADIENT}|{CHOICES}"),
        (_returned_to_the_neighbours_place, f"{GRADIENT}|{CHOICES}"),
        (_gradient_of_an_idle_expert_kept, GRADIENT),
    ],
    ids=["neighbour", "worst", "weights", "place", "idle"],
)
def test_a_wrong_dispatch_is_caught(proofs, mutation, words, fields) -> None:
    results = proofs(2, fields, broken=mutation)
    assert [found["passed"] for found in results] == [False] * 2, results
    assert re.search(words, results[0]["detail"]), results[0]["detail"]


def _choices_not_repeated(rank: int, size: int) -> Planted:
    return patch.object(Choices, "repeated", lambda self, *given, **named: nullcontext())


@contextmanager
def _nearest_sent_elsewhere_and_not_repeated(rank: int, size: int) -> Iterator[None]:
    with _nearest_sent_elsewhere(rank, size), _choices_not_repeated(rank, size):
        yield


@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": "tp"},
        {"strategy": "tp:sequence=true", "activation_checkpointing": True, "accumulation": 2},
        {"strategy": "fsdp:attention=gathered:cp=2", "activation_checkpointing": "selective"},
        {"strategy": "pipeline:1f1b:microbatches=2", "accumulation": 2},
    ],
    ids=str,
)
def test_a_choice_within_rounding_is_repeated(proofs, fields) -> None:
    repeated, not_repeated = (
        proofs(2, HALF | fields, broken=broken)[0]
        for broken in (_nearest_sent_elsewhere, _nearest_sent_elsewhere_and_not_repeated)
    )
    assert repeated["passed"], repeated["detail"]
    assert re.search(GRADIENT, not_repeated["detail"]), not_repeated["detail"]


def test_no_choice_differs_in_equal_arithmetic(proofs) -> None:
    assert re.search(CHOICES, proofs(2, MIXTURE, broken=_nearest_sent_elsewhere)[0]["detail"])
