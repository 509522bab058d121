"""Top-k over real ranks: what is sent, what is kept, and where training goes with and without feedback."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strategies.collectives.link import Link
from strategies.compression.catalog import build_compressor
from strategies.exchange.buckets import Bucket, pieces_of
from strategies.gradient_exchange import ExchangeSettings, GradientExchange

Threads = Callable[..., list[Any]]
CPU = torch.device("cpu")
KINDS = ["exact", "sampled", "block"]


def bucket_of(values: Tensor, index: int = 0) -> Bucket:
    return Bucket(index=index, values=values, pieces=pieces_of(iter([("w", values.shape)])))


def normal(n: int, *seeds: int) -> Tensor:
    return torch.randn(
        n, generator=torch.Generator().manual_seed(sum(1000**i * s for i, s in enumerate(seeds)))
    )


def open_exchange(group: Any, spec: str) -> GradientExchange:
    return GradientExchange(ExchangeSettings(group=group, compression=spec, seed=5), device=CPU)


def kept(exchange: GradientExchange) -> Tensor:
    """A copy of what the one bucket has left."""
    return dict(exchange.residual())["w"].clone()


def summed(group: Any, spec: str, values: list[Tensor]) -> tuple[Tensor, Tensor, int]:
    """Sum and residual of this rank's values, and the bytes that it put on the wire."""
    exchange = open_exchange(group, spec)
    exchange.audited = True
    bucket = bucket_of(values[group.rank()].clone())
    exchange.sum_shares(bucket)
    return bucket.values, kept(exchange), group.traffic.payload_bytes


def test_by_hand(threads: Threads) -> None:
    """Half of each is sent: 4 and 2 by rank 0, 3 and -5 by rank 1."""
    values = [torch.tensor([4.0, -1, 0, 2]), torch.tensor([0.0, 3, -5, 1])]
    (first, left, _), (second, other, _) = threads(2, summed, "topk:0.5", values)
    assert first.tolist() == second.tolist() == [4, 3, -5, 2]
    assert left.tolist() == [0, -1, 0, 0]
    assert other.tolist() == [0, 0, 0, 1]


def test_what_both_send_is_added(threads: Threads) -> None:
    values = [torch.tensor([4.0, 1, 0]), torch.tensor([-7.0, 0, 2])]
    for summary, _, _ in threads(2, summed, "topk:0.34", values):
        assert summary.tolist() == [-3, 0, 0]


