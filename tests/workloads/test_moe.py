"""A mixture of experts against a plain loop, and the routings against their stated loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from results.errors import SpecError, UsageError
from workloads.catalog import WORKLOADS, even_workload, shape_of
from workloads.moe import MoEShape
from workloads.moe.model import Balance, SparseMLP, forced_experts, grouped_products, looped_products

SMALL = MoEShape(
    layers=1,
    width=12,
    heads=2,
    kv_heads=2,
    hidden=10,
    context=48,
    vocabulary=20,
    seq=24,
    tied=True,
    experts=6,
    chosen=2,
)


def _one_token(layer: SparseMLP, token: Tensor, experts: list[int], dropped: Sequence[int] = ()) -> Tensor:
    """The weighted sum over a token's experts, less those without a place for it, (width,) in float64."""
    shape, scores = layer.shape, torch.softmax(layer.gate.weight @ token, dim=0)
    weights = scores[experts] / (scores[experts].sum() if shape.renormalised else 1)
    out = torch.zeros_like(token)
    for weight, expert in zip(weights, experts, strict=True):
        if expert in dropped:
            continue
        first = layer.experts.gate_up_proj[2 * shape.hidden * expert :][: 2 * shape.hidden]
        last = layer.experts.down_proj[shape.width * expert :][: shape.width]
        gate, up = (first @ token).chunk(2)
        out = out + weight * (last @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("how", [{}, {"renormalised": False, "chosen": 3}, {"routing": "skewed", "skew": 3}])
def test_a_layer_is_the_weighted_sum_of_each_tokens_experts(how) -> None:
    torch.manual_seed(0)
    shape = replace(SMALL, **how)
    layer = SparseMLP(shape).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(3, 24, 12, dtype=torch.float64, requires_grad=True)
    forced = forced_experts(shape, torch.arange(24)).tolist()

    def expected() -> Tensor:
        rows = []
        for place, token in enumerate(x.flatten(0, 1)):
            best = (layer.gate.weight @ token).topk(shape.chosen).indices.tolist()
            rows.append(_one_token(layer, token, forced[place % 24] if shape.routing == "skewed" else best))
        return torch.stack(rows).view_as(x)

    # The weights are computed in single precision.
    near = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(layer(x), expected(), **near)
    every = (x, *layer.parameters())
    ours, theirs = (torch.autograd.grad(out.square().sum(), every) for out in (layer(x), expected()))
    torch.testing.assert_close(ours, theirs, **near | {"atol": 1e-4})


def test_an_expert_drops_the_later_tokens_of_each_sequence() -> None:
    """With 1.1 means of 8 rows it has 9 places."""
    torch.manual_seed(0)
    layer = SparseMLP(replace(SMALL, capacity=1.1)).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    layer.experts.rows.begin(torch.device("cpu"))
    x = torch.randn(3, 24, 12, dtype=torch.float64, requires_grad=True)

    def expected() -> tuple[Tensor, list[int], int]:
        rows, computed, dropped = [], [0] * 6, 0
        for sequence in x:
            places = [9] * 6
            for token in sequence:
                best = (layer.gate.weight @ token).topk(2).indices.tolist()
                late = [expert for expert in best if not places[expert]]
                rows.append(_one_token(layer, token, best, late))
                dropped += len(late)
                for expert in set(best) - set(late):
                    places[expert] -= 1
                    computed[expert] += 1
        return torch.stack(rows).view_as(x), computed, dropped

    found, (theirs, computed, dropped) = layer(x), expected()
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-6)
    assert (layer.experts.rows.read(), layer.experts.rows.dropped()) == (computed, dropped)
    assert 0 < dropped < 30
    every = (x, *layer.parameters())
    gradients = (torch.autograd.grad(out.square().sum(), every) for out in (found, theirs))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("capacity", "places"), [(0.0, None), (1.0, 8), (1.1, 9), (1.125, 9), (2.2, 18)])
def test_places_are_rounded_up(capacity, places) -> None:
    assert replace(SMALL, capacity=capacity).places == places
    # 1.1 times 10 is a little more than 11 in floating point.
    assert replace(SMALL, capacity=1.1, seq=30).places == 11


def test_the_auxiliary_loss_is_of_each_sequence() -> None:
    torch.manual_seed(0)
    shape = replace(SMALL, aux=0.5)
    layer = SparseMLP(shape)
    nn.init.normal_(layer.gate.weight)
    layer.loss_factor = 0.25
    x = torch.randn(3, 24, 12, requires_grad=True)

    def balance() -> Tensor:
        total = torch.zeros(())
        for sequence in x:
            scores = [torch.softmax(layer.gate.weight @ token, dim=0) for token in sequence]
            times = [0] * 6
            for score in scores:
                for expert in score.topk(2).indices.tolist():
                    times[expert] += 1
            means = torch.stack(scores).mean(0)
            total = total + 6 * sum(many / 48 * mean for many, mean in zip(times, means, strict=True))
        return total / 3

    every = (x, layer.gate.weight)
    # Of the output there is no gradient.
    ours = torch.autograd.grad((0 * layer(x)).sum(), every)
    theirs = torch.autograd.grad(0.25 * 0.5 * balance(), every)
    torch.testing.assert_close(ours, theirs)


