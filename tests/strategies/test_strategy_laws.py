"""The laws of every strategy that trains replicas, whatever it exchanges: over real ranks.

A new strategy needs a line in the tables: with what it trains as a loop over the replicas on one process
does, how it averages, clips, leaves out a step that overflowed, undoes steps without exchange, and that
nothing holds its model. What it sends in a step is compared with its closed form in test_traffic.py.
"""

from __future__ import annotations

from typing import Any

import data_parallel as replicas
import pytest
import split_models
import torch
from torch import nn

from harness.worker.exchange.group import open_exchange
from strategies import Trainer, TrainSettings

Settings = dict[str, Any]
SGD, ADAMW = "sgd:lr=0.1:momentum=0.9", "adamw:lr=0.01:weight_decay=0.1"
DDP = "ddp:bucket_mb=0.001"
SCRATCH = "scratch-ddp:bucket_mb=0.001:first_bucket_mb=0.001"
"""About 260 floats: the models of data_parallel.py have several buckets."""
FSDP, ZERO1 = "scratch-fsdp:stage={}", "zero1:bucket_mb=0.001"


def case(strategy: str, model: str, **settings: Any) -> Any:
    """A parameter of a test: the model and the settings, with an id that says both."""
    options = (f"{name}={value}" for name, value in settings.items())
    return pytest.param(
        model,
        {"strategy": strategy, "optimizer": SGD, **settings},
        id=" ".join([strategy, model, *options]),
    )


REPLICAS = [
    # torch's DDP alone, and by our hook.
    case("ddp", "normed"),
    case("ddp", "normed", accumulation=2),
    case(DDP, "dropped"),
    case(f"{DDP}:bucket_view=true", "dropped", accumulation=2),
    case("ddp:bucket_view=true", "shared"),
    case(DDP, "shared", accumulation=2),
    case("ddp:find_unused=true", "unused"),
    case(f"{DDP}:find_unused=true", "unused", accumulation=2),
    case(f"{DDP}:static_graph=true", "normed"),
    case("ddp", "shared", clip_norm=0.05),
    case("ddp", "normed", collective="ring"),
    case(DDP, "dropped", collective="ring"),
    case(f"{DDP}:bucket_view=true", "normed", collective="tree", accumulation=2),
    case("ddp", "shared", collective="ring", clip_norm=0.05),
    case(f"{DDP}:static_graph=true", "normed", collective="ring"),
    case("ddp", "mixed", collective="ring"),
    case("ddp", "images", collective="ring", memory_format="channels_last"),
    case("scratch-ddp", "normed"),
    case("scratch-ddp", "normed", accumulation=2),
    case(SCRATCH, "dropped"),
    case(SCRATCH, "dropped", accumulation=2),
    case("scratch-ddp", "shared"),
    case(SCRATCH, "shared", accumulation=2),
    case("scratch-ddp:find_unused=true", "unused"),
    case(f"{SCRATCH}:find_unused=true", "unused", accumulation=2),
    case("scratch-ddp", "mixed"),
    case(SCRATCH, "mixed"),
    case("scratch-ddp", "embedded"),
    case(SCRATCH, "embedded", accumulation=2),
    case("scratch-ddp", "shared", clip_norm=0.05),
    case("scratch-ddp", "dropped", activation_checkpointing=True),
    case("scratch-ddp", "normed", activation_checkpointing=True, accumulation=2),
    case(SCRATCH, "images", memory_format="channels_last"),
    case(SCRATCH, "normed", collective="ring"),
    case(f"{SCRATCH}:find_unused=true", "unused", collective="tree"),
    case("zero1", "normed"),
    case("zero1", "normed", accumulation=2),
    case(ZERO1, "dropped"),
    case("zero1", "dropped", activation_checkpointing=True),
    case("zero1", "normed", clip_norm=0.1),
    case("zero1", "shared"),
    case("zero1", "images"),
    case("fsdp", "normed"),
    case("fsdp", "normed", accumulation=2),
    case("fsdp:reshard=false", "normed"),
    case("zero2", "dropped", accumulation=2),
    case("fsdp:prefetch=1", "dropped"),
    case("fsdp:offload=cpu", "dropped"),
    case("fsdp", "dropped", activation_checkpointing=True),
    case("fsdp", "shared"),
    case("fsdp", "images"),
    *(
        case(FSDP.format(stage), model)
        for stage in (1, 3)
        for model in ("normed", "dropped", "shared", "mixed", "embedded", "images")
    ),
    case("scratch-fsdp:offload=cpu", "normed"),
    case("scratch-fsdp", "dropped", activation_checkpointing=True),
    case(FSDP.format(1), "normed", accumulation=2),
]
UNITS = [
    *(case(FSDP.format(2), model) for model in ("normed", "shared", "mixed", "embedded")),
    # Units of blocks: tied, frozen in parts, of one parameter, called twice, that checkpoint themselves.
    *(
        case(FSDP.format(stage), model)
        for stage in (1, 2, 3)
        for model in ("deep", "tied", "frozen", "one each", "repeated", "recomputing", "stochastic")
    ),
    case("scratch-fsdp", "deep", optimizer=ADAMW),
    case("scratch-fsdp:stage=1:prefetch=0", "tied", optimizer=ADAMW),
    case("scratch-fsdp", "stochastic", activation_checkpointing=True),
    case("scratch-fsdp", "tied", activation_checkpointing="selective"),
    case("scratch-fsdp", "frozen", activation_checkpointing=True),
    case("scratch-fsdp:prefetch=8", "frozen"),
    case("scratch-fsdp:prefetch=0", "repeated"),
    case(FSDP.format(1), "stochastic", accumulation=3),
    case("zero1", "deep", optimizer=ADAMW),
    case("fsdp", "deep", optimizer=ADAMW),
]


