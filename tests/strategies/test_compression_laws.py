"""The laws of every compressor that approximates, whatever it does: over real ranks, in float64."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from exchanging import CPU, an_exchange, bucket_of, residual_of
from torch import Tensor

from harness.worker.exchange.group import ExchangeGroup
from strategies.catalog import COMPRESSIONS
from strategies.collectives.link import Link
from strategies.compression.catalog import build_compressor
from strategies.exchange.buckets import Bucket, pieces_of
from strategies.gradient_exchange import ExchangeSettings, GradientExchange

Named = dict[str, Tensor]

SPECS = [
    "int8:block=16",
    "int8:block=16:feedback=true",
    "signsgd",
    "signsgd:feedback=false",
    "powersgd:2",
    "powersgd:2:feedback=false",
    "powersgd:1:warmup=2",
    "threshold:0.3",
    "threshold:0.3:feedback=false",
]
SPARSE = [
    *(f"topk:0.1:select={kind}" for kind in ("exact", "sampled", "block")),
    "randomk:0.3",
    "randomk:0.3:feedback=false",
    *(f"dgc:0.01:warmup=4:select={kind}" for kind in ("exact", "sampled", "block")),
]
"""Compressors that send some elements as they are."""
SHAPES = {"matrix": (12, 10), "filters": (6, 4, 3, 3), "bias": (7,), "factor": ()}
WIDE = {"wide": (100, 100)}
"""Large enough that samples are taken of it."""
LAYOUTS = [
    [["factor", "bias", "filters", "matrix", "wide"]],
    [["factor", "bias"], ["filters"], ["matrix"], ["wide"]],
    [["matrix", "bias"], ["wide"], ["factor", "filters"]],
]
"""Layouts that change as DDP forms buckets anew after its first step; no parameter stays where it was."""
STEPS = len(LAYOUTS) + 1


sys.path.append(str(Path(__file__).parents[2] / "docs" / "examples"))


@pytest.fixture(autouse=True, scope="module")
def _example() -> Iterator[None]:
    """`threshold`, from another package."""
    from threshold_compressor import ThresholdFacts

    COMPRESSIONS.register(ThresholdFacts)
    yield
    COMPRESSIONS.forget("threshold")


def share_of(
    rank: int, step: int, dtype: torch.dtype = torch.float32, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> Named:
    """One rank's gradients of a step, of very different sizes from one parameter to the other."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    sizes = zip(shapes.items(), (1.0, 1e-3, 30.0, 1.0, 1.0), strict=False)
    return {
        name: size * torch.randn(shape, generator=generator, dtype=dtype) for (name, shape), size in sizes
    }


def exchanged(exchange: GradientExchange, share: Named, step: int) -> Named:
    """The sums of a step, in the buckets of that step."""
    sums = {}
    for index, layout in enumerate(LAYOUTS[min(step, len(LAYOUTS) - 1)]):
        names = [name for name in layout if name in share]
        if not names:
            continue
        pieces = pieces_of((name, share[name].shape) for name in names)
        values = torch.cat([share[name].flatten() for name in names])
        exchange.sum_shares(Bucket(index=index, values=values, pieces=pieces))
        sums |= {piece.name: piece.of(values).clone() for piece in pieces}
    return sums


def copies(named: Iterator[tuple[str, Tensor]]) -> Named:
    return {name: value.clone() for name, value in named}


def whole_run(group: ExchangeGroup, spec: str, dtype: torch.dtype) -> list[dict[str, Named]]:
    """The share, carried residual, sums and new residual of this rank in each step."""
    exchange = an_exchange(group, spec, seed=3)
    steps = []
    for step in range(STEPS):
        share = share_of(group.rank(), step, dtype)
        carried = copies(exchange.carried())
        sums = exchanged(exchange, share, step)
        steps.append(
            {"share": share, "carried": carried, "sums": sums, "residual": copies(exchange.residual())}
        )
    return steps


def total(ranks: list[list[dict[str, Named]]], step: int, key: str, name: str) -> Tensor:
    """Over the ranks; what is not there counts as zero."""
    parts = [rank[step][key].get(name, torch.zeros(SHAPES[name])).double() for rank in ranks]
    return torch.stack(parts).sum(dim=0)


@pytest.mark.parametrize(
    ("spec", "dtype", "rtol"),
    [(spec, torch.float32, 2e-6) for spec in (*SPECS, *SPARSE, "dgc:0.1:momentum=0.5")]
    + [("powersgd:2", torch.float64, 1e-14), ("powersgd:2:feedback=false", torch.float64, 1e-14)],
)
def test_a_compressor_applies_or_keeps_each_share(threads, spec, dtype, rtol) -> None:
    # rtol: of the largest sum of magnitudes; 34 roundings in float32, 90 in float64.
    ranks = threads(3, whole_run, spec, dtype)
    for name in SHAPES:
        put_in = came_out = torch.zeros(SHAPES[name], dtype=torch.float64)
        for step in range(STEPS):
            share, carried, residual = (
                total(ranks, step, key, name) for key in ("share", "carried", "residual")
            )
            sums = ranks[0][step]["sums"][name].double()
            scale = sum(
                (rank[step]["share"][name].abs().max() + residual.abs().max()).item() for rank in ranks
            )
            torch.testing.assert_close(share + carried, sums + residual, rtol=0, atol=rtol * scale)
            put_in, came_out = put_in + share, came_out + sums
        # With momentum a share comes back in later steps, too.
        if name in ranks[0][1]["carried"] and "dgc" not in spec:
            torch.testing.assert_close(put_in, came_out + residual, rtol=0, atol=STEPS * rtol * scale)


