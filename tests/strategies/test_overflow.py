"""A loss scaler leaves a step out: what an exchange kept before it is kept after it, in the new scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import data_parallel as replicas
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from strategies import Trainer, TrainSettings

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
    """On a rank, after each of five steps: parameters, what is carried, and the scale. In the fourth step the
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
    ranks: Callable[..., list[Any]], strategy: str, compression: str
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