@pytest.mark.xdist_group("two ranks")
@pytest.mark.parametrize(("model", "settings"), [*REPLICAS, *UNITS])
def test_two_ranks_train_as_a_serial_loop_does_bit_for_bit(ranks, model, settings) -> None:
    replicas.assert_as_serial(ranks(2, replicas.train, model, settings), model, settings)


@pytest.mark.slow
@pytest.mark.xdist_group("three ranks")
@pytest.mark.parametrize(("model", "settings"), REPLICAS)
def test_three_ranks_agree_with_the_serial_loop_within_rounding(ranks, model, settings) -> None:
    # 24, 8 and 5 rows over three ranks: of the last some rank has a row less.
    replicas.assert_near_serial(ranks(3, replicas.train, model, settings), model, settings)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        case(SCRATCH, "dropped", accumulation=2),
        case(ZERO1, "dropped"),
        # Five rows: 2, 2, 1 and none.
        case("fsdp", "normed", accumulation=2),
        case("scratch-fsdp", "mixed"),
    ],
)
def test_four_ranks_agree_with_the_serial_loop_within_rounding(ranks, model, settings) -> None:
    replicas.assert_near_serial(ranks(4, replicas.train, model, settings), model, settings)


@pytest.mark.parametrize(
    ("model", "settings"), [case(SCRATCH, "embedded"), case(f"{SCRATCH}:find_unused=true", "unused")]
)
def test_one_rank_trains_as_if_it_were_alone(ranks, model, settings) -> None:
    replicas.assert_as_serial(ranks(1, replicas.train, model, settings), model, settings)


