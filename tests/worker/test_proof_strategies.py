"""The proof of strategies that split a model: right cells pass it, and what each can do wrong is caught."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from planting import GPT, GRADIENT, STATE, UPDATE, Fields, Planted, after, wrapped
from torch import Tensor

from harness.worker.cell.setup import CellSetup
from strategies.collectives.link import Link
from strategies.pipeline import model as pipeline
from strategies.pipeline.model import PipelineModel
from strategies.pipeline.shards import ShardedStages
from strategies.pipeline.stages import Cut
from strategies.scratch_fsdp import model as scratch_fsdp
from strategies.tensor_parallel import model as tensor_parallel
from strategies.trainer import Trainer
from strategies.training.slicing import Slicings

DOUBLES: Fields = GPT | {"workload": "py:proof_models:gpt_of_doubles"}
"""No two sums of the squares need give the same factor to the bit."""
SGD: Fields = GPT | {"optimizer": "sgd:lr=0.05"}
PIPELINE: Fields = GPT | {"strategy": "pipeline:1f1b:microbatches=2", "micro_batch": 2}
NANO: Fields = {"workload": "llama-nano:seq=16", "micro_batch": 4, "optimizer": "adamw:lr=0.001"}
MIXTURE: Fields = NANO | {"workload": "moe-nano:routing=skewed:seq=16"}
LEARNED: Fields = NANO | {"workload": "moe-nano:seq=32", "precision": "bf16"}
"""Among as many tokens a rounding sends some to another expert."""
SHARDED_STAGES: Fields = PIPELINE | {"strategy": "pipeline:1f1b:microbatches=2:pp=2:shard=2"}
DIVIDED: Fields = NANO | {"strategy": "pipeline:zero-bubble"}
FOLDED: Fields = DIVIDED | {"strategy": "pipeline:zbv"}
RESNET: Fields = {"workload": "resnet18-32px", "micro_batch": 4, "optimizer": "sgd:lr=0.002"}
EIGHT: Fields = {"precision": "float8"}
TWICE_CLIPPED: Fields = {"accumulation": 2, "clip_norm": 0.1}

SAME_BITS = "gradients, buffers and updates are equal bit for bit"
ROUNDED = "gradients agree within the rounding of a sum in another order; updates are equal bit for bit"
NORM = "updates agree within the rounding of a norm over shards"
CLIPPED = f"gradients are equal bit for bit; {NORM}"
ROUNDED_AND_CLIPPED = f"gradients agree within the rounding of a sum in another order; {NORM}"
EACH = "gradients agree within 0.0001 of their L2 norm, parameter by parameter"
COARSEST = "gradients agree within 0.2 of their L2 norm"
COARSE = "gradients agree within 0.03 of their L2 norm, parameter by parameter"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "fields", "replicas", "rule"),
    [
        # At stage 1 micro-batches are added up before the ranks are; at 2 and 3 all four are terms of a sum.
        (2, GPT | {"strategy": "scratch-fsdp:stage=1"} | TWICE_CLIPPED, 2, CLIPPED),
        (2, GPT | {"strategy": "scratch-fsdp:stage=2"} | TWICE_CLIPPED, 2, ROUNDED_AND_CLIPPED),
        (2, GPT | {"strategy": "scratch-fsdp:stage=3"}, 2, SAME_BITS),
        (2, DOUBLES | {"strategy": "scratch-fsdp:stage=3"} | TWICE_CLIPPED, 2, ROUNDED_AND_CLIPPED),
        (3, SGD | {"strategy": "scratch-fsdp:stage=3"}, 3, ROUNDED),
        (2, GPT | {"strategy": "fsdp"}, 2, SAME_BITS),
        (2, GPT | {"strategy": "manual:reshard.checkpoint*2+keep"}, 2, SAME_BITS),
        (2, GPT | {"strategy": "zero1"}, 2, SAME_BITS),
        (4, GPT | {"strategy": "hsdp", "node_size": 2}, 4, ROUNDED),
        (2, GPT | {"strategy": "tp", "clip_norm": 0.1}, 1, EACH),
        (2, GPT | {"strategy": "tp", "precision": "bf16"}, 1, COARSE),
        (4, GPT | {"strategy": "fsdp:tp=2"}, 2, EACH),
        (2, MIXTURE | {"strategy": "tp"}, 1, EACH),
        (2, MIXTURE | {"strategy": "fsdp:cp=2"}, 1, EACH),
        (2, MIXTURE | {"strategy": "pipeline:1f1b"}, 1, EACH),
        (4, LEARNED | {"strategy": "fsdp:cp=2:tp=2"}, 1, COARSE),
        (2, PIPELINE | TWICE_CLIPPED, 1, EACH),
        (2, PIPELINE | {"strategy": "pipeline:gpipe:microbatches=2", "optimizer": "sgd:lr=0.05"}, 1, EACH),
        pytest.param(
            3,
            PIPELINE | {"strategy": "pipeline:1f1b:microbatches=3", "micro_batch": 3},
            1,
            EACH,
            marks=pytest.mark.slow,
        ),
        pytest.param(2, PIPELINE | {"precision": "bf16"}, 1, COARSE, marks=pytest.mark.slow),
        (4, PIPELINE | {"strategy": "pipeline:1f1b:microbatches=2:dp=2"}, 2, EACH),
        (2, DIVIDED | TWICE_CLIPPED, 1, EACH),
        (2, FOLDED | TWICE_CLIPPED, 1, EACH),
        (2, FOLDED | EIGHT, 1, f"{COARSEST}, parameter by parameter"),
        (2, NANO | EIGHT | {"strategy": "fsdp:cp=2"}, 1, f"{COARSEST}, parameter by parameter"),
        (2, NANO | EIGHT | {"strategy": "fsdp:params=bf16", "accumulation": 2}, 2, COARSEST),
        (2, MIXTURE | EIGHT | {"strategy": "zero1", "activation_checkpointing": "selective"}, 2, COARSEST),
        (2, FOLDED | {"strategy": "pipeline:dualpipev"} | TWICE_CLIPPED, 1, EACH),
        (2, FOLDED | {"strategy": "pipeline:looped-bfs"} | TWICE_CLIPPED, 1, EACH),
        pytest.param(2, FOLDED | {"workload": "gpt-nano:seq=16", "precision": "bf16"}, 1, COARSE),
        (4, FOLDED | {"strategy": "pipeline:zbv:dp=2"}, 2, EACH),
        (4, SHARDED_STAGES | TWICE_CLIPPED, 2, EACH),
        (4, FOLDED | {"strategy": "pipeline:zbv:pp=2:shard=2"} | TWICE_CLIPPED, 2, EACH),
        pytest.param(
            *(8, FOLDED | {"strategy": "pipeline:1f1b:pp=2:reshard=true:shard=2"}, 4, EACH),
            marks=pytest.mark.long,
        ),
        (4, FOLDED | {"strategy": "pipeline:zbv:pp=2:tp=2"} | TWICE_CLIPPED, 1, EACH),
        (4, NANO | {"strategy": "pipeline:1f1b:pp=2:sequence=true:tp=2"} | TWICE_CLIPPED, 1, EACH),
        (4, NANO | {"strategy": "pipeline:1f1b:cp=2:pp=2"} | TWICE_CLIPPED, 1, EACH),
        (4, FOLDED | {"strategy": "pipeline:zbv:attention=gathered:cp=2:pp=2"}, 1, EACH),
        (8, FOLDED | {"strategy": "pipeline:zbv:pp=2:sequence=true:shard=2:tp=2"} | TWICE_CLIPPED, 2, EACH),
        (8, FOLDED | {"strategy": "pipeline:zbv:cp=2:pp=2:shard=2"} | TWICE_CLIPPED, 2, EACH),
        pytest.param(
            *(8, NANO | {"strategy": "pipeline:1f1b:cp=2:pp=2:tp=2"} | TWICE_CLIPPED, 1, EACH),
            marks=pytest.mark.long,
        ),
        pytest.param(
            2, RESNET | {"strategy": "pipeline:gpipe:microbatches=2"}, 1, EACH, marks=pytest.mark.slow
        ),
        pytest.param(2, RESNET | {"strategy": "scratch-fsdp:stage=3"}, 2, SAME_BITS, marks=pytest.mark.slow),
    ],
)
def test_a_model_that_is_split_is_proven_as_far_as_arithmetic_allows(
    proofs, size, fields, replicas, rule
) -> None:
    results = proofs(size, fields)
    assert {(found["passed"], found["method"]) for found in results} == {(True, "serial-simulation")}, results
    who = "1 replica" if replicas == 1 else f"{replicas} replicas"
    assert results[0]["detail"] == f"3 steps of {who} recomputed on one device; {rule}"
    difference, bound = results[0]["max_difference"], results[0]["max_bound"]
    assert difference <= bound
    assert (bound == 0) == (rule in (SAME_BITS, CLIPPED))


def _ends_not_summed(rank: int, size: int) -> Planted:
    def wrong(original: Any, self: PipelineModel) -> None:
        copied, self._copied = self._copied, set()
        original(self)
        self._copied = copied

    return wrapped(PipelineModel, "_exchange_gradients", wrong)


def _ends_averaged(rank: int, size: int) -> Planted:
    def halve(model: PipelineModel) -> None:
        for name in model._copied & model._own.keys():
            model._own[name].grad.div_(2)

    return after(PipelineModel, "_exchange_gradients", halve)


def _stages_of_a_v_swapped(rank: int, size: int) -> Planted:
    """Each rank computes its later stage first."""

    def wrong(original: Any, *given: Any, **named: Any) -> Cut:
        cut: Cut = original(*given, **named)
        return replace(cut, runs=cut.runs[::-1])

    return wrapped(pipeline, "cut_model", wrong)


def _gradients_of_the_microbatch_before(rank: int, size: int) -> Planted:
    """Microbatches come out of order, but only backward."""
    before: dict[int, Any] = {}

    def wrong(original: Any, self: Any, microbatch: int) -> Any:
        found = tuple(value.clone() for value in original(self, microbatch))
        used, before[self.stage_index] = before.get(self.stage_index, found), found
        return used

    return wrapped(pipeline._ObservedStage, "_retrieve_recv_grads", wrong)


@contextmanager
def _averaged_before_the_last_microbatch(rank: int, size: int) -> Iterator[None]:
    early: dict[Tensor, Tensor] = {}

    def backward(original: Any, self: Any, microbatch: int, *given: Any, **named: Any) -> None:
        original(self, microbatch, *given, **named)
        if microbatch == 0:
            early.update((value, value.grad.clone()) for value in self.submod.parameters())

    def reduce(original: Any, self: ShardedStages) -> None:
        for parameter, gradient in early.items():
            parameter.grad = gradient
        early.clear()
        original(self)

    with wrapped(pipeline._ObservedStage, "backward_one_chunk", backward):
        with wrapped(ShardedStages, "reduce", reduce):
            yield


def _norm_of(choose: Callable[[PipelineModel], Link]) -> Planted:
    def wrong(original: Any, self: PipelineModel, max_norm: float) -> Any:
        parts, self._parts = self._parts, choose(self)
        norm = original(self, max_norm)
        self._parts = parts
        return norm

    return wrapped(PipelineModel, "clip_gradients", wrong)


def _norm_of_one_stage(rank: int, size: int) -> Planted:
    return _norm_of(lambda model: model._grid.shard)


def _norm_of_one_shard(rank: int, size: int) -> Planted:
    return _norm_of(lambda model: model._pipeline)


def _norm_added_up_over_tp(rank: int, size: int) -> Planted:
    return wrapped(Slicings, "copies", lambda original, *given: 1)


def _data_of_the_replica_before(rank: int, size: int) -> Planted:
    original = CellSetup.replica.fget
    return patch.object(CellSetup, "replica", property(lambda self: max(0, original(self) - 1)))


def _data_by_rank_not_by_replica(rank: int, size: int) -> Planted:
    return patch.object(CellSetup, "replica", property(lambda self: self.rank.rank % self.cell.replicas))


def _by_the_local_norm(model: Any) -> Planted:
    def wrong(gradients: Sequence[tuple[Tensor, int]], max_norm: float, *_: object) -> None:
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient, _ in gradients))
        for gradient, _ in gradients:
            gradient.mul_(min(1.0, max_norm / norm))

    return patch.object(model, "clip_shards", wrong)


def _clipped_by_the_local_norm(rank: int, size: int) -> Planted:
    return _by_the_local_norm(scratch_fsdp)


def _clipped_by_the_norm_of_one_stage(rank: int, size: int) -> Planted:
    return _by_the_local_norm(pipeline)


def _clipped_too_far(rank: int, size: int) -> Planted:
    """Lower the norm by half a thousandth, which a bound for sums in single precision would allow."""

    def wrong(clip: Any, gradients: Any, max_norm: float, *arguments: Any) -> Any:
        return clip(gradients, 0.9995 * max_norm, *arguments)

    return wrapped(scratch_fsdp, "clip_shards", wrong)


def _momentum_dropped_after_the_first_step(rank: int, size: int) -> Planted:
    steps = iter(range(9))

    def drop(trainer: Trainer) -> None:
        if next(steps) == 0:
            trainer.model.local_state(trainer.optimizer).clear()

    return after(Trainer, "update", drop)


def _gradient_not_summed_at_the_entrance(rank: int, size: int) -> Planted:
    """Leave out the last layer: each of three blocks is entered twice in a forward pass."""
    calls = iter(range(1000))

    def wrong(original: Any, self: Any, x: Tensor) -> Tensor:
        return x if next(calls) % 6 == 5 else original(self, x)

    return wrapped(tensor_parallel._Entrance, "enter", wrong)


def _a_shard_not_updated(rank: int, size: int) -> Planted:
    """The smallest one, on the last rank."""

    def wrong(original: Any, self: Trainer) -> None:
        shard = min(self.model.parameters(), key=torch.numel)
        before = shard.detach().clone()
        original(self)
        if rank == size - 1:
            shard.data.copy_(before)

    return wrapped(Trainer, "update", wrong)


DATA = "(micro-batches|random state), and each must have its own"
RANKS_APART = f"{GRADIENT}|replicas differ after the update"
"""Finding if a parameter that every rank has gets a different gradient on each."""
SHARDED: Fields = GPT | {"strategy": "scratch-fsdp:stage=3"}
MOMENTUM: Fields = {"optimizer": "sgd:lr=0.05"}


@pytest.mark.parametrize(
    ("mutation", "size", "fields", "detail"),
    [
        (_ends_averaged, 2, PIPELINE, GRADIENT),
        pytest.param(_ends_averaged, 2, PIPELINE | {"precision": "bf16"}, GRADIENT, marks=pytest.mark.slow),
        (_data_of_the_replica_before, 2, SHARDED, DATA),
        pytest.param(
            _data_of_the_replica_before,
            4,
            PIPELINE | {"strategy": "pipeline:1f1b:microbatches=2:dp=2"},
            DATA,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            _data_by_rank_not_by_replica,
            4,
            GPT | {"strategy": "fsdp:tp=2"},
            f"{DATA}|replicas differ after the update",
            marks=pytest.mark.slow,
        ),
        (_clipped_by_the_local_norm, 2, SHARDED | MOMENTUM | {"clip_norm": 0.1}, UPDATE),
        (_clipped_by_the_norm_of_one_stage, 2, FOLDED | MOMENTUM | {"clip_norm": 0.1}, UPDATE),
        (_clipped_too_far, 2, SHARDED | {"optimizer": "sgd:lr=1e-4:momentum=0", "clip_norm": 0.1}, UPDATE),
        (_momentum_dropped_after_the_first_step, 2, SHARDED | MOMENTUM, STATE),
        pytest.param(
            _momentum_dropped_after_the_first_step,
            2,
            GPT | {"strategy": "zero1"},
            STATE,
            marks=pytest.mark.slow,
        ),
        (_momentum_dropped_after_the_first_step, 2, PIPELINE, STATE),
        (_stages_of_a_v_swapped, 2, FOLDED, GRADIENT),
        (_gradients_of_the_microbatch_before, 2, FOLDED, GRADIENT),
        (_gradients_of_the_microbatch_before, 2, DIVIDED, GRADIENT),
        (_averaged_before_the_last_microbatch, 4, SHARDED_STAGES, GRADIENT),
        (_norm_added_up_over_tp, 4, NANO | {"strategy": "pipeline:zbv:pp=2:tp=2", "clip_norm": 0.1}, UPDATE),
        (_norm_of_one_shard, 4, SHARDED_STAGES | MOMENTUM | {"clip_norm": 0.1}, UPDATE),
        (_gradient_not_summed_at_the_entrance, 2, GPT | {"strategy": "tp"}, RANKS_APART),
        (_a_shard_not_updated, 2, SHARDED, UPDATE),
    ],
)
def test_a_split_that_trains_wrongly_is_caught_on_all_ranks(proofs, mutation, size, fields, detail) -> None:
    results = proofs(size, fields, broken=mutation)
    assert [found["passed"] for found in results] == [False] * size, results[0]["detail"]
    assert results[0]["method"] == "serial-simulation"
    assert re.search(detail, results[0]["detail"]), results[0]["detail"]


@pytest.mark.parametrize(
    ("mutation", "size", "fields"),
    [
        (_ends_not_summed, 2, PIPELINE),
        (_norm_of_one_stage, 4, SHARDED_STAGES | {"clip_norm": 0.1}),
    ],
)
def test_ends_of_a_pipeline_that_do_not_have_the_same_gradient_are_called_so_on_all_ranks(
    proofs, mutation, size, fields
) -> None:
    expected = {"copies": "wte.weight is not the same on the ranks that have a copy of it"}
    assert proofs(size, fields, broken=mutation) == [expected] * size
