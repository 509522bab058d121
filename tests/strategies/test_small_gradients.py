"""Compressors of scaled codes keep their promises of gradients of any size, down to subnormal numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.worker.exchange import ExchangeGroup
from harness.worker.findings import ProofFinding
from harness.worker.promised import Witness, compare_promises
from strategies.catalog import COMPRESSIONS
from strategies.exchange.buckets import Bucket, pieces_of
from strategies.exchange.gradient_exchange import ExchangeSettings, GradientExchange

Threads = Callable[..., list[Any]]
VALUES = 1200
"""Not a multiple of the blocks of two ranks."""
EXPONENTS = range(-150, 3)
"""2^-149 is the smallest number of fp32, and 2^-126 the smallest that is normal."""


def findings_of(group: ExchangeGroup, spec: str) -> list[tuple[int, ProofFinding]]:
    """What is found of one exchange for each size of the gradients."""
    exchange = GradientExchange(
        ExchangeSettings(group=group, compression=spec, seed=3), device=torch.device("cpu")
    )
    exchange.audited = True
    witness = Witness(exchange.compressor, after_ramp=False)
    exchange.compressor, witness.watching = witness, True
    facts = COMPRESSIONS.facts(spec)
    generator = torch.Generator().manual_seed(group.rank())
    found = []
    for index, exponent in enumerate(EXPONENTS):
        values = torch.randn(VALUES, generator=generator, dtype=torch.float64) * 2.0**exponent
        pieces = pieces_of([("weight", torch.Size([VALUES]))])
        exchange.sum_shares(Bucket(index=index, values=values.float(), pieces=pieces))
        checked = compare_promises(facts.name, facts.promises, witness.taken())
        found += [(exponent, finding) for finding in checked]
    return found


@pytest.mark.parametrize("spec", ["int8:block=16", "int8:block=256:feedback=true", "signsgd"])
def test_promises_are_kept_of_gradients_of_any_size(threads: Threads, spec: str) -> None:
    for found in threads(2, findings_of, spec):
        assert len(found) == 2 * len(EXPONENTS)
        broken = [(exponent, finding.what) for exponent, finding in found if not finding.passed]
        assert broken == []
