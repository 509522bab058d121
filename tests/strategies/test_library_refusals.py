"""The library refuses what a plan refuses, with the same sentence, before anything is sent."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from builders import a_cell
from rank_builders import a_trainer
from recorded_world import RecordingGroup
from torch import nn
from torch.nn import functional as F

from harness.worker.exchange.group import ExchangeGroup
from results.cell import Cell
from results.errors import SpecError, UsageError
from strategies import ExchangeSettings, Trainer, TrainSettings, parallelize
from strategies.refusal import refusal

CPU = torch.device("cpu")
PLAIN_SGD = "sgd:momentum=0"
SAME_SENTENCE: list[dict[str, Any]] = [
    {"strategy": "fsdp", "compression": "topk:0.1"},
    {"strategy": "zero2", "compression": "int8"},
    {"strategy": "scratch-fsdp", "compression": "topk:0.1"},
    {"strategy": "single", "compression": "topk:0.1"},
    {"strategy": "fsdp", "collective": "ring"},
    {"strategy": "ddp", "compression": "dgc:0.1", "optimizer": "adamw"},
    {"strategy": "ddp", "compression": "dgc:0.1", "optimizer": "sgd"},
    {"strategy": "local-sgd:2", "precision": "fp16"},
    {"strategy": "ddp:find_unused=true", "compression": "topk:0.1"},
    {"strategy": "scratch-ddp:find_unused=true", "compression": "topk:0.1"},
    {"strategy": "ddp", "compression": "topk:0.1", "collective": "tree"},
    {"strategy": "scratch-fsdp", "compile": True},
    {"strategy": "ddp", "precision": "tf32"},
]


def cell(**fields: Any) -> Cell:
    gpus = 1 if fields["strategy"] == "single" else 2
    return a_cell(**{"gpus": gpus, "micro_batch": 4, "optimizer": PLAIN_SGD} | fields)


def train(group: ExchangeGroup, **settings: Any) -> Trainer:
    return a_trainer(nn.Linear(4, 4), group=group, **{"optimizer": PLAIN_SGD} | settings)


@pytest.mark.parametrize(
    "settings", SAME_SENTENCE, ids=lambda settings: " ".join(map(str, settings.values()))
)
def test_a_trainer_refuses_with_the_sentence_of_a_plan(settings) -> None:
    with pytest.raises(SpecError) as refused:
        train(RecordingGroup(0, 2), **settings)
    assert str(refused.value) == str(refusal(cell(**settings)))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"clip_norm": -1.0}, "clip_norm is finite and more than 0, not -1.0"),
        ({"accumulation": 0}, "accumulation is at least 1, not 0"),
        ({"precision": "nonsense"}, "precision takes fp32, tf32, bf16, fp16 or float8, not 'nonsense'"),
        ({"memory_format": "rows"}, "memory_format takes contiguous or channels_last, not 'rows'"),
    ],
)
def test_a_value_that_no_cell_may_have_is_refused(settings, sentence) -> None:
    with pytest.raises(SpecError) as refused:
        a_trainer(nn.Linear(4, 4), **settings)
    assert str(refused.value) == sentence


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "ddp", "compression": "topk:0.1"},
        {"strategy": "ddp", "collective": "ring"},
        {"strategy": "zero1"},
        {"strategy": "single", "clip_norm": 1.0},
    ],
)
def test_sparse_gradients_that_nothing_could_take_are_refused_by_name(settings) -> None:
    module, group = nn.Sequential(nn.Embedding(4, 2, sparse=True)), RecordingGroup(0, 2)
    with pytest.raises(UsageError, match=r"not support sparse gradients, which 0 has: use .*scratch-ddp"):
        a_trainer(module, group=group, optimizer=PLAIN_SGD, **settings).step(
            iter([(torch.tensor([1, 1]), torch.zeros(2, 2))])
        )


@pytest.mark.parametrize(
    ("strategy", "exchange"),
    [
        ("fsdp", {"compression": "topk:0.1"}),
        ("zero1", {"collective": "ring"}),
        ("single", {"compression": "int8"}),
        ("local-sgd:2", {"compression": "dgc:0.1"}),
    ],
)
def test_parallelize_refuses_with_the_sentence_of_a_plan(strategy, exchange) -> None:
    settings = ExchangeSettings(group=RecordingGroup(0, 2), **exchange)
    with pytest.raises(SpecError) as refused:
        parallelize(nn.Linear(4, 4), strategy, device=CPU, exchange=settings)
    assert str(refused.value) == str(refusal(cell(strategy=strategy, **exchange)))


def test_without_a_process_group_it_says_what_to_call() -> None:
    with pytest.raises(UsageError, match=r"no process group is open: start with torchrun, and call torch\."):
        parallelize(nn.Linear(4, 4), "ddp", device=CPU)


def warmed_up(group: ExchangeGroup, module: nn.Module) -> list[list[float]]:
    """Parameters after each of five steps of a user's loop, of which three warm up."""
    module = copy.deepcopy(module)
    exchange = ExchangeSettings(group=group)
    with torch.enable_grad():
        model = parallelize(module, "local-sgd:2:warmup=3", device=CPU, exchange=exchange)
        optimizer = model.build_optimizer("sgd:lr=0.1:momentum=0")
        found = []
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + group.rank())
            for last in (False, True):
                with model.exchange(now=last):
                    F.mse_loss(
                        model.module(torch.randn(3, 4, generator=generator)), torch.zeros(3, 4)
                    ).backward()
            optimizer.step()
            model.updated()
            optimizer.zero_grad()
            found.append(module.weight.flatten().tolist())
    return found


def test_the_warm_up_of_local_sgd_averages_gradients_in_a_loop_of_ones_own(threads) -> None:
    torch.manual_seed(0)
    ours, theirs = threads(2, warmed_up, nn.Linear(4, 4))
    # Three steps of the warm-up, one alone, and the average.
    assert [one == other for one, other in zip(ours, theirs, strict=True)] == [True, True, True, False, True]


def test_a_device_that_training_does_not_know_is_refused() -> None:
    with pytest.raises(UsageError, match=r"meta .*: use cpu or cuda"):
        Trainer(nn.Linear(4, 4), F.mse_loss, device=torch.device("meta"), settings=TrainSettings())
