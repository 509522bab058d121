"""The proof that a cell trains: real cells pass it, and what was compared is said."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from planting import GPT, MLP, NORMED, Fields, Planted, after, gradients_times, no_time, wrapped
from torch import Tensor

from harness.worker.proof import examination, reference, simulation
from strategies.trainer import Trainer
from strategies.training.parallel import ParallelModel

RESNET: Fields = {"workload": "resnet18-32px", "micro_batch": 2, "optimizer": "sgd:lr=0.002"}
OWN: Fields = {"dataset": "own", "micro_batch": 4, "optimizer": "sgd"}
SPOKEN: Fields = {"workload": "py:proof_models:spoken", "micro_batch": 4, "optimizer": "sgd"}
TWO_LOSSES: Fields = {"workload": "py:proof_models:two_losses", "micro_batch": 4, "optimizer": "adamw"}
SPARSE: Fields = {"workload": "py:proof_models:sparse", "micro_batch": 8, "optimizer": "sgd"}
TEACHER: Fields = {"workload": "py:proof_models:teacher", "micro_batch": 4, "optimizer": "sgd"}


@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (1, MLP | {"accumulation": 2}),
        (1, GPT | {"dataset": "text"}),
        (2, MLP | {"accumulation": 2, "clip_norm": 0.1, "dataset": "digits"}),
        (2, MLP | {"strategy": "ddp:bucket_view=true:bucket_mb=0.1", "memory_format": "channels_last"}),
        (2, NORMED),
        (2, NORMED | {"accumulation": 3, "clip_norm": 0.1}),
        pytest.param(
            2,
            RESNET | {"accumulation": 2, "activation_checkpointing": True, "dataset": "digits"},
            marks=pytest.mark.slow,
        ),
        (2, GPT | {"accumulation": 2, "clip_norm": 1.0, "dataset": "text"}),
        (1, SPOKEN),
        (2, SPOKEN | {"accumulation": 2}),
        (2, SPOKEN | {"strategy": "fsdp"}),
        (2, SPOKEN | {"strategy": "scratch-fsdp"}),
        (1, SPARSE),
        (2, SPARSE),
        (2, SPARSE | {"strategy": "scratch-fsdp"}),
        (1, TEACHER),
        (2, TEACHER | {"accumulation": 2}),
        (2, TEACHER | {"strategy": "zero1"}),
        (2, TWO_LOSSES | {"strategy": "scratch-ddp", "accumulation": 2}),
        (2, OWN | {"workload": "py:proof_models:of_a_dataset", "accumulation": 2}),
        (2, OWN | {"workload": "py:proof_models:of_a_loader", "accumulation": 2}),
    ],
)
def test_a_cell_on_one_rank_or_two_is_proven_bit_for_bit(proofs, size, fields) -> None:
    results = proofs(size, fields)
    assert {(found["passed"], found["method"]) for found in results} == {(True, "serial-simulation")}
    first = results[0]
    assert (first["max_difference"], first["max_bound"]) == (0.0, 0.0)
    assert first["detail"] == (
        f"3 steps of {size} {'replica' if size == 1 else 'replicas'} recomputed on one device;"
        " gradients, buffers and updates are equal bit for bit"
    )


CONDITIONED: Fields = {"workload": "py:proof_models:conditioned", "micro_batch": 4, "optimizer": "adamw"}


@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (2, {"strategy": "fsdp", "accumulation": 2}),
        (2, {"strategy": "fsdp:reshard=false"}),
        (2, {"strategy": "scratch-fsdp"}),
        (3, {"strategy": "fsdp"}),
        pytest.param(2, {"strategy": "fsdp", "activation_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_blocks_that_share_an_input_are_proven_without_a_wider_bound(proofs, size, fields) -> None:
    found = proofs(size, CONDITIONED | fields)[0]
    assert found["passed"], found["detail"]
    if size == 2:
        assert (found["max_difference"], found["max_bound"]) == (0.0, 0.0)
        assert ("added block by block" in found["detail"]) == (fields["strategy"] != "scratch-fsdp")


EVERY = ("ddp", "zero1", "scratch-ddp", "fsdp", "fsdp:reshard=false", "scratch-fsdp", "scratch-fsdp:stage=2")
"""Strategies whose steps on two ranks have the bits of a serial loop."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", EVERY)
@pytest.mark.parametrize("workload", ["mlp", "resnet18-32px", "gpt-nano", "llama-nano", "moe-nano"])
def test_these_cells_have_the_bits_of_a_serial_loop(proofs, workload, strategy) -> None:
    fields = {"workload": workload, "micro_batch": 2, "optimizer": "adamw:lr=0.001", "strategy": strategy}
    found = proofs(2, fields)[0]
    assert (found["passed"], found["max_difference"], found["max_bound"]) == (True, 0.0, 0.0)
    assert found["detail"].endswith("; gradients, buffers and updates are equal bit for bit")