def test_a_bias_moves_the_choices_and_not_the_weights() -> None:
    torch.manual_seed(0)
    layer, plain = SparseMLP(replace(SMALL, bias=0.25)), SparseMLP(SMALL)
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 24, 12)
    torch.testing.assert_close(layer(x), plain(x))
    # Expert 3 has at least as much as the largest score of another.
    layer.balance.bias[3] = 1.0
    for token, out in zip(x.flatten(0, 1), layer(x).flatten(0, 1), strict=True):
        other = (layer.gate.weight @ token).index_fill(0, torch.tensor(3), -math.inf).argmax()
        torch.testing.assert_close(out, _one_token(layer, token, [3, int(other)]))
    tally = layer.balance.tally.tolist()
    assert (sum(tally), tally[3] >= 48) == (2 * 96, True)
    with torch.no_grad():
        layer(x)
    layer.eval()(x)
    assert layer.balance.tally.tolist() == tally


def test_a_bias_moves_by_its_step_towards_the_mean() -> None:
    balance = Balance(4, 0.25)
    balance.count(torch.tensor([1, 2, 0, 5]))
    # 2 is the mean.
    balance.settle(balance.tally)
    assert balance.bias.tolist() == [0.25, 0, 0.25, -0.25]
    balance.settle(torch.tensor([6, 6, 6, 7]))
    assert (balance.bias.tolist(), balance.tally.tolist()) == ([0.5, 0.25, 0.5, -0.5], [0] * 4)


def test_grouped_products_are_those_of_the_loop() -> None:
    torch.manual_seed(0)
    rows, weight = (
        torch.randn(*size, dtype=torch.bfloat16, requires_grad=True) for size in ((40, 16), (4, 24, 16))
    )
    sizes = [10, 0, 25, 5]
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    grouped = grouped_products(rows, weight, ends=ends)
    looped = looped_products(rows, weight, sizes=sizes)
    torch.testing.assert_close(grouped, looped)
    ours, theirs = (torch.autograd.grad(out.square().sum(), (rows, weight)) for out in (grouped, looped))
    torch.testing.assert_close(ours, theirs)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    torch.manual_seed(0)
    layer = SparseMLP(SMALL)
    # A constant token, so that all choose the same two experts.
    layer(torch.ones(2, 24, 12)).sum().backward()
    assert layer.experts.down_proj.grad is not None
    used = layer.experts.down_proj.grad.view(6, -1).abs().sum(1) > 0
    assert used.sum() == 2


@pytest.mark.parametrize(
    ("how", "busiest"),
    [
        ({"routing": "balanced"}, 8),
        # 48 choices in all, 8 on average: at 3 times all tokens choose the busiest.
        ({"routing": "skewed", "skew": 3}, 24),
        ({"routing": "skewed", "skew": 2}, 16),
        ({"routing": "skewed", "skew": 2, "experts": 12}, 8),
    ],
)
def test_forced_loads_are_those_that_are_stated(how, busiest) -> None:
    shape = replace(SMALL, **how)
    chosen = forced_experts(shape, torch.arange(24))
    assert all(len(set(one)) == len(one) for one in chosen.tolist())
    first, *others = torch.bincount(chosen.flatten(), minlength=shape.experts).tolist()
    assert first == busiest
    assert max(others) - min(others) <= (shape.chosen if shape.routing == "skewed" else 0)
    # A rank with a part of the sample has the choices of its positions.
    torch.testing.assert_close(forced_experts(shape, torch.arange(7, 15)), chosen[7:15])


def test_tokens_without_their_positions_are_refused() -> None:
    layer = SparseMLP(replace(SMALL, routing="balanced"))
    layer(torch.zeros(1, 12, 12), torch.arange(6, 18))
    for positions in (None, torch.arange(24)):
        with pytest.raises(UsageError, match="12 tokens came without their positions"):
            layer(torch.zeros(1, 12, 12), positions)


def test_a_part_of_a_sequence_is_refused_by_what_is_of_complete_ones() -> None:
    for how in ({"aux": 0.01}, {"capacity": 2.0}, {"bias": 0.001}):
        with pytest.raises(UsageError, match="complete sequences, and 12 of 24 tokens came"):
            SparseMLP(replace(SMALL, **how))(torch.zeros(1, 12, 12), torch.arange(6, 18))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("moe-nano:aux=0.01:routing=balanced", "aux balances a router's choices: use routing=learned"),
        ("moe-nano:aux=-1", "at least 0"),
        ("moe-nano:bias=0.001:routing=skewed", "bias balances a router's choices: use routing=learned"),
        ("moe-nano:skew=3", "skew needs routing=skewed"),
        ("moe-nano:routing=skewed:skew=5", "at most 4 times the mean, not 5"),
        ("mixtral-8x7b:seq=40000", "at most its context"),
    ],
)
def test_a_routing_that_cannot_be_is_refused(text, words) -> None:
    with pytest.raises(SpecError, match=words):
        shape_of(WORKLOADS.parse(text))


@pytest.mark.parametrize(
    ("text", "active"),
    # The model cards: "12.9B", "39B" and "800M" of active parameters.
    [("mixtral-8x7b", 12_879_925_248), ("mixtral-8x22b", 39_152_031_744), ("granite-3b", 882_874_368)],
)
def test_the_active_parameters_are_those_of_the_model_cards(text, active) -> None:
    shape = shape_of(WORKLOADS.parse(text))
    assert isinstance(shape, MoEShape)
    idle = shape.layers * (shape.experts - shape.chosen) * 3 * shape.width * shape.hidden
    assert shape.parts().values - idle == active


@pytest.mark.parametrize(
    ("text", "even"),
    [
        ("moe-nano", "moe-nano:routing=balanced"),
        ("moe-nano:routing=balanced", "moe-nano:routing=balanced"),
        ("moe-nano:routing=skewed:seq=32:skew=4", "moe-nano:routing=balanced:seq=32"),
        ("llama-nano", None),
    ],
)
def test_the_workload_of_an_even_load_differs_in_the_routing_alone(text, even) -> None:
    assert even_workload(WORKLOADS.parse(text)) == even
