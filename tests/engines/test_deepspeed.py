"""DeepSpeed's engine over real ranks: trained as by a serial loop, proven, undone and resumed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import data_parallel as replicas
import pytest
import resuming
import split_models
import test_reshard as reshard
import test_traffic as counting
import torch
import torch.distributed as dist
from planting import GPT, MLP, REPLICAS, UPDATE, Fields, Planted, wrapped

from harness.worker.exchange.group import open_exchange
from results.cell import StepPolicy
from strategies import parallelize
from strategies.catalog import STRATEGIES
from strategies.deepspeed import model as seam
from strategies.deepspeed.facts import DeepSpeed
from strategies.evaluation import evaluate
from strategies.predictions import footprint

missing = DeepSpeed.engine.missing
POLICY = StepPolicy(block_steps=2, warmup_max_steps=2, min_blocks=2, max_blocks=2, quads=2)
pytestmark = [
    pytest.mark.skipif(missing is not None, reason=str(missing)),
    pytest.mark.xdist_group("deepspeed"),
]
STAGES = range(4)
SGD, ADAMW = "sgd:lr=0.1:momentum=0.9", "adamw:lr=0.01:weight_decay=0.1"


def of_stage(stage: int, options: str = "") -> str:
    return f"deepspeed:stage={stage}{options}"


CASES = [
    *((stage, model, {}) for stage in STAGES for model in ("normed", "dropped", "shared")),
    *((stage, "deep", {"optimizer": ADAMW}) for stage in STAGES),
    *((stage, "frozen", {"activation_checkpointing": True}) for stage in STAGES),
    *((stage, "normed", {"accumulation": 3}) for stage in (0, 1)),
    (1, "one each", {"strategy": of_stage(1, ":reduce_bucket_size=40:overlap_comm=true")}),
    (2, "tied", {"strategy": of_stage(2, ":reduce_bucket_size=40:offload=cpu")}),
    (
        3,
        "deep",
        {"strategy": of_stage(3, ":reduce_bucket_size=40:max_live_parameters=60:overlap_comm=false")},
    ),
    (3, "dropped", {"strategy": of_stage(3, ":offload=cpu")}),
]


@pytest.mark.parametrize(("stage", "model", "settings"), CASES)
def test_two_ranks_train_as_a_serial_loop_does_bit_for_bit(ranks, stage, model, settings) -> None:
    settings = {"strategy": of_stage(stage), "optimizer": SGD, **settings}
    replicas.assert_as_serial(ranks(2, replicas.train, model, settings), model, settings)


@pytest.mark.parametrize("stage", STAGES)
def test_three_ranks_train_as_a_loop_does_within_rounding(ranks, stage) -> None:
    settings = {"strategy": of_stage(stage), "optimizer": SGD}
    # 24, 8 and 5 rows over three ranks.
    replicas.assert_near_serial(ranks(3, replicas.train, "normed", settings), "normed", settings)


def single(build: Callable[[str], Any], model: str) -> Any:
    """The models of split_models.py are in double precision, which DeepSpeed does not take."""
    workload = build(model)
    workload.module.float()
    return workload


def undone(rank: int, settings: Fields) -> tuple[bool, bool, bool]:
    with wrapped(split_models, "build", single):
        return split_models.undone(rank, "gpt", settings)


SAME_BITS = "gradients, buffers and updates are equal bit for bit"
CLIPPED = "gradients are equal bit for bit; updates agree within the rounding of a norm over shards"
ROUNDED = "gradients agree within the rounding of a sum in another order; updates are equal bit for bit"
NEAR = "gradients agree within 0.03 of their L2 norm"
LINEAR = "gradients agree within 0.0001 of their L2 norm"
"""The rule of stage 3: its linear function adds up the gradients of a bias in another order."""


@pytest.mark.parametrize(
    ("size", "stage", "fields", "rule"),
    [
        *((2, stage, {}, SAME_BITS) for stage in (0, 1, 2)),
        (3, 1, {}, ROUNDED),
        *((size, 3, {}, LINEAR) for size in (2, 3)),
        (2, 0, {"accumulation": 2, "clip_norm": 0.1}, SAME_BITS),
        (2, 1, {"accumulation": 2, "clip_norm": 0.1}, CLIPPED),
        (2, 2, {"accumulation": 2}, ROUNDED),
        (2, 2, {"clip_norm": 0.1}, CLIPPED),
        (2, 3, {"accumulation": 2, "clip_norm": 0.1}, LINEAR),
        *((2, stage, {"precision": "bf16"}, NEAR) for stage in STAGES),
        (2, 3, {"activation_checkpointing": True, "accumulation": 2}, LINEAR),
        (2, 2, {"accumulation": 2, "strategy": of_stage(2, ":offload=cpu")}, ROUNDED),
        (2, 1, {"accumulation": 2, "strategy": of_stage(1, ":overlap_comm=true")}, SAME_BITS),
        (2, 2, {"activation_checkpointing": "selective"}, SAME_BITS),
    ],
)
def test_every_stage_is_proven_as_far_as_arithmetic_allows(proofs, size, stage, fields, rule) -> None:
    results = proofs(size, GPT | {"strategy": of_stage(stage)} | fields)
    assert {(found["passed"], found["method"]) for found in results} == {(True, "serial-simulation")}, results
    assert results[0]["detail"] == f"3 steps of {size} replicas recomputed on one device; {rule}"


DIFFERS = "gradient (of .* )?differs from the serial simulation"


def _scaled_by_the_accumulation_twice(rank: int, size: int) -> Planted:
    from deepspeed import DeepSpeedEngine

    return wrapped(DeepSpeedEngine, "backward", lambda original, self, loss, **_: original(self, loss))


def _group_of_this_rank_alone(rank: int, size: int) -> Planted:
    own = dist.new_group([rank], use_local_synchronization=True)
    return patch.object(seam.Everyone, "get_data_parallel_group", lambda self: own)


def _stale_parts_of_other_ranks(rank: int, size: int) -> Planted:
    from deepspeed.runtime.zero import stage_1_and_2

    return patch.object(stage_1_and_2, "all_gather_dp_groups", lambda **_: None)


def _stale_part_of_stage_3(rank: int, size: int) -> Planted:
    """The update goes to a copy of the vector."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Zero

    def wrong(original: Any, self: Any, index: int) -> None:
        before = self.fp16_partitioned_groups_flat[index].clone()
        original(self, index)
        self.fp16_partitioned_groups_flat[index].copy_(before)
        self.fp32_partitioned_groups_flat[index].data.copy_(before)

    return wrapped(Zero, "_reassign_or_swap_out_partitioned_parameters", wrong)


