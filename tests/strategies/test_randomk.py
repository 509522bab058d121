"""Random-k: what is drawn, that ranks draw alike from no other's generator, and its two scalings."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from torch import Tensor

from strategies.compression.catalog import build_compressor
from strategies.compression.randomk import draw
from strategies.compression.streams import Streams
from strategies.exchange.buckets import Bucket, pieces_of
from strategies.gradient_exchange import ExchangeSettings, GradientExchange

Threads = Callable[..., list[Any]]
CPU = torch.device("cpu")
BIASED, UNBIASED = "randomk:0.3", "randomk:0.3:feedback=false"
FALSE_ALARM = 1e-6
DRAWS = 4000


class Alone:
    """A wire of one rank."""

    rank, size = 0, 1

    def largest(self, values: Tensor) -> None: ...

    def all_reduce(self, values: Tensor) -> None: ...

    def all_gather(self, values: Tensor) -> Tensor:
        return values[None]

    def all_to_all(self, values: Tensor) -> Tensor:
        return values


def bucket_of(values: Tensor, index: int = 0) -> Bucket:
    return Bucket(index=index, values=values, pieces=pieces_of(iter([("w", values.shape)])))


def normal(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def open_exchange(group: Any, spec: str) -> GradientExchange:
    exchange = GradientExchange(ExchangeSettings(group=group, compression=spec, seed=5), device=CPU)
    exchange.audited = True
    return exchange


def kept(exchange: GradientExchange) -> Tensor:
    return dict(exchange.residual())["w"].clone()


def summed(group: Any, spec: str, values: list[Tensor]) -> tuple[Tensor, Tensor, int]:
    """Sum and residual of this rank's values, and the bytes that it put on the wire."""
    exchange, bucket = open_exchange(group, spec), bucket_of(values[group.rank()].clone())
    exchange.sum_shares(bucket)
    return bucket.values, kept(exchange), group.traffic.payload_bytes


@settings(deadline=None)
@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), st.integers(0, 99))
def test_one_of_each_block_is_drawn(size: tuple[int, int], seed: int) -> None:
    n, k = size
    indices, lengths = draw(n, k, torch.Generator().manual_seed(seed))
    blocks = np.array_split(np.arange(n), k)
    assert lengths.tolist() == [len(block) for block in blocks]
    assert all(index in block for index, block in zip(indices.tolist(), blocks, strict=True))


def test_by_hand(threads: Threads) -> None:
    """Three of ten elements: one of the first four, one of the next three, one of the last."""
    values = [torch.arange(1.0, 11), torch.arange(10.0, 110, 10)]
    both = values[0] + values[1]
    (total, left, _), (same, other, _) = threads(2, summed, BIASED, values)
    assert torch.equal(total, same)
    drawn = total.nonzero()[:, 0].tolist()
    assert [sum(index in block for index in drawn) for block in (range(4), range(4, 7), range(7, 10))] == [
        1
    ] * 3
    for index in range(10):
        assert total[index] == (both[index] if index in drawn else 0)
        assert left[index] == (0 if index in drawn else values[0][index])
        assert other[index] == (0 if index in drawn else values[1][index])


def test_without_feedback_by_hand(threads: Threads) -> None:
    """What is drawn counts for its block, of four, three or three elements."""
    values = [torch.arange(1.0, 11), torch.arange(10.0, 110, 10)]
    (total, left, _), _ = threads(2, summed, UNBIASED, values)
    lengths = [4] * 4 + [3] * 6
    drawn = total.nonzero()[:, 0].tolist()
    for index in range(10):
        factor = lengths[index] if index in drawn else 0
        assert total[index] == factor * (values[0] + values[1])[index]
        assert left[index] == (1 - factor) * values[0][index]


@pytest.mark.parametrize("spec", ["randomk:0.1", "randomk:0.1:feedback=false"])
def test_what_goes_in_is_sent_or_kept(threads: Threads, spec: str) -> None:
    """Whole numbers, so exactly; with feedback bit for bit the one or the other, on every rank."""
    n, size, steps = 103, 3, 5

    def share(step: int, rank: int) -> Tensor:
        return normal(n, 10 * step + rank).mul(50).round()

    def run(group: Any) -> list[tuple[Tensor, Tensor]]:
        exchange, result = open_exchange(group, spec), []
        for step in range(steps):
            bucket = bucket_of(share(step, group.rank()))
            exchange.sum_shares(bucket)
            result.append((bucket.values, kept(exchange)))
        return result

    results = threads(size, run)
    feedback = "false" not in spec
    before = [torch.zeros(n)] * size
    for step in range(steps):
        given_in = [share(step, rank) + (before[rank] if feedback else 0) for rank in range(size)]
        before = [results[rank][step][1] for rank in range(size)]
        for rank in range(size):
            assert torch.equal(results[rank][step][0] + sum(before), sum(given_in))
            if feedback:
                assert ((before[rank] == 0) | (before[rank] == given_in[rank])).all()


