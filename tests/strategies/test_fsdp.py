"""torch's FSDP2: its names, and models that it cannot shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.worker.exchange import open_exchange
from strategies import Trainer, TrainSettings
from strategies.catalog import STRATEGIES

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")


class Scalar(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 5)
        self.scale = nn.Parameter(torch.tensor(1.0))


class TwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5).double()


UNFIT: dict[str, Callable[[], nn.Module]] = {
    "scalar": Scalar,
    "types": TwoTypes,
    "sparse": lambda: nn.Sequential(nn.Embedding(4, 5, sparse=True), nn.Linear(5, 5)),
}


def complaint(rank: int, model: str) -> str:
    """On a rank: what the strategy says of a model that it cannot shard."""
    try:
        Trainer(
            UNFIT[model](),
            F.mse_loss,
            device=CPU,
            settings=TrainSettings(strategy="fsdp"),
            group=open_exchange(),
        ).step(iter([(torch.ones(2, 5), torch.ones(2, 5))]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("scalar", "UsageError: fsdp shards the first dimension, and scale has none: use ddp or scratch-ddp"),
        ("sparse", "UsageError: fsdp has no sparse gradients, as 0 asks for: use ddp or scratch-ddp"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused_with_the_way_out(
    ranks: Ranks, model: str, told: str
) -> None:
    assert ranks(2, complaint, model) == [told] * 2


def test_zero_2_and_zero_3_are_names_of_fsdp() -> None:
    assert STRATEGIES.parse("zero2").text == "fsdp:reshard=false"
    assert STRATEGIES.parse("zero3").text == "fsdp"
    assert STRATEGIES.parse("zero2:prefetch=2").text == "fsdp:prefetch=2:reshard=false"
