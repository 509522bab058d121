"""Pipelines over real ranks, against a serial loop over replicas and microbatches, in double precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pipelines
import pytest
import recorded_world
import serial_pipelines
import torch
from builders import a_cell
from torch import Tensor, nn
from torch.nn import functional as F

from harness.worker.exchange.group import open_exchange
from results.errors import UsageError
from results.layout import ModelLayout
from results.parts import ModelParts
from strategies import Trainer, TrainSettings
from strategies.catalog import STRATEGIES, group_layout
from strategies.pipeline.facts import Pipeline
from strategies.pipeline.model import _own_errors
from strategies.pipeline.order import FOLDED
from strategies.pipeline.stages import Twin, cut_model
from strategies.training.gathered import CopiesDifferError
from workloads.build import build_workload
from workloads.catalog import WORKLOADS, facts
from workloads.gpt.model import token_loss

FIRST = ["tied, clipped, accumulated", "BatchNorm, checkpointed", "one parameter a block"]
SECOND = ["tied, checkpointed, AdamW", "BatchNorm, accumulated", "frozen, clipped"]
WHOLE = [case for case in [*FIRST, *SECOND, "found, accumulated"] if "checkpointed" not in case]
"""A divided backward pass refuses activation checkpointing."""
SCHEDULES = [
    pytest.param(2, "gpipe", [*SECOND, "found, accumulated"], marks=pytest.mark.slow),
    (2, "1f1b", [*FIRST, *SECOND]),
    (2, "interleaved", [*FIRST, *SECOND]),
    (2, "zero-bubble", WHOLE),
    (2, "zbv", WHOLE),
    (2, "dualpipev", WHOLE),
    pytest.param(2, "looped-bfs", FIRST, marks=pytest.mark.slow),
    pytest.param(4, "1f1b", FIRST, marks=pytest.mark.slow),
    (4, "1f1b:dp=2", SECOND),
]
MORE_SCHEDULES = [
    *((3, schedule) for schedule in ("gpipe", "1f1b", "interleaved")),
    *((4, schedule) for schedule in ("gpipe", "interleaved", "gpipe:dp=2", "interleaved:pp=2")),
]
DIVIDED = [(2, "zero-bubble:chunks=1"), (3, "zero-bubble"), (3, "zbv"), (4, "zero-bubble:dp=2"), (4, "zbv")]
SHARDED = [
    (4, "zbv:pp=2:shard=2", [case for case in WHOLE if case != "one parameter a block"]),
    (4, "1f1b:pp=2:reshard=true:shard=2", [*FIRST[:2], *SECOND]),
    (8, "1f1b:pp=2:shard=2", SECOND),
]
MICROBATCHES = {2: 4, 3: 6, 4: 4, 8: 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "schedule", "cases"),
    [
        *SCHEDULES,
        *(pytest.param(*case, [*FIRST, *SECOND], marks=pytest.mark.slow) for case in MORE_SCHEDULES),
        *(pytest.param(*case, WHOLE, marks=pytest.mark.slow) for case in DIVIDED),
        *SHARDED,
    ],
)
def test_every_schedule_trains_as_the_model_does_in_one_piece(ranks, size, schedule, cases) -> None:
    strategy = f"pipeline:{schedule}:microbatches={MICROBATCHES[size]}"
    results = ranks(size, pipelines.train, strategy, cases)
    for case in cases:
        serial_pipelines.assert_as_serial(results, case, strategy)


EACH_SCHEDULE = ["gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "dualpipev", "zbv"]


@pytest.mark.parametrize(
    ("size", "schedule"),
    [
        *((2, schedule) for schedule in EACH_SCHEDULE),
        (4, "zbv:pp=2:shard=2"),
        (4, "1f1b:pp=2:reshard=true:shard=2"),
        *(pytest.param(4, f"{each}:pp=2:shard=2", marks=pytest.mark.slow) for each in EACH_SCHEDULE[:-1]),
    ],
)
def test_gradients_are_equal_bit_for_bit_to_sums_in_the_order_of_the_schedule(ranks, size, schedule) -> None:
    strategy = f"pipeline:{schedule}:microbatches=6"
    replicas = group_layout(strategy, size).replicas
    expected = serial_pipelines.mean_in_order(STRATEGIES.facts(strategy).shape(size), replicas)
    for result in ranks(size, pipelines.train, strategy, ["tied"]):
        gradients = result["tied"][0]["gradients"]
        assert gradients.keys() == expected.keys()
        assert [name for name, value in expected.items() if not torch.equal(gradients[name], value)] == []


@pytest.mark.slow
def test_sums_in_another_order_train_alike(ranks, other_rounding) -> None:
    strategy = "pipeline:1f1b:dp=2:microbatches=4"
    results = ranks(4, other_rounding.otherwise, pipelines.__file__, "train", strategy, SECOND)
    for case in SECOND:
        serial_pipelines.assert_as_serial(results, case, strategy)


def test_a_gradient_that_is_left_out_is_seen_unless_it_is_rounding_alone() -> None:
    strategy = "pipeline:1f1b:microbatches=4"
    gradients = serial_pipelines.Serial("BatchNorm, accumulated", strategy, 2).step(0)["gradients"]
    left_out = {name: gradients | {name: torch.zeros_like(value)} for name, value in gradients.items()}
    unseen = [name for name, ours in left_out.items() if not serial_pipelines.apart(ours, gradients)]
    # A BatchNorm takes the mean away, and with it what a bias adds that only a linear layer parts from it.
    biases = ["first.0.bias", "first.1.bias", *(f"body.{block}.0.bias" for block in range(8))]
    assert unseen == biases


def test_a_gpt_trains_as_it_does_in_one_piece(ranks) -> None:
    serial_pipelines.assert_as_serial(
        ranks(2, pipelines.train, "pipeline:1f1b", ["GPT"]), "GPT", "pipeline:1f1b"
    )


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_has_the_parameters_of_its_stages_and_the_ends_a_copy_of_what_they_share(ranks, size) -> None:
    strategy = f"pipeline:interleaved:microbatches={MICROBATCHES[size]}"
    results = ranks(size, pipelines.train, strategy, ["tied, checkpointed, AdamW", "one parameter a block"])
    for case, shared in (("tied, checkpointed, AdamW", ["wte.weight"]), ("one parameter a block", [])):
        own = [name for result in results for name in result[case][-1]["own"]]
        whole = [name for name, _ in pipelines.build(pipelines.CASES[case][0]).named_parameters()]
        assert sorted(own) == sorted([*whole, *shared])
        assert all(len(result[case][-1]["own"]) < len(whole) for result in results)


def test_bf16_and_fp16_train_as_the_model_does_in_one_piece(ranks) -> None:
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found = ranks(2, pipelines.precise_step, precision)
        module = pipelines.build("tied")
        for at in range(4):
            inputs, targets = (part.chunk(4)[at] for part in pipelines.batch("tied", 0, 0, 0))
            with torch.autocast("cpu", dtype=dtype):
                loss = token_loss(module(inputs), targets) / 4
            (loss * found[0]["scale"]).backward()
        for result in found:
            for name, parameter in module.named_parameters():
                difference = (result["gradients"][name] - parameter.grad).norm()
                # A tied table is rounded once more or less.
                assert difference <= 1e-3 * parameter.grad.norm(), name


def test_micro_batches_may_be_of_another_size_than_the_one_before(ranks) -> None:
    expected = serial_pipelines.Serial("BatchNorm, checkpointed", "pipeline:1f1b", 2).step(0)["gradients"]
    for gradients in ranks(2, pipelines.resized):
        serial_pipelines.assert_near(gradients, expected)


@pytest.mark.parametrize(
    ("size", "where", "strategy"),
    [*((3, where, "pipeline:gpipe") for where in range(3)), (4, 1, "pipeline:zbv:pp=2:shard=2")],
)
def test_an_overflow_in_one_stage_is_one_of_all(ranks, size, where, strategy) -> None:
    # The scaler begins with 2^16, and halves it where a step is left out.
    found = ranks(size, pipelines.overflowing_step, where, strategy)
    assert found == [[(2.0**15, False), (2.0**15, True)]] * size


@pytest.mark.parametrize(
    "strategy",
    [
        *("pipeline:gpipe", "pipeline:1f1b", "pipeline:interleaved:dp=2", "pipeline:zbv"),
        *("pipeline:zbv:pp=2:shard=2", "pipeline:1f1b:pp=2:reshard=true:shard=2"),
    ],
)
def test_steps_without_the_exchange_end_and_can_be_undone(ranks, strategy) -> None:
    size = 4 if "=2" in strategy else 2
    for losses, differing in ranks(size, pipelines.with_off_steps, strategy):
        assert all(torch.tensor(losses).isfinite())
        assert differing == []


def test_a_model_is_freed_when_nobody_has_it(ranks) -> None:
    assert ranks(2, pipelines.forgotten) == [(True, True)] * 2


def test_a_micro_batch_that_does_not_divide_is_refused(ranks) -> None:
    told = "UsageError: the micro-batch (10 samples) must be a multiple of microbatches (4)"
    assert ranks(2, pipelines.complaint, 10, 4) == [told] * 2


def test_an_error_of_a_stage_is_raised(ranks) -> None:
    assert ranks(2, pipelines.raising) == ["OutOfMemoryError: no memory for (3, 8)"] * 2
    with pytest.raises(RuntimeError, match="another"), _own_errors():
        raise RuntimeError("another")


# The idle share of an ideal pipeline: its closed form, worked out by hand.


def test_the_ideal_bubble_by_hand(ranks) -> None:
    for size, strategy, idle in (
        *((2, "1f1b", 1 / 4), (4, "1f1b", 3 / 4), (4, "gpipe:microbatches=8", 3 / 8)),
        # Two stages a rank, each half as long.
        (4, "interleaved:microbatches=8", 1.5 / 8),
    ):
        assert STRATEGIES.facts(f"pipeline:{strategy}").bubble(size) == pytest.approx(idle)
    # A share of the step with its bubble.
    [first, _] = ranks(2, pipelines.step_of, "tied", "pipeline:interleaved:chunks=3:microbatches=2", {})
    assert first["ideal"] == pytest.approx(1 / (3 * 2 + 1))
    [first, *_] = ranks(4, pipelines.step_of, "tied", "pipeline:1f1b:dp=2", {})
    assert first["ideal"] == pytest.approx(1 / 5)


# The stages that a plan reckons with are those that the workers cut.

WIDE = ("resnet18-32px", "resnet50")
"""Models that have eight blocks and more."""
CASES = [
    *((workload, stages) for workload in ("gpt-nano", "llama-nano", *WIDE) for stages in (2, 4)),
    *((workload, 8) for workload in WIDE),
]


@pytest.mark.parametrize(("workload", "stages"), CASES)
def test_a_plan_and_a_worker_cut_alike(workload, stages) -> None:
    built = build_workload(workload)
    worker = cut_model(built.module, Twin(built.module), built.layout, ranks=stages, stages=stages)
    parts = facts(WORKLOADS.parse(workload)).parts
    assert isinstance(parts, ModelParts)
    cell = a_cell(
        workload=workload, strategy="pipeline:1f1b", gpus=stages, micro_batch=4, model_parallel=stages
    )
    pipeline = Pipeline(STRATEGIES.parse(cell.strategy))
    planned = [stage for stages_of_rank in pipeline.stages(cell, parts) for stage in stages_of_rank]
    assert [stage.blocks for stage in planned] == list(worker.runs)


# What a step of a pipeline sends, by closed forms, and when each stage computes.


@pytest.mark.parametrize(
    ("size", "schedule", "pieces", "chunks"),
    [
        (3, "1f1b", 6, 1),
        (3, "interleaved", 6, 2),
        (4, "gpipe", 4, 1),
        (8, "1f1b", 8, 1),
        (8, "interleaved", 8, 2),
        (3, "zero-bubble", 4, 2),
        (8, "zbv", 3, 2),
        (4, "dualpipev", 8, 2),
        (3, "looped-bfs:chunks=3", 5, 3),
        (256, "zbv:dp=32", 4, 2),
        (256, "gpipe:dp=8", 3, 1),
        (256, "1f1b:dp=16", 16, 1),
    ],
)
def test_the_messages_of_a_pipeline_of_many_ranks(size, schedule, pieces, chunks) -> None:
    """The bytes of the first, the second and the last stage's rank, by the same closed form."""
    strategy = f"pipeline:{schedule}:microbatches={pieces}"
    groups = group_layout(strategy, size)
    stages = groups.pipeline * chunks
    tokens = torch.zeros(pieces, pipelines.TOKENS, dtype=torch.int64)
    for place in (0, 1, groups.pipeline - 1):
        with recorded_world.opened(place * groups.replicate, size) as (group, calls):
            trainer = Trainer(
                pipelines.Tied(stages),
                token_loss,
                device=pipelines.CPU,
                settings=TrainSettings(strategy=strategy),
                layout=ModelLayout(
                    blocks=tuple(f"body.{block}" for block in range(stages)),
                    stem=("wte",),
                    head=("norm", "wte"),
                    sample=(pipelines.TOKENS,),
                    sample_type="int64",
                ),
                group=group,
            )
            trainer.step(iter([(tokens, tokens)]))
            calls.clear()
            trainer.step(iter([(tokens, tokens)]))
            found = Counter(tuple(call) for call in calls)
        folds = schedule.startswith(FOLDED)
        own = [stage for stage in range(stages) if stage % groups.pipeline == place]
        own = [place, stages - 1 - place] if folds else own
        edges = sum(stage < stages - 1 for stage in own) + sum(stage > 0 for stage in own)
        # Where a V turns, nothing is sent.
        edges -= 2 * (folds and place == groups.pipeline - 1)
        activations = pipelines.TOKENS * pipelines.WIDTH * 4
        expected = Counter(
            {
                ("send", groups.pipeline, activations): edges * pieces,
                # What comes in over an edge goes back as a gradient.
                ("recv", groups.pipeline, activations): edges * pieces,
                ("broadcast", groups.pipeline, 8): 1,
            }
        )
        table, block = 11 * pipelines.WIDTH * 4, (pipelines.WIDTH + 1) * pipelines.WIDTH * 4
        last = 0 if folds else groups.pipeline - 1
        if place in (0, last) and not folds:
            expected["all_reduce", 2, table] += 1
        if groups.replicate > 1:
            kept = chunks * block + (place == 0) * table
            kept += (place == last) * ((not folds) * table + 2 * pipelines.WIDTH * 4)
            expected["all_reduce", groups.replicate, kept] += 1
        assert found == expected


