"""torch's FSDP2 over real ranks, against a serial loop over the replicas and closed forms of its traffic."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from harness.worker.exchange import open_exchange
from results.cell import Cell
from results.layout import ModelLayout
from strategies import Trainer, TrainSettings
from strategies.catalog import STRATEGIES
from strategies.refusal import refusal

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "BatchNorm": ("normed", {}),
    "BatchNorm, accumulated": ("normed", {"accumulation": 2}),
    "kept whole": ("normed", {"strategy": "fsdp:reshard=false"}),
    "kept whole, accumulated": ("dropped", {"strategy": "zero2", "accumulation": 2}),
    "dropout, prefetched": ("dropped", {"strategy": "fsdp:prefetch=1"}),
    "offloaded": ("dropped", {"strategy": "fsdp:offload=cpu"}),
    "checkpointed": ("dropped", {"activation_checkpointing": True}),
    "one matrix in three places": ("shared", {}),
    "convolutions": ("images", {}),
}


def settings_of(case: str) -> tuple[str, dict[str, Any]]:
    model, settings = CASES[case]
    return model, {"strategy": "fsdp", "optimizer": "sgd:lr=0.1:momentum=0.9", **settings}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_a_serial_loop_does_bit_for_bit(
    ranks: Ranks, replicas: ModuleType, case: str
) -> None:
    replicas.assert_as_serial(ranks(2, replicas.train, *settings_of(case)), *settings_of(case))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_agree_with_the_serial_loop_within_the_rounding_of_the_average(
    ranks: Ranks, replicas: ModuleType, case: str, size: int
) -> None:
    # 24, 8 and 5 rows: over 3 and 4 ranks some ranks have a row less, or none.
    replicas.assert_near_serial(ranks(size, replicas.train, *settings_of(case)), *settings_of(case))


@pytest.mark.parametrize("size", [2, 3])
def test_clipping_is_by_the_norm_of_all_shards(ranks: Ranks, replicas: ModuleType, size: int) -> None:
    settings = {"strategy": "fsdp", "optimizer": "sgd:lr=1:momentum=0", "clip_norm": 0.05}
    for result in ranks(size, replicas.train, "normed", settings):
        first = result[0]
        moved = [(first["parameters"][name] - first["start"][name]).flatten() for name in first["gradients"]]
        gradient = torch.cat([value.flatten() for value in first["gradients"].values()])
        assert gradient.norm() > 0.1
        torch.testing.assert_close(-torch.cat(moved), gradient * 0.05 / gradient.norm(), rtol=1e-4, atol=1e-7)


class Blocks(nn.Module):
    """Two blocks of 6 x 6, what is around them 5 x 6 and 6 x 5; 5 rows do not divide by 2."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6, bias=False)
        self.blocks = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
        self.last = nn.Linear(6, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.blocks(self.first(x)))
        return y


