"""Pipelines over real ranks, against a serial loop over replicas and microbatches, in double precision."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from harness.worker.exchange import ExchangeGroup, open_exchange
from results.layout import ModelLayout
from strategies import Phase, Trainer, TrainSettings
from strategies.catalog import group_layout, microbatches
from strategies.optimizer import build_optimizer
from strategies.pipeline import _own_errors, ideal_bubble
from strategies.snapshot import Snapshot
from workloads.gpt import GPT, build_gpt, token_loss
from workloads.shapes import GPTShape

Ranks = Callable[..., list[Any]]
Batch = tuple[Tensor, Tensor]
CPU = torch.device("cpu")
BLOCKS, WIDTH, TOKENS, ROWS, STEPS = 8, 8, 5, 12, 2
SHAPE = GPTShape(layers=2, width=WIDTH, heads=2, context=6, vocabulary=11, seq=TOKENS)
NAMES = tuple(f"body.{block}" for block in range(BLOCKS))
CHAIN = ModelLayout(blocks=NAMES, stem=("first",), head=("last",), sample=(6,))
LAYOUTS = {
    "gpt": build_gpt(SHAPE).layout,
    "tied": ModelLayout(
        blocks=NAMES, stem=("wte",), head=("norm", "wte"), sample=(TOKENS,), sample_type="int64"
    ),
}


class Chain(nn.Module):
    """Blocks of 8 features between 6 and 5."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH))
        self.body = nn.Sequential(*(block() for _ in range(BLOCKS)))
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)))

    def stem(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return y

    def head(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(x)
        return y


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + F.gelu(self.linear(x))
        return y


class Tied(nn.Module):
    """Tokens to logits; the head is the embedding's table."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, WIDTH)
        self.body = nn.ModuleList(Residual() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stem(tokens)
        for block in self.body:
            x = block(x)
        return self.head(x)

    def stem(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.wte(tokens)
        return y

    def head(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.wte.weight)


class Scale(nn.Module):
    """One parameter, without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.scale


def frozen() -> nn.Module:
    """The whole of a first stage of three or more, a part of another, and what is tied in none."""
    module = Chain(normed)
    module.first.requires_grad_(False)
    for block in (0, 1, 2):
        module.body[block].requires_grad_(False)
    module.body[6][0].weight.requires_grad_(False)  # type: ignore[index]
    return module


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "gpt": lambda: GPT(SHAPE),
    "normed": lambda: Chain(normed),
    "frozen": frozen,
    "scales": lambda: Chain(Scale),
}


def build(model: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]()


def loss_of(model: str) -> Callable[[Tensor, Tensor], Tensor]:
    return token_loss if model in LAYOUTS else F.cross_entropy


def batch(model: str, step: int, micro: int, replica: int, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + replica)
    if model in LAYOUTS:
        tokens = torch.randint(SHAPE.vocabulary, (ROWS, TOKENS + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    inputs = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(5, (ROWS,), generator=generator)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied, clipped, accumulated": ("tied", {"clip_norm": 0.05, "accumulation": 2}),
    "tied, checkpointed, AdamW": ("tied", {"activation_checkpointing": True, "optimizer": "adamw:lr=0.01"}),
    "BatchNorm, accumulated": ("normed", {"accumulation": 2}),
    "BatchNorm, checkpointed": ("normed", {"activation_checkpointing": "selective"}),
    "frozen, clipped": ("frozen", {"clip_norm": 0.05}),
    "one parameter a block": ("scales", {}),
    "GPT": ("gpt", {}),
}
EVERYWHERE = [case for case in CASES if case != "GPT"]


def copied(pairs: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in pairs}


def trainer_of(
    model: str, strategy: str, group: ExchangeGroup, *, double: bool = True, **settings: Any
) -> Trainer:
    module = build(model).double() if double else build(model)
    return Trainer(
        module,
        loss_of(model),
        device=CPU,
        settings=TrainSettings(strategy=strategy, **{"optimizer": "sgd:lr=0.1:momentum=0.9", **settings}),
        layout=LAYOUTS.get(model, CHAIN),
        group=group,
    )


def train(rank: int, strategy: str, cases: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """On a rank, of each case: what each step leaves."""
    replica = group_layout(strategy, dist.get_world_size()).replica(rank)
    exchange, found = open_exchange(), {}
    for case in cases:
        model, settings = CASES[case]
        trainer = trainer_of(model, strategy, exchange, **settings)
        steps = []
        for step in range(STEPS):
            accumulation = trainer.settings.accumulation
            loss = trainer.compute_gradients(batch(model, step, at, replica) for at in range(accumulation))
            gradients = copied(trainer.model.named_gradients())
            steps.append({"loss": loss.item(), "gradients": gradients})
            trainer.update()
        steps[-1] |= {
            "parameters": copied(trainer.model.named_parameters()),
            "buffers": copied(trainer.model.named_buffers()),
            "state": dict(trainer.model.named_state(trainer.optimizer)),
            "own": [name for name, _ in trainer.model.bare.named_parameters()],
        }
        found[case] = steps
        exchange.reset()
    return found


class Serial:
    """The same on one process: replicas one after another, microbatch by microbatch."""

    def __init__(self, case: str, strategy: str, size: int) -> None:
        self.model, settings = CASES[case]
        self.settings = TrainSettings(
            strategy=strategy, **{"optimizer": "sgd:lr=0.1:momentum=0.9", **settings}
        )
        self.replicas, self.pieces = group_layout(strategy, size).replicas, microbatches(strategy)
        self.module = build(self.model).double()
        self.optimizer = build_optimizer(self.settings.optimizer, self.module.parameters())

    def step(self, step: int) -> dict[str, Any]:
        twins, losses = [], []
        for replica in range(self.replicas):
            twin = copy.deepcopy(self.module)
            losses.append(self._backward(twin, step, replica))
            twins.append(twin)
        self.optimizer.zero_grad()
        for name, parameter in self.module.named_parameters():
            shares = [twin.get_parameter(name).grad for twin in twins]
            if shares[0] is not None:
                parameter.grad = sum(shares) / self.replicas  # type: ignore[arg-type,operator]
        gradients = copied((n, p.grad) for n, p in self.module.named_parameters() if p.grad is not None)
        if self.settings.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.clip_norm)
            assert norm > 2 * self.settings.clip_norm
        self.optimizer.step()
        buffers = [copied(twin.named_buffers()) for twin in twins]
        for name, buffer in self.module.named_buffers():
            buffer.copy_(buffers[0][name])
        return {
            "losses": losses, "gradients": gradients, "buffers": buffers,
            "parameters": copied(self.module.named_parameters()),
        }  # fmt: skip

    def _backward(self, twin: nn.Module, step: int, replica: int) -> float:
        total, accumulation = 0.0, self.settings.accumulation
        for at in range(accumulation):
            inputs, targets = batch(self.model, step, at, replica)
            for piece, wanted in zip(inputs.chunk(self.pieces), targets.chunk(self.pieces), strict=True):
                loss = loss_of(self.model)(twin(piece), wanted) / (self.pieces * accumulation)
                loss.backward()
                total += loss.item()
        return total


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> None:
    """Each within `bound` of its L2 norm, in the same order."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert (ours[name].double() - value.double()).norm() <= bound * value.double().norm(), name


SCHEDULES = [(size, schedule) for size in (2, 3, 4) for schedule in ("gpipe", "1f1b", "interleaved")]
COPIES = [(4, "gpipe:dp=2"), (4, "1f1b:dp=2"), (4, "interleaved:dp=2")]
MICROBATCHES = {2: 4, 3: 6, 4: 4}


def assert_as_serial(results: list[Any], case: str, strategy: str) -> None:
    size = len(results)
    serial, groups = Serial(case, strategy, size), group_layout(strategy, size)
    found = [result[case] for result in results]
    for step in range(STEPS):
        expected = serial.step(step)
        for rank, steps in enumerate(found):
            assert_near(steps[step]["gradients"], expected["gradients"], 1e-12)
            assert steps[step]["loss"] == pytest.approx(expected["losses"][groups.replica(rank)], rel=1e-12)
    for rank, steps in enumerate(found):
        # AdamW divides by a root of gradients, some of which are rounding alone.
        bound = 1e-9 if "AdamW" in case else 1e-12
        assert_near(steps[-1]["parameters"], expected["parameters"], bound)
        assert_near(steps[-1]["buffers"], expected["buffers"][groups.replica(rank)], 1e-12)
    assert_all_have_the_same(serial, [steps[-1] for steps in found])


@pytest.mark.parametrize(("size", "schedule"), [*SCHEDULES, *COPIES])
def test_every_schedule_trains_as_the_model_does_in_one_piece(ranks: Ranks, size: int, schedule: str) -> None:
    strategy = f"pipeline:{schedule}:microbatches={MICROBATCHES[size]}"
    results = ranks(size, train, strategy, EVERYWHERE)
    for case in EVERYWHERE:
        assert_as_serial(results, case, strategy)


def test_a_gpt_trains_as_it_does_in_one_piece(ranks: Ranks) -> None:
    assert_as_serial(ranks(2, train, "pipeline:1f1b", ["GPT"]), "GPT", "pipeline:1f1b")


def assert_all_have_the_same(serial: Serial, found: list[dict[str, Any]]) -> None:
    """What ranks say of the whole is equal bit for bit, and of the optimizer's state complete."""
    theirs = {
        name: serial.optimizer.state[value]
        for name, value in serial.module.named_parameters()
        if value.requires_grad
    }
    for other in found:
        for name, value in found[0]["parameters"].items():
            assert torch.equal(other["parameters"][name], value), name
        assert list(other["state"]) == list(theirs)
        for name, state in theirs.items():
            assert other["state"][name].keys() == state.keys()
            for key, value in state.items():
                assert torch.equal(other["state"][name][key], found[0]["state"][name][key])
                torch.testing.assert_close(other["state"][name][key], value, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_has_the_parameters_of_its_stages_and_the_ends_a_copy_of_what_they_share(
    ranks: Ranks, size: int
) -> None:
    strategy = f"pipeline:interleaved:microbatches={MICROBATCHES[size]}"
    results = ranks(size, train, strategy, ["tied, checkpointed, AdamW", "one parameter a block"])
    for case, shared in (("tied, checkpointed, AdamW", ["wte.weight"]), ("one parameter a block", [])):
        own = [name for result in results for name in result[case][-1]["own"]]
        whole = [name for name, _ in build(CASES[case][0]).named_parameters()]
        assert sorted(own) == sorted([*whole, *shared])
        assert all(len(result[case][-1]["own"]) < len(whole) for result in results)


class Noted:
    """The phases of a step as they begin."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begins(self, phase: Phase) -> None:
        self.seen.append(phase.value[0])

    def step_done(self, loss: Tensor) -> None:
        self.seen.append(".")


def step_of(rank: int, model: str, strategy: str, settings: dict[str, Any]) -> dict[str, Any]:
    """On a rank, in single precision: the second step's bytes, operations and phases."""
    exchange = open_exchange()
    trainer = trainer_of(model, strategy, exchange, double=False, **settings)
    micro = trainer.settings.accumulation
    replica = group_layout(strategy, dist.get_world_size()).replica(rank)
    batches = [batch(model, step, at, replica, torch.float32) for step in range(2) for at in range(micro)]
    trainer.step(iter(batches[:micro]))
    before = exchange.traffic.payload_bytes, exchange.traffic.operations
    trainer.observer = noted = Noted()
    trainer.step(iter(batches[micro:]))
    found = {
        "bytes": exchange.traffic.payload_bytes - before[0],
        "operations": exchange.traffic.operations - before[1],
        "phases": "".join(noted.seen),
        "own": sum(4 * value.numel() for value in trainer.model.bare.parameters()),
        "buffers": sum(value.nbytes for value in trainer.model.bare.buffers()),
        "ideal": trainer.model.bubble_ideal,
    }
    exchange.reset()
    return found


@pytest.mark.parametrize(("size", "schedule"), SCHEDULES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_travels_is_the_closed_form(ranks: Ranks, size: int, schedule: str, accumulation: int) -> None:
    """A rank sends each microbatch's activations (rows / m, 5, 8) from each of its stages to the next one,
    and their gradients to the one before; the ends sum the table of 11 x 8; all take part in the loss."""
    pieces = MICROBATCHES[size]
    strategy = f"pipeline:{schedule}:microbatches={pieces}"
    stages = size * (2 if schedule == "interleaved" else 1)
    found = ranks(size, step_of, "tied", strategy, {"accumulation": accumulation})
    for rank, step in enumerate(found):
        own = [stage for stage in range(stages) if stage % size == rank]
        edges = sum(stage < stages - 1 for stage in own) + sum(stage > 0 for stage in own)
        end = rank in (0, size - 1)
        assert step["bytes"] == (accumulation * edges * ROWS * TOKENS * WIDTH * 4 + end * 11 * WIDTH * 4 + 8)
        assert step["operations"] == accumulation * edges * pieces + end + 1


@pytest.mark.parametrize(
    ("size", "schedule", "pieces", "chunks"),
    [(8, "1f1b", 8, 1), (8, "interleaved", 8, 2), (256, "gpipe:dp=8", 3, 1), (256, "1f1b:dp=16", 16, 1)],
)
def test_what_travels_between_many_ranks(
    recorded_world: ModuleType, size: int, schedule: str, pieces: int, chunks: int
) -> None:
    """Of the first, the second and the last stage's rank, by the same closed form."""
    strategy = f"pipeline:{schedule}:microbatches={pieces}"
    groups = group_layout(strategy, size)
    stages = groups.pipeline * chunks
    tokens = torch.zeros(pieces, TOKENS, dtype=torch.int64)
    for place in (0, 1, groups.pipeline - 1):
        with recorded_world.opened(place * groups.replicate, size) as (group, calls):
            trainer = Trainer(
                Tied(stages),
                token_loss,
                device=CPU,
                settings=TrainSettings(strategy=strategy),
                layout=ModelLayout(
                    blocks=tuple(f"body.{block}" for block in range(stages)),
                    stem=("wte",),
                    head=("norm", "wte"),
                    sample=(TOKENS,),
                    sample_type="int64",
                ),
                group=group,
            )
            trainer.step(iter([(tokens, tokens)]))
            calls.clear()
            trainer.step(iter([(tokens, tokens)]))
            found = Counter(tuple(call) for call in calls)
        own = [stage for stage in range(stages) if stage % groups.pipeline == place]
        edges = sum(stage < stages - 1 for stage in own) + sum(stage > 0 for stage in own)
        activations = TOKENS * WIDTH * 4
        expected = Counter(
            {
                ("send", groups.pipeline, activations): edges * pieces,
                # What comes in over an edge goes back as a gradient.
                ("recv", groups.pipeline, activations): edges * pieces,
                ("broadcast", groups.pipeline, 8): 1,
            }
        )
        table, block = 11 * WIDTH * 4, (WIDTH + 1) * WIDTH * 4
        if place in (0, groups.pipeline - 1):
            expected["all_reduce", 2, table] += 1
        if groups.replicate > 1:
            kept = chunks * block + (place == 0) * table
            kept += (place == groups.pipeline - 1) * (table + 2 * WIDTH * 4)
            expected["all_reduce", groups.replicate, kept] += 1
        assert found == expected


@pytest.mark.parametrize("model", ["tied", "normed"])
def test_copies_average_each_stage_once_and_take_the_buffers_of_the_first(ranks: Ranks, model: str) -> None:
    found = ranks(4, step_of, model, "pipeline:1f1b:dp=2", {"accumulation": 2})
    activation = 4 * WIDTH * (TOKENS if model == "tied" else 1)
    for step in found:
        # Two stages: each rank sends one way over one edge, in two micro-batches of 12 rows.
        shared = 11 * WIDTH * 4 if model == "tied" else 0
        assert step["bytes"] == 2 * ROWS * activation + shared + step["own"] + step["buffers"] + 8
        assert step["operations"] == 2 * 4 + bool(shared) + 1 + bool(step["buffers"]) + 1


def test_in_bf16_activations_travel_as_the_next_stage_takes_them(ranks: Ranks) -> None:
    # The blocks end in tanh of a bf16 norm.
    found = ranks(2, step_of, "normed", "pipeline:1f1b", {"precision": "bf16"})
    assert [step["bytes"] for step in found] == [ROWS * WIDTH * 2 + 8] * 2


def test_phases_are_told_where_a_stage_computes(ranks: Ranks) -> None:
    first, last = ranks(2, step_of, "tied", "pipeline:1f1b:microbatches=2", {})
    # Data; forward from then on; F and B of two microbatches; optimizer. The first stage is one ahead.
    assert (first["phases"], last["phases"]) == ("dffffbbo.".replace("ffff", "fff"), "dffbfbo.")
    first, last = ranks(2, step_of, "tied", "pipeline:gpipe:microbatches=2", {})
    assert (first["phases"], last["phases"]) == ("dfffbbo.", "dfffbbo.")


def test_bf16_and_fp16_train_as_the_model_does_in_one_piece(ranks: Ranks) -> None:
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found = ranks(2, precise_step, precision)
        module = build("tied")
        for at in range(4):
            inputs, targets = (part.chunk(4)[at] for part in batch("tied", 0, 0, 0))
            with torch.autocast("cpu", dtype=dtype):
                loss = token_loss(module(inputs), targets) / 4
            (loss * found[0]["scale"]).backward()
        for result in found:
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None
                difference = (result["gradients"][name] - parameter.grad).norm()
                # A tied table is rounded once more or less.
                assert difference <= 1e-3 * parameter.grad.norm(), name


def precise_step(rank: int, precision: str) -> dict[str, Any]:
    exchange = open_exchange()
    trainer = trainer_of("tied", "pipeline:1f1b", exchange, double=False, precision=precision)
    trainer.compute_gradients(iter([batch("tied", 0, 0, 0)]))
    found = {
        "gradients": copied(trainer.model.named_gradients()),
        "scale": trainer.scaler.get_scale(),
    }
    exchange.reset()
    return found


def overflowing_step(rank: int, where: int) -> list[tuple[float, bool]]:
    """On a rank: the scaler's factor after each of two steps, and whether the parameters moved; in the first
    one a gradient overflows on rank `where`."""
    exchange = open_exchange()
    trainer = trainer_of("tied", "pipeline:gpipe", exchange, double=False, precision="fp16")
    found = []
    for step in range(2):
        before = copied(trainer.model.bare.named_parameters())
        trainer.compute_gradients(iter([batch("tied", step, 0, 0)]))
        if step == 0 and rank == where:
            next(p for p in trainer.model.parameters() if p.grad is not None).grad.fill_(torch.inf)  # type: ignore[union-attr]
        trainer.update()
        after = trainer.model.bare.named_parameters()
        found.append((trainer.scaler.get_scale(), any(not torch.equal(p, before[n]) for n, p in after)))
    exchange.reset()
    return found


@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_overflow_in_one_stage_is_one_of_all(ranks: Ranks, where: int) -> None:
    # The scaler begins with 2^16, and halves it where a step is left out.
    assert ranks(3, overflowing_step, where) == [[(2.0**15, False), (2.0**15, True)]] * 3


def with_off_steps(rank: int, strategy: str, off: bool) -> tuple[list[float], dict[str, Tensor]]:
    """On a rank: two steps, some without the exchange which are undone, and two more."""
    exchange = open_exchange()
    trainer = trainer_of("normed", strategy, exchange)
    replica = group_layout(strategy, dist.get_world_size()).replica(rank)
    batches = iter([batch("normed", step, 0, replica) for step in range(6)])
    for step in range(2):
        trainer.step(iter([batch("normed", step, 0, replica)]))
    losses = []
    if off:
        snapshot = Snapshot(trainer)
        exchange.traffic.enabled = False
        before = exchange.traffic.operations
        losses = [trainer.step(batches).item() for _ in range(3)]
        assert exchange.traffic.operations == before
        exchange.traffic.enabled = True
        snapshot.restore()
    for step in range(2, 4):
        trainer.step(iter([batch("normed", step, 0, replica)]))
    found = copied(trainer.model.named_parameters()) | copied(trainer.model.named_buffers())
    exchange.reset()
    return losses, found


@pytest.mark.parametrize("strategy", ["pipeline:gpipe", "pipeline:1f1b", "pipeline:interleaved:dp=2"])
def test_steps_without_the_exchange_end_and_can_be_undone(ranks: Ranks, strategy: str) -> None:
    size = 4 if "dp" in strategy else 2
    plain = ranks(size, with_off_steps, strategy, False)
    for (losses, found), (_, expected) in zip(
        ranks(size, with_off_steps, strategy, True), plain, strict=True
    ):
        assert all(torch.tensor(losses).isfinite())
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def forgotten(rank: int) -> tuple[bool, bool]:
    exchange = open_exchange()
    trainer = trainer_of("tied", "pipeline:interleaved", exchange)
    trainer.step(iter([batch("tied", 0, 0, 0)]))
    model, module = weakref.ref(trainer.model), weakref.ref(trainer.model.bare)
    gc.disable()
    try:
        del trainer
        return model() is None, module() is None
    finally:
        gc.enable()
        exchange.reset()


def test_a_model_is_freed_when_nobody_has_it(ranks: Ranks) -> None:
    assert ranks(2, forgotten) == [(True, True)] * 2


def complaint(rank: int, rows: int, microbatches: int) -> str:
    exchange = open_exchange()
    trainer = trainer_of("normed", f"pipeline:gpipe:microbatches={microbatches}", exchange)
    inputs, targets = batch("normed", 0, 0, 0)
    try:
        trainer.step(iter([(inputs[:rows], targets[:rows])]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        exchange.reset()
    return ""


def test_a_micro_batch_that_does_not_divide_is_refused(ranks: Ranks) -> None:
    told = "UsageError: a micro-batch of 10 does not divide into 4 microbatches"
    assert ranks(2, complaint, 10, 4) == [told] * 2


def resized(rank: int) -> dict[str, Tensor]:
    """On a rank: a step of 8 rows, then one of 12."""
    exchange = open_exchange()
    trainer = trainer_of("normed", "pipeline:1f1b", exchange, optimizer="sgd:lr=0")
    inputs, targets = batch("normed", 0, 0, 0)
    trainer.step(iter([(inputs[:8], targets[:8])]))
    trainer.compute_gradients(iter([(inputs, targets)]))
    gradients = copied(trainer.model.named_gradients())
    exchange.reset()
    return gradients


def test_micro_batches_may_be_of_another_size_than_the_one_before(ranks: Ranks) -> None:
    expected = Serial("BatchNorm, checkpointed", "pipeline:1f1b", 2).step(0)["gradients"]
    for gradients in ranks(2, resized):
        assert_near(gradients, expected, 1e-12)


def raising(rank: int) -> str:
    """On a rank: what comes of an error in a stage; without the exchange nobody waits for the others."""
    exchange = open_exchange()
    trainer = trainer_of("normed", "pipeline:gpipe", exchange)
    trainer.step(iter([batch("normed", 0, 0, 0)]))
    for block in trainer.model.bare.get_submodule("body").children():
        block.forward = fail
    exchange.traffic.enabled = False
    try:
        trainer.step(iter([batch("normed", 1, 0, 0)]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        exchange.reset()
    return ""


def fail(x: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("no memory for (3, 8)")


def test_what_a_stage_raises_is_raised(ranks: Ranks) -> None:
    assert ranks(2, raising) == ["OutOfMemoryError: no memory for (3, 8)"] * 2
    with pytest.raises(RuntimeError, match="another"), _own_errors():
        raise RuntimeError("another")


def idle_share(order: list[list[tuple[str, int]]], pieces: int) -> float:
    """Of stages that take 1 for a forward and 2 for a backward pass, in the order of each: by simulation."""
    done: dict[tuple[int, str, int], int] = {}
    free, todo = [0] * len(order), [list(each) for each in order]
    while any(todo):
        for stage, each in enumerate(todo):
            while each:
                kind, piece = each[0]
                before = (stage - 1, "F", piece) if kind == "F" else (stage + 1, "B", piece)
                if before[0] in range(len(order)) and before not in done:
                    break
                begin = max(free[stage], done.get(before, 0))
                free[stage] = done[stage, kind, piece] = begin + (1 if kind == "F" else 2)
                each.pop(0)
    return 1 - 3 * pieces / max(free)


def gpipe_order(stages: int, pieces: int) -> list[list[tuple[str, int]]]:
    return [[(kind, piece) for kind in "FB" for piece in range(pieces)] for _ in range(stages)]


def one_f_one_b_order(stages: int, pieces: int) -> list[list[tuple[str, int]]]:
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage, pieces)
        order = [("F", piece) for piece in range(ahead)]
        for piece in range(pieces):
            order.append(("B", piece))
            if ahead + piece < pieces:
                order.append(("F", ahead + piece))
        orders.append(order)
    return orders


@pytest.mark.parametrize("order", [gpipe_order, one_f_one_b_order])
@pytest.mark.parametrize(("stages", "pieces"), [(2, 4), (3, 6), (4, 8), (4, 4), (8, 32)])
def test_the_ideal_bubble_is_that_of_a_simulation(order: Any, stages: int, pieces: int) -> None:
    assert ideal_bubble(stages, pieces) == pytest.approx(idle_share(order(stages, pieces), pieces))


def test_the_ideal_bubble_by_hand(ranks: Ranks) -> None:
    assert ideal_bubble(4, 8) == 3 / 11
    # Two stages a rank, each half as long: (p - 1) / v of 8 + (p - 1) / v.
    assert ideal_bubble(4, 8, 2) == pytest.approx(1.5 / 9.5)
    [first, _] = ranks(2, step_of, "tied", "pipeline:interleaved:chunks=3:microbatches=2", {})
    assert first["ideal"] == 1 / (3 * 2 + 1)
    [first, *_] = ranks(4, step_of, "tied", "pipeline:1f1b:dp=2", {})
    assert first["ideal"] == 1 / 5
