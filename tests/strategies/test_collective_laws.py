"""The laws of every collective, whatever the way of its sums: over real sockets between threads.

A new collective needs a line in `SPECS`. The messages and bytes of each are tested in a separate file.
"""

from __future__ import annotations

import pytest
import torch
from builders import a_cell
from exchanging import bucket_of, whole_numbers
from torch import Tensor

from harness.worker.exchange.group import ExchangeGroup
from strategies.catalog import COLLECTIVES, COMPRESSIONS
from strategies.collectives.catalog import build_route
from strategies.collectives.link import Link
from strategies.collectives.wire import Wire
from strategies.compression.base import Compressor
from strategies.compression.catalog import build_compressor
from strategies.compression.none import Dense
from strategies.exchange.buckets import Bucket

SPECS = [
    "default",
    # 0.001 MiB are 262 values in single precision, so that longer vectors have several chunks.
    "ring:chunk_mb=0.001",
    "tree:chunk_mb=0.001",
    "hierarchical:via=shards",
    "hierarchical:via=leaders",
]
CHUNK = 262
CALLS = ("all-reduce", "all-gather", "all-to-all")
"""The calls that a collective may implement, in the words of its facts."""


def node_sizes(spec: str, size: int) -> list[int]:
    """Ranks of a node: what the collective goes with on `size` ranks, if it goes by nodes at all."""
    facts, plain = COLLECTIVES.facts(spec), COMPRESSIONS.facts("none")
    sizes = [1, 2, 3, size] if facts.by_nodes else [1]
    return [
        node_size
        for node_size in sorted({one for one in sizes if one <= size})
        if facts.refusal(a_cell(gpus=size, collective=spec, node_size=node_size), plain) is None
    ]


def sums_of_whole_numbers(size: int, numel: int) -> list[float]:
    # Of 2 ** r over all ranks: 2 ** size - 1.
    return [(2**size - 1) * (1000 + place) for place in range(numel)]


def lengths(size: int) -> list[int]:
    """None, fewer than ranks, as many, and around the borders of segments and chunks."""
    half, segments = 2 * CHUNK, size * CHUNK
    return sorted({0, 1, size - 1, size, size + 1, 7, half, half + 1, segments - 1, segments, segments + 1})


def sums_of_all(group: ExchangeGroup, spec: str, node_size: int, values: list[Tensor]) -> list[Tensor]:
    """On a rank: the sums of vectors, one after another by one route. The residual must be zero."""
    route = build_route(spec, Link(group), node_size=node_size)
    for index, one in enumerate(values):
        residual = torch.full_like(one, 7)
        route.sum_shares(bucket_of(one, index), residual, Dense())
        assert not residual.any()
    return values


def sum_whole_numbers(group: ExchangeGroup, spec: str) -> list[list[Tensor]]:
    size = group.size()
    return [
        sums_of_all(group, spec, node_size, [whole_numbers(group.rank(), numel) for numel in lengths(size)])
        for node_size in node_sizes(spec, size)
    ]


@pytest.mark.parametrize(
    "size", [1, 2, 3, 4, *(pytest.param(size, marks=pytest.mark.slow) for size in (5, 6, 7)), 8]
)
@pytest.mark.parametrize("spec", SPECS)
def test_sums_of_whole_numbers_are_exact(threads, spec, size) -> None:
    for of_node_sizes in threads(size, sum_whole_numbers, spec):
        for found in of_node_sizes:
            for numel, values in zip(lengths(size), found, strict=True):
                assert values.tolist() == sums_of_whole_numbers(size, numel)


def messages_of_a_sum(group: ExchangeGroup, spec: str, numel: int) -> int:
    sums_of_all(group, spec, 1, [whole_numbers(group.rank(), numel)])
    return group.traffic.operations


