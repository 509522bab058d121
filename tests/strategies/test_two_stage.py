"""`int8` against its definition, written out in numpy, and by what chance may do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from exchanging import an_exchange, bucket_of, residual_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from harness.worker.exchange.group import ExchangeGroup
from strategies.compression.int8 import Int8
from strategies.compression.signsgd import ScaledSign

FALSE_ALARM = 1e-6
"""The probability that a test of chance fails for correct code, had its seed not been fixed."""
SLACK = 1 + 1e-5
"""For single precision, where a bound is a step of a block."""


def compressor(*, block: int, seed: int = 0, rank: int = 0) -> Int8:
    return Int8(block=block, seed=seed, rank=rank, feedback=False)


def coded(values: Tensor, *, block: int, seed: int = 0) -> Tensor:
    """One encoding and decoding of one shard."""
    int8 = compressor(block=block, seed=seed)
    return int8.decode(int8.encode(values.view(1, -1), torch.tensor([values.numel()])))[0]


def steps_of(values: np.ndarray, block: int) -> np.ndarray:
    """Every value's step, max |x| / 127 of its block, by a plain loop; the length need not be a multiple."""
    steps = np.empty(values.shape)
    for start in range(0, len(values), block):
        part = np.s_[start : start + block]
        steps[part] = np.abs(values[part]).max() / 127
    return steps


def test_whole_multiples_of_the_step_are_exact() -> None:
    values = torch.arange(-127.0, 128.0).repeat(2)[:504]  # 504 = 2 * 252; each half has a value of 127
    assert torch.equal(coded(values, block=252), values)


def test_a_scale_follows_the_block_that_it_is_of() -> None:
    # Steps of 1, 10 and 0.5; the second block's largest is negative.
    values = torch.tensor([127.0, 1, -2, 3, -1270, 10, 20, -30, 63.5, -0.5, 1, 0])
    int8 = compressor(block=4)
    codes = int8.encode(values.view(1, -1), torch.tensor([12])).view(3, 8).numpy()
    assert codes[:, :4].view(np.int8).tolist() == [[127, 1, -2, 3], [-127, 1, 2, -3], [127, -1, 2, 0]]
    assert codes[:, 4:].copy().view(np.float32).flatten().tolist() == [1.0, 10.0, 0.5]


@settings(max_examples=60)
@given(
    values=arrays(
        np.float32, st.integers(1, 6).map(lambda blocks: 8 * blocks), elements=st.floats(-1e6, 1e6, width=32)
    ),
    seed=st.integers(0, 2**32),
)
def test_a_value_moves_by_less_than_its_step(values, seed) -> None:
    decoded = coded(torch.from_numpy(values), block=8, seed=seed).double().numpy()
    steps = np.maximum(steps_of(values.astype(np.float64), 8), torch.finfo(torch.float32).tiny)
    assert (np.abs(decoded - values) <= steps * SLACK).all()
    levels = decoded / steps
    np.testing.assert_allclose(levels, np.round(levels), atol=1e-4)
    assert np.abs(levels).max() <= 127.001


@pytest.mark.parametrize("largest", [1e-45, 2e-43, 1e-40, 1e-37, 3e38])
def test_the_smallest_and_the_largest_numbers_keep_their_step(largest) -> None:
    values = largest * torch.linspace(-1, 1, 8)
    step = max(largest / 127, 2.0**-126)
    assert ((coded(values, block=8) - values).abs() <= step * SLACK).all()


def test_the_largest_never_wraps_around() -> None:
    # floor(127 + u) is 128 for one u in 2^18: a hundred thousand blocks hit it, and minus 127 its like.
    values = torch.tensor([0.1, -0.1]).repeat(8 * 50_000)
    assert torch.equal(coded(values, block=2).sign(), values.sign())
    assert (coded(values, block=2).abs() <= 0.1 * SLACK).all()


def test_a_block_of_zeros_has_a_step() -> None:
    codes = compressor(block=8).encode(torch.zeros(1, 8), torch.tensor([8]))[0]
    assert codes[8:].clone().view(torch.float32).item() == 2.0**-126
    assert not codes[:8].any()


