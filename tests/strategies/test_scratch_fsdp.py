"""The averages of `scratch-fsdp`, and its gathering ahead; how it trains is in test_strategy_laws.py."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import data_parallel as replicas
import pytest
import torch
from recorded_world import RecordingGroup
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from results.errors import UsageError
from results.layout import ModelLayout
from strategies import Phase, Trainer, TrainSettings
from strategies.collectives.link import Link
from strategies.scratch_fsdp.flat import _Reduced, start_reduce_scatter

UNIT_ROUNDOFF = 2.0**-24
ACCUMULATION, SIZE = 3, 3


def sizes_of_terms(module: nn.Module, step: int) -> dict[str, Tensor]:
    """The sum of the absolute values that are averaged in each element: micro-batches of all replicas."""
    sizes: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
    for replica in range(SIZE):
        for micro in range(ACCUMULATION):
            module.zero_grad()
            inputs, targets = replicas.batch(step, micro, replica)
            (F.cross_entropy(module(inputs), targets) / ACCUMULATION / SIZE).backward()
            for name, parameter in module.named_parameters():
                sizes[name] = sizes[name] + parameter.grad.abs()
    return sizes


@pytest.mark.parametrize("stage", [2, 3])
def test_micro_batches_are_averaged_one_by_one(ranks, stage) -> None:
    """3 times 3 terms in an order of the strategy's own: see `assert_near_serial` for the bound."""
    settings = {"strategy": f"scratch-fsdp:stage={stage}", "optimizer": "sgd", "accumulation": ACCUMULATION}
    results = ranks(SIZE, replicas.train, "tied", settings)
    roundings = ACCUMULATION * SIZE + 1
    bound = 2 * roundings * UNIT_ROUNDOFF / (1 - roundings * UNIT_ROUNDOFF)
    for step in range(replicas.STEPS):
        serial = replicas.Serial("tied", SIZE, settings)
        serial.module.load_state_dict(results[0][step]["start"], strict=False)
        sizes = sizes_of_terms(replicas.copy.deepcopy(serial.module), step)
        gradients, _ = serial.gradients(step)
        for result in results:
            assert result[step]["gradients"].keys() == gradients.keys()
            for name, gradient in result[step]["gradients"].items():
                assert bool(((gradient - gradients[name]).abs() <= bound * sizes[name]).all()), name
        assert len({result[step]["fingerprint"] for result in results}) == 1


@pytest.mark.parametrize("stage", [1, 3])
def test_prefetching_changes_no_bit(ranks, stage) -> None:
    settings = {"optimizer": replicas.ADAMW, "accumulation": 2}
    runs = [
        ranks(
            2,
            replicas.train,
            "tied",
            {"strategy": f"scratch-fsdp:stage={stage}:prefetch={ahead}", **settings},
        )
        for ahead in (0, 1, 2)
    ]
    assert len({result[-1]["fingerprint"] for run in runs for result in run}) == 1


# What `scratch-fsdp` averages: sums of parts, gradients that overflow, and bfloat16.

CPU = torch.device("cpu")


def bfloat16_step(rank: int) -> tuple[list[list[float]], str]:
    """On a rank: the average gradient of W in y = W x, and what the module computes in."""
    module = nn.Linear(2, 1, bias=False)
    settings = TrainSettings(strategy="scratch-fsdp:params=bf16", precision="bf16")
    trainer = Trainer(
        module, lambda y, t: 2 * (y * t).sum(), device=CPU, settings=settings, group=open_exchange()
    )
    trainer.compute_gradients(iter([(torch.tensor([[(256.0, 1.0)[rank], 4.0]]), torch.ones(1, 1))]))
    (name, gradient), = trainer.model.named_gradients()  # fmt: skip
    assert (name, gradient.dtype) == ("weight", torch.float32)
    assert [shard.dtype for shard in trainer.model.parameters()] == [torch.float32]
    return gradient.tolist(), str(module.weight.dtype)


def test_the_average_of_bfloat16_gradients_is_a_single_precision_number(ranks) -> None:
    # 2 * 256 / 2 + 2 * 1 / 2 = 257, which bfloat16 does not have: 256 or 258.
    assert ranks(2, bfloat16_step) == [([[257.0, 8.0]], "torch.bfloat16")] * 2


