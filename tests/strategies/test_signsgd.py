"""`signsgd` against its definition, written out in numpy loops, and on a function where plain signs fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from harness.worker.exchange.group import ExchangeGroup
from strategies.compression.signsgd import ScaledSign
from strategies.exchange.buckets import Bucket, pieces_of
from strategies.gradient_exchange import ExchangeSettings, GradientExchange

Threads = Callable[..., list[Any]]
Array = np.ndarray[Any, np.dtype[np.float64]]
CPU = torch.device("cpu")


def coded(values: Tensor) -> Tensor:
    """One encoding and decoding of one shard."""
    sign = ScaledSign(feedback=False)
    return sign.decode(sign.encode(values.view(1, -1), torch.tensor([values.numel()])))[0]


@settings(max_examples=60, deadline=None)
@given(
    values=arrays(
        np.float32, st.integers(1, 9).map(lambda count: 8 * count), elements=st.floats(-8, 8, width=32)
    )
)
def test_codes_are_bits_and_the_mean_magnitude(values: Array) -> None:
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
    assert coded(torch.tensor([0.0, -0.0, 4.0, -4.0, 2.0, -2.0, 2.0, -2.0])).tolist() == [
        2.0, 2.0, 2.0, -2.0, 2.0, -2.0, 2.0, -2.0,
    ]  # fmt: skip


def test_a_shard_of_padding_alone_is_zero() -> None:
    sign = ScaledSign(feedback=True)
    assert sign.decode(sign.encode(torch.zeros(1, 8), torch.tensor([0]))).tolist() == [[0.0] * 8]


def test_the_contraction_is_exactly_what_it_should_be() -> None:
    # Whole numbers, and as many as a power of two: nothing is rounded on either side.
    values = torch.randint(-1000, 1001, (4096,), generator=torch.Generator().manual_seed(1)).float()
    x = values.double()
    lost = ((coded(values).double() - x) ** 2).sum()
    assert lost == (x**2).sum() - x.abs().sum() ** 2 / 4096


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


def summed(group: ExchangeGroup, n: int) -> tuple[Array, Array, Array]:
    """Share, sum and residual."""
    settings = ExchangeSettings(group=group, compression="signsgd")
    exchange = GradientExchange(settings, device=CPU)
    share = torch.randn(n, generator=torch.Generator().manual_seed(10 * n + group.rank()))
    values = share.clone()
    exchange.sum_shares(Bucket(index=0, values=values, pieces=pieces_of(iter([("w", share.shape)]))))
    (residual,) = (part.double().numpy() for _, part in exchange.residual())
    return share.double().numpy(), values.double().numpy(), residual


@pytest.mark.parametrize("n", [1, 3, 8, 20, 33, 160, 1001])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_and_what_is_kept_follow_the_definition(threads: Threads, size: int, n: int) -> None:
    # Among the sizes are shards that are partly or wholly padding: it must not thin out the scale.
    shares, sums, residual = zip(*threads(size, summed, n), strict=True)
    expected_sums, expected_unsent = two_stages(list(shares))
    for rank in range(size):
        np.testing.assert_allclose(sums[rank], expected_sums, rtol=1e-6)
        np.testing.assert_allclose(residual[rank], expected_unsent[rank], rtol=0, atol=3e-6)


class Alone:
    """The wire of a world of one."""

    rank, size = 0, 1

    def all_reduce(self, values: Tensor) -> None: ...

    def largest(self, values: Tensor) -> None: ...

    def all_gather(self, values: Tensor) -> Tensor:
        return values.view(1, -1)

    def all_to_all(self, values: Tensor) -> Tensor:
        return values


def descended(*, feedback: bool) -> list[float]:
    """f(x) = |x1 + x2| / 2 + |x1 - x2| by 500 steps of scaled signs from (1, 1), step sizes 0.1 / sqrt(t).

    Every subgradient is (s, s) / 2 + (t, -t) with s and t of +-1, so that its signs are (t, -t): along them
    x1 + x2 stays as it is (Karimireddy et al. 2019, section 3, with epsilon = 1/2).
    """
    x = torch.ones(2, dtype=torch.float64)
    sign, kept = ScaledSign(feedback=feedback), torch.zeros(2)
    found = []
    for t in range(1, 501):
        plus, minus = (math.copysign(1, value) for value in (x[0] + x[1], x[0] - x[1]))
        values = 0.1 / math.sqrt(t) * torch.tensor([plus / 2 + minus, plus / 2 - minus])
        if feedback:
            values += kept
        sign.sum_shares(Bucket(index=0, values=values, pieces=()), kept, Alone())
        x -= values
        found.append(((x[0] + x[1]).abs() / 2 + (x[0] - x[1]).abs()).item())
    return found


def test_without_feedback_signs_get_nowhere_and_with_it_they_arrive() -> None:
    assert min(descended(feedback=False)) >= 1
    assert max(descended(feedback=True)[-50:]) < 0.05
