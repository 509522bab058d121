"""Top-k over real ranks: what is sent, the residuals, and where training goes with and without feedback."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from exchanging import Alone, an_exchange, bucket_of, normal, residual_of
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm
from torch import Tensor
from torch.optim.sgd import sgd

from strategies.collectives.link import Link
from strategies.compression import selection
from strategies.compression.catalog import build_compressor
from strategies.compression.randomk import draw
from strategies.compression.selection import SELECTIONS, equal_blocks
from strategies.compression.streams import Streams
from strategies.exchange.buckets import Bucket, pieces_of

KINDS = ["exact", "sampled", "block"]


def summed(group: Any, spec: str, values: list[Tensor]) -> tuple[Tensor, Tensor, int]:
    """Sum and residual of this rank's values, and the bytes that it put on the wire."""
    exchange = an_exchange(group, spec, seed=5)
    bucket = bucket_of(values[group.rank()].clone())
    exchange.sum_shares(bucket)
    return bucket.values, residual_of(exchange), group.traffic.payload_bytes


def test_by_hand(threads) -> None:
    """Half of each is sent: 4 and 2 by rank 0, 3 and -5 by rank 1."""
    values = [torch.tensor([4.0, -1, 0, 2]), torch.tensor([0.0, 3, -5, 1])]
    (first, left, _), (second, other, _) = threads(2, summed, "topk:0.5", values)
    assert first.tolist() == second.tolist() == [4, 3, -5, 2]
    assert left.tolist() == [0, -1, 0, 0]
    assert other.tolist() == [0, 0, 0, 1]


