"""All-reduces of our own against the backend's: goal for the ring on 2 ranks a median ratio of at most 1.25.

One bucket of 25 MiB in single precision, ranks as processes, in blocks A B B A; a block lasts from a barrier
to the last rank. More ranks than cores are for information.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture

from strategies.collectives.build import build_route
from strategies.collectives.link import Link
from strategies.collectives.route import Route
from strategies.compression.none.compressor import Dense
from strategies.exchange.buckets import Bucket

Ranks = Callable[..., list[Any]]

NUMEL = 25 * 2**20 // 4
BLOCK = 2
QUADS = 100


def ratios(rank: int, collective: str, node_size: int, quads: int) -> list[float]:
    """On a rank: the time of `collective` over that of the backend's all-reduce, a quad each."""
    link = Link()
    routes = [build_route(text, link, node_size=node_size) for text in (collective, "default")]
    ours, backend = routes
    bucket = Bucket(index=0, values=torch.zeros(NUMEL), pieces=())

    def block(route: Route) -> float:
        bucket.values.fill_(1.0)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(BLOCK):
            route.sum_shares(bucket, None, Dense())
        wall = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(wall, op=dist.ReduceOp.MAX)
        return wall.item()

    for route in (ours, backend, backend, ours):
        block(route)
    found = []
    for _ in range(quads):
        first, second, third, fourth = block(ours), block(backend), block(backend), block(ours)
        found.append((first + fourth) / (second + third))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collective", "size", "node_size"),
    [
        ("ring", 2, 2),
        ("tree", 2, 2),
        ("ring", 4, 4),
        ("tree", 4, 4),
        ("hierarchical", 4, 2),
        ("hierarchical:via=leaders", 4, 2),
    ],
)
def test_all_reduce_of_25_mib_against_the_backend(
    benchmark: BenchmarkFixture,
    ranks: Ranks,
    collective: str,
    size: int,
    node_size: int,
    quads: Callable[[int], int],
) -> None:
    many = quads(QUADS)
    found = benchmark.pedantic(
        ranks, (size, ratios, collective, node_size, many), {"timeout_s": 300}, rounds=1
    )[0]
    assert len(found) == many
    names = ("lower_quartile", "median_ratio", "upper_quartile")
    spread = dict(zip(names, np.percentile(found, [25, 50, 75]).round(3).tolist(), strict=True))
    benchmark.extra_info.update(spread, quads=many)
    print(f"\n{collective} on {size} ranks: {spread}")