@pytest.mark.parametrize("spec", [*SPECS, "bf16", "topk:0.1:feedback=false", "randomk:0.3:feedback=false"])
def test_feedback_carries_what_was_not_sent_and_nothing_else(threads, spec) -> None:
    steps = threads(2, whole_run, spec, torch.float32)[1]
    # A compressor may have no option of this name.
    expected = set(SHAPES) if build_compressor(spec, seed=3, rank=1).feedback else set()
    for before, after in pairwise(steps):
        assert set(after["carried"]) == expected
        for name, carried in after["carried"].items():
            assert torch.equal(carried, before["residual"][name])


def sums_of_sizes(group: ExchangeGroup, spec: str, sizes: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Share, sum and residual of buckets of these sizes, the even ones in two columns."""
    found = []
    for n in sizes:
        share = torch.randn(n, generator=torch.Generator().manual_seed(100 * n + group.rank()))
        exchange, values = an_exchange(group, spec, seed=3), share.clone()
        shape = torch.Size((n // 2, 2)) if n % 2 == 0 else torch.Size((n,))
        exchange.sum_shares(bucket_of(values, shape=shape))
        found.append((share, values, residual_of(exchange).flatten()))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("spec", ["int8:block=8", "int8:block=9", "signsgd", "powersgd:1", "threshold:0.3"])
def test_any_length_over_any_number_of_ranks(threads, spec, size) -> None:
    lengths = [1, 2, 7, 8, 9, 40, 41, 120]
    by_rank = threads(size, sums_of_sizes, spec, lengths)
    for number in range(len(lengths)):
        shares, sums, residual = zip(*(rank[number] for rank in by_rank), strict=True)
        assert len({hashlib.sha256(values.numpy().tobytes()).digest() for values in sums}) == 1
        expected = torch.stack(shares).double().sum(dim=0) - torch.stack(residual).double().sum(dim=0)
        scale = sum(share.abs().max().item() for share in shares)
        torch.testing.assert_close(sums[0].double(), expected, rtol=0, atol=2e-6 * scale)


def over_rubbish(group: ExchangeGroup, spec: str) -> Tensor:
    residual, values = torch.full((120,), float("nan")), torch.ones(120)
    pieces = pieces_of(iter([("w", torch.Size((10, 10))), ("bias", torch.Size((20,)))]))
    compressor = build_compressor(spec, seed=0, rank=group.rank())
    compressor.sum_shares(Bucket(index=0, values=values, pieces=pieces), residual, Link(group))
    return residual


@pytest.mark.parametrize("spec", SPECS)
def test_the_old_content_of_the_residual_does_not_matter(threads, spec) -> None:
    # Ones are exact for all: the largest of their block, a constant magnitude, a matrix of rank one.
    for residual in threads(2, over_rubbish, spec):
        torch.testing.assert_close(residual, torch.zeros(120), rtol=0, atol=1e-5)


def continued(group: ExchangeGroup, spec: str) -> tuple[list[Named], list[Named]]:
    """The last steps of one exchange, and the same by another exchange from what the first had saved."""
    first, second = (an_exchange(group, spec, seed=3) for _ in range(2))
    shares = [share_of(group.rank(), step, shapes=SHAPES | WIDE) for step in range(6)]
    for step in range(3):
        exchanged(first, shares[step], step)
    saved = first.state_dict()
    expected = [exchanged(first, shares[step], step) for step in range(3, 6)]
    # Not as new either: what is loaded must take the place of what was there.
    exchanged(second, shares[5], 0)
    second.load_state_dict(saved)
    return expected, [exchanged(second, shares[step], step) for step in range(3, 6)]


@pytest.mark.parametrize("spec", [*SPECS, *SPARSE, "fp16", "bf16"])
def test_a_restored_exchange_goes_on_with_the_same_bits_whatever_torchs_own_generator_does(
    threads, spec
) -> None:
    before = torch.get_rng_state()
    for expected, found in threads(2, continued, spec):
        for one, other in zip(expected, found, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in SHAPES | WIDE)
    assert torch.equal(torch.get_rng_state(), before)


def summed(group: ExchangeGroup, spec: str, values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Sum and residual of this rank's values."""
    exchange, share = an_exchange(group, spec), values[group.rank()].clone()
    exchange.sum_shares(bucket_of(share))
    return share, residual_of(exchange)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "spec",
    [
        *(f"topk:1.0:select={kind}" for kind in ("exact", "sampled", "block")),
        *(f"randomk:1.0:feedback={feedback}" for feedback in ("true", "false")),
    ],
)
def test_all_of_it_is_the_dense_sum(threads, spec, size) -> None:
    """Bit for bit: any numbers on two ranks, integers on more, whose sum is the same in any order."""
    values = [torch.randn(999, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    if size > 2:
        values = [value.mul(1000).round() for value in values]
    for sums, residual in threads(size, summed, spec, values):
        assert torch.equal(sums, torch.stack(values).sum(0))
        assert not residual.any()


@pytest.mark.parametrize("values", [[0.0], [-3.0], [0.0, -0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
@pytest.mark.parametrize("spec", ["fp16", "bf16", *SPARSE])
def test_zeros_and_single_elements_are_summed_exactly(threads, spec, values) -> None:
    share = torch.tensor(values)
    for sums, residual in threads(3, summed, spec, [share] * 3):
        assert torch.equal(sums, 3 * share)
        assert not residual.any()


NUMEL = 1001


def handed_over(size: int) -> dict[str, tuple[int, int]]:
    """Bytes and operations of a bucket of `NUMEL` values in single precision, by hand."""
    # A shard is whole bytes of 8 signs and a scale of 4 bytes, or whole blocks of 16 codes and their scale;
    # every rank sends one to each rank, then that of the sum.
    octets, blocks = -(-NUMEL // (8 * size)), -(-NUMEL // (16 * size))
    return {
        # A value and its place; the same of all ranks.
        "topk:0.01": (8 * 10, 1),
        "topk:1e-6": (8, 1),
        "topk:1.0": (8 * NUMEL, 1),
        "dgc:0.01": (8 * 10, 1),
        # A value, and none of its place; and who has seen what is not finite.
        "randomk:0.01": (4 * 10, 1),
        "randomk:1e-6": (4, 1),
        "randomk:0.25": (4 * 250, 1),
        "randomk:1.0": (4 * NUMEL, 1),
        "fp16": (2 * NUMEL + 4, 2),
        "bf16": (2 * NUMEL, 1),
        "signsgd": ((size + 1) * (octets + 4), 2),
        "int8:block=16": ((size + 1) * blocks * (16 + 4), 2),
    }


def traffic_of(group: ExchangeGroup, specs: list[str]) -> dict[str, tuple[int, int]]:
    found = {}
    for spec in specs:
        group.traffic.payload_bytes = group.traffic.operations = 0
        values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(group.rank()))
        settings = ExchangeSettings(group=group, compression=spec, seed=3)
        bucket = bucket_of(values)
        GradientExchange(settings, device=CPU).sum_shares(bucket)
        found[spec] = group.traffic.payload_bytes, group.traffic.operations
    return found


@pytest.mark.parametrize("size", range(2, 9))
def test_bytes_do_not_depend_on_the_values(threads, size) -> None:
    expected = handed_over(size)
    assert threads(size, traffic_of, list(expected)) == [expected] * size


def zeros_then_ones(group: ExchangeGroup, spec: str) -> tuple[Tensor, Tensor]:
    """The sums of a step of zeros, and of a step of ones after it."""
    exchange = an_exchange(group, spec)
    bucket = bucket_of(torch.zeros(120), shape=(12, 10))
    exchange.sum_shares(bucket)
    first = bucket.values.clone()
    bucket.values.fill_(1)
    exchange.sum_shares(bucket)
    return first, bucket.values


@pytest.mark.parametrize("spec", ["int8", "int8:feedback=true", "signsgd", "powersgd:2", "threshold:0.3"])
def test_zeros_are_summed_to_zeros_and_leave_no_trace(threads, spec) -> None:
    for zeros, ones in threads(2, zeros_then_ones, spec):
        assert torch.equal(zeros, torch.zeros(120))
        torch.testing.assert_close(ones, torch.full((120,), 2.0), rtol=1e-6, atol=0)


def with_one_bad(group: ExchangeGroup, spec: str, bad: float) -> tuple[Tensor, Tensor]:
    share = torch.randn(120, generator=torch.Generator().manual_seed(group.rank()))
    if group.rank() == 1:
        share[57] = bad
    exchange = an_exchange(group, spec)
    exchange.sum_shares(bucket_of(share, shape=(12, 10)))
    return share, residual_of(exchange)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("spec", ["int8:block=16", "signsgd", "powersgd:2", "threshold:0.3", *SPARSE])
def test_a_non_finite_value_stays_visible_in_the_sum(threads, spec, bad) -> None:
    for sums, residual in threads(3, with_one_bad, spec, bad):
        if spec.startswith("randomk"):
            # All ranks say so at once, even if it was not drawn.
            assert not sums.isfinite().all()
        else:
            assert not sums[57].isfinite()
        if spec.startswith(("topk", "dgc")):
            assert (sums.isfinite().sum(), bool(residual.isfinite().all())) == (119, True)
