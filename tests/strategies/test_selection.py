"""Which elements are selected, against naive loops; of every way exactly k different ones, whatever comes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strategies.compression import selection
from strategies.compression.facts import share_of
from strategies.compression.selection import SELECTIONS, equal_blocks

KINDS = sorted(SELECTIONS)
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


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def largest(values: Tensor, k: int) -> list[int]:
    order = sorted(range(len(values)), key=lambda i: -abs(values[i].item()))
    return sorted(order[:k])


@st.composite
def sizes(draw: Callable[..., int]) -> Sizes:
    n = draw(st.integers(1, 3000))
    return n, draw(st.integers(1, n))


def test_by_hand() -> None:
    values = torch.tensor([3.0, -5.0, 1.0, 4.0, -0.5, 2.0])
    assert select("exact", values, 2) == [1, 3]
    assert select("sampled", values, 2) == [1, 3]
    # Blocks (3, -5, 1) and (4, -0.5, 2); with four, (3, -5), (1, 4), (-0.5) and (2).
    assert select("block", values, 2) == [1, 3]
    assert select("block", values, 4) == [1, 3, 4, 5]


@pytest.mark.parametrize(
    ("ratio", "n", "k"), [(0.01, 1000, 10), (1e-6, 1000, 1), (1, 7, 7), (0.3, 9, 3), (0.5, 1, 1)]
)
def test_the_number_that_is_sent(ratio: float, n: int, k: int) -> None:
    assert share_of(n, ratio) == k


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_subnormal_numbers_are_told_from_zeros(dtype: torch.dtype) -> None:
    """The largest of a sample may be zero as well: all that is not zero is then a candidate."""
    values = torch.zeros(4000, dtype=dtype)
    kind = torch.finfo(dtype)
    # So many that a sample saves something: of fewer the selection is exact.
    places = list(range(1000, 4000, 30))
    values[places] = torch.arange(1, 101).to(dtype) * (kind.smallest_normal * kind.eps)
    assert select("sampled", values, 100) == places


@settings(deadline=None)
@given(sizes())
def test_blocks_are_those_of_numpy(size: Sizes) -> None:
    n, k = size
    expected = [part.tolist() for part in np.array_split(np.arange(n), k)]
    found = [
        list(range(start, start + run.length))
        for run in equal_blocks(n, k)
        for start in run.starts(torch.device("cpu")).tolist()
    ]
    assert found == expected


@pytest.mark.parametrize("cached", [1, 16, 1 << 18])
def test_each_way_finds_what_a_naive_search_finds(monkeypatch: pytest.MonkeyPatch, cached: int) -> None:
    """At 1000 of 5000 a sample's threshold is the 50th of 192: the check of `sampled` is below."""
    monkeypatch.setattr(selection, "_CACHED", cached)
    for n, k in [(1, 1), (7, 7), (50, 3), (1000, 999), (5000, 1000)]:
        values = normal(n, seed=n)
        assert select("exact", values, k) == largest(values, k)
        blocks = np.array_split(np.arange(n), k)
        assert select("block", values, k) == [
            max(part.tolist(), key=lambda i: abs(values[i].item())) for part in blocks
        ]


@settings(deadline=None)
@given(sizes(), st.integers(0, 3), st.sampled_from(KINDS))
def test_exactly_k_different_ones_whatever_the_ties(size: Sizes, levels: int, kind: str) -> None:
    n, k = size
    select(kind, normal(n).mul(levels).round(), k)


@pytest.mark.parametrize("cached", [1000, 1 << 18])
def test_with_enough_candidates_a_sample_finds_the_largest_of_all(
    monkeypatch: pytest.MonkeyPatch, cached: int
) -> None:
    """The threshold is the 520th of 2,000: fewer than k candidates are 5.3 standard deviations away, 1e-7."""
    monkeypatch.setattr(selection, "_CACHED", cached)
    values = normal(200_000)
    assert select("sampled", values, 40_000) == select("exact", values, 40_000)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values each search for the exactly largest goes through, as it happens."""
    lengths: list[int] = []
    exact = selection.exact

    def noting(values: Tensor, k: int) -> Tensor:
        lengths.append(len(values))
        return exact(values, k)

    monkeypatch.setattr(selection, "exact", noting)
    return lengths


def test_a_sample_spares_the_search_of_all(searched: list[int]) -> None:
    """1.3 k candidates, with a standard deviation of 1 / sqrt(52), 14 %: 2 k are nearly 4 of them away."""
    values = normal(400_000)
    for seed in range(20):
        select("sampled", values, 4000, seed)
    assert max(searched) < 8000
    assert np.mean(searched) == pytest.approx(1.3 * 4000, rel=0.15)


def test_zeros_are_not_searched(searched: list[int]) -> None:
    """Of an embedding most gradients are zero: with 2000 others, k of them are found among 2000."""
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
def test_the_few_that_matter_are_found(others: float) -> None:
    """30 large ones among 20,000 equal ones, which have no order: all of the 30, and 970 others."""
    values = torch.full((20_000,), others)
    places = torch.randperm(20_000, generator=torch.Generator().manual_seed(1))[:30]
    values[places] = -normal(30).abs() - 1
    for kind in ("exact", "sampled"):
        assert set(places.tolist()) <= set(select(kind, values, 1000))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [1, 900, 15_000])
def test_what_is_not_finite_is_selected_first(kind: str, bad: float, count: int) -> None:
    """As many as are selected at most; a block sends one of its own."""
    n, k = 20_000, 1000
    values = normal(n)
    places = torch.randperm(n, generator=torch.Generator().manual_seed(2))[:count]
    values[places] = bad
    chosen = values[select(kind, values, k)]
    found = int((~chosen.isfinite()).sum())
    expected = len({int(place) // (n // k) for place in places}) if kind == "block" else min(count, k)
    assert found == expected


def test_contraction_by_hand() -> None:
    """Of (3, -4, 1), the largest sent leaves 9 + 1 = 10 of 26, and may leave 2/3 of 26."""
    values = torch.tensor([3.0, -4.0, 1.0])
    values[select("exact", values, 1)] = 0
    assert values.square().sum().item() == 10


@settings(deadline=None)
@given(sizes(), st.integers(0, 100))
def test_contraction(size: Sizes, seed: int) -> None:
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


def test_contraction_of_a_sample() -> None:
    """As of the largest k, where enough candidates are found (see above for how likely they are not)."""
    values = normal(200_000).double()
    left = values.clone()
    left[select("sampled", values, 40_000)] = 0
    assert left.square().sum() <= (1 - 0.2) * values.square().sum()


@pytest.mark.parametrize("kind", KINDS)
def test_the_values_and_the_global_generator_stay_as_they_are(kind: str) -> None:
    values = normal(20_000)
    before, state = values.clone(), torch.get_rng_state()
    select(kind, values, 1000)
    assert torch.equal(values, before)
    assert torch.equal(torch.get_rng_state(), state)