def traffic_of_a_step(rank: int, strategy: str, accumulation: int) -> tuple[int, int, int, int]:
    """On a rank: payload bytes and operations of a step, and its elements of parameters and momentum."""
    torch.manual_seed(0)
    group = open_exchange()
    trainer = Trainer(
        Blocks(),
        F.mse_loss,
        device=CPU,
        settings=TrainSettings(strategy=strategy, optimizer="sgd:lr=0.1", accumulation=accumulation),
        layout=ModelLayout(blocks=("blocks.0", "blocks.1")),
        group=group,
    )
    batches = iter([(torch.ones(2, 5), torch.ones(2, 5))] * 4 * accumulation)
    trainer.step(batches)
    before = group.traffic.payload_bytes, group.traffic.operations
    trainer.step(batches)
    momentum = [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
    return (
        group.traffic.payload_bytes - before[0],
        group.traffic.operations - before[1],
        sum(_kept(parameter) for parameter in trainer.model.parameters()),
        sum(_kept(value) for value in momentum),
    )


def _kept(value: torch.Tensor) -> int:
    assert isinstance(value, DTensor)
    return value.to_local().numel()


def _closed_form(size: int, *, reshard: bool, accumulation: int) -> tuple[int, int]:
    """Bytes that a rank hands over in a step, and operations.

    A rank hands over its shard, padded to equal shards, for a gathering, and all shards for an average. The
    two blocks are gathered in every forward and, if they were given up, in every backward pass; what is
    around them in every forward pass.
    """
    block = 4 * math.ceil(6 / size) * 6
    around = 4 * (math.ceil(6 / size) * 5 + math.ceil(5 / size) * 6)
    gathers = 2 if reshard else 1
    shards = accumulation * (gathers * 2 * block + around)
    averages = size * (2 * block + around)
    return shards + averages, accumulation * (gathers * 2 + 1) + 3


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("strategy", "reshard"), [("fsdp", True), ("zero2", False), ("zero3", True)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_travels_is_the_closed_form(
    ranks: Ranks, size: int, strategy: str, reshard: bool, accumulation: int
) -> None:
    expected = _closed_form(size, reshard=reshard, accumulation=accumulation)
    for payload, operations, _, _ in ranks(size, traffic_of_a_step, strategy, accumulation):
        assert (payload, operations) == expected


def test_parameters_and_optimizer_state_lie_in_shards(ranks: Ranks) -> None:
    # 6 rows: 2 each of 3 ranks; the 5 rows of the last: 2, 2 and 1.
    kept = [(parameters, momentum) for _, _, parameters, momentum in ranks(3, traffic_of_a_step, "fsdp", 1)]
    assert kept == [(2 * 12 + 10 + 12,) * 2, (2 * 12 + 10 + 12,) * 2, (2 * 12 + 10 + 6,) * 2]
    assert sum(parameters for parameters, _ in kept) == 2 * 36 + 2 * 30


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


class Rows(nn.Linear):
    """Four rows: two of each of two ranks."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)


def overflowing_steps(rank: int, settings: dict[str, Any]) -> list[tuple[bool, int, float, torch.Tensor]]:
    """On a rank: of each step whether its own shard is finite, what its update exchanges, the scaler's factor
    after it, and the parameters.

    The loss is y t with t = (0, 0, 0, 4), so that the gradient of the last row alone is 4 x, times the
    factor, in fp16, and x = 1/4 (1, 0, 0, 0).
    """
    torch.manual_seed(0)
    group = open_exchange()
    trainer = Trainer(
        Rows(),
        lambda outputs, targets: (outputs * targets).sum(),
        device=CPU,
        settings=TrainSettings(precision="fp16", optimizer="sgd:lr=1:momentum=0", **settings),
        group=group,
    )
    found = []
    for _ in range(4):
        trainer.compute_gradients(iter([(torch.eye(4)[:1] / 4, 4 * torch.eye(4)[3:])]))
        (parameter,) = trainer.model.parameters()
        assert isinstance(parameter.grad, DTensor)
        finite = bool(parameter.grad.to_local().isfinite().all())
        before = group.traffic.operations
        trainer.update()
        exchanged = group.traffic.operations - before
        ((_, whole),) = trainer.model.named_parameters()
        found.append((finite, exchanged, trainer.scaler.get_scale(), whole.clone()))
    return found


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {"strategy": "fsdp"}),
        (2, {"strategy": "fsdp:offload=cpu", "clip_norm": 100.0}),
        (4, {"strategy": "hsdp", "node_size": 2}),
    ],
)
def test_a_shard_that_overflows_makes_all_ranks_leave_the_step_out(
    ranks: Ranks, size: int, settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    start = Rows().weight.detach()
    # fp16 ends at 65504. The factor begins at 2^16, and the gradient of y is 4 times it: with 2^16, 2^15 and
    # 2^14 it overflows, with 2^13 it does not.
    after = start.clone()
    after[3, 0] -= 4 / 4
    results = ranks(size, overflowing_steps, settings)
    for rank, steps in enumerate(results):
        overflows = rank % 2 == 1
        assert [finite for finite, _, _, _ in steps] == [not overflows] * 3 + [True]
        # What ranks agree on, and the norm of all gradients.
        assert {exchanged for _, exchanged, _, _ in steps} == {2 if "clip_norm" in settings else 1}
        assert [factor for _, _, factor, _ in steps] == [2.0**15, 2.0**14, 2.0**13, 2.0**13]
        for expected, (_, _, _, whole) in zip([start] * 3 + [after], steps, strict=True):
            torch.testing.assert_close(whole, expected, rtol=0, atol=1e-6)


def test_zero_2_and_zero_3_are_names_of_fsdp() -> None:
    assert STRATEGIES.parse("zero2").text == "fsdp:reshard=false"
    assert STRATEGIES.parse("zero3").text == "fsdp"
    assert STRATEGIES.parse("zero2:prefetch=2").text == "fsdp:prefetch=2:reshard=false"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"compression": "topk:0.01"}, "goes with --compression none and --collective default alone"),
        ({"collective": "ring"}, "goes with --compression none and --collective default alone"),
        ({"strategy": "fsdp:tp=2"}, "leaves nothing to shard on 2 ranks: use tp, which is the same"),
        ({"strategy": "fsdp:tp=2", "gpus": 3}, "a number of ranks that 2 divides, not 3"),
        ({"strategy": "fsdp:tp=2", "gpus": 4, "compile": True}, "which torch.compile cannot trace"),
        ({"strategy": "fsdp:params=bf16"}, "goes with --precision bf16"),
        ({"memory_format": "channels_last"}, "goes with --memory-format contiguous alone"),
        ({"gpus": 1}, "needs at least 2"),
    ],
)
def test_combinations_without_sense_are_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    fields: dict[str, Any] = {
        "workload": "gpt-nano", "dataset": "synthetic", "strategy": "fsdp", "gpus": 2, "micro_batch": 4,
        "device": "cpu", "backend": "gloo", "optimizer": "sgd", **changes,
    }  # fmt: skip
    assert reason in str(refusal(Cell(**fields)))
