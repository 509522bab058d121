"""Half precision: what is rounded, what is scaled, what survives, and what an overflow looks like."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from exchanging import bucket_of, normal
from torch import Tensor

from strategies.collectives.link import Link
from strategies.compression.base import Compressor
from strategies.compression.casts import Fp16
from strategies.compression.catalog import build_compressor

U16 = 2.0**-11
"""Unit roundoff of fp16."""
LARGEST = 65504.0


class Echo:
    """A wire on which `size` ranks have the same values, and add them up one after another."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.agreed = self.sent = torch.empty(0)

    def largest(self, values: Tensor) -> None:
        self.agreed = values.clone()

    def all_reduce(self, values: Tensor) -> None:
        self.sent = values.clone()
        for _ in range(self.size - 1):
            values += self.sent

    def all_gather(self, values: Tensor) -> Tensor:
        raise NotImplementedError

    def all_to_all(self, values: Tensor) -> Tensor:
        raise NotImplementedError


def build(name: str) -> Compressor:
    return build_compressor(name, seed=0, rank=0)


def summed(group: Any, name: str, values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Sum and residual of this rank's values."""
    bucket = bucket_of(values[group.rank()].clone())
    residual = torch.full_like(bucket.values, 9.0)
    build(name).sum_shares(bucket, residual, Link(group))
    return bucket.values, residual


def test_bf16_by_hand() -> None:
    """bf16 has 8 bits: between 1 and 2 it is counted in steps of 2^-7, and 1 + 2^-8 goes to even."""
    bucket = bucket_of(torch.tensor([1.0, 1 + 2.0**-8, 1 + 2.0**-7 + 2.0**-9, 3e38]))
    residual = torch.empty(4)
    before = bucket.values.clone()
    build("bf16").sum_shares(bucket, residual, Echo(1))
    assert bucket.values.tolist()[:3] == [1.0, 1.0, 1 + 2.0**-7]
    assert residual.tolist()[:3] == [0.0, 2.0**-8, 2.0**-9]
    assert torch.equal(bucket.values + residual, before)


def test_fp16_by_hand() -> None:
    """The largest is 1.5, so that at one rank 2^15 is the scale: 49152 of 65504. The steps at 1.5 are 2^-10,
    and the smallest number is 2^-24 2^-15 = 2^-39, instead of 2^-24."""
    bucket = bucket_of(torch.tensor([1.5, -1 - 2.0**-11, 2.0**-39, 2.0**-41]))
    residual = torch.empty(4)
    wire = Echo(1)
    build("fp16").sum_shares(bucket, residual, wire)
    assert wire.sent.dtype == torch.float16
    assert wire.sent.tolist() == [49152, -32768, 2.0**-24, 0]
    assert bucket.values.tolist() == [1.5, -1, 2.0**-39, 0]
    assert residual.tolist() == [0, -(2.0**-11), 0, 2.0**-41]


def test_small_shares_survive_at_256_ranks() -> None:
    """Shares of 1e-5 / 256 = 4e-8 are under fp16's smallest normal number by far, and half its smallest."""
    gradient = torch.tensor([1e-5, 3e-6, -2e-5, 1e-2])
    share = gradient / 256
    assert (share[:3].half() == share[:3]).sum() == 0
    assert share[1].half() == 0
    bucket = bucket_of(share.clone())
    Fp16().sum_shares(bucket, None, Echo(256))
    # 256 roundings of a sum, and one of the share.
    assert ((bucket.values - gradient).abs() <= ((1 + U16) ** 257 - 1) * gradient.abs()).all()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 100, 256, 1000])