def _gradients_of_the_step_before(rank: int, size: int) -> Planted:
    """The update takes them, after the right ones were shown."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Third
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Zero

    kept: list[Any] = []

    def wrong(original: Any, self: Any, *arguments: object) -> None:
        held = self.averaged_gradients[0]
        kept.append([value.clone() for value in held])
        for value, before in zip(held, kept[max(0, len(kept) - 2)], strict=True):
            value.copy_(before)
        original(self, *arguments)

    stack = ExitStack()
    for kind in (Zero, Third):
        stack.enter_context(wrapped(kind, "step", wrong))
    return stack


def _micro_batch_before_is_lost(rank: int, size: int) -> Planted:
    from deepspeed import DeepSpeedEngine

    return wrapped(
        DeepSpeedEngine,
        "set_gradient_accumulation_boundary",
        lambda original, self, last: (original(self, last), self.optimizer.zero_grad())[0],
    )


def _wrong_gradient_of_a_bias(rank: int, size: int) -> Planted:
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3 as Linear

    def wrong(original: Any, *arguments: Any) -> Any:
        of_input, of_weight, of_bias = original(*arguments)
        return of_input, of_weight, None if of_bias is None else 2 * of_bias

    return patch.object(Linear, "backward", staticmethod(partial(wrong, Linear.backward)))


@pytest.mark.parametrize(
    ("mutation", "stage", "fields", "detail"),
    [
        *((_scaled_by_the_accumulation_twice, stage, {"accumulation": 2}, DIFFERS) for stage in STAGES),
        *((_group_of_this_rank_alone, stage, {}, f"{DIFFERS}|{REPLICAS}") for stage in STAGES),
        *((_stale_parts_of_other_ranks, stage, {}, f"{UPDATE}|{REPLICAS}") for stage in (1, 2)),
        (_stale_part_of_stage_3, 3, {}, UPDATE),
        *((_gradients_of_the_step_before, stage, {}, UPDATE) for stage in (1, 2, 3)),
        (_wrong_gradient_of_a_bias, 3, {}, DIFFERS),
        (_micro_batch_before_is_lost, 3, {"accumulation": 2}, DIFFERS),
    ],
)
def test_an_engine_that_trains_wrongly_is_caught_on_all_ranks(
    proofs, mutation, stage, fields, detail
) -> None:
    results = proofs(2, GPT | {"strategy": of_stage(stage)} | fields, broken=mutation)
    assert [found["passed"] for found in results] == [False] * 2, results[0]["detail"]
    assert re.search(detail, results[0]["detail"]), results[0]["detail"]


@pytest.mark.parametrize("strategy", [*map(of_stage, STAGES), of_stage(3, ":max_live_parameters=1000000000")])
def test_a_whole_run_records_bytes_and_the_exposed_exchange(whole_runs, strategy) -> None:
    """The run also compares what it sends and keeps with the closed form (`conformance.py`)."""
    fields = {"workload": "gpt-nano", "micro_batch": 1, "optimizer": "adamw:lr=0.001", "steps": POLICY}
    for record in whole_runs(2, fields | {"strategy": strategy}):
        assert (record["outcome"], record["reason"]) == ("ok", None), record["reason"]
        assert record["proof"] is None or record["proof"].passed
        assert len(record["quads"].on_first_ns) == POLICY.quads
        assert record["work"].exchange_payload_bytes > 0
        assert record["recorded"].operations.step


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_whose_gradients_are_not_finite_diverges_as_of_ddp(whole_runs, stage) -> None:
    """DeepSpeed leaves out such an update at stages 1 to 3."""
    fields = GPT | {"workload": "py:proof_models:without_finite_gradients", "strategy": of_stage(stage)}
    assert [record["outcome"] for record in whole_runs(2, fields)] == ["diverged"] * 2


def _group_that_is_not_counted(rank: int, size: int) -> Planted:
    return patch.object(seam.Everyone, "get_data_parallel_group", lambda self: dist.group.WORLD)


def test_an_exchange_beside_the_counting_group_fails_the_run(whole_runs) -> None:
    fields = MLP | {"strategy": of_stage(1)}
    for record in whole_runs(2, fields, broken=_group_that_is_not_counted):
        assert record["outcome"] != "ok"
        assert "operations a step over the default process group" in record["reason"]


SENT = [
    *((stage, "gpt", {}) for stage in STAGES),
    *((stage, "gpt", {"accumulation": 2}) for stage in STAGES),
    (3, "llama", {"activation_checkpointing": True}),
    (2, "adapted", {}),
]


@pytest.mark.parametrize(("stage", "model", "settings"), SENT)
def test_a_step_sends_the_bytes_of_the_closed_form(ranks, stage, model, settings) -> None:
    terms = counting.terms_of(of_stage(stage), 2, counting.parts_for(model), **{"micro_batch": 4} | settings)
    expected = sum(term.payload_bytes for term in terms)
    sent, operations = max(ranks(2, counting.traffic_of_a_step, of_stage(stage), model, settings))
    if settings.get("activation_checkpointing"):
        # What is computed again, and gathered for that, ends before the end of a block.
        assert sent == pytest.approx(expected, rel=0.1)
    else:
        # Beside them the norm of stages 1 to 3, and the padding of a vector.
        assert expected <= sent <= expected + 24
    assert operations >= sum(term.operations for term in terms)


@pytest.mark.parametrize("stage", STAGES)
def test_steps_without_exchange_can_be_undone_and_nothing_holds_the_model(ranks, stage) -> None:
    settings = {"optimizer": ADAMW, "strategy": of_stage(stage)}
    for differ, same, gone in ranks(2, undone, settings):
        assert (differ, same) == (True, True)
        # DeepSpeed keeps a model of stage 3: its worker takes no other run.
        assert gone or stage == 3


def state_elements(rank: int, strategy: str) -> int:
    """On a rank: the elements of AdamW's moments."""
    with wrapped(split_models, "build", single):
        trainer = split_models.trainer_of("gpt", {"strategy": strategy, "optimizer": ADAMW}, open_exchange())
    trainer.step(split_models.batches_of(0, rank, {}))
    states = trainer.model.local_state(trainer.optimizer).values()
    return sum(v.numel() for state in states for v in state.values() if v.dim())


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_keeps_its_part_of_the_state(ranks, stage) -> None:
    whole = 2 * sum(p.numel() for p in split_models.build("gpt").module.parameters())
    for kept in ranks(2, state_elements, of_stage(stage)):
        assert kept == whole if not stage else abs(kept - whole / 2) <= 2 * 32


