"""torch's FSDP2: its names, and models that it cannot shard."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rank_builders import a_trainer
from torch import Tensor, nn

from harness.worker.exchange.group import open_exchange
from results.errors import UsageError
from results.layout import ModelLayout
from strategies.catalog import STRATEGIES


class Scalar(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 5)
        self.scale = nn.Parameter(torch.tensor(1.0))


class TwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5).double()


class Shared(nn.Sequential):
    """Two blocks with one matrix."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 5), nn.Linear(5, 5))
        self[1].weight = self[0].weight


UNFIT: dict[str, Callable[[], nn.Module]] = {
    "scalar": Scalar,
    "types": TwoTypes,
    "shared": Shared,
    "sparse": lambda: nn.Sequential(nn.Embedding(4, 5, sparse=True), nn.Linear(5, 5)),
}


def complaint(rank: int, model: str) -> str:
    """On a rank: what the strategy says of a model that it cannot shard."""
    try:
        a_trainer(
            UNFIT[model](),
            layout=ModelLayout(blocks=("0", "1") if model == "shared" else ()),
            group=open_exchange(),
            strategy="fsdp",
        ).step(iter([(torch.ones(2, 5), torch.ones(2, 5))]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("scalar", "UsageError: fsdp shards the first dimension, and scale "),
        (
            "shared",
            "UsageError: fsdp shards each block by itself, and 1 and 0 share 0.weight: use ddp or "
            "scratch-ddp",
        ),
        (
            "types",
            "UsageError: fsdp shards trained parameters of one data type together, and what is around the "
            "blocks has float32, float64: use ddp or scratch-ddp",
        ),
        ("sparse", "UsageError: fsdp does not support sparse gradients, which 0 has: use ddp or scratch-ddp"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused_with_the_way_out(ranks, model, told) -> None:
    for found in ranks(2, complaint, model):
        assert found.startswith(told)
        assert found.endswith("use scratch-fsdp" if model == "scalar" else ": use ddp or scratch-ddp")


class OneOfTwo(nn.Module):
    """Two layers of equal size, of which the sign of the first input chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if bool(x[0, 0] > 0) else self.b(x)


def chosen(rank: int, strategy: str, signs: list[list[float]]) -> list[str]:
    """On a rank: what is said of each step, whose first input has this rank's sign."""
    trainer = a_trainer(OneOfTwo(), group=open_exchange(), strategy=strategy)
    told = []
    for step in signs:
        try:
            trainer.step(iter([(step[rank] * torch.ones(2, 5), torch.ones(2, 5))]))
            told.append("")
        except UsageError as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_ranks_that_use_different_parameters_are_refused_on_all_ranks(ranks, strategy) -> None:
    assert (
        ranks(2, chosen, strategy, [[1.0, -1.0]])
        == [
            [
                "the gradient of a.weight, a.bias, b.weight (4 parameters) came on some ranks and not on "
                "others: use the same parameters on all ranks in every step, or use ddp:find_unused=true or "
                "scratch-ddp:find_unused=true"
            ]
        ]
        * 2
    )


class Shortcut(nn.Module):
    """Two blocks, of which a negative first input leaves the second one out, or a part of it."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.a, self.b = nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        if bool(x[0, 0] > 0):
            y = y + self.b(y)
        elif not self.whole:
            y = y + self.b[1](torch.ones(2, 9))
        return y


def shortened(rank: int, strategy: str, whole: bool, blocks: tuple[str, ...]) -> str:
    """On a rank: what is said of a first step in which one of the ranks takes the shortcut."""
    trainer = a_trainer(
        Shortcut(whole), layout=ModelLayout(blocks=blocks), group=open_exchange(), strategy=strategy
    )
    sign = 1.0 - 2 * rank
    with pytest.raises(UsageError) as refused:
        trainer.step(iter([(sign * torch.ones(2, 5), torch.ones(2, 5))]))
    return str(refused.value)


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
@pytest.mark.parametrize(("whole", "blocks"), [(False, ()), (True, ()), (True, ("a", "b"))])
def test_ranks_that_use_parameters_of_unequal_size_are_refused_on_all_ranks(
    ranks, strategy, whole, blocks
) -> None:
    told = ranks(2, shortened, strategy, whole, blocks)
    assert told[0] == told[1]
    assert told[0].startswith("ranks use different parameters of the model (they exchange ")
    assert told[0].endswith(
        "use the same parameters on all ranks in every step, or use ddp:find_unused=true or "
        "scratch-ddp:find_unused=true"
    )


def test_a_rank_that_uses_other_parameters_in_a_later_step_says_so(ranks) -> None:
    ours, theirs = ranks(2, chosen, "fsdp", [[1.0, 1.0], [1.0, -1.0]])
    assert ours == ["", ""]
    assert theirs[0] == ""
    assert theirs[1].startswith(
        "the gradient of a.bias, a.weight, b.bias (4 parameters) came in this step or in"
    )


def shortened_later(rank: int, folder: Path) -> str:
    """On a rank: what ends it where rank 1 leaves block b out in its third step."""
    trainer = a_trainer(
        Shortcut(whole=True), layout=ModelLayout(blocks=("a", "b")), group=open_exchange(), strategy="fsdp"
    )
    for sign in (1.0, 1.0, 1.0 - 2 * rank):
        try:
            trainer.step(iter([(sign * torch.ones(2, 5), torch.ones(2, 5))]))
        except UsageError as error:
            (folder / "refused").write_text(str(error))
            os._exit(0)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_rank_that_skips_a_block_in_a_later_step_is_refused_before_it_exchanges(ranks, tmp_path) -> None:
    other = ranks(2, shortened_later, tmp_path, dying=(1,))[0]
    assert "Connection closed" in other or "reset" in other
    told = (tmp_path / "refused").read_text()
    assert told.startswith("rank 1 gathers a (")
    assert " where in the first step it gathers b (" in told


def test_zero_2_and_zero_3_are_names_of_fsdp() -> None:
    assert STRATEGIES.parse("zero2").text == "fsdp:reshard=false"
    assert STRATEGIES.parse("zero3").text == "fsdp"
    assert STRATEGIES.parse("zero2:prefetch=2").text == "fsdp:prefetch=2:reshard=false"
