"""Compressors of scaled codes keep their promises of gradients of any size, down to subnormal numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.worker.exchange.group import ExchangeGroup
from harness.worker.proof.comparison import ProofFinding
from harness.worker.proof.compressor_promises import Exchanged, Witness, compare_promises
from strategies.catalog import COMPRESSIONS
from strategies.compression.promise import Unbiased
from strategies.exchange.buckets import Bucket, pieces_of
from strategies.gradient_exchange import ExchangeSettings, GradientExchange

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


@pytest.mark.parametrize(
    ("draw", "kept"),
    [
        (torch.rand_like, True),
        (lambda x: torch.full_like(x, 0.5), False),
        (torch.zeros_like, False),
        (lambda x: torch.where(x < 0, 0.0, 1.0), False),
    ],
    ids=["unbiased", "nearest", "up", "towards minus infinity"],
)
def test_values_are_rounded_to_powers_of_two_without_bias(
    draw: Callable[[torch.Tensor], torch.Tensor], kept: bool
) -> None:
    """Natural compression: x goes from 2^k up to 2^(k+1) with the probability |x| / 2^k - 1."""
    torch.manual_seed(0)
    x = torch.cat([torch.randn(40000, dtype=torch.float32), torch.zeros(8)])
    below = torch.exp2(x.abs().log2().floor())
    up = draw(x) < x.abs() / below - 1
    sent = torch.where(x == 0, 0.0, x.sign() * below * (1 + up.float()))
    promise = Unbiased(step=lambda size: 2.0 ** size.log2().floor())
    exchanged = Exchanged(
        values=x, sent=sent, sums=sent, carried=x - sent, wire_bytes=0, rank=0, size=2, before=0
    )
    [finding] = compare_promises("natural", [promise], [exchanged])
    assert finding.passed == kept, finding.what