@pytest.mark.parametrize("strategy", ["fsdp", "scratch-fsdp"])
def test_a_strategy_that_loses_what_forward_changes_is_not_proven(proofs, strategy) -> None:
    results = proofs(2, TEACHER | {"strategy": strategy})
    assert [found["passed"] for found in results] == [False, False]
    assert "forward itself changes teacher.weight" in results[0]["detail"]


@pytest.mark.parametrize("fields", [MLP | {"accumulation": 2}, NORMED, GPT])
def test_a_cell_on_three_ranks_is_proven_within_the_rounding_of_a_sum(proofs, fields) -> None:
    found = proofs(3, fields)[0]
    assert found["passed"]
    assert "within the rounding of a sum in another order" in found["detail"]
    assert 0 < found["max_difference"] <= found["max_bound"] < 1e-4


@pytest.mark.parametrize(
    "fields", [MLP | {"precision": "bf16"}, MLP | {"precision": "fp16", "clip_norm": 1.0}]
)
def test_low_precision_is_proven_within_a_stated_part_of_the_gradient(proofs, fields) -> None:
    found = proofs(2, fields)[0]
    assert found["passed"]
    stated = {"bf16": "0.03", "fp16": "0.01"}[fields["precision"]]
    assert f"gradients agree within {stated} of their L2 norm" in found["detail"]


def test_a_run_whose_batches_are_dictionaries_of_texts_is_measured_as_any_other(whole_runs) -> None:
    record = whole_runs(2, SPOKEN)[0]
    assert (record["outcome"], record["reason"]) == ("ok", None)
    assert record["recorded"].operations.step
    assert record["buckets"].started
    assert (record["work"].samples, record["work"].updates, record["work"].flops) == (4, 10, None)
    assert record["absent"]["flops"].endswith("batches differ in shape")


def test_data_of_a_users_own_are_proven_where_they_can_be_read_again(whole_runs) -> None:
    in_a_row = whole_runs(2, OWN | {"workload": "py:proof_models:of_a_loader"})[0]
    assert (in_a_row["outcome"], in_a_row["reason"]) == ("ok", None)
    assert "are not read again up to that step" in in_a_row["proof"].detail
    assert min(in_a_row["steps"].data_ns) > 0
    noise = whole_runs(2, OWN | {"workload": "py:proof_models:of_noise"})[0]
    assert noise["outcome"] != "ok"
    assert "data= gives other samples when it is read again: seed what is random" in noise["reason"]


def test_a_workload_says_how_many_samples_its_batches_have(whole_runs) -> None:
    record = whole_runs(2, OWN | {"workload": "py:proof_models:of_graphs"})[0]
    assert (record["outcome"], record["reason"]) == ("ok", None)
    assert record["work"].samples == OWN["micro_batch"]