@pytest.mark.parametrize("model", ["tied", "normed"])
def test_copies_average_each_stage_once_and_take_the_buffers_of_the_first(ranks, model) -> None:
    found = ranks(4, pipelines.step_of, model, "pipeline:1f1b:dp=2", {"accumulation": 2})
    activation = 4 * pipelines.WIDTH * (pipelines.TOKENS if model == "tied" else 1)
    for step in found:
        # Two stages: each rank sends one way over one edge, in two micro-batches of 12 rows.
        shared = 11 * pipelines.WIDTH * 4 if model == "tied" else 0
        assert step["bytes"] == 2 * pipelines.ROWS * activation + shared + step["own"] + step["buffers"] + 8
        assert step["operations"] == 2 * 4 + bool(shared) + 1 + bool(step["buffers"]) + 1


def test_in_bf16_activations_travel_as_the_next_stage_takes_them(ranks) -> None:
    # The blocks end in tanh of a bf16 norm.
    found = ranks(2, pipelines.step_of, "normed", "pipeline:1f1b", {"precision": "bf16"})
    assert [step["bytes"] for step in found] == [pipelines.ROWS * pipelines.WIDTH * 2 + 8] * 2


def test_phases_are_told_where_a_stage_computes(ranks) -> None:
    first, last = ranks(2, pipelines.step_of, "tied", "pipeline:1f1b:microbatches=2", {})
    # Data; forward from then on; F and B of two microbatches; optimizer. The first stage is one ahead.
    assert (first["phases"], last["phases"]) == ("dffffbbo.".replace("ffff", "fff"), "dffbfbo.")
    first, last = ranks(2, pipelines.step_of, "tied", "pipeline:gpipe:microbatches=2", {})
    assert (first["phases"], last["phases"]) == ("dfffbbo.", "dfffbbo.")