def needed(stage: int, options: str = "", **fields: object) -> Any:
    cell = counting.a_cell(
        workload="gpt-nano", strategy=of_stage(stage, options), gpus=8, optimizer="adamw", **fields
    )
    return footprint(cell, counting.SMALL)


def test_buffers_of_a_device_have_the_size_that_was_asked_for() -> None:
    bucket = 4 * 500_000_000
    on_gpu = {"device": "cuda", "backend": "nccl"}
    assert needed(2).buckets < bucket <= needed(2, **on_gpu).buckets < 2 * bucket
    assert needed(3, **on_gpu).buckets < 2 * bucket <= needed(2, ":overlap_comm=true", **on_gpu).buckets
    assert needed(1, memory_limit_mb=4000).buckets >= bucket


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_offloaded_is_not_on_the_gpu(stage) -> None:
    def in_update(options: str) -> Any:
        text = of_stage(stage, options)
        cell = counting.a_cell(strategy=text, gpus=8, optimizer="adamw", device="cuda", backend="nccl")
        return list(STRATEGIES.facts(text).moments(cell, counting.SMALL))[-1]

    kept, found = in_update(""), in_update(":offload=cpu")
    assert kept.optimizer > found.optimizer
    assert (found.parameters == 0) == (stage == 3)


IMPORTS = """
import sys
from builders import a_cell
from harness.worker.rank.process import fork_obstacle, import_for
import_for([a_cell(strategy="deepspeed")], None)
sys.exit(fork_obstacle() or "deepspeed" not in sys.modules)
"""