def test_data_that_every_replica_reads_alike_are_warned_of(whole_runs) -> None:
    alike, apart = (
        whole_runs(2, OWN | {"workload": f"py:proof_models:{name}"})[0]["warnings"]
        for name in ("of_a_loader_for_all", "of_a_loader")
    )
    assert [words for words in alike if "replicas 0 and 1 read the same batches" in words]
    assert not [words for words in apart if "the same batches" in words]


def test_a_pipeline_says_which_batches_it_takes(whole_runs) -> None:
    fields = SPOKEN | {"workload": "py:proof_models:cancelling_by_a_step", "strategy": "pipeline:gpipe"}
    taken = "it takes batches of two tensors, (inputs, targets), and a loss(outputs, targets), not a step"
    for record in whole_runs(2, fields):
        assert taken in record["reason"]


def _slow_replicas(rank: int, size: int) -> Planted:
    """Let each take 15 s by its clock: rank 0 would take too long for all of them, but not for one."""
    clock = count(step=15)
    return patch.object(reference, "time", SimpleNamespace(perf_counter=lambda: next(clock)))


@pytest.mark.parametrize(
    "fields",
    [
        NORMED | {"accumulation": 2, "clip_norm": 0.1},
        GPT | {"strategy": "fsdp"},
        MLP | {"strategy": "scratch-ddp", "precision": "fp16"},
    ],
)
def test_ranks_share_a_simulation_that_takes_one_of_them_too_long(proofs, fields) -> None:
    found = proofs(2, fields, broken=_slow_replicas)[0]
    assert (found["passed"], found["method"]) == (True, "serial-simulation"), found["detail"]
    assert "3 steps of 2 replicas recomputed, one on a device of each" in found["detail"]
    if fields.get("precision") is None:
        assert (found["max_difference"], found["max_bound"]) == (0.0, 0.0)


def _no_room(rank: int, size: int) -> Planted:
    return patch.object(simulation, "simulate_step", side_effect=torch.OutOfMemoryError("no room"))


def _no_room_for_the_update(rank: int, size: int) -> Planted:
    return patch.object(simulation, "replay_update", side_effect=torch.OutOfMemoryError("no room"))


@contextmanager
def _slow_replicas_and_one_dropped(rank: int, size: int) -> Iterator[None]:
    def change(trainer: Trainer) -> None:
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                # Of the gradients of two, those of the last.
                torch.distributed.broadcast(parameter.grad, src=size - 1)
                parameter.grad.mul_(1.5)

    with _slow_replicas(rank, size), after(Trainer, "compute_gradients", change):
        yield


def test_a_shared_simulation_finds_what_differs(proofs) -> None:
    found = proofs(2, NORMED, broken=_slow_replicas_and_one_dropped)[0]
    assert not found["passed"]
    assert "differs from the serial simulation" in found["detail"]


@contextmanager
def _slow_by_its_own_thread(rank: int, size: int) -> Iterator[None]:
    """A step computes for 100 s by the thread's clock; nothing may be built to learn more."""
    clock = SimpleNamespace(thread_time=count(step=100).__next__)
    with (
        patch.object(examination, "time", clock),
        patch.object(simulation, "ReferenceModel", side_effect=AssertionError),
    ):
        yield


def _little_memory(rank: int, size: int) -> Planted:
    return patch.object(simulation, "available_bytes", lambda: 2.0**15)


@contextmanager
def _no_time_and_twice_the_gradient_on_rank_0(rank: int, size: int) -> Iterator[None]:
    def wrong(original: Any, self: Trainer) -> None:
        if rank == 0:
            gradients_times(2)(self)
        original(self)

    with no_time(rank, size), wrapped(Trainer, "update", wrong):
        yield


FP16: Fields = {"micro_batch": 4, "optimizer": "sgd:lr=0.001", "precision": "fp16"}


def test_gradients_at_the_edge_of_fp16_lose_the_same_digits_on_both_sides(proofs) -> None:
    found = proofs(2, FP16 | {"workload": "py:proof_models:quiet_tokens"})[0]
    assert (found["passed"], found["method"]) == (True, "serial-simulation"), found["detail"]
    assert found["max_difference"] < found["max_bound"] / 10