@pytest.mark.parametrize(
    ("spec", "numel", "messages"),
    [
        # Of three ranks' ring every rank sends 4 messages a chunk of its segments.
        ("ring:chunk_mb=0.001", 3 * CHUNK, [4, 4, 4]),
        ("ring:chunk_mb=0.001", 3 * (CHUNK + 1), [8, 8, 8]),
        ("ring", 3 * (CHUNK + 1), [4, 4, 4]),
        # Of a chunk ranks 0, 1 and 2 send 1, 2 and 1 messages in the first tree, 2, 1 and 1 in the second.
        ("tree:chunk_mb=0.001", 2 * CHUNK, [3, 3, 2]),
        ("tree:chunk_mb=0.001", 2 * (CHUNK + 1), [6, 6, 4]),
        ("tree", 2 * (CHUNK + 1), [3, 3, 2]),
    ],
)
def test_a_message_is_as_long_as_the_spec_says(threads, spec, numel, messages) -> None:
    assert threads(3, messages_of_a_sum, spec, numel) == messages


def random_values(rank: int) -> Tensor:
    return torch.randn(3001, generator=torch.Generator().manual_seed(rank))


def sum_random(group: ExchangeGroup, spec: str, node_size: int) -> Tensor:
    (summed,) = sums_of_all(group, spec, node_size, [random_values(group.rank())])
    return summed


@pytest.mark.parametrize("size", [2, 3, 5, 6, 8])
@pytest.mark.parametrize("spec", SPECS)
def test_random_sums_are_right_and_have_the_same_bits_on_all_ranks(threads, spec, size) -> None:
    shares = torch.stack([random_values(rank).double() for rank in range(size)])
    # p - 1 additions: gamma(p - 1) of the sum of magnitudes (Higham 2002, section 4.2), u = 2 ** -24.
    gamma = (size - 1) * 2.0**-24 / (1 - (size - 1) * 2.0**-24)
    for node_size in node_sizes(spec, size):
        found = threads(size, sum_random, spec, node_size)
        assert len({values.numpy().tobytes() for values in found}) == 1
        assert ((found[0].double() - shares.sum(0)).abs() <= gamma * shares.abs().sum(0)).all()


TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32]


def sums_of_types(group: ExchangeGroup, spec: str, node_size: int) -> list[Tensor]:
    values = torch.arange(50) % 7 + group.rank()
    return sums_of_all(group, spec, node_size, [values.to(dtype) for dtype in TYPES])


@pytest.mark.parametrize("spec", SPECS)
def test_types(threads, spec) -> None:
    # 4 * (i % 7) + 0 + 1 + 2 + 3, at most 30: exact in all of them.
    expected = [4 * (place % 7) + 6 for place in range(50)]
    for node_size in node_sizes(spec, 4):
        for found in threads(4, sums_of_types, spec, node_size):
            assert [values.dtype for values in found] == TYPES
            assert [values.tolist() for values in found] == [expected] * len(TYPES)


class EvenPlaces(Compressor):
    """Sends the elements at even places and keeps the others."""

    def __init__(self) -> None:
        super().__init__(feedback=True)

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        residual.copy_(bucket.values)
        residual[::2] = 0
        sent = bucket.values[::2].contiguous()
        wire.all_reduce(sent)
        bucket.values.zero_()
        bucket.values[::2] = sent


def sums_and_residual(group: ExchangeGroup, spec: str, node_size: int) -> tuple[Tensor, Tensor]:
    route = build_route(spec, Link(group), node_size=node_size)
    values, residual = whole_numbers(group.rank(), 101), torch.full((101,), torch.nan)
    route.sum_shares(bucket_of(values), residual, EvenPlaces())
    return values, residual


@pytest.mark.parametrize("size", [1, 2, 4, 6])
@pytest.mark.parametrize("spec", SPECS)
def test_the_unsent_part_is_kept_on_exactly_one_rank(threads, spec, size) -> None:
    for node_size in node_sizes(spec, size):
        sums, residuals = zip(*threads(size, sums_and_residual, spec, node_size), strict=True)
        assert len({values.numpy().tobytes() for values in sums}) == 1
        assert (sums[0] + torch.stack(residuals).sum(0)).tolist() == sums_of_whole_numbers(size, 101)
        # One node has no slow link to compress for, if it goes by nodes.
        one_node = COLLECTIVES.facts(spec).by_nodes and node_size == size
        assert any(residual.any() for residual in residuals) != one_node


