"""Every way of computing parts of a sequence wrongly is caught by the proof."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from planting import Fields, Planted, wrapped
from torch import Tensor
from torch.nn.attention.bias import causal_upper_left

from strategies.context import model
from strategies.context.model import ContextSplit

NANO: Fields = {"workload": "llama-nano:seq=32", "micro_batch": 2, "optimizer": "sgd:lr=0.05"}
ULYSSES, GATHERED = (NANO | {"strategy": f"fsdp:cp=2{other}"} for other in ("", ":attention=gathered"))
GROUPED: Fields = ULYSSES | {"workload": "py:proof_models:grouped"}


def _heads_of_the_neighbour(rank: int, size: int) -> Planted:
    return wrapped(model, "_to_heads", lambda original, *given: original(*given).roll(1, 1))


def _tokens_of_the_neighbour(rank: int, size: int) -> Planted:
    return wrapped(model, "_to_tokens", lambda original, *given: original(*given).roll(1, 2))


def _keys_of_the_neighbour(rank: int, size: int) -> Planted:
    def wrong(original: Any, context: Any, values: Tensor, link: Any) -> Tensor:
        gathered: Tensor = original(context, values, link)
        return gathered.roll(values.shape[2] // 2, dims=2)

    return wrapped(model._AllTokens, "forward", wrong)


def _gradients_of_keys_not_added(rank: int, size: int) -> Planted:
    def wrong(original: Any, context: Any, gradient: Tensor) -> Any:
        summed, nothing = original(context, gradient)
        return summed / size, nothing

    return wrapped(model._AllTokens, "backward", wrong)


def _mask_off_by_a_chunk(rank: int, size: int) -> Planted:
    return wrapped(model, "causal_lower_right", lambda original, *sizes: causal_upper_left(*sizes))


def _in_the_part(change: Any) -> Planted:
    def wrong(original: Any, self: Any, batch: Any, loss: Any) -> Any:
        inputs, targets = original(self, batch, loss)
        return change(inputs, targets)

    return wrapped(ContextSplit, "part", wrong)


def _positions_not_shifted(rank: int, size: int) -> Planted:
    return _in_the_part(
        lambda inputs, targets: (inputs | {"positions": torch.arange(targets.shape[1])}, targets)
    )


def _label_lost_at_the_boundary(rank: int, size: int) -> Planted:
    def change(inputs: Any, targets: Tensor) -> Any:
        targets = targets.clone()
        targets[:, -1] = -100
        return inputs, targets

    return _in_the_part(change)


def _gradients_of_repeated_heads_not_added(rank: int, size: int) -> Planted:
    """Only the first of the copies of a head of keys or values gets its gradient."""

    def wrong(original: Any, heads: Tensor, copies: int, dim: int) -> Tensor:
        repeated: Tensor = original(heads, copies, dim=dim)
        others = torch.arange(repeated.shape[dim]).remainder(copies).bool()[:, None, None]
        return torch.where(others, repeated.detach(), repeated)

    return wrapped(Tensor, "repeat_interleave", wrong)


@contextmanager
def _mean_over_ranks_rather_than_tokens(rank: int, size: int) -> Iterator[None]:
    """Accept targets that a loss ignores, of which the ranks have unequal numbers."""
    with (
        wrapped(ContextSplit, "_refuse_gaps", lambda original, *given: None),
        wrapped(ContextSplit, "even", lambda original, split, loss: loss),
    ):
        yield


def _targets_shifted_after_the_split(rank: int, size: int) -> Planted:
    return _in_the_part(lambda inputs, targets: (inputs, targets.roll(1, 1)))


@pytest.mark.parametrize(
    ("mutation", "fields"),
    [
        (_heads_of_the_neighbour, ULYSSES),
        (_tokens_of_the_neighbour, ULYSSES),
        (_keys_of_the_neighbour, GATHERED),
        (_gradients_of_keys_not_added, GATHERED),
        (_mask_off_by_a_chunk, GATHERED),
        (_positions_not_shifted, ULYSSES),
        (_label_lost_at_the_boundary, ULYSSES),
        (_targets_shifted_after_the_split, GATHERED),
        (_gradients_of_repeated_heads_not_added, GROUPED),
        (_mean_over_ranks_rather_than_tokens, GROUPED | {"workload": "py:proof_models:padded"}),
    ],
)
def test_a_sequence_that_is_split_wrongly_is_caught(proofs, mutation, fields) -> None:
    results = proofs(2, fields, broken=mutation)
    assert [found["passed"] for found in results] == [False] * 2
    assert results[0]["method"] == "serial-simulation"


@pytest.mark.parametrize(
    "fields", [GROUPED, ULYSSES | {"clip_norm": 0.05}, GATHERED | {"activation_checkpointing": "selective"}]
)
def test_a_sequence_that_is_split_rightly_is_proven(proofs, fields) -> None:
    assert all(found["passed"] for found in proofs(2, fields))
