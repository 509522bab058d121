"""The time to find 1 % of a bucket of 25 million values, against one copy of it, on one thread.

The goal is 3 copies by a sample; the figures are kept in the benchmark's record, not asserted. A copy is a
`clone`, into new memory, and is taken in turns with the selection.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import rank_builders
import torch
from torch import Tensor

from strategies.compression.selection import SELECTIONS

NUMEL = 25_000_000
SENT = NUMEL // 100
ROUNDS = 5
one_thread = rank_builders.one_thread


@pytest.fixture(scope="module")
def values() -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(SELECTIONS))
def test_selection_against_a_copy(benchmark, values, kind) -> None:
    generator = torch.Generator().manual_seed(1)
    copies_ns: list[int] = []

    def copied() -> None:
        start = time.perf_counter_ns()
        values.clone()
        copies_ns.append(time.perf_counter_ns() - start)

    indices = benchmark.pedantic(
        SELECTIONS[kind], (values, SENT, generator), setup=copied, rounds=ROUNDS, warmup_rounds=1
    )
    assert len(indices) == SENT
    if benchmark.disabled:  # among the tests in several processes: one round, without a figure
        return
    copy_ms = float(np.median(copies_ns)) / 1e6
    found = {"copies": 1e3 * benchmark.stats.stats.median / copy_ms, "copy_ms": copy_ms}
    benchmark.extra_info.update(found)
    print(f"\n{kind}: {found}")