class Calls(Compressor):
    """Makes every call of the wire once."""

    def __init__(self) -> None:
        super().__init__(feedback=False)
        self.found: dict[str, object] = {}

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        self.found["place"] = (wire.rank, wire.size)
        own = 10 * wire.rank
        for name in CALLS:
            values = torch.arange(own, own + wire.size, dtype=torch.int32)
            try:
                self.found[name] = self._called(wire, name, values).tolist()
            except NotImplementedError:
                self.found[name] = None
        largest = torch.tensor([1.0, -1.0]) * wire.rank
        wire.largest(largest)
        self.found["largest"] = largest.tolist()

    def _called(self, wire: Wire, name: str, values: Tensor) -> Tensor:
        if name == "all-to-all":
            return wire.all_to_all(values[:, None])[:, 0]
        if name == "all-gather":
            return wire.all_gather(values)
        wire.all_reduce(values)
        return values


def calls(group: ExchangeGroup, spec: str) -> dict[str, object]:
    compressor = Calls()
    route = build_route(spec, Link(group), node_size=1)
    route.sum_shares(bucket_of(torch.ones(3)), None, compressor)
    return compressor.found


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("spec", SPECS)
def test_a_collective_implements_exactly_what_its_facts_state(threads, spec, size) -> None:
    implements = COLLECTIVES.facts(spec).implements
    assert implements <= set(CALLS)
    rows = [[10 * rank + place for place in range(size)] for rank in range(size)]
    for rank, found in enumerate(threads(size, calls, spec)):
        expected = {
            "all-reduce": [sum(column) for column in zip(*rows, strict=True)],
            "all-gather": rows,
            "all-to-all": [row[rank] for row in rows],
        }
        answers = {name: value if name in implements else None for name, value in expected.items()}
        assert found == {"place": (rank, size), "largest": [size - 1.0, 0.0], **answers}


def compressed(group: ExchangeGroup, spec: str, compression: str) -> Tensor | None:
    route = build_route(spec, Link(group), node_size=1)
    compressor = build_compressor(compression, seed=0, rank=group.rank())
    bucket = bucket_of(random_values(group.rank()).view(-1)[:120])
    try:
        route.sum_shares(bucket, torch.zeros(120), compressor)
    except NotImplementedError:
        return None
    return bucket.values


COMPRESSORS = [
    f"{facts.name}:{facts.positional.minimum}" if facts.positional else facts.name
    for facts in COMPRESSIONS.all_facts
    if facts.compressor
]


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_compressor_goes_over_it_if_it_implements_what_the_compressor_needs(
    threads, spec, compression
) -> None:
    found = threads(2, compressed, spec, compression)
    if COMPRESSIONS.facts(compression).need in COLLECTIVES.facts(spec).implements:
        assert torch.equal(*found)
        assert found[0].any()
    else:
        assert found == [None, None]


def while_off(group: ExchangeGroup, spec: str, node_size: int) -> tuple[list[float], int]:
    route = build_route(spec, Link(group), node_size=node_size)
    values = torch.full((6,), 1.0 + group.rank())
    group.traffic.stand_ins.keep_messages()
    route.sum_shares(bucket_of(values), None, Dense())
    group.traffic.payload_bytes = 0
    group.traffic.enabled = False
    values.fill_(1.0 + group.rank())
    route.sum_shares(bucket_of(values), None, Dense())
    return values.tolist(), group.traffic.payload_bytes


@pytest.mark.parametrize("spec", SPECS)
def test_with_the_exchange_off_a_rank_computes_with_its_own_values_and_its_last_messages(
    threads, spec
) -> None:
    for node_size in node_sizes(spec, 4):
        for rank, (values, payload_bytes) in enumerate(threads(4, while_off, spec, node_size)):
            assert payload_bytes == 0
            # A rank sends its own values or a sum of some ranks' values.
            assert all(1.0 + rank <= value <= 4 * 4 for value in values)