SPLIT: list[Any] = [
    (2, "zero1", "gpt", {"optimizer": ADAMW, "accumulation": 2, "clip_norm": 0.1}),
    (3, "zero1", "frozen", {"accumulation": 2, "clip_norm": 0.1}),
    (2, "tp", "gpt", {}),
    # A head on each.
    (4, "tp", "gpt", {"optimizer": ADAMW}),
    (4, "tp", "llama", {"clip_norm": 0.1}),
    # Queries, keys and values are split in three ways.
    (2, "tp", "grouped", {"optimizer": ADAMW}),
    (2, "tp", "grouped", {"clip_norm": 0.1}),
    (2, "tp", "llama", {"optimizer": ADAMW, "accumulation": 2}),
    (2, "tp", "gpt", {"activation_checkpointing": True}),
    (2, "tp", "llama", {"activation_checkpointing": "selective"}),
    (2, "tp", "frozen", {"clip_norm": 0.1}),
    (2, "tp:sequence=true", "gpt", {"optimizer": ADAMW, "accumulation": 2, "clip_norm": 0.1}),
    (4, "tp:sequence=true", "llama", {"activation_checkpointing": True}),
    (2, "tp:sequence=true", "grouped", {"activation_checkpointing": "selective"}),
    (2, "tp:sequence=true", "frozen", {"clip_norm": 0.1}),
    (2, "hsdp", "gpt", {}),
    (4, "hsdp", "grouped", {"node_size": 2, "optimizer": ADAMW, "accumulation": 2, "clip_norm": 0.1}),
    pytest.param(4, "hsdp:offload=cpu:reshard=false", "gpt", {"node_size": 2}, marks=pytest.mark.slow),
    (4, "fsdp:tp=2", "grouped", {"accumulation": 2, "clip_norm": 0.1}),
    (4, "fsdp:tp=2", "llama", {"optimizer": ADAMW, "activation_checkpointing": True}),
    pytest.param(4, "fsdp:tp=2", "frozen", {"clip_norm": 0.1}, marks=pytest.mark.slow),
    (4, "fsdp:tp=2:sequence=true", "grouped", {"accumulation": 2, "clip_norm": 0.1}),
    (4, "manual:reshard.checkpoint+keep:tp=2:sequence=true", "gpt", {"clip_norm": 0.1}),
    pytest.param(
        8, "hsdp:tp=2:sequence=true", "gpt", {"node_size": 4, "clip_norm": 0.1}, marks=pytest.mark.slow
    ),
    pytest.param(
        8, "hsdp:tp=2", "gpt", {"node_size": 4, "optimizer": ADAMW, "clip_norm": 0.1}, marks=pytest.mark.slow
    ),
    (2, "manual:reshard.checkpoint+keep", "gpt", {"optimizer": ADAMW}),
    (3, "manual:keep.offload+reshard.checkpoint.offload", "gpt", {"accumulation": 2}),
    (4, "manual:reshard.checkpoint+keep:tp=2", "gpt", {"clip_norm": 0.1}),
]


@pytest.mark.slow
@pytest.mark.xdist_group("split models")
@pytest.mark.parametrize(("size", "strategy", "model", "settings"), SPLIT)
def test_ranks_that_split_a_model_train_as_a_loop_over_the_replicas_does(
    ranks, size, strategy, model, settings
) -> None:
    """Gradients, parameters and the optimizer's state, in double precision."""
    settings = {"strategy": strategy, "optimizer": SGD, **settings}
    split_models.assert_as_serial(ranks(size, split_models.train, model, settings), model, settings)


@pytest.mark.parametrize(
    ("size", "strategy", "exchange"),
    [
        *(
            (size, strategy, exchange)
            for size in (1, 2, 3, 4)
            for strategy, exchange in (
                ("ddp", {}),
                (f"{DDP}:bucket_view=true", {}),
                ("ddp", {"collective": "ring"}),
                (f"{DDP}:bucket_view=true", {"collective": "tree"}),
                ("scratch-ddp", {}),
                (f"{SCRATCH}:find_unused=true", {}),
            )
        ),
        *((size, strategy, {}) for size in (2, 3, 4) for strategy in ("zero1", "fsdp", "scratch-fsdp")),
    ],
)
def test_integer_gradients_are_averaged_exactly_on_any_number_of_ranks(
    ranks, size, strategy, exchange
) -> None:
    weight = torch.tensor(dict(replicas.INTEGER_WEIGHTS)[size])
    for parameters in ranks(size, replicas.integer_step, strategy, exchange):
        assert torch.equal(parameters["weight"], weight)


@pytest.mark.parametrize("strategy", [DDP, SCRATCH])
def test_a_parameter_that_no_replica_uses_has_no_gradient_and_stays(ranks, strategy) -> None:
    settings = {"strategy": f"{strategy}:find_unused=true", "optimizer": SGD, "accumulation": 2}
    first, _ = ranks(2, replicas.train, "unused", settings)
    assert "always.weight" in first[-1]["gradients"]
    assert "never.weight" not in first[-1]["gradients"]
    assert torch.equal(first[-1]["parameters"]["never.weight"], first[0]["start"]["never.weight"])