@pytest.mark.parametrize("exponent", [-100, -30, -1, 0, 16, 100])
def test_no_sum_overflows_and_the_scale_is_as_large_as_that_allows(size, exponent) -> None:
    """p m (1 + u)^p stays below 65504, and with twice the scale would not."""
    for seed in range(5):
        values = normal(50, seed) * 2.0**exponent
        bucket, wire = bucket_of(values.clone()), Echo(size)
        Fp16().sum_shares(bucket, None, wire)
        assert bucket.values.isfinite().all()
        sent = wire.sent.double().abs().max().item()
        assert size * sent * (1 + U16) ** (size - 1) <= LARGEST
        # The largest value itself may have been rounded down by 1 + u.
        assert 2 * size * sent * (1 + U16) ** (size + 1) > LARGEST
        exact = size * values.double()
        error = (bucket.values.double() - exact).abs()
        # Of relative roundings, and of the share to a whole multiple of fp16's smallest number.
        smallest = 2.0**-24 * values.abs().max().item() / sent
        assert (error <= ((1 + U16) ** size - 1) * exact.abs() + size * smallest).all()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("exponent", [-130, -20, 0, 90])
def test_values_of_few_bits_are_summed_exactly(threads, size, exponent) -> None:
    """Whole numbers up to 200, five of which stay below 2^11, times any power of two: no rounding at all."""
    values = [normal(40, rank).mul(60).round().clamp(-200, 200) * 2.0**exponent for rank in range(size)]
    for summary, residual in threads(size, summed, "fp16", values):
        assert torch.equal(summary, torch.stack(values).sum(0))
        assert not residual.any()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_unsent_part_is_the_rounding_of_the_share(threads, name, size) -> None:
    """sum over ranks(values) = sums + sum over ranks(residual), up to the roundings of the sum: p - 1,
    each of less than u times what the partial sums can be."""
    values = [normal(1000, 10 + rank) for rank in range(size)]
    results = threads(size, summed, name, values)
    u = U16 if name == "fp16" else 2.0**-8
    residuals = torch.stack([residual for _, residual in results]).double().sum(0)
    exact = torch.stack(values).double()
    assert all(torch.equal(result[0], results[0][0]) for result in results)
    assert (
        (results[0][0] + residuals - exact.sum(0)).abs() <= 1.1 * (size - 1) * u * exact.abs().sum(0)
    ).all()
    for share, (_, residual) in zip(values, results, strict=True):
        assert 0 < residual.abs().max()
        assert (residual.abs() <= u * share.abs() + 2.0**-30).all()


@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 1e-41, 1e30])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_one_rank_alone_loses_nothing_but_its_unsent(name, scale) -> None:
    """Bit for bit: what is rounded off is representable, also of subnormal numbers."""
    values = normal(1000, 3) * scale
    bucket, residual = bucket_of(values.clone()), torch.empty(1000)
    build(name).sum_shares(bucket, residual, Echo(1))
    assert torch.equal(bucket.values + residual, values)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_non_finite_value_reaches_the_sum_and_does_not_spread(threads, name, culprit, bad) -> None:
    """And is not spread: all ranks agree to leave the rest unscaled."""
    values = [torch.tensor([1.0, 2.0, 300.0]) for _ in range(3)]
    values[culprit][1] = bad
    for summary, _ in threads(3, summed, name, values):
        torch.testing.assert_close(
            summary, torch.tensor([3.0, 3 * bad, 900.0]), equal_nan=True, rtol=2**-7, atol=0
        )


def test_the_maximum_over_ranks_never_contains_nan() -> None:
    """It would depend on who compares whom with what; infinity says the same."""
    wire = Echo(2)
    Fp16().sum_shares(bucket_of(torch.tensor([1.0, math.nan, -2.0])), None, wire)
    assert wire.agreed.tolist() == [math.inf]
    assert wire.sent[[0, 2]].tolist() == [1.0, -2.0]


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_buckets_of_other_types(name, dtype) -> None:
    share = torch.tensor([1.0, -2.5, 0.0, 96.0], dtype=dtype)
    bucket, residual = bucket_of(share.clone()), torch.empty_like(share)
    build(name).sum_shares(bucket, residual, Echo(3))
    assert bucket.values.dtype == dtype
    assert torch.equal(bucket.values, 3 * share)
    assert not residual.any()