X = normal(20, 1)
LENGTHS = torch.tensor([4.0] * 8 + [3] * 12)
"""Of the block of each of 20 elements: 30 % of them are 6, and 20 = 4 + 4 + 3 + 3 + 3 + 3."""


@cache
def draws(spec: str) -> Tensor:
    """C(X) in DRAWS steps: (DRAWS, 20), fp64."""
    compressor = build_compressor(spec, seed=7, rank=0)
    results = []
    for _ in range(DRAWS):
        bucket = bucket_of(X.clone())
        compressor.sum_shares(bucket, None, Alone())
        results.append(bucket.values.double())
    return torch.stack(results)


def z_limit(tests: int) -> float:
    """Of the largest of that many z-scores, two-sided."""
    return float(norm.ppf(1 - FALSE_ALARM / 2 / tests))


def test_unbiased_with_the_variance_of_theory() -> None:
    """Blocks of L = 4 and 3: E C(x) = x, variance (L - 1) x_i^2, E |C(x) - x|^2 = sum of (L - 1) |x_B|^2.

    z-scores of 20 means and one variance, at a false alarm rate of 1e-6 (Bonferroni).
    """
    found = draws(UNBIASED)
    z = (found.mean(0) - X) / ((LENGTHS - 1) * X.square() / DRAWS).sqrt()
    assert z.abs().max() < z_limit(21)
    errors = (found - X).square().sum(1)
    expected = ((LENGTHS - 1) * X.square()).sum()
    assert abs(errors.mean() - expected) / (errors.std() / DRAWS**0.5) < z_limit(21)


def test_with_feedback_it_is_a_contraction_by_the_share_that_is_sent() -> None:
    """Unscaled: E |C(x) - x|^2 = (1 - 1/L) |x_B|^2 in every block, and never more than |x|^2."""
    errors = (draws(BIASED) - X).square().sum(1)
    assert (errors < X.square().sum()).all()
    expected = ((1 - 1 / LENGTHS) * X.square()).sum()
    assert abs(errors.mean() - expected) / (errors.std() / DRAWS**0.5) < z_limit(1)


def test_blocks_and_steps_are_independent() -> None:
    """Whether a block's first element is drawn, against the same of the 5 other blocks, and of itself a step
    later: 6 x 5 / 2 + 6 correlations, each with a variance of 1 / DRAWS."""
    first = (draws(BIASED)[:, [0, 4, 8, 11, 14, 17]] != 0).double()
    scores = (first - first.mean(0)) / first.std(0)
    within = (scores.T @ scores / DRAWS)[torch.ones(6, 6).triu(1).bool()]
    later = (scores[1:] * scores[:-1]).mean(0)
    z = torch.cat([within, later]) * DRAWS**0.5
    assert len(z) == 21
    assert z.abs().max() < z_limit(21)


def test_every_bucket_and_step_and_seed_has_a_stream_of_its_own() -> None:
    """Of 8 seeds, 8 buckets and 8 steps, no two draw the same 64 of 4096: sums or anagrams as seeds would."""
    seen = set()
    for seed in range(8):
        streams = Streams(seed)
        for _ in range(8):
            for index in range(8):
                generator = streams.next(bucket_of(torch.zeros(1), index))
                seen.add(tuple(draw(4096, 64, generator)[0].tolist()))
    assert len(seen) == 8**3


def test_equal_keys_draw_alike() -> None:
    first, second = Streams(3), Streams(3)
    for _ in range(3):
        one, other = (draw(100, 10, streams.next(bucket_of(torch.zeros(1)))) for streams in (first, second))
        assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("spec", [BIASED, UNBIASED])
def test_torchs_generators_neither_decide_nor_change(threads: Threads, spec: str) -> None:
    values = [normal(100, rank) for rank in range(2)]
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = threads(2, summed, spec, values)[0][0]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(threads(2, summed, spec, values)[0][0], first)


@pytest.mark.parametrize("spec", [BIASED, UNBIASED])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_at_once_even_if_it_is_not_drawn(
    threads: Threads, spec: str, bad: float
) -> None:
    for place in range(10):
        values = [torch.ones(10), torch.ones(10)]
        values[1][place] = bad
        for total, _, _ in threads(2, summed, spec, values):
            assert not total.isfinite().all()


def test_finite_values_raise_no_alarm() -> None:
    """Not even those whose sum, or difference, would overflow."""
    largest = torch.finfo(torch.float32).max
    bucket = bucket_of(torch.tensor([largest, largest, -largest, -largest]))
    build_compressor("randomk:1.0", seed=0, rank=0).sum_shares(bucket, None, Alone())
    assert bucket.values.tolist() == [largest, largest, -largest, -largest]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_stay_what_they_are(threads: Threads, dtype: torch.dtype) -> None:
    values = torch.arange(1.0, 11, dtype=dtype)
    for total, left, payload_bytes in threads(2, summed, UNBIASED, [values] * 2):
        assert total.dtype == left.dtype == dtype
        assert torch.equal(total + 2 * left, 2 * values)
        assert payload_bytes == 3 * dtype.itemsize