def hoeffding(draws: int, width: float, tests: int) -> float:
    """The bound that the mean of `draws` independent numbers of mean zero, each in an interval of `width`,
    exceeds in any of `tests` cases (Bonferroni) with a probability of at most FALSE_ALARM (Hoeffding 1963,
    theorem 2)."""
    return width * math.sqrt(math.log(2 * tests / FALSE_ALARM) / (2 * draws))


BLOCK = torch.tensor([127.0, 0.5, -0.5, 0.01, -63.9, 0.99, 12.25, -100.6])
"""Has a step of 1."""


def test_rounding_is_unbiased_and_no_wilder_than_a_coin() -> None:
    draws = 40_000
    errors = (coded(BLOCK.repeat(draws), block=8) - BLOCK.repeat(draws)).view(draws, 8).double()
    limit = hoeffding(draws, width=1, tests=16)
    assert limit < 0.0155  # a bias of a sixtieth of a step is seen
    assert errors.mean(dim=0).abs().max() < limit
    up = (BLOCK - BLOCK.floor()).double()
    assert ((errors**2).mean(dim=0) - up * (1 - up)).abs().max() < limit


def test_neighbours_blocks_calls_ranks_and_seeds_draw_on_their_own() -> None:
    # Each value is a coin: two sets of 1016 agree in half of them, and in at least 400, at most 616, with
    # a probability of all but 2 exp(-2 * 108^2 / 1016) < 1e-9.
    half = torch.full((1024,), 0.5)
    half[::128] = 127
    fair = half == 0.5

    def levels(int8: Int8) -> Tensor:
        return int8.decode(int8.encode(half.view(1, -1), torch.tensor([1024])))[0][fair]

    again = compressor(block=128)
    draws = [levels(again), levels(again), levels(compressor(block=128, rank=1))]
    draws.append(levels(compressor(block=128, seed=1)))
    draws.append(draws[0].roll(1))
    for i in range(len(draws)):
        for j in range(i):
            assert 400 < (draws[i] == draws[j]).sum() < 616, (i, j)
    assert torch.equal(levels(compressor(block=128)), draws[0])


def summed(group: ExchangeGroup, share: Callable[[int], Tensor], block: int) -> tuple[Tensor, ...]:
    """Share, sum and residual."""
    exchange, own = an_exchange(group, f"int8:block={block}", seed=5), share(group.rank())
    values = own.clone()
    exchange.sum_shares(bucket_of(values))
    return own, values, residual_of(exchange)


