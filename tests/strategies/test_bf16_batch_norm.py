"""`params=bf16` and BatchNorm: refused on CPU, where torch cannot compute it, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.worker.exchange.group import open_exchange
from results.errors import UsageError
from strategies import Trainer, TrainSettings
from strategies.training.precision import require_bf16_parameters

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")


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
def test_a_batch_norm_that_torch_does_not_compute_is_refused_with_the_way_out(
    ranks: Ranks, strategy: str
) -> None:
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