def scattered(group: ExchangeGroup, by_backend: bool) -> tuple[Tensor, list[float]]:
    link = Link(group)
    values = (torch.arange(3 * link.size) * (link.rank + 1)).float()
    kept = values.clone()
    summed = (_Reduced(link, values) if by_backend else start_reduce_scatter(link, values)).wait()
    assert torch.equal(values, kept)
    return summed.tolist()


@pytest.mark.parametrize("by_backend", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_rank_gets_its_part_of_the_sum(threads, size, by_backend) -> None:
    # Rank r gives r + 1 times 0, 1, 2, ...
    factor = size * (size + 1) / 2
    expected = [[factor * (3 * rank + place) for place in range(3)] for rank in range(size)]
    assert threads(size, scattered, by_backend) == expected


# `scratch-fsdp` where a rank lacks a gradient: all ranks issue the same, and all say so.

LAYOUT = ModelLayout(blocks=("1", "2", "3"))


class Choosing(nn.Linear):
    """A block that uses its bias where the first input is positive."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias if bool(x[0, 0] > 0) else None)


def trainer_of(group: ExchangeGroup, strategy: str) -> Trainer:
    """A model of three blocks after a matrix that is trained as well; all keep the sign of what they take."""
    module = nn.Sequential(nn.Linear(5, 5, bias=False), *(Choosing(5, 5) for _ in range(3)))
    for layer in module:
        nn.init.eye_(layer.weight)
    for block in module[1:]:
        nn.init.zeros_(block.bias)
    return Trainer(
        module,
        F.mse_loss,
        device=torch.device("cpu"),
        settings=TrainSettings(strategy=strategy, optimizer="sgd:lr=0"),
        layout=LAYOUT,
        group=group,
    )


def complaint(trainer: Trainer, sign: float) -> str:
    try:
        trainer.step(iter([(sign * torch.ones(2, 5), torch.ones(2, 5))]))
    except UsageError as error:
        return str(error)
    return ""


def complaints(rank: int, strategy: str, signs: list[list[float]]) -> list[str]:
    """On a rank: what is said of each step, whose first input has this rank's sign."""
    trainer = trainer_of(open_exchange(), strategy)
    return [complaint(trainer, step[rank]) for step in signs]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_without_gradient_is_refused_on_all_ranks(ranks, stage) -> None:
    here, there = ranks(2, complaints, f"scratch-fsdp:stage={stage}", [[-1.0, 1.0], [1.0, 1.0]])
    assert here[0] == (
        "no gradient came for 1.bias, 2.bias, 3.bias (3 parameters), and shards are updated as a whole: "
        "freeze what is not used, or use ddp:find_unused=true or scratch-ddp:find_unused=true"
    )
    assert there[0] == "a parameter has no gradient on another rank, whose error names it"
    assert here[1] == there[1] == ""
    later = ranks(2, complaints, f"scratch-fsdp:stage={stage}", [[1.0, 1.0], [-1.0, -1.0]])
    assert [told[0] for told in later] == ["", ""]
    assert all(told[1].startswith("no gradient came for 1.bias, 2.bias, 3.bias") for told in later)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_issues_the_same_whether_its_gradients_come_or_not(stage) -> None:
    seen, told = [], []
    for sign in (1.0, -1.0):
        group = RecordingGroup(0, 4)
        told.append(complaint(trainer_of(group, f"scratch-fsdp:stage={stage}"), sign))
        seen.append(group.seen)
    assert [bool(text) for text in told] == [False, True]
    assert seen[0] == seen[1]
    # A block: 25 values, 3 zeros, 5 values, filled up to 4 * 9. Around them 25, filled up to 4 * 7: last.
    averages = [numbytes for name, numbytes in seen[0] if name == "alltoall_base"]
    assert averages == [4 * 36] * 3 + [4 * 28]


def loop_of_ones_own(rank: int) -> str:
    """On a rank: what is said of a backward pass that no step of the strategy is around."""
    model = trainer_of(open_exchange(), "scratch-fsdp").model
    try:
        with model.exchange(now=True):
            model.module(torch.ones(2, 5)).sum().backward()
    except UsageError as error:
        return str(error)
    return ""


def test_a_loop_of_ones_own_is_refused_and_not_trained_wrongly(ranks) -> None:
    assert all("train with a Trainer" in told for told in ranks(2, loop_of_ones_own))


# What `scratch-fsdp` sends and holds in a step, by closed forms, and what it leaves when a step fails.

BLOCK = 36
AROUND = 62
"""30 elements, two zeros so that the next parameter begins at a multiple of 16 bytes, 30 elements."""


class Probed(nn.Linear):
    """A block of one parameter that notes, forward and backward, the number of gathered blocks."""

    watching: Callable[[], None] = staticmethod(lambda: None)
    failing = ""

    def forward(self, x: Tensor) -> Tensor:
        self.watching()
        if self.failing == "forward":
            raise ValueError("broken")
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(self._backward)
        # Inside of the block: its output has other hooks.
        return 1 * y

    def _backward(self, gradient: Tensor) -> None:
        self.watching()
        if self.failing == "backward":
            raise ValueError("broken")


class Blocks(nn.Module):
    """Four blocks of 6 x 6, what is around them 6 x 5 and 5 x 6."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6, bias=False), nn.Linear(6, 5, bias=False)
        self.blocks = nn.Sequential(*(Probed(6, 6, bias=False) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        Probed.watching()
        y: Tensor = self.last(self.blocks(self.first(x)))
        if y.requires_grad:
            y.register_hook(lambda gradient: Probed.watching())
        return 1 * y

    def whole(self) -> tuple[int, int]:
        """How many of the two around and of the blocks have memory."""
        around = sum(holds(part.weight) for part in (self.first, self.last))
        return around, sum(holds(block.weight) for block in self.blocks)


class Recomputing(Blocks):
    """The same, which checkpoints its blocks itself: each is called again in its backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        for block in self.blocks:
            y = checkpoint(block, y, use_reentrant=False)
        y = self.last(y)
        return y


class OtherOnOneRank(Blocks):
    """The same, which on rank 1 uses its first block in another way."""

    rank, how, calls = 0, "", 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        here = self.rank == 1
        y: Tensor = self.first(x)
        if here and self.how == "called twice":
            y = self.blocks[0](y)
        y = self.blocks[0](y)
        if here and (self.how == "detached" or (self.how == "detached at first" and self.calls == 1)):
            y = y.detach()
        return self.last(self.blocks[1:](y))


def step_of_others(group: ExchangeGroup, strategy: str, how: str) -> str:
    """Take a step of two micro-batches in which rank 1 uses a block in another way, and return its error."""
    module, trainer = build(group, strategy, OtherOnOneRank, accumulation=2)
    assert isinstance(module, OtherOnOneRank)
    module.rank, module.how = group.rank(), how
    try:
        with torch.enable_grad():
            trainer.step(batches(group.rank()))
    except UsageError as error:
        return str(error)
    return "ok"


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("how", ["detached at first", "called twice"])
def test_ranks_that_hold_what_they_use_need_not_use_it_alike(threads, stage, how) -> None:
    assert threads(2, step_of_others, f"scratch-fsdp:stage={stage}", how) == ["ok", "ok"]


@pytest.mark.parametrize(
    ("stage", "how", "words"),
    [
        (1, "detached", "no gradient"),
        (2, "detached", "no gradient"),
        (3, "detached", "ranks use different parameters"),
        (3, "called twice", "ranks use different parameters"),
    ],
)
def test_ranks_that_would_wait_for_each_other_are_refused(threads, stage, how, words) -> None:
    for said in threads(2, step_of_others, f"scratch-fsdp:stage={stage}", how):
        assert words in said


def holds(parameter: Tensor) -> bool:
    """Whether it owns memory for its values; a released parameter shows a single NaN."""
    return parameter.untyped_storage().nbytes() >= parameter.nbytes


SCHEDULE_LAYOUT = ModelLayout(blocks=tuple(f"blocks.{place}" for place in range(4)))


def build(
    group: ExchangeGroup, strategy: str, kind: type[Blocks] = Blocks, **settings: Any
) -> tuple[Blocks, Trainer]:
    torch.manual_seed(0)
    module = kind()
    chosen = TrainSettings(strategy=strategy, optimizer="sgd:lr=0.1:momentum=0.9", **settings)
    return module, Trainer(
        module, F.mse_loss, device=CPU, settings=chosen, layout=SCHEDULE_LAYOUT, group=group
    )


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randn(3, 5, generator=generator), torch.randn(3, 5, generator=generator)


def parameters_of(trainer: Trainer) -> list[Tensor]:
    return [value.clone() for _, value in trainer.model.named_parameters()]


def traffic_of_a_step(
    group: ExchangeGroup, strategy: str, accumulation: int, precision: str = "fp32"
) -> tuple[int, ...]:
    """Payload bytes and operations of a step, this rank's elements of parameters and of momentum."""
    with torch.enable_grad():
        _, trainer = build(group, strategy, accumulation=accumulation, precision=precision)
        data = batches(group.rank())
        trainer.step(data)
        before = group.traffic.payload_bytes, group.traffic.operations
        trainer.step(data)
    momentum = [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
    return (
        group.traffic.payload_bytes - before[0],
        group.traffic.operations - before[1],
        sum(parameter.numel() for parameter in trainer.model.parameters()),
        sum(value.numel() for value in momentum),
    )


def closed_form(size: int, stage: int, accumulation: int, shard_bytes: int = 4) -> tuple[int, ...]:
    """The expected `traffic_of_a_step`. A rank hands over its shard for a gathering, and all shards for an
    average."""
    block, around = math.ceil(BLOCK / size), math.ceil(AROUND / size)
    gathers = accumulation if stage == 3 else 1
    averages = accumulation if stage > 1 else 1
    block_gathers = 2 * gathers if stage == 3 else 1
    gathered = shard_bytes * (block_gathers * 4 * block + gathers * around)
    averaged = 4 * averages * size * (4 * block + around)
    operations = block_gathers * 4 + gathers + averages * 5
    return gathered + averaged, operations, 4 * block + around, 4 * block + around


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "size", [2, 3, 4, *(pytest.param(size, marks=pytest.mark.slow) for size in (5, 6, 7)), 8]
)
def test_bytes_sent_and_elements_kept_are_the_closed_forms(threads, size, stage, accumulation) -> None:
    found = threads(size, traffic_of_a_step, f"scratch-fsdp:stage={stage}", accumulation)
    assert found == [closed_form(size, stage, accumulation)] * size


@pytest.mark.parametrize("rank", [0, 100, 255])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_256_ranks_hand_over_what_the_closed_forms_say(rank, stage) -> None:
    found = traffic_of_a_step(RecordingGroup(rank, 256), f"scratch-fsdp:stage={stage}", 2)
    assert found == closed_form(256, stage, 2)


def test_the_order_of_a_step_at_256_ranks() -> None:
    """Each unit is gathered one ahead of its turn; an average begins before the next block's gathering."""
    group = RecordingGroup(3, 256)
    _, trainer = build(group, "scratch-fsdp")
    trainer.step(batches(3))
    del group.seen[:]
    trainer.step(batches(3))
    gather = [("_allgather_base", 4)]
    average = [("alltoall_base", 4 * 256)]
    backward = gather + gather + average + gather + average + gather + average + average + average
    assert group.seen == gather * 5 + backward


def test_parameters_gathered_in_bfloat16_are_averaged_in_single_precision() -> None:
    found = traffic_of_a_step(RecordingGroup(0, 256), "scratch-fsdp:params=bf16", 1, "bf16")
    # 8 bfloat16 are 16 bytes: 30 elements again begin anew at 32.
    assert found == closed_form(256, 3, 1, shard_bytes=2)


class Watch:
    """Notes which blocks are gathered whenever a phase begins."""

    def __init__(self, module: Blocks) -> None:
        self.module = module
        self.seen: list[tuple[str, tuple[int, int], int]] = []

    def begins(self, phase: Phase) -> None:
        gradients = sum(parameter.grad is not None for parameter in self.module.parameters())
        self.seen.append((phase.value, self.module.whole(), gradients))

    def step_done(self, loss: Tensor) -> None:
        self.begins(Phase.DATA)


WHOLE: dict[int, list[tuple[str, tuple[int, int], int]]] = {
    # Parameters stay; the gradients of the first micro-batch wait whole for those of the second.
    1: [
        ("data", (2, 4), 0), ("forward", (2, 4), 0), ("backward", (2, 4), 0),
        ("data", (2, 4), 6), ("forward", (2, 4), 6), ("backward", (2, 4), 6),
        ("optimizer", (2, 4), 0), ("data", (2, 4), 0),
    ],
    # Gradients are given up as well.
    2: [
        ("data", (2, 4), 0), ("forward", (2, 4), 0), ("backward", (2, 4), 0),
        ("data", (2, 4), 0), ("forward", (2, 4), 0), ("backward", (2, 4), 0),
        ("optimizer", (2, 4), 0), ("data", (2, 4), 0),
    ],
    # What is around the blocks is whole from its forward to the end of backward, and nothing else.
    3: [
        ("data", (0, 0), 0), ("forward", (0, 0), 0), ("backward", (2, 0), 0),
        ("data", (0, 0), 0), ("forward", (0, 0), 0), ("backward", (2, 0), 0),
        ("optimizer", (0, 0), 0), ("data", (0, 0), 0),
    ],
}  # fmt: skip


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_gathered_units_between_the_phases_of_a_step(stage) -> None:
    module, trainer = build(RecordingGroup(1, 4), f"scratch-fsdp:stage={stage}", accumulation=2)
    assert module.whole() == (0, 0)
    trainer.step(batches(1))
    trainer.observer = watch = Watch(module)
    trainer.step(batches(1))
    assert watch.seen == WHOLE[stage]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_no_more_blocks_are_whole_than_the_one_in_use_and_those_ahead(monkeypatch, ahead) -> None:
    module, trainer = build(RecordingGroup(1, 4), f"scratch-fsdp:prefetch={ahead}")
    seen: list[int] = []
    monkeypatch.setattr(Probed, "watching", staticmethod(lambda: seen.append(module.whole()[1])))
    trainer.step(batches(1))
    # Before the first block, as before the last one in backward, those ahead; at the far end nothing is left.
    way = [ahead, *(min(1 + ahead, left) for left in (4, 3, 2, 1))]
    assert seen == way + way


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_block_that_is_called_again_in_backward_gathers_none_ahead(monkeypatch, ahead) -> None:
    group = RecordingGroup(1, 4)
    module, trainer = build(group, f"scratch-fsdp:prefetch={ahead}", Recomputing)
    seen: list[int] = []
    monkeypatch.setattr(Probed, "watching", staticmethod(lambda: seen.append(module.whole()[1])))
    group.seen.clear()
    trainer.step(batches(1))
    way = [min(1 + ahead, left) for left in (4, 3, 2, 1)]
    # Each twice in backward: as it is called again, and as its gradient has come.
    assert seen == way + [whole for whole in way for _ in range(2)]
    # Every unit in forward, every block in backward.
    assert sum(name == "_allgather_base" for name, _ in group.seen) == 5 + 4


def test_a_forward_pass_alone_leaves_nothing_whole(threads) -> None:
    def evaluate(group: ExchangeGroup) -> tuple[bool, tuple[int, int]]:
        module, trainer = build(group, "scratch-fsdp")
        x = torch.ones(2, 5)
        values = dict(trainer.model.named_parameters())
        expected = x @ values["first.weight"].T
        for place in range(4):
            expected = expected @ values[f"blocks.{place}.weight"].T
        return torch.allclose(module(x), expected @ values["last.weight"].T), module.whole()

    assert threads(3, evaluate) == [(True, (0, 0))] * 3


def failing(rank: int, strategy: str, where: str, micro: int) -> tuple[list[str], tuple[int, int], bool]:
    """On a rank: a step that fails in a block while the next is gathered, then one as if it had not been."""
    found, told, left = [], [], (0, 0)
    for broken in ("", where):
        module, trainer = build(open_exchange(), strategy, accumulation=2)
        data = batches(rank)
        trainer.step(data)

        def breaking(data: Iterator[Any], module: Blocks = module) -> Iterator[Any]:
            for number, batch in enumerate(data):
                module.blocks[1].failing = where if number == micro else ""
                yield batch

        if broken:
            try:
                trainer.step(breaking(batches(9)))
            except ValueError as error:
                told.append(str(error))
            left = module.whole()
            module.blocks[1].failing = ""
        trainer.step(data)
        found.append(parameters_of(trainer))
    return told, left, all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("micro", [0, 1])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_fails_leaves_nothing_behind(ranks, stage, where, micro) -> None:
    found = ranks(2, failing, f"scratch-fsdp:stage={stage}", where, micro)
    assert found == [(["broken"], (0, 0), True)] * 2