@pytest.mark.parametrize(
    ("settings", "exchanges"),
    [
        # The model is one bucket.
        ({"strategy": "ddp"}, 1),
        ({"strategy": "ddp:bucket_view=true"}, 1),
        # And who used what.
        ({"strategy": "ddp:find_unused=true"}, 2),
        # A ring of two: each sends one segment to sum it, and one that is summed.
        ({"strategy": "ddp", "collective": "ring"}, 2),
        ({"strategy": "scratch-ddp"}, 1),
        ({"strategy": "scratch-ddp:find_unused=true"}, 2),
    ],
)
def test_nothing_is_exchanged_before_the_last_micro_batch(ranks, settings, exchanges) -> None:
    for seen in ranks(2, replicas.count_exchanges, settings):
        before = ["data", "forward", "backward"] * 3
        assert seen[:9] == [(phase, 0) for phase in before]
        assert seen[9:] == [("optimizer", exchanges), ("done", exchanges)]


@pytest.mark.parametrize(
    ("strategy", "model", "compression"),
    [
        ("ddp", "normed", "topk:0.3"),
        (DDP, "images", "topk:0.3"),
        (DDP, "shared", "powersgd:1"),
        ("ddp", "images", "powersgd:1"),
        (DDP, "normed", "torch-powersgd:1"),
        ("ddp", "images", "torch-powersgd:1"),
        (SCRATCH, "images", "topk:0.3"),
        (SCRATCH, "normed", "powersgd:1"),
    ],
)
def test_a_compressed_exchange_keeps_what_it_does_not_apply(ranks, strategy, model, compression) -> None:
    # Five steps: buckets are formed anew after the first, and torch's compressor is dense in the first two.
    form = "channels_last" if model == "images" else "contiguous"
    settings = {"strategy": strategy, "compression": compression, "memory_format": form}
    results = ranks(3, replicas.train, model, settings, 5)
    lossy_steps = 3 if compression.startswith("torch") else 5
    assert replicas.assert_law_is_kept(results, model, settings) == lossy_steps


SHARDING = ["fsdp", *(FSDP.format(stage) for stage in (1, 2, 3))]


@pytest.mark.parametrize("strategy", SHARDING)
def test_clipping_is_by_the_norm_of_all_shards(ranks, strategy) -> None:
    settings = {"strategy": strategy, "optimizer": "sgd:lr=1:momentum=0", "clip_norm": 0.05}
    for result in ranks(3, replicas.train, "normed", settings):
        first = result[0]
        moved = [(first["parameters"][name] - first["start"][name]).flatten() for name in first["gradients"]]
        gradient = torch.cat([value.flatten() for value in first["gradients"].values()])
        assert gradient.norm() > 0.1
        torch.testing.assert_close(-torch.cat(moved), gradient * 0.05 / gradient.norm(), rtol=1e-4, atol=1e-7)


Overflow = list[tuple[int, float, torch.Tensor]]


def overflowing_steps(rank: int, settings: Settings) -> Overflow:
    """On a rank, of each step: what its update exchanges, the scaler's factor and the parameters after it.

    The loss is y t with t = (0, 0, 0, 4), so that the gradient of the last row alone is 4 x, times the
    factor, in fp16, and x = 1/4 (1, 0, 0, 0): what overflows lies in the last rank's shard.
    """
    group = open_exchange()
    module = nn.Linear(4, 4, bias=False)
    nn.init.ones_(module.weight)
    trainer = Trainer(
        module,
        lambda outputs, targets: (outputs * targets).sum(),
        device=torch.device("cpu"),
        settings=TrainSettings(precision="fp16", optimizer="sgd:lr=1:momentum=0", **settings),
        group=group,
    )
    found = []
    for _ in range(4):
        trainer.compute_gradients(iter([(torch.eye(4)[:1] / 4, 4 * torch.eye(4)[3:])]))
        before = group.traffic.operations
        trainer.update()
        exchanged = group.traffic.operations - before
        ((_, whole),) = trainer.model.named_parameters()
        found.append((exchanged, trainer.scaler.get_scale(), whole.clone()))
    return found