def test_steps_that_overflow_are_left_out_by_both_sides_and_the_others_are_compared(proofs) -> None:
    found = proofs(2, FP16 | {"workload": "py:proof_models:loud"})[0]
    assert (found["passed"], found["method"]) == (True, "serial-simulation")
    assert 0 < found["max_bound"] < 1


def test_where_every_step_overflows_the_proof_is_the_weaker_one_and_says_why(proofs) -> None:
    found = proofs(2, FP16 | {"workload": "py:proof_models:deafening"})[0]
    assert (found["passed"], found["method"]) == (True, "replica-agreement")
    assert "left out every step" in found["detail"]
    assert found["max_difference"] is None


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        (
            no_time,
            r"a serial simulation of a step would take about \d+ s, and about \d+ s shared out over 2 ranks",
        ),
        (
            _slow_by_its_own_thread,
            "a serial simulation of a step would take about 190 s, and about 95 s shared out over 2 ranks",
        ),
        (
            _little_memory,
            r"to recompute a step takes about [\d.e-]+ GiB of host memory \(ranks on the host: 1\), and "
            r"3.1e-05 GiB are available",
        ),
        (_no_room, "a serial simulation does not fit in memory in addition to the model"),
        (_no_room_for_the_update, "a serial simulation does not fit in memory in addition to the model"),
    ],
)
def test_where_the_reference_does_not_fit_the_gradients_are_sampled_and_the_reason_is_named(
    proofs, obstacle, reason
) -> None:
    results = proofs(2, MLP, broken=obstacle)
    assert {(found["passed"], found["method"]) for found in results} == {(True, "sampled-gradients")}
    sampled = (
        r"2 steps of 2 replicas: 4 projections and 16 elements of each parameter's gradient are .*; a "
        r"defect of (\S+) of such a gradient is missed with a probability of at most 1e-06; "
    )
    expected = rf"{sampled}the replicas' parameters are equal bit for bit after the update; {reason}"
    told = re.fullmatch(expected, results[0]["detail"])
    assert told, results[0]["detail"]
    # 5 roundings, 7.2 deviations of them, and 50 bounds to be missed by 4 projections once in a million.
    assert float(told[1]) == pytest.approx(5 * 2**-24 * 7.2 * 50.5, rel=0.05)


COMPRESSED: Fields = {"strategy": "scratch-ddp", "compression": "topk:0.5"}


def test_where_no_projection_says_anything_the_weakest_proof_is_given(proofs) -> None:
    results = proofs(2, MLP | COMPRESSED, broken=no_time)
    assert {(found["passed"], found["method"]) for found in results} == {(True, "replica-agreement")}
    equal = "the replicas' parameters are equal bit for bit after the update; a serial simulation of a step"
    assert results[0]["detail"].startswith(equal)


def _little_memory_on_the_last_rank(rank: int, size: int) -> Planted:
    left = 2.0**30 if rank < size - 1 else 2.0**15
    return patch.object(simulation, "available_bytes", lambda: left)


def test_every_rank_that_simulates_in_a_later_step_has_room_for_it(proofs) -> None:
    """After a warm-up, whose steps only rank 0 simulates."""
    fields = MLP | {"strategy": "local-sgd:2:warmup=2"}
    for found in proofs(2, fields, broken=_little_memory_on_the_last_rank):
        assert (found["passed"], found["method"]) == (True, "replica-agreement")
        assert "(ranks on the host: 2)" in found["detail"]


@contextmanager
def _slow_replicas_and_no_room_for_the_second_parameter(rank: int, size: int) -> Iterator[None]:
    """On the last rank, in the middle of a walk in which all ranks gather."""

    def load(self: Any, start: Any) -> None:
        values = iter(start)
        next(values)
        raise torch.OutOfMemoryError("no room")

    with _slow_replicas(rank, size), ExitStack() as stack:
        if rank == size - 1:
            stack.enter_context(patch.object(reference.ReferenceModel, "load", load))
        yield