# A pipeline's parameters as a whole: copies of one are compared, and one without a gradient is refused.

WIDTH, VOCABULARY, BLOCKS = 4, 7, 6


class Block(nn.Module):
    """Has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.used(x))


class Tied(nn.Module):
    """Tokens to logits: the matrix of `lm_head`, which the head may call or not, is the embedding's."""

    def __init__(self, calls: str) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        self.body = nn.ModuleList(Block() for _ in range(BLOCKS))
        self._calls = calls

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stem(tokens)
        for block in self.body:
            x = block(x)
        return self.head(x)

    def stem(self, tokens: Tensor) -> Tensor:
        return self.wte(tokens)

    def head(self, x: Tensor) -> Tensor:
        return F.linear(x, self.get_submodule(self._calls).weight)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def data() -> Iterator[tuple[Tensor, Tensor]]:
    tokens = torch.arange(12).view(4, 3) % VOCABULARY
    while True:
        yield tokens, tokens.flip(0)


def trainer_of(strategy: str, *, calls: str = "wte", frozen: tuple[str, ...]) -> Trainer:
    """Train a model without the parameters whose names have this ending."""
    torch.manual_seed(0)
    module = Tied(calls)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))
    layout = ModelLayout(
        blocks=tuple(f"body.{block}" for block in range(BLOCKS)),
        stem=("wte",),
        head=(calls,),
        sample=(3,),
        sample_type="int64",
    )
    settings = TrainSettings(strategy=strategy, optimizer="sgd:lr=0.1:momentum=0.9")
    return Trainer(
        module, loss, device=torch.device("cpu"), settings=settings, layout=layout, group=open_exchange()
    )


