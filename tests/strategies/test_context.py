"""Context parallelism over real ranks, against attention over whole sequences on one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from results.errors import UsageError
from results.layout import ModelLayout
from strategies import Trainer, TrainSettings, evaluate
from strategies.collectives.link import Link
from strategies.context.model import ContextSplit
from workloads.build import build_workload

SAMPLES, TOKENS, SIZE = 2, 16, 8


class Mixer(nn.Module):
    """One block of attention without parameters: inputs are queries, keys and values in one."""

    def __init__(self, heads: tuple[int, int], **options: Any) -> None:
        super().__init__()
        self.heads, self.options = heads, options

    def forward(self, inputs: Tensor, positions: Tensor) -> Tensor:
        assert inputs.shape[1] == len(positions)
        queries, keys = self.heads
        query, key, value = inputs.transpose(1, 2).split([queries, keys, keys], dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, **self.options)
        return (mixed.transpose(1, 2) * (1 + positions)[:, None, None]).flatten(2)


def drawn(heads: tuple[int, int]) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(SAMPLES, TOKENS, sum(heads) + heads[1], SIZE)


def on_ranks(
    group: ExchangeGroup, attention: str, heads: tuple[int, int], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """On a rank: its positions, and the gradient of its tokens."""
    module = Mixer(heads, **options)
    split = ContextSplit(module, ModelLayout(), Link(group), attention)
    own, _ = split.part((DRAWN[heads], torch.zeros(SAMPLES, TOKENS)), F.mse_loss)
    own["inputs"].requires_grad_()
    with torch.enable_grad():
        (module(**own).square().mean() / group.size()).backward()
    return own["positions"], own["inputs"].grad


CAUSAL: dict[str, Any] = {"is_causal": True}
DRAWN = {heads: drawn(heads) for heads in ((4, 4), (8, 2), (4, 1))}
GROUPED: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "scale": 0.3}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("heads", "options"), [((4, 4), {}), ((4, 4), CAUSAL), ((8, 2), GROUPED), ((4, 1), GROUPED)]
)
@pytest.mark.parametrize("attention", ["ulysses", "gathered"])
def test_gradients_are_those_of_whole_sequences(threads, attention, size, heads, options) -> None:
    inputs = DRAWN[heads].clone().requires_grad_()
    Mixer(heads, **options)(inputs, torch.arange(TOKENS)).square().mean().backward()
    expected = inputs.grad
    assert expected is not None
    found = torch.zeros_like(expected)
    for positions, gradient in threads(size, on_ranks, attention, heads, options):
        found[:, positions] = gradient
    # Ulysses computes each head as one device does; copies of grouped keys are added in another order.
    same_order = attention == "ulysses" and options is not GROUPED
    torch.testing.assert_close(
        found, expected, rtol=0 if same_order else 1e-5, atol=0 if same_order else 1e-7
    )


class Plain(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x


def masked(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, torch.ones(8, 8, dtype=torch.bool))


def dropped(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


def three_heads(x: Tensor) -> Tensor:
    x = x[:, :3]
    return F.scaled_dot_product_attention(x, x, x)


def several_heads_at_once(x: Tensor) -> Tensor:
    result: Tensor = nn.MultiheadAttention(8, 2)(x[0], x[0], x[0], need_weights=False)[0]
    return result


def refused(group: ExchangeGroup, attend: Callable[[Tensor], Tensor]) -> str:
    module = Plain()
    module.forward = lambda x, positions: attend(x)  # type: ignore[method-assign]
    split = ContextSplit(module, ModelLayout(), Link(group), "ulysses")
    split.part((INPUTS, INPUTS), F.mse_loss)
    with pytest.raises(UsageError) as error:
        module(torch.zeros(1, 4, 8, 8), positions=torch.arange(8))
    return str(error.value)


@pytest.mark.parametrize(
    ("attend", "words"),
    [
        (masked, "an explicit mask"),
        (dropped, "dropout in attention"),
        (three_heads, "3 heads a rank"),
        (several_heads_at_once, "does not call scaled_dot_product_attention"),
    ],
)
def test_attention_that_cannot_be_split_is_refused_by_name(threads, attend, words) -> None:
    assert all(words in error for error in threads(2, refused, attend))


def refused_batch(group: ExchangeGroup, batch: Any, loss: Any) -> str:
    split = ContextSplit(Plain(), ModelLayout(), Link(group), "gathered")
    with pytest.raises(UsageError) as error:
        split.part(batch, loss)
    return str(error.value)


INPUTS = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("batch", "loss", "words"),
    [
        ({"input_ids": INPUTS}, None, "(inputs, targets)"),
        ((INPUTS, torch.zeros(2)), F.mse_loss, "(samples, tokens, ...)"),
        ((INPUTS[:, :6], INPUTS[:, :6]), F.mse_loss, "6 tokens of a sample do not divide into 4 chunks"),
        ((INPUTS, torch.full((2, 8), -100)), F.cross_entropy, "less than 0"),
        (({"x": INPUTS, "positions": INPUTS}, INPUTS), F.mse_loss, "packed documents"),
        (({"x": INPUTS, "attention_mask": INPUTS}, INPUTS), F.mse_loss, "attention_mask of the batch"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(threads, batch, loss, words) -> None:
    assert all(words in error for error in threads(2, refused_batch, batch, loss))


def uneven_loss(group: ExchangeGroup, **options: Any) -> str:
    """The error of a loss over three classes; only the last chunk has targets of 0."""
    split = ContextSplit(Plain(), ModelLayout(), Link(group), "ulysses")
    targets = torch.tensor([[1, 2, 1, 2, 1, 2, 0, 0]])

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), **options)

    _, own = split.part((INPUTS[:1], targets), loss)
    with pytest.raises(UsageError) as error:
        split.even(loss)(torch.zeros(1, 4, 3), own)
    split.even(lambda outputs, targets: F.cross_entropy(outputs.flatten(0, 1), targets.flatten()))(
        torch.zeros(1, 4, 3), own
    )
    return str(error.value)


def test_a_loss_that_does_not_weigh_all_tokens_alike_is_refused_on_all_ranks(threads) -> None:
    assert all("ignores targets of 0" in error for error in threads(2, partial(uneven_loss, ignore_index=0)))
    weighed = partial(uneven_loss, weight=torch.tensor([1.0, 2.0, 3.0]))
    assert all("has weights of classes" in error for error in threads(2, weighed))


class Pair(nn.Module):
    def forward(self, first: Tensor, second: Tensor, position_ids: Tensor) -> Tensor:
        return first


def named_inputs(group: ExchangeGroup) -> dict[str, Tensor]:
    split = ContextSplit(Pair(), ModelLayout(), Link(group), "gathered")
    inputs: dict[str, Tensor] = split.part(((DRAWN_TOKENS, 2 * DRAWN_TOKENS), DRAWN_TOKENS), F.mse_loss)[0]
    return inputs


DRAWN_TOKENS = torch.arange(16.0).view(2, 8)


def test_all_inputs_are_cut_and_given_by_name(threads) -> None:
    for rank, own in ((0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])):
        found = threads(2, named_inputs)[rank]
        assert found["position_ids"].tolist() == [own]
        assert torch.equal(found["first"], DRAWN_TOKENS[:, own])
        assert torch.equal(found["second"], 2 * DRAWN_TOKENS[:, own])


def evaluated(rank: int, strategy: str) -> dict[str, float]:
    """On a rank: figures of a validation after a step, of a batch that all ranks of a replica get."""
    torch.manual_seed(0)
    workload = build_workload("llama-nano:seq=16")
    group = None if strategy == "single" else open_exchange()
    settings = TrainSettings(strategy=strategy)
    device = torch.device("cpu")
    trainer = Trainer(
        workload.module, workload.loss, device=device, settings=settings, layout=workload.layout, group=group
    )
    batch = workload.synthetic(torch.Generator().manual_seed(1), 2)
    trainer.step(iter([batch]))
    return evaluate(trainer, [batch])


def test_a_validation_sees_whole_sequences(ranks) -> None:
    expected = pytest.approx(evaluated(0, "single"), rel=1e-5)
    assert all(found == expected for found in ranks(2, evaluated, "fsdp:cp=2"))


def test_a_model_that_takes_no_positions_is_refused(threads) -> None:
    def build(group: ExchangeGroup) -> None:
        ContextSplit(nn.Linear(2, 2), ModelLayout(), Link(group), "ulysses")

    with pytest.raises(UsageError, match="neither positions nor position_ids"):
        threads(2, partial(build))