def several_steps(group: Any, spec: str, n: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    """The sum and the residual of each step."""
    exchange = an_exchange(group, spec, seed=5)
    result = []
    for step in range(steps):
        bucket = bucket_of(normal(n, step, group.rank()))
        exchange.sum_shares(bucket)
        result.append((bucket.values, residual_of(exchange)))
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_topk_sends_or_keeps_each_value_bit_for_bit(threads, kind) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_travel_as_fp32(threads, dtype) -> None:
    """Bits that fp32 lacks stay in the residual: 2^-30 of 1 + 2^-30."""
    values = torch.tensor([0.25, 1 + 2.0**-30, -0.5, -2.0], dtype=dtype)
    results = threads(2, summed, "topk:0.5", [values] * 2)
    for summary, residual, payload_bytes in results:
        assert summary.dtype == residual.dtype == dtype
        assert summary.tolist() == [0, 2, 0, -4]
        assert residual.tolist() == [0.25, 2.0**-30 if dtype == torch.float64 else 0, -0.5, 0]
        assert payload_bytes == 16


def test_with_feedback_it_does(threads) -> None:
    """(4, 3), then (4, 3 + 3): the second is sent in the second step."""

    def run(group: Any) -> tuple[list[float], list[float]]:
        exchange = an_exchange(group, "topk:0.5")
        for _ in range(2):
            bucket = bucket_of(torch.tensor([4.0, 3.0]))
            exchange.sum_shares(bucket)
        return bucket.values.tolist(), dict(exchange.carried())["w"].tolist()

    assert threads(2, run) == [([0, 12], [4, 0])] * 2


def test_ranks_look_at_different_samples(threads) -> None:
    """One sample in 20 finds too few candidates (see below), but not on all ranks at once: with
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


# Random-k: what is drawn, that ranks draw alike from no other's generator, and its two scalings.

BIASED, UNBIASED = "randomk:0.3", "randomk:0.3:feedback=false"
FALSE_ALARM = 1e-6
DRAWS = 4000


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), st.integers(0, 99))
def test_one_of_each_block_is_drawn(size, seed) -> None:
    n, k = size
    indices, lengths = draw(n, k, torch.Generator().manual_seed(seed))
    blocks = np.array_split(np.arange(n), k)
    assert lengths.tolist() == [len(block) for block in blocks]
    assert all(index in block for index, block in zip(indices.tolist(), blocks, strict=True))


def test_without_feedback_by_hand(threads) -> None:
    """A drawn value counts for its block, of four, three or three elements."""
    values = [torch.arange(1.0, 11), torch.arange(10.0, 110, 10)]
    (total, left, _), _ = threads(2, summed, UNBIASED, values)
    lengths = [4] * 4 + [3] * 6
    drawn = total.nonzero()[:, 0].tolist()
    for index in range(10):
        factor = lengths[index] if index in drawn else 0
        assert total[index] == factor * (values[0] + values[1])[index]
        assert left[index] == (1 - factor) * values[0][index]


X = normal(20, 1)
LENGTHS = torch.tensor([4.0] * 8 + [3] * 12)
"""The block length of each of 20 elements: 30 % of them are 6, and 20 = 4 + 4 + 3 + 3 + 3 + 3."""


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
    """The two-sided limit of the largest of `tests` z-scores."""
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
    """No two of 8 seeds, 8 buckets and 8 steps draw the same 64 of 4096: sums or anagrams as seeds would."""
    seen = set()
    for seed in range(8):
        streams = Streams(seed)
        for _ in range(8):
            for index in range(8):
                generator = streams.next(bucket_of(torch.zeros(1), index))
                seen.add(tuple(draw(4096, 64, generator)[0].tolist()))
    assert len(seen) == 8**3


def test_finite_values_raise_no_alarm() -> None:
    """Not even those whose sum, or difference, would overflow."""
    largest = torch.finfo(torch.float32).max
    bucket = bucket_of(torch.tensor([largest, largest, -largest, -largest]))
    build_compressor("randomk:1.0", seed=0, rank=0).sum_shares(bucket, None, Alone())
    assert bucket.values.tolist() == [largest, largest, -largest, -largest]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_stay_what_they_are(threads, dtype) -> None:
    values = torch.arange(1.0, 11, dtype=dtype)
    for total, left, payload_bytes in threads(2, summed, UNBIASED, [values] * 2):
        assert total.dtype == left.dtype == dtype
        assert torch.equal(total + 2 * left, 2 * values)
        assert payload_bytes == 3 * dtype.itemsize


# Deep gradient compression: momentum that is corrected, masked, warmed up, saved and carried along.

F32 = np.float32


def dgc_bucket_of(values: Tensor, *names: str) -> Bucket:
    """A bucket of equally long parameters, of one if no names are given."""
    names = names or ("w",)
    shape = torch.Size([len(values) // len(names)])
    return Bucket(index=0, values=values, pieces=pieces_of((name, shape) for name in names))


def exchanged(group: Any, spec: str, shares: list[list[Tensor]]) -> list[tuple[Tensor, Tensor, Tensor, int]]:
    """Sum, residual, carried residual and sent bytes of each step of this rank's shares."""
    exchange, result = an_exchange(group, spec), []
    for share in shares[group.rank()]:
        bucket, before = dgc_bucket_of(share.clone()), group.traffic.payload_bytes
        exchange.sum_shares(bucket)
        kept, carried = dict(exchange.residual())["w"].clone(), dict(exchange.carried())["w"].clone()
        result.append((bucket.values, kept, carried, group.traffic.payload_bytes - before))
    return result


def test_dgc_by_hand(threads) -> None:
    """One of three is sent, and the momentum is 1/2.

    Step 1: u = v = (4, 1, 0), 4 is sent and zeroed in both. Step 2: u = (1, 1/2 + 1, 0), v = (1, 1 + 3/2, 0),
    and 5/2 is sent. Step 3, without a gradient: u = (1/2, 0, 0), v = (1 + 1/2, 0, 0), and 3/2 is sent.
    """
    shares = [[torch.tensor(g) for g in ([4.0, 1, 0], [1.0, 1, 0], [0.0, 0, 0])]]
    ((first, second, third),) = threads(1, exchanged, "dgc:0.34:momentum=0.5", shares)
    assert [step[0].tolist() for step in (first, second, third)] == [[4, 0, 0], [0, 2.5, 0], [1.5, 0, 0]]
    assert [step[1].tolist() for step in (first, second, third)] == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
    # v + m u: what comes to the next gradient.
    assert [step[2].tolist() for step in (first, second, third)] == [[0, 1.5, 0], [1.5, 0, 0], [0, 0, 0]]


def simulated(shares: list[list[Tensor]], k: int, momentum: float) -> list[np.ndarray]:
    """The sums of all steps, by the paper's algorithm for momentum SGD, in numpy's fp32."""
    size, n = len(shares), len(shares[0][0])
    u, v = [np.zeros(n, F32)] * size, [np.zeros(n, F32)] * size
    sums = []
    for step in range(len(shares[0])):
        total = np.zeros(n, F32)
        for rank in range(size):
            u[rank] = F32(momentum) * u[rank] + shares[rank][step].numpy()
            v[rank] = v[rank] + u[rank]
            mask = np.abs(v[rank]) >= np.sort(np.abs(v[rank]))[-k]
            total[mask] += v[rank][mask]
            u[rank], v[rank] = u[rank] * ~mask, v[rank] * ~mask
        sums.append(total)
    return sums


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_against_a_simulation(threads, size, momentum) -> None:
    """Bit for bit, as sums are taken in the order of ranks."""
    shares = [[normal(200, 100 * step + rank) for step in range(6)] for rank in range(size)]
    expected = simulated(shares, 10, momentum)
    for steps in threads(size, exchanged, f"dgc:0.05:momentum={momentum}", shares):
        for (found, _, _, _), total in zip(steps, expected, strict=True):
            np.testing.assert_array_equal(found.numpy(), total)


def test_at_ratio_1_it_is_sgd_with_momentum(threads) -> None:
    """Bit for bit on one rank: steps of plain SGD by what it sends, and of torch's SGD with momentum."""
    shares = [[normal(50, 100 * step + 0) for step in range(8)]]
    expected, found, buffers = torch.ones(50), torch.ones(50), [None]
    options = {"weight_decay": 0, "dampening": 0, "nesterov": False, "maximize": False, "foreach": False}
    for share, (total, kept, _, _) in zip(shares[0], *threads(1, exchanged, "dgc:1.0", shares), strict=True):
        sgd([expected], [share], buffers, lr=0.1, momentum=0.9, **options)
        found.add_(total, alpha=-0.1)
        assert torch.equal(found, expected)
        assert not kept.any()


def test_warm_up_is_the_papers(threads) -> None:
    """25 %, 6.29 %, 1.58 %, 0.40 %, 0.1 %: 1/4 (0.004)^(t/4) of 100,000. 8 bytes each."""
    shares = [[normal(100_000, 100 * step + 0) for step in range(6)]]
    (steps,) = threads(1, exchanged, "dgc:0.001:warmup=4", shares)
    assert [payload_bytes // 8 for *_, payload_bytes in steps] == [25_000, 6287, 1581, 398, 100, 100]


@pytest.mark.parametrize(
    ("spec", "counts"),
    [("dgc:0.01:warmup=1", [250, 10, 10]), ("dgc:0.5:warmup=2", [500, 500, 500]), ("dgc:0.01", [10, 10, 10])],
)
def test_warm_up_sends_no_less_than_later_steps(threads, spec, counts) -> None:
    shares = [[normal(1000, 100 * step + 0) for step in range(3)]]
    (steps,) = threads(1, exchanged, spec, shares)
    assert [payload_bytes // 8 for *_, payload_bytes in steps] == counts


@pytest.mark.parametrize(("spec", "steps"), [("dgc:0.01:warmup=7", 7), ("dgc:0.01", 0)])
def test_warm_up_is_told(spec, steps) -> None:
    assert build_compressor(spec, seed=0, rank=0).ramp_steps == steps


def test_momentum_goes_with_its_parameters_into_new_buckets(threads) -> None:
    """First (a, b) in one bucket, then (b, a): what is sent and kept is gradient + v + m u of each."""

    def run(group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        exchange = an_exchange(group, "dgc:0.1:momentum=0.5")
        exchange.sum_shares(dgc_bucket_of(normal(60, 0), "a", "b"))
        expected = {name: value + 1 for name, value in exchange.carried()}
        second = dgc_bucket_of(torch.ones(60), "b", "a")
        exchange.sum_shares(second)
        kept = dict(exchange.residual())
        return expected, {piece.name: piece.of(second.values) + kept[piece.name] for piece in second.pieces}

    ((expected, found),) = threads(1, run)
    assert sorted(expected) == ["a", "b"]
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6)


# Which elements are selected, against naive loops; of every way exactly k different ones, whatever comes.

Sizes = tuple[int, int]


def select(kind: str, values: Tensor, k: int, seed: int = 0) -> list[int]:
    """The selected indices, checked to be exactly k different ones, in order."""
    found = SELECTIONS[kind](values, k, torch.Generator().manual_seed(seed))
    assert found.dtype == torch.int64
    indices = sorted(found.tolist())
    assert len(indices) == len(set(indices)) == k
    assert indices[0] >= 0
    assert indices[-1] < len(values)
    return indices


def largest(values: Tensor, k: int) -> list[int]:
    order = sorted(range(len(values)), key=lambda i: -abs(values[i].item()))
    return sorted(order[:k])


@st.composite
def sizes(draw: Callable[..., int]) -> Sizes:
    n = draw(st.integers(1, 3000))
    return n, draw(st.integers(1, n))


def test_selection_by_hand() -> None:
    values = torch.tensor([3.0, -5.0, 1.0, 4.0, -0.5, 2.0])
    assert select("exact", values, 2) == [1, 3]
    assert select("sampled", values, 2) == [1, 3]
    # Blocks (3, -5, 1) and (4, -0.5, 2); with four, (3, -5), (1, 4), (-0.5) and (2).
    assert select("block", values, 2) == [1, 3]
    assert select("block", values, 4) == [1, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_subnormal_numbers_are_told_from_zeros(dtype) -> None:
    """The largest of a sample may be zero as well: all that is not zero is then a candidate."""
    values = torch.zeros(4000, dtype=dtype)
    kind = torch.finfo(dtype)
    # So many that a sample saves something: of fewer the selection is exact.
    places = list(range(1000, 4000, 30))
    values[places] = torch.arange(1, 101).to(dtype) * (kind.smallest_normal * kind.eps)
    assert select("sampled", values, 100) == places


@given(sizes())
def test_blocks_are_those_of_numpy(size) -> None:
    n, k = size
    expected = [part.tolist() for part in np.array_split(np.arange(n), k)]
    found = [
        list(range(start, start + run.length))
        for run in equal_blocks(n, k)
        for start in run.starts(torch.device("cpu")).tolist()
    ]
    assert found == expected


@pytest.mark.parametrize("cached", [1, 16, 1 << 18])
def test_each_way_finds_what_a_naive_search_finds(monkeypatch, cached) -> None:
    """At 1000 of 5000 a sample's threshold is the 50th of 192: the check of `sampled` is below."""
    monkeypatch.setattr(selection, "_CACHED", cached)
    for n, k in [(1, 1), (7, 7), (50, 3), (1000, 999), (5000, 1000)]:
        values = normal(n, n)
        assert select("exact", values, k) == largest(values, k)
        blocks = np.array_split(np.arange(n), k)
        assert select("block", values, k) == [
            max(part.tolist(), key=lambda i: abs(values[i].item())) for part in blocks
        ]


@given(sizes(), st.integers(0, 3), st.sampled_from(KINDS))
def test_exactly_k_different_ones_whatever_the_ties(size, levels, kind) -> None:
    n, k = size
    select(kind, normal(n).mul(levels).round(), k)


@pytest.mark.parametrize("cached", [1000, 1 << 18])
def test_with_enough_candidates_a_sample_finds_the_largest_of_all(monkeypatch, cached) -> None:
    """The threshold is the 520th of 2,000: fewer than k candidates are 5.3 standard deviations away, 1e-7."""
    monkeypatch.setattr(selection, "_CACHED", cached)
    values = normal(200_000)
    assert select("sampled", values, 40_000) == select("exact", values, 40_000)


@pytest.fixture
def searched(monkeypatch) -> list[int]:
    """How many values each search for the exactly largest goes through, as it happens."""
    lengths: list[int] = []
    exact = selection.exact

    def noting(values: Tensor, k: int) -> Tensor:
        lengths.append(len(values))
        return exact(values, k)

    monkeypatch.setattr(selection, "exact", noting)
    return lengths


def test_a_sample_spares_the_search_of_all(searched) -> None:
    """1.3 k candidates, with a standard deviation of 1 / sqrt(52), 14 %: 2 k are nearly 4 of them away."""
    values = normal(400_000)
    for seed in range(20):
        select("sampled", values, 4000, seed)
    assert max(searched) < 8000
    assert np.mean(searched) == pytest.approx(1.3 * 4000, rel=0.15)


def test_zeros_are_not_searched(searched) -> None:
    """Most gradients of an embedding are zero: with 2000 others, k of them are found among 2000."""
    values = torch.zeros(400_000)
    values[::200] = normal(2000)
    assert select("sampled", values, 1900) == [200 * i for i in largest(normal(2000), 1900)]
    assert set(range(0, 400_000, 200)) <= set(select("sampled", values, 4000))
    assert searched == [2000]


def test_too_few_candidates_are_filled_up() -> None:
    """With a threshold of rank 50 one sample in 20 gives too few: then the largest m and k - m others."""
    n, k = 10_000, 1000
    values = normal(n)
    by_size = torch.argsort(values.abs(), descending=True).argsort()
    short = 0
    for seed in range(200):
        ranks = by_size[select("sampled", values, k, seed)].sort().values
        in_order = int((ranks == torch.arange(k)).long().cumprod(0).sum())
        short += in_order < k
        assert in_order > k / 2
    assert 0 < short < 40


@pytest.mark.parametrize("others", [0.0, 1e-3])
def test_the_few_that_matter_are_found(others) -> None:
    """30 large ones among 20,000 equal ones, which have no order: all of the 30, and 970 others."""
    values = torch.full((20_000,), others)
    places = torch.randperm(20_000, generator=torch.Generator().manual_seed(1))[:30]
    values[places] = -normal(30).abs() - 1
    for kind in ("exact", "sampled"):
        assert set(places.tolist()) <= set(select(kind, values, 1000))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [1, 900, 15_000])
def test_non_finite_values_are_selected_first(kind, bad, count) -> None:
    """The selection finds all bad values, but at most `k`; a block selects only one of its values."""
    n, k = 20_000, 1000
    values = normal(n)
    places = torch.randperm(n, generator=torch.Generator().manual_seed(2))[:count]
    values[places] = bad
    chosen = values[select(kind, values, k)]
    found = int((~chosen.isfinite()).sum())
    expected = len({int(place) // (n // k) for place in places}) if kind == "block" else min(count, k)
    assert found == expected


@given(sizes(), st.integers(0, 100))
def test_contraction(size, seed) -> None:
    """|x - C(x)|^2 <= (1 - k/n) |x|^2 for the largest k; of the largest of each block, (1 - 1/length).

    Integers, so that both sides are exact in fp64.
    """
    n, k = size
    values = normal(n, seed).mul(20).round().double()
    whole = values.square().sum().item()
    for kind, kept in (("exact", 1 - k / n), ("block", 1 - 1 / math.ceil(n / k))):
        left = values.clone()
        left[select(kind, values, k)] = 0
        assert left.square().sum().item() <= kept * whole * (1 + 1e-12)