def test_a_rank_imports_the_engine_before_it_forks_runs() -> None:
    surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], env=surroundings, capture_output=True, check=False, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "settings", [{}, {"accumulation": 2, "optimizer": "adamw:lr=0.01", "clip_norm": 0.1}]
)
def test_a_resumed_run_goes_on_bit_for_bit(ranks, tmp_path, settings) -> None:
    cases = [(of_stage(stage), settings) for stage in STAGES]
    assert ranks(2, resuming.broken, cases, tmp_path) == [[], []]


@pytest.mark.parametrize(
    "way",
    [
        (of_stage(1), 2, of_stage(3), 3),
        (of_stage(3), 3, "ddp", 2),
        ("scratch-fsdp", 2, of_stage(2), 2),
    ],
    ids=str,
)
def test_a_run_resumes_on_other_ranks_and_as_another_strategy(ranks, tmp_path, way) -> None:
    strategy, size, other, others = way
    before = reshard.run(ranks, size, reshard.saved, strategy, tmp_path)
    loaded, later = reshard.run(ranks, others, reshard.gone_on, other, tmp_path)
    assert loaded.keys() == before.keys()
    torch.testing.assert_close(reshard.frozen_less(loaded), reshard.frozen_less(before), rtol=0, atol=0)
    alone = reshard.opened("single", seed=0)
    reshard.train(alone, 6)
    torch.testing.assert_close(later, reshard.whole(alone), rtol=1e-3, atol=1e-4)


def validated(rank: int, stage: int) -> tuple[bool, float, float]:
    """On a rank: whether steps are the same with validations between them; the loss that a validation finds,
    and the one of the same parameters without the engine."""
    settings = {"strategy": of_stage(stage), "optimizer": SGD}
    with wrapped(split_models, "build", single):
        alone, ends = split_models.build("gpt"), []
        for validations in (0, 2):
            trainer = split_models.trainer_of("gpt", settings, open_exchange())
            for step in range(3):
                for _ in range(validations):
                    found = evaluate(trainer, [split_models.batch(9, 0, 0)])["val_loss"]
                trainer.step(split_models.batches_of(step, rank, settings))
            ends.append(split_models.copied(trainer.model.named_parameters()))
        found = evaluate(trainer, [split_models.batch(9, 0, 0)])["val_loss"]
    alone.module.load_state_dict(ends[0], strict=False)
    x, y = split_models.batch(9, 0, 0)
    same = all(torch.equal(ends[0][name], end) for name, end in ends[1].items())
    return same, found, float(alone.loss(alone.module(x), y))


