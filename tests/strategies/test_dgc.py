"""Deep gradient compression: momentum that is corrected, masked, warmed up, saved and carried along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.sgd import sgd

from strategies.compression.catalog import build_compressor
from strategies.exchange.buckets import Bucket, pieces_of
from strategies.gradient_exchange import ExchangeSettings, GradientExchange

Threads = Callable[..., list[Any]]
CPU = torch.device("cpu")
F32 = np.float32


def bucket_of(values: Tensor, *names: str) -> Bucket:
    """A bucket of equally long parameters, of one if no names are given."""
    names = names or ("w",)
    shape = torch.Size([len(values) // len(names)])
    return Bucket(index=0, values=values, pieces=pieces_of((name, shape) for name in names))


def normal(n: int, step: int, rank: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * step + rank))


def open_exchange(group: Any, spec: str) -> GradientExchange:
    return GradientExchange(ExchangeSettings(group=group, compression=spec, seed=5), device=CPU)


def exchanged(group: Any, spec: str, shares: list[list[Tensor]]) -> list[tuple[Tensor, Tensor, Tensor, int]]:
    """By step, from this rank's shares: sum, what is kept, what it will carry over, and the bytes sent."""
    exchange, result = open_exchange(group, spec), []
    for share in shares[group.rank()]:
        bucket, before = bucket_of(share.clone()), group.traffic.payload_bytes
        exchange.sum_shares(bucket)
        kept, carried = dict(exchange.residual())["w"].clone(), dict(exchange.carried())["w"].clone()
        result.append((bucket.values, kept, carried, group.traffic.payload_bytes - before))
    return result


def test_by_hand(threads: Threads) -> None:
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
def test_against_a_simulation(threads: Threads, size: int, momentum: float) -> None:
    """Bit for bit, as sums are taken in the order of ranks."""
    shares = [[normal(200, step, rank) for step in range(6)] for rank in range(size)]
    expected = simulated(shares, 10, momentum)
    for steps in threads(size, exchanged, f"dgc:0.05:momentum={momentum}", shares):
        for (found, _, _, _), total in zip(steps, expected, strict=True):
            np.testing.assert_array_equal(found.numpy(), total)


@pytest.mark.parametrize("kind", ["exact", "sampled", "block"])
def test_what_goes_in_is_sent_or_kept(threads: Threads, kind: str) -> None:
    """sum over ranks(gradient + what was carried over) = sums + sum over ranks(kept), with momentum 1/2 and
    whole numbers exactly."""
    n, size, steps = 150, 3, 5
    shares = [[normal(n, s, r).mul(50).round() for s in range(steps)] for r in range(size)]
    results = threads(size, exchanged, f"dgc:0.1:momentum=0.5:select={kind}", shares)
    carried = torch.zeros(n)
    for step in range(steps):
        came = sum(shares[rank][step] for rank in range(size)) + carried
        left = sum(results[rank][step][1] for rank in range(size))
        for rank in range(size):
            assert torch.equal(results[rank][step][0] + left, came)
        carried = sum(results[rank][step][2] for rank in range(size))


def test_at_ratio_1_it_is_sgd_with_momentum(threads: Threads) -> None:
    """Bit for bit on one rank: steps of plain SGD by what it sends, and of torch's SGD with momentum."""
    shares = [[normal(50, step, 0) for step in range(8)]]
    expected, found, buffers = torch.ones(50), torch.ones(50), [None]
    options = {"weight_decay": 0, "dampening": 0, "nesterov": False, "maximize": False, "foreach": False}
    for share, (total, kept, _, _) in zip(shares[0], *threads(1, exchanged, "dgc:1.0", shares), strict=True):
        sgd([expected], [share], buffers, lr=0.1, momentum=0.9, **options)
        found.add_(total, alpha=-0.1)
        assert torch.equal(found, expected)
        assert not kept.any()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_so_it_is_on_many_ranks(threads: Threads, size: int) -> None:
    """With momentum 1/2 and whole numbers momentum of the sum is the sum of momenta, exactly."""
    shares = [[normal(50, s, r).mul(20).round() for s in range(5)] for r in range(size)]
    velocity = torch.zeros(50)
    results = threads(size, exchanged, "dgc:1.0:momentum=0.5", shares)
    for step in range(5):
        velocity = velocity / 2 + sum(shares[rank][step] for rank in range(size))
        for rank in range(size):
            assert torch.equal(results[rank][step][0], velocity)


def test_without_momentum_it_is_topk(threads: Threads) -> None:
    shares = [[normal(100, step, rank) for step in range(4)] for rank in range(2)]
    plain, corrected = (threads(2, exchanged, spec, shares) for spec in ("topk:0.1", "dgc:0.1:momentum=0"))
    for one, other in zip(plain[0], corrected[0], strict=True):
        assert all(torch.equal(*pair) for pair in zip(one[:3], other[:3], strict=True))


def test_warm_up_is_the_papers(threads: Threads) -> None:
    """25 %, 6.29 %, 1.58 %, 0.40 %, 0.1 %: 1/4 (0.004)^(t/4) of 100,000. 8 bytes each."""
    shares = [[normal(100_000, step, 0) for step in range(6)]]
    (steps,) = threads(1, exchanged, "dgc:0.001:warmup=4", shares)
    assert [payload_bytes // 8 for *_, payload_bytes in steps] == [25_000, 6287, 1581, 398, 100, 100]


@pytest.mark.parametrize(
    ("spec", "counts"),
    [("dgc:0.01:warmup=1", [250, 10, 10]), ("dgc:0.5:warmup=2", [500, 500, 500]), ("dgc:0.01", [10, 10, 10])],
)
def test_warm_up_sends_no_less_than_later_steps(threads: Threads, spec: str, counts: list[int]) -> None:
    shares = [[normal(1000, step, 0) for step in range(3)]]
    (steps,) = threads(1, exchanged, spec, shares)
    assert [payload_bytes // 8 for *_, payload_bytes in steps] == counts


@pytest.mark.parametrize(("spec", "steps"), [("dgc:0.01:warmup=7", 7), ("dgc:0.01", 0)])
def test_warm_up_is_told(spec: str, steps: int) -> None:
    assert build_compressor(spec, seed=0, rank=0).ramp_steps == steps


def test_momentum_goes_with_its_parameters_into_new_buckets(threads: Threads) -> None:
    """First (a, b) in one bucket, then (b, a): what is sent and kept is gradient + v + m u of each."""

    def run(group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        exchange = open_exchange(group, "dgc:0.1:momentum=0.5")
        exchange.sum_shares(bucket_of(normal(60, 0, 0), "a", "b"))
        expected = {name: value + 1 for name, value in exchange.carried()}
        second = bucket_of(torch.ones(60), "b", "a")
        exchange.sum_shares(second)
        kept = dict(exchange.residual())
        return expected, {piece.name: piece.of(second.values) + kept[piece.name] for piece in second.pieces}

    ((expected, found),) = threads(1, run)
    assert sorted(expected) == ["a", "b"]
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_sent(threads: Threads, bad: float) -> None:
    shares = [[normal(100, 0, rank)] for rank in range(2)]
    shares[1][0][70] = bad
    for ((total, kept, _, _),) in threads(2, exchanged, "dgc:0.05", shares):
        assert not total[70].isfinite()
        assert kept.isfinite().all()
