"""Every way of splitting tokens between split layers wrongly is caught by the proof."""

from __future__ import annotations

import re
from typing import Any

import pytest
from planting import GPT, GRADIENT, UPDATE, Fields, Planted, wrapped
from torch import Tensor

from strategies.tensor_parallel import model, sequence
from strategies.tensor_parallel.model import TensorParallelModel
from strategies.tensor_parallel.sequence import SequenceSplit
from strategies.training.slicing import Slicings

APART = f"{GRADIENT}|replicas differ after the update"
SPLIT: Fields = GPT | {"strategy": "tp:sequence=true", "optimizer": "sgd:lr=0.05"}
TWICE_CLIPPED: Fields = {"accumulation": 2, "clip_norm": 0.05}
LLAMA: Fields = SPLIT | {"workload": "llama-nano:seq=32", "micro_batch": 2}


def _norms_not_summed(rank: int, size: int) -> Planted:
    return wrapped(SequenceSplit, "sum_gradients", lambda original, *given: None)


def _norms_summed_in_every_micro_batch(rank: int, size: int) -> Planted:
    return wrapped(TensorParallelModel, "exchange", lambda original, self, now: original(self, now=True))


def _bias_added_by_every_rank(rank: int, size: int) -> Planted:
    def wrong(original: Any, self: Any, x: Tensor) -> Tensor:
        result: Tensor = original(self, x) + (size - 1) * self.bias
        return result

    return wrapped(model._SplitByInputs, "forward", wrong)


def _in_the_backward_pass(of: str, instead: Any) -> Planted:
    """Replace what follows one of the moves in the backward pass."""

    def wrong(original: Any, values: Tensor, link: Any, there: Any, back: Any) -> Tensor:
        moved: Tensor = original(values, link, there, instead if there is getattr(sequence, of) else back)
        return moved

    return wrapped(sequence, "exchanged", wrong)


def _own_part(gradient: Tensor, link: Any) -> Tensor:
    """The gradient of this rank's tokens, and zeros for the others."""
    whole = gradient.new_zeros(gradient.shape[0], gradient.shape[1] * link.size, *gradient.shape[2:])
    whole.chunk(link.size, dim=1)[link.rank].copy_(gradient)
    return whole


def _before_the_split_not_gathered(rank: int, size: int) -> Planted:
    return _in_the_backward_pass("own_tokens", _own_part)


def _after_the_blocks_summed(rank: int, size: int) -> Planted:
    return _in_the_backward_pass("all_tokens", sequence.own_sums)


def _at_an_entrance_not_summed(rank: int, size: int) -> Planted:
    def wrong(original: Any, values: Tensor, link: Any, there: Any, back: Any) -> Tensor:
        moved: Tensor = original(
            values, link, there, sequence.own_tokens if there is sequence.all_tokens else back
        )
        return moved

    return wrapped(model, "exchanged", wrong)


def _own_tokens_of_the_neighbour(rank: int, size: int) -> Planted:
    return wrapped(sequence, "own_tokens", lambda original, values, link: original(values.flip(1), link))


def _norm_summed_over_the_ranks(rank: int, size: int) -> Planted:
    return wrapped(Slicings, "copies", lambda original, *given: 1)


@pytest.mark.parametrize(
    ("mutation", "fields", "detail"),
    [
        (_norms_not_summed, SPLIT, APART),
        (_norms_summed_in_every_micro_batch, LLAMA | {"accumulation": 2}, GRADIENT),
        (_bias_added_by_every_rank, SPLIT, GRADIENT),
        (_before_the_split_not_gathered, SPLIT, APART),
        (_after_the_blocks_summed, LLAMA, GRADIENT),
        (_at_an_entrance_not_summed, SPLIT, APART),
        (_own_tokens_of_the_neighbour, LLAMA, GRADIENT),
        (_norm_summed_over_the_ranks, SPLIT | {"clip_norm": 0.05}, UPDATE),
    ],
)
def test_tokens_that_are_split_wrongly_are_caught(proofs, mutation, fields, detail) -> None:
    results = proofs(2, fields, broken=mutation)
    assert [found["passed"] for found in results] == [False] * 2, results[0]["detail"]
    assert re.search(detail, results[0]["detail"]), results[0]["detail"]


@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (2, SPLIT | TWICE_CLIPPED),
        (2, LLAMA | {"activation_checkpointing": "selective", "optimizer": "adamw:lr=0.001"}),
        (2, LLAMA | {"precision": "bf16"}),
        (4, SPLIT | TWICE_CLIPPED | {"strategy": "fsdp:tp=2:sequence=true"}),
        (4, LLAMA | {"strategy": "fsdp:attention=gathered:cp=2:tp=2:sequence=true"}),
    ],
)
def test_tokens_that_are_split_rightly_are_proven(proofs, size, fields) -> None:
    results = proofs(size, fields)
    assert all(found["passed"] for found in results), results[0]["detail"]