@pytest.mark.parametrize("stage", STAGES)
def test_a_validation_between_steps_changes_nothing(ranks, stage) -> None:
    for same, found, expected in ranks(2, validated, stage):
        assert same
        assert found == pytest.approx(expected, rel=1e-6)


def norms(rank: int, stage: int) -> list[tuple[float, float]]:
    """On a rank: the norms that the trainer shows, read after all steps, and the norms of the gradients."""
    settings = {"strategy": of_stage(stage), "optimizer": SGD, "clip_norm": 0.01}
    with wrapped(split_models, "build", single):
        trainer = split_models.trainer_of("gpt", settings, open_exchange())
    found = []
    for step in range(2):
        trainer.compute_gradients(split_models.batches_of(step, rank, settings))
        gradients = [value.flatten().clone() for _, value in trainer.model.named_gradients()]
        trainer.update()
        found.append((trainer.gradient_norm, torch.cat(gradients).norm()))
    return [(float(shown), float(real)) for shown, real in found]


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_of_a_step_is_shown(ranks, stage) -> None:
    for steps in ranks(2, norms, stage):
        for shown, real in steps:
            assert shown == pytest.approx(real, rel=1e-5)


def complaints(rank: int) -> list[str]:
    """Return the errors of this rank for a caller's calls, three models, and another accelerator."""
    found, device, exchange = [], torch.device("cpu"), open_exchange()

    def note(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")

    deepspeed = seam.imported(device)
    settings = {"strategy": "deepspeed", "optimizer": SGD}
    note(lambda: parallelize(replicas.build("deep"), "deepspeed", device=device).build_optimizer(SGD))
    note(lambda: replicas.train(rank, "mixed", settings))
    with wrapped(replicas, "build", lambda original, model: original(model).bfloat16()):
        note(lambda: replicas.train(rank, "deep", settings))
    with wrapped(split_models, "build", single):
        optimizer = split_models.trainer_of("gpt", settings, exchange).optimizer
    note(lambda: optimizer.load_state_dict(optimizer.state_dict()))
    note(lambda: replicas.train(rank, "embedded", settings))
    with patch("deepspeed.accelerator.get_accelerator") as accelerator:
        on = accelerator.return_value
        for on.device_name.return_value, on.communication_backend_name.return_value in (
            ("cuda", "nccl"),
            ("cpu", "ccl"),
        ):
            note(lambda: replicas.train(rank, "deep", settings))
    with wrapped(deepspeed, "initialize", lambda original, **named: (dist.new_group(), original(**named))[1]):
        note(lambda: replicas.train(rank, "deep", settings))
    # It compiles programs. A process that is killed meanwhile leaves a lock, for which others wait.
    with patch("deepspeed.ops._probe_compatible_ops", side_effect=AssertionError("it compiles")):
        note(lambda: replicas.train(rank, "deep", settings))
    exchange.reset()
    return found


def test_what_cannot_be_trained_is_refused_with_the_way_out_and_nothing_is_compiled(ranks) -> None:
    for found in ranks(2, complaints, fresh=True):
        assert [said.partition(":")[0] for said in found] == ["UsageError"] * 8
        words = (
            "train by a Trainer",
            "float32, not float32, float64",
            "float32, not bfloat16",
            "trainer.load_state_dict",
            "sparse",
            "works on cuda by nccl",
            "works on cpu by ccl",
            "opened a process group",
        )
        for said, word in zip(found, words, strict=True):
            assert word in said


def test_a_broken_installation_is_told_in_a_sentence() -> None:
    with patch.dict("sys.modules", {"deepspeed": None}), pytest.raises(Exception, match="cannot be imported"):
        seam.imported(torch.device("cpu"))