IDLE = ("idle.weight", "idle.bias")


def told_of_copies(trainer: Trainer) -> list[str]:
    """The errors when parameters, gradients and state are asked for."""
    model, told = trainer.model, []
    asked = (model.named_parameters, model.named_gradients, partial(model.named_state, trainer.optimizer))
    for ask in asked:
        try:
            for _ in ask():
                pass
            told.append("")
        except CopiesDifferError as error:
            told.append(str(error))
    return told


def drifted(rank: int, where: int, what: str, calls: str) -> list[list[str]]:
    """On a rank: what is said before and after a value of one copy is the next that there is."""
    trainer = trainer_of("pipeline:1f1b", calls=calls, frozen=IDLE)
    trainer.step(data())
    trainer.compute_gradients(data())
    told = [told_of_copies(trainer)]
    if rank == where:
        table = next(value for value in trainer.model.parameters() if value.shape == (VOCABULARY, WIDTH))
        values: dict[str, Any] = {
            "parameter": table.detach(),
            "gradient": table.grad,
            "state": trainer.optimizer.state[table]["momentum_buffer"],
        }
        values[what][3, 2] = torch.nextafter(values[what][3, 2], torch.tensor(torch.inf))
    return [*told, told_of_copies(trainer)]


@pytest.mark.parametrize("calls", ["wte", "lm_head"])
@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.parametrize(("at", "what"), list(enumerate(("parameter", "gradient", "state"))))
def test_copies_that_differ_in_one_bit_are_told_on_all_ranks(ranks, where, at, what, calls) -> None:
    expected = [""] * 3
    expected[at] = "wte.weight is not the same on the ranks that have a copy of it"
    assert ranks(3, drifted, where, what, calls) == [[[""] * 3, expected]] * 3


