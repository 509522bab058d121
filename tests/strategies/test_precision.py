"""A loss scaler leaves a step out: the residuals before it are those after it, in the new scale."""

from __future__ import annotations

from typing import Any

import data_parallel as replicas
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from harness.worker.proof.comparison import ProofFinding
from harness.worker.proof.compressor_promises import Exchanged, Witness, compare_promises
from results.errors import UsageError
from results.layout import ModelLayout
from strategies import Trainer, TrainSettings
from strategies.catalog import COMPRESSIONS
from strategies.compression.promise import Unbiased
from strategies.exchange.buckets import Bucket, pieces_of
from strategies.gradient_exchange import ExchangeSettings, GradientExchange
from strategies.training.precision import require_bf16_parameters

CPU = torch.device("cpu")
SGD = "sgd:lr=0.01:momentum=0"
SCRATCH = "scratch-ddp:bucket_mb=0.001:first_bucket_mb=0.001"
KEEPING = (
    (SCRATCH, "topk:0.1"),
    (SCRATCH, "topk:0.1:select=block"),
    (SCRATCH, "randomk:0.1"),
    (SCRATCH, "powersgd:1"),
    (SCRATCH, "int8:feedback=true"),
    (SCRATCH, "signsgd"),
    (SCRATCH, "dgc:0.1"),
    ("ddp:bucket_mb=0.001", "topk:0.1"),
    ("ddp:bucket_mb=0.001", "torch-powersgd:1"),
)


def overflow(rank: int, strategy: str, compression: str) -> list[dict[str, Any]]:
    """On a rank, after each of five steps: parameters, residuals, and the scale. In the fourth step the
    gradients of rank 1 alone overflow."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.Linear(40, 5))
    settings = TrainSettings(strategy=strategy, compression=compression, optimizer=SGD, precision="fp16")
    trainer = Trainer(module, F.cross_entropy, device=CPU, settings=settings)
    trainer.scaler.load_state_dict(trainer.scaler.state_dict() | {"scale": 1024.0})
    exchange = trainer.model.gradient_exchange
    assert exchange is not None
    found = []
    generator = torch.Generator().manual_seed(rank)
    for step in range(5):
        inputs = torch.randn(4, 8, generator=generator)
        if rank == 1 and step == 3:
            inputs[0, 0] = torch.inf
        trainer.step(iter([(inputs, torch.tensor([0, 1, 2, 3]))]))
        found.append(
            {
                "parameters": _copied(trainer.model.named_parameters()),
                "carried": _copied(exchange.carried()),
                "scale": trainer.scaler.get_scale(),
            }
        )
    return found


def _copied(named: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in named}


@pytest.mark.parametrize(("strategy", "compression"), KEEPING)
def test_a_step_that_overflows_leaves_what_is_kept_and_the_next_one_updates(
    ranks, strategy, compression
) -> None:
    for steps in ranks(2, overflow, strategy, compression):
        _, _, before, left_out, after = steps
        assert (before["scale"], left_out["scale"], after["scale"]) == (1024.0, 512.0, 512.0)
        replicas.assert_same(left_out["parameters"], before["parameters"])
        # Half a power of two: exact.
        halved = {name: value / 2 for name, value in before["carried"].items()}
        assert any(bool(value.any()) for value in halved.values())
        replicas.assert_same(left_out["carried"], halved)
        for name, value in after["parameters"].items():
            assert value.isfinite().all(), name
        assert any(not torch.equal(after["parameters"][n], v) for n, v in before["parameters"].items())


# Compressors of scaled codes keep their promises of gradients of any size, down to subnormal numbers.

VALUES = 1200
"""Not a multiple of the blocks of two ranks."""
EXPONENTS = range(-150, 3)
"""2^-149 is the smallest number of fp32, and 2^-126 the smallest that is normal."""


def findings_of(group: ExchangeGroup, spec: str) -> list[tuple[int, ProofFinding]]:
    """The result of one exchange for each size of the gradients."""
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
def test_promises_are_kept_of_gradients_of_any_size(threads, spec) -> None:
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
def test_values_are_rounded_to_powers_of_two_without_bias(draw, kept) -> None:
    """Natural compression: x goes from 2^k up to 2^(k+1) with the probability |x| / 2^k - 1."""
    torch.manual_seed(0)
    x = torch.cat([torch.randn(40000, dtype=torch.float32), torch.zeros(8)])
    below = torch.exp2(x.abs().log2().floor())
    up = draw(x) < x.abs() / below - 1
    sent = torch.where(x == 0, 0.0, x.sign() * below * (1 + up.float()))
    promise = Unbiased(step=lambda size: 2.0 ** size.log2().floor())
    exchanged = Exchanged(
        values=x, sent=sent, sums=sent, residual=x - sent, wire_bytes=0, rank=0, size=2, before=0
    )
    [finding] = compare_promises("natural", [promise], [exchanged])
    assert finding.passed == kept, finding.what


# `params=bf16` and BatchNorm: refused on CPU, where torch cannot compute it, and only there.


def told(rank: int, strategy: str, options: dict[str, bool]) -> str:
    """On a rank: what comes of a step of a model with a BatchNorm of these options."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, **options), nn.Linear(3, 2))
    settings = TrainSettings(strategy=strategy, precision="bf16")
    try:
        trainer = Trainer(module, F.cross_entropy, device=CPU, settings=settings, group=open_exchange())
        trainer.step(iter([(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))]))
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["fsdp", "scratch-fsdp"])
def test_a_batch_norm_that_torch_does_not_compute_is_refused_with_the_way_out(ranks, strategy) -> None:
    expected = (
        "params=bf16: on CPU torch has no BatchNorm with parameters in bfloat16 and statistics in float32, "
        "as 1 would be: leave params=bf16 out, autocast computes in bf16 as well"
    )
    assert ranks(2, told, f"{strategy}:params=bf16", {}) == [expected] * 2
    # The way out is one, and what torch computes is not refused.
    assert ranks(2, told, strategy, {}) == [""] * 2
    assert ranks(2, told, f"{strategy}:params=bf16", {"affine": False}) == [""] * 2
    assert ranks(2, told, f"{strategy}:params=bf16", {"track_running_stats": False}) == [""] * 2


def test_torch_does_not_compute_what_is_refused() -> None:
    norm = nn.BatchNorm1d(3)
    for parameter in norm.parameters():
        parameter.data = parameter.data.bfloat16()
    for values in (torch.randn(4, 3), torch.randn(4, 3).bfloat16()):
        with pytest.raises(RuntimeError, match="scalar type"):
            norm(values)


def test_on_cuda_nothing_is_refused() -> None:
    require_bf16_parameters(nn.BatchNorm1d(3), torch.device("cuda"))


class Noting(nn.Linear):
    """Notes at each pass whether autocast keeps the casts of weights."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.kept: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled())
        return super().forward(x)


@pytest.mark.parametrize(("checkpointing", "kept"), [(False, [True]), (True, [False, False])])
def test_weights_of_blocks_that_are_computed_again_are_not_kept_in_half_precision(
    checkpointing, kept
) -> None:
    block = Noting()
    settings = TrainSettings(optimizer=SGD, precision="bf16", activation_checkpointing=checkpointing)
    layout = ModelLayout(blocks=("0",))
    trainer = Trainer(nn.Sequential(block), F.cross_entropy, device=CPU, settings=settings, layout=layout)
    trainer.step(iter([(torch.randn(4, 8), torch.tensor([0, 1, 2, 3]))]))
    assert block.kept == kept