@pytest.mark.parametrize(
    ("size", "settings", "exchanges"),
    [
        (2, {"strategy": "ddp"}, [0] * 4),
        (2, {"strategy": "scratch-ddp"}, [0] * 4),
        # Both ranks send their parameters on where there is an update.
        (2, {"strategy": "zero1"}, [0, 0, 0, 2]),
        # What ranks agree on.
        (2, {"strategy": "fsdp"}, [1] * 4),
        # And the norm of all gradients.
        (2, {"strategy": "fsdp:offload=cpu", "clip_norm": 100.0}, [2] * 4),
        (4, {"strategy": "hsdp", "node_size": 2}, [1] * 4),
        (2, {"strategy": "scratch-fsdp:stage=1"}, [1] * 4),
        (2, {"strategy": "scratch-fsdp"}, [1] * 4),
    ],
)
def test_a_shard_that_overflows_makes_all_ranks_leave_the_step_out(ranks, size, settings, exchanges) -> None:
    # fp16 ends at 65504. The factor begins at 2^16, and the gradient of y is 4 times it: with 2^16, 2^15 and
    # 2^14 it overflows, with 2^13 it does not.
    start = torch.ones(4, 4)
    after = start.clone()
    after[3, 0] -= 4 / 4
    for steps in ranks(size, overflowing_steps, settings):
        assert [exchanged for exchanged, _, _ in steps] == exchanges
        assert [factor for _, factor, _ in steps] == [2.0**15, 2.0**14, 2.0**13, 2.0**13]
        for expected, (_, _, whole) in zip([start] * 3 + [after], steps, strict=True):
            torch.testing.assert_close(whole, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {"strategy": DDP}),
        (2, {"strategy": SCRATCH}),
        (2, {"strategy": "scratch-ddp", "optimizer": SGD}),
        (2, {"strategy": "zero1"}),
        (2, {"strategy": "fsdp"}),
        *((2, {"strategy": FSDP.format(stage)}) for stage in (1, 2, 3)),
        (4, {"strategy": "hsdp", "node_size": 2}),
        (2, {"strategy": "tp"}),
        pytest.param(4, {"strategy": "fsdp:tp=2"}, marks=pytest.mark.slow),
        (2, {"strategy": "manual:reshard.checkpoint+keep"}),
    ],
)
def test_steps_without_exchange_can_be_undone_and_nothing_holds_the_model(ranks, size, settings) -> None:
    settings = {"optimizer": ADAMW, **settings}
    assert ranks(size, split_models.undone, "gpt", settings) == [(True, True, True)] * size


WIDTH = 16
"""Sizes of `gpt` in split_models.py: two blocks, 17 tokens, 8 positions."""


def _shapes(tensor: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(rows, elements of a row) of the parameters of a block, and of what is around the blocks; of a block a
    rank has a part of the outputs of qkv and the MLP's first layer, and of the inputs of the other two."""
    d = WIDTH
    part = d // tensor
    attention = [(3 * part, d), (3 * part, 1), (d, part), (d, 1)]
    mlp = [(4 * part, d), (4 * part, 1), (d, 4 * part), (d, 1)]
    return [*attention, *mlp, *[(d, 1)] * 4], [(17, d), (8, d), (d, 1), (d, 1)]


@pytest.mark.parametrize(
    ("size", "settings", "shards", "tensor"),
    [
        (2, {"strategy": "tp"}, 1, 2),
        (4, {"strategy": "tp"}, 1, 4),
        (2, {"strategy": "fsdp"}, 2, 1),
        (4, {"strategy": "hsdp", "node_size": 2}, 2, 1),
        pytest.param(8, {"strategy": "hsdp:tp=2", "node_size": 4}, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_a_rank_keeps_its_shard_of_its_part(ranks, size, settings, shards, tensor) -> None:
    """The elements of parameters, and twice as many of AdamW's state; 17 rows over two ranks are 9 and 8."""
    inside, around = _shapes(tensor)
    for rank, (kept, state) in enumerate(
        ranks(size, split_models.kept, "gpt", {**settings, "optimizer": ADAMW})
    ):
        place = rank // tensor % shards
        own = sum(
            (min(rows, -(-rows // shards) * (place + 1)) - -(-rows // shards) * place) * row
            for rows, row in [*inside * 2, *around]
        )
        assert (sum(kept.values()), state) == (own, 2 * own)