def complaint(rank: int, strategy: str, frozen: tuple[str, ...]) -> str:
    """On a rank: what is said of two steps, and of the copies after them."""
    try:
        trainer = trainer_of(strategy, frozen=frozen)
        for _ in range(2):
            trainer.step(data())
    except UsageError as error:
        return str(error)
    return "".join(told_of_copies(trainer))


def test_a_trained_parameter_without_gradient_is_refused_on_all_ranks(ranks) -> None:
    there = "a parameter has no gradient on another rank, whose error names it"
    # Block 0 is in the first stage.
    frozen = tuple(f"{block}.{name}" for block in range(1, BLOCKS) for name in IDLE)
    here = (
        "no gradient came for body.0.idle.weight, body.0.idle.bias (2 parameters), and every stage updates "
        "all that it trains: freeze what is not used, or use ddp:find_unused=true or "
        "scratch-ddp:find_unused=true"
    )
    assert ranks(2, complaint, "pipeline:gpipe", frozen) == [here, there]
    assert ranks(3, complaint, "pipeline:1f1b", frozen) == [here, there, there]
    # The copies of a stage are beside each other.
    assert ranks(4, complaint, "pipeline:1f1b:dp=2", frozen) == [here, here, there, there]
    assert ranks(4, complaint, "pipeline:1f1b:pp=2:shard=2", frozen) == [here, here, there, there]


def test_a_frozen_parameter_needs_no_gradient_at_either_end(ranks) -> None:
    assert ranks(2, complaint, "pipeline:1f1b", IDLE) == [""] * 2
    assert ranks(2, complaint, "pipeline:1f1b", (*IDLE, "wte.weight")) == [""] * 2
    assert ranks(4, complaint, "pipeline:1f1b:dp=2", (*IDLE, "wte.weight")) == [""] * 4