def rough(rank: int) -> Tensor:
    """1000 values whose sizes change from block to block by a factor of a million."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(1000, generator=generator) * (10.0 ** (torch.arange(1000) // 16 % 7 - 3))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_both_stages_are_off_by_less_than_a_step(threads, size) -> None:
    shares, sums, residual = zip(*threads(size, summed, rough, 16), strict=True)
    length = 16 * math.ceil(1000 / (16 * size))
    exact = np.zeros(1000)
    first = np.zeros(1000)
    for rank in range(size):
        # Shards begin at whole blocks, so that the blocks of the bucket are those of its shards.
        own_steps = steps_of(shares[rank].double().numpy(), 16)
        elsewhere = np.ones(1000, dtype=bool)
        elsewhere[rank * length : (rank + 1) * length] = False
        assert (np.abs(residual[rank].numpy()) < own_steps * SLACK)[elsewhere].all()
        exact += shares[rank].double().numpy()
        first += own_steps
    assert np.abs(residual[0][length:].numpy()).sum() > 0 or size == 1
    error = np.abs(sums[0].double().numpy() - exact)
    blocks = np.arange(1000) // 16
    reach = np.array([(np.abs(exact) + first)[blocks == block].max() for block in blocks])
    assert (error < (first + reach / 127) * SLACK).all()


def repeated(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(8, generator=generator).repeat(8192)


def test_the_sum_of_both_stages_is_unbiased(threads) -> None:
    # Three roundings, each of mean zero given those before it and within an interval of one step: Hoeffding's
    # bound holds for such sums too (Azuma 1967), with sqrt(3) < 2 for the three. No step is longer than
    # twice what the largest sum of magnitudes would have.
    shares, sums, _ = zip(*threads(2, summed, repeated, 8), strict=True)
    exact = shares[0][:8].double() + shares[1][:8].double()
    bound = sum(share.abs().max().item() for share in shares)
    step = 2 * bound / 127
    mean = sums[0].double().view(8192, 8).mean(dim=0)
    assert (mean - exact).abs().max() < 2 * hoeffding(8192, width=step, tests=8)


# `signsgd` against its definition, written out in numpy loops.

Array = np.ndarray[Any, np.dtype[np.float64]]


def signs_coded(values: Tensor) -> Tensor:
    """One encoding and decoding of one shard."""
    sign = ScaledSign(feedback=False)
    return sign.decode(sign.encode(values.view(1, -1), torch.tensor([values.numel()])))[0]


@settings(max_examples=60)
@given(
    values=arrays(
        np.float32, st.integers(1, 9).map(lambda count: 8 * count), elements=st.floats(-8, 8, width=32)
    )
)
def test_codes_are_bits_and_the_mean_magnitude(values) -> None:
    codes = ScaledSign(feedback=True).encode(
        torch.from_numpy(values).view(1, -1), torch.tensor([len(values)])
    )
    packed, scale = codes[0, :-4].numpy(), codes[0, -4:].clone().view(torch.float32)
    assert packed.tobytes() == np.packbits(values >= 0, bitorder="little").tobytes()
    assert scale.item() == pytest.approx(np.abs(values.astype(np.float64)).mean(), rel=1e-6, abs=1e-38)


def test_every_byte_is_decoded_bit_by_bit() -> None:
    codes = torch.cat([torch.arange(256, dtype=torch.uint8), torch.tensor([2.5]).view(torch.uint8)])
    expected = [2.5 if byte >> bit & 1 else -2.5 for byte in range(256) for bit in range(8)]
    assert ScaledSign(feedback=True).decode(codes.view(1, -1))[0].tolist() == expected


def test_the_sign_of_zero_is_plus() -> None:
    assert signs_coded(torch.tensor([0.0, -0.0, 4.0, -4.0, 2.0, -2.0, 2.0, -2.0])).tolist() == [
        2.0, 2.0, 2.0, -2.0, 2.0, -2.0, 2.0, -2.0,
    ]  # fmt: skip


def test_a_shard_of_padding_alone_is_zero() -> None:
    sign = ScaledSign(feedback=True)
    assert sign.decode(sign.encode(torch.zeros(1, 8), torch.tensor([0]))).tolist() == [[0.0] * 8]


def two_stages(shares: list[Array]) -> tuple[Array, list[Array]]:
    """The sum, and what each rank did not send, by the definition."""
    size, n = len(shares), len(shares[0])
    length = 8 * math.ceil(n / (8 * size))
    sums, residual = np.zeros(n), [share.copy() for share in shares]
    for owner in range(size):
        part = slice(owner * length, min((owner + 1) * length, n))
        if part.start >= n:
            continue
        own = np.zeros(part.stop - part.start)
        for rank in range(size):
            sent = scaled_sign(shares[rank][part])
            residual[rank][part] -= sent
            own += sent
        sums[part] = scaled_sign(own)
        residual[owner][part] += own - sums[part]
    return sums, residual


def scaled_sign(values: Array) -> Array:
    scale = sum(abs(value) for value in values) / len(values)
    return np.array([scale if value >= 0 else -scale for value in values])


def signs_summed(group: ExchangeGroup, n: int) -> tuple[Array, Array, Array]:
    """Share, sum and residual."""
    exchange = an_exchange(group, "signsgd")
    share = torch.randn(n, generator=torch.Generator().manual_seed(10 * n + group.rank()))
    values = share.clone()
    exchange.sum_shares(bucket_of(values))
    return share.double().numpy(), values.double().numpy(), residual_of(exchange).double().numpy()


@pytest.mark.parametrize("n", [1, 3, 8, 20, 33, 160, 1001])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_and_what_is_kept_follow_the_definition(threads, size, n) -> None:
    # Among the sizes are shards that are partly or wholly padding: it must not thin out the scale.
    shares, sums, residual = zip(*threads(size, signs_summed, n), strict=True)
    expected_sums, expected_residuals = two_stages(list(shares))
    for rank in range(size):
        np.testing.assert_allclose(sums[rank], expected_sums, rtol=1e-6)
        np.testing.assert_allclose(residual[rank], expected_residuals[rank], rtol=0, atol=3e-6)