def test_a_rank_without_room_for_its_share_gathers_with_the_others_all_the_same(proofs) -> None:
    fields = GPT | {"strategy": "fsdp"}
    found = proofs(2, fields, broken=_slow_replicas_and_no_room_for_the_second_parameter)[0]
    assert (found["passed"], found["method"]) == (True, "sampled-gradients"), found["detail"]
    assert "a serial simulation does not fit in memory in addition to the model" in found["detail"]


def test_a_forward_pass_that_a_step_computes_again_is_not_what_a_simulation_takes(proofs) -> None:
    """At most half of 100 s, less the 5 s that may be taken once."""
    fields = GPT | {"activation_checkpointing": True}
    detail = proofs(2, fields, broken=_slow_by_its_own_thread)[0]["detail"]
    assert "would take about 90 s, and about 45 s shared out over 2 ranks" in detail


def test_the_weaker_proof_too_can_fail(proofs) -> None:
    for found in proofs(2, MLP | COMPRESSED, broken=_no_time_and_twice_the_gradient_on_rank_0):
        assert not found["passed"]
        assert found["method"] == "replica-agreement"
        assert "parameters differ after the update" in found["detail"]


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        ("data_of_its_own", "do not follow the generator that it is given"),
        ("noise_of_its_own", "a model that draws from a generator other than torch's"),
    ],
)
def test_data_that_do_not_follow_their_generator_are_told_from_a_model_that_draws_its_own(
    proofs, model, cause
) -> None:
    [found] = proofs(1, {"workload": f"py:proof_models:{model}", "micro_batch": 4, "optimizer": "sgd"})
    assert not found["passed"]
    assert cause in found["detail"]


@contextmanager
def _counted_wholes(rank: int, size: int) -> Iterator[None]:
    """Every whole tensor is a copy; besides the one that is handed out, the last may be alive."""

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def named(self: ParallelModel) -> Iterator[tuple[str, Tensor]]:
            handed_out: list[weakref.ref[Tensor]] = []
            for name, value in original(self):
                whole = value.clone()
                handed_out.append(weakref.ref(whole))
                yield name, whole
                del whole
                alive = sum(reference() is not None for reference in handed_out)
                assert alive <= 2 or rank == 0
                most[rank] = max(most[rank], alive)

        return named

    most = [0] * size
    with ExitStack() as stack:
        for name in ("named_parameters", "named_gradients", "named_buffers"):
            original = getattr(ParallelModel, name)
            stack.enter_context(patch.object(ParallelModel, name, counted(original)))
        yield
    # Six parameters on rank 0: the proof does keep them somewhere.
    assert most[0] > 2 or rank != 0


def test_ranks_that_compare_nothing_keep_no_wholes(proofs) -> None:
    assert all(found["passed"] for found in proofs(2, MLP, broken=_counted_wholes))


def test_a_loss_that_is_not_finite_in_the_first_steps_is_called_so_on_all_ranks(proofs) -> None:
    found = proofs(3, {"workload": "py:proof_models:diverging", "micro_batch": 1, "optimizer": "sgd"})
    assert found == [{"diverged": "the loss is not a finite number (NaN or infinity)"}] * 3


@pytest.mark.parametrize("strategy", ["ddp", "local-sgd:2"])
def test_a_loss_with_a_collective_is_recomputed_on_all_its_ranks_at_once(whole_runs, strategy) -> None:
    fields = {"workload": "py:proof_models:contrastive", "micro_batch": 4, "optimizer": "sgd"}
    record = whole_runs(2, fields | {"strategy": strategy})[0]
    assert (record["outcome"], record["reason"]) == ("ok", None)
    assert record["proof"].method == "serial-simulation"
    assert record["proof"].late_steps