def several_steps(group: Any, spec: str, n: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    """By step, the sum and what was kept."""
    exchange = open_exchange(group, spec)
    result = []
    for step in range(steps):
        bucket = bucket_of(normal(n, step, group.rank()))
        exchange.sum_shares(bucket)
        result.append((bucket.values, kept(exchange)))
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_in_is_sent_or_kept_bit_for_bit(threads: Threads, kind: str) -> None:
    """On each rank every element of gradient + kept is sent as it is or kept as it is; and the result is the
    sum of what was sent, in the order of ranks. Recomputed with numpy."""
    n, size, ratio, steps = 2000, 3, 0.1, 4
    results = threads(size, several_steps, f"topk:{ratio}:select={kind}", n, steps)
    before = [np.zeros(n, np.float32)] * size
    for step in range(steps):
        total = np.zeros(n, np.float32)
        for rank in range(size):
            share = before[rank] + normal(n, step, rank).numpy()
            left = results[rank][step][1].numpy()
            sent = left != share
            assert sent.sum() == ratio * n
            assert (left[sent] == 0).all()
            total[sent] += share[sent]
            before[rank] = left
        for rank in range(size):
            np.testing.assert_array_equal(results[rank][step][0].numpy(), total)


@pytest.mark.parametrize("kind", KINDS)
def test_over_the_steps_nothing_is_lost(threads: Threads, kind: str) -> None:
    """All sums, and what is kept at the end, are all gradients of all ranks; whole numbers, so exactly."""
    n, size, steps = 500, 3, 6

    def run(group: Any) -> tuple[Tensor, Tensor]:
        exchange, total = open_exchange(group, f"topk:0.02:select={kind}"), torch.zeros(n)
        for step in range(steps):
            bucket = bucket_of(normal(n, step, group.rank()).mul(50).round())
            exchange.sum_shares(bucket)
            total += bucket.values
        return total, kept(exchange)

    results = threads(size, run)
    gradients = [normal(n, step, rank).mul(50).round() for step in range(steps) for rank in range(size)]
    left = torch.stack([residual for _, residual in results]).sum(0)
    for total, _ in results:
        assert torch.equal(total + left, torch.stack(gradients).sum(0))
    assert left.abs().max() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_end_with_the_same_bits(threads: Threads, kind: str) -> None:
    """Ties and all: a third of the values are equal to others."""
    values = [normal(20_000, rank).mul(8).round().div(7) for rank in range(4)]
    results = threads(4, summed, f"topk:0.05:select={kind}", values)
    assert len({hashlib.sha256(summary.numpy().tobytes()).hexdigest() for summary, _, _ in results}) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_sent_and_not_kept(threads: Threads, kind: str, bad: float) -> None:
    values = [normal(20_000, rank) for rank in range(2)]
    values[1][12_345] = bad
    (first, left, _), (second, other, _) = threads(2, summed, f"topk:0.05:select={kind}", values)
    for summary in (first, second):
        assert summary[12_345].isnan() if math.isnan(bad) else summary[12_345] == bad
        assert summary.isfinite().sum() == 19_999
    assert left.isfinite().all()
    assert other.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_travel_as_fp32(threads: Threads, dtype: torch.dtype) -> None:
    """What fp32 has no bits for stays in the residual: 2^-30 of 1 + 2^-30."""
    values = torch.tensor([0.25, 1 + 2.0**-30, -0.5, -2.0], dtype=dtype)
    results = threads(2, summed, "topk:0.5", [values] * 2)
    for summary, residual, payload_bytes in results:
        assert summary.dtype == residual.dtype == dtype
        assert summary.tolist() == [0, 2, 0, -4]
        assert residual.tolist() == [0.25, 2.0**-30 if dtype == torch.float64 else 0, -0.5, 0]
        assert payload_bytes == 16


def test_without_feedback_nothing_comes_back(threads: Threads) -> None:
    def run(group: Any) -> tuple[list[float], list[str]]:
        exchange = open_exchange(group, "topk:0.5:feedback=false")
        for _ in range(3):
            bucket = bucket_of(torch.tensor([4.0, 3.0]))
            exchange.sum_shares(bucket)
        return bucket.values.tolist(), [name for name, _ in exchange.carried()]

    assert threads(2, run) == [([8, 0], [])] * 2


def test_with_feedback_it_does(threads: Threads) -> None:
    """(4, 3), then (4, 3 + 3): the second is sent in the second step."""

    def run(group: Any) -> tuple[list[float], list[float]]:
        exchange = open_exchange(group, "topk:0.5")
        for _ in range(2):
            bucket = bucket_of(torch.tensor([4.0, 3.0]))
            exchange.sum_shares(bucket)
        return bucket.values.tolist(), dict(exchange.carried())["w"].tolist()

    assert threads(2, run) == [([0, 12], [4, 0])] * 2


QUADRATIC = torch.tensor([[-3.0, 2.0, 2.0], [2.0, -3.0, 2.0], [2.0, 2.0, -3.0]])


def descend(group: Any, spec: str, steps: int) -> Tensor:
    """Of f_i(x) = <a_i, x>^2 + |x|^2 / 4, one of them on each of three ranks, from (1, 1, 1)."""
    exchange, a, x = open_exchange(group, spec), QUADRATIC[group.rank()], torch.ones(3)
    for _ in range(steps):
        bucket = bucket_of((2 * (a @ x) * a + x / 2) / 3)
        exchange.sum_shares(bucket)
        x = x - 0.01 * bucket.values
    return x


def test_without_feedback_the_largest_element_alone_leads_astray(threads: Threads) -> None:
    """Three functions of Beznosikov et al. 2020 (arXiv:2002.12410).

    At x = t (1, 1, 1) the gradient of rank i is t (2 a_i + 1/2): -5.5 t at i, and 4.5 t elsewhere. Each rank
    sends its -5.5 t, so that every step multiplies x by 1 + 0.01 x 5.5 / 3.
    """
    for x in threads(3, descend, "topk:0.34:feedback=false", 400):
        np.testing.assert_allclose(x.numpy(), (1 + 0.055 / 3) ** 400, rtol=1e-3)
        assert x.norm() > 1000


def test_with_feedback_it_arrives(threads: Threads) -> None:
    for x in threads(3, descend, "topk:0.34", 800):
        assert x.norm() < 1e-3


def test_ranks_look_at_different_samples(threads: Threads) -> None:
    """One sample in 20 finds too few candidates (see test_selection.py), but not on all ranks at once: with
    equal values, what two ranks select is not always the same."""

    def run(group: Any) -> list[Tensor]:
        compressor = build_compressor("topk:0.1:select=sampled", seed=0, rank=group.rank())
        selected = []
        for _ in range(150):
            bucket, residual = bucket_of(normal(10_000, 0)), torch.empty(10_000)
            compressor.sum_shares(bucket, residual, Link(group))
            selected.append(residual == 0)
        return selected

    first, second = threads(2, run)
    assert not all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert not all(torch.equal(first[0], other) for other in first)
