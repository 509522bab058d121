"""A choice for each block: how it is written, what it means, and that the ranks do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import split_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_builders import a_trainer
from torch.distributed.fsdp import CPUOffloadPolicy

from harness.worker.exchange.group import open_exchange
from results.errors import SpecError, UsageError
from results.layout import ModelLayout
from strategies.catalog import STRATEGIES
from strategies.fsdp import model as fsdp
from strategies.fsdp import shards
from strategies.fsdp.block_choices import BlockChoice, canonical, read_choices
from workloads.gpt import GPTShape
from workloads.gpt.model import build_gpt

SGD = "sgd:lr=0.1:momentum=0.9"
RESHARD, KEEP = BlockChoice(reshard=True), BlockChoice(reshard=False)


def test_runs_are_choices_for_blocks_in_a_row() -> None:
    assert read_choices("reshard*2+keep") == [RESHARD, RESHARD, KEEP]
    assert read_choices("keep.checkpoint.offload+reshard.offload") == [
        BlockChoice(reshard=False, checkpoint=True, offload=True),
        BlockChoice(reshard=True, offload=True),
    ]
    assert len(read_choices("reshard*10+keep*2+keep")) == 13


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("reshard+reshard", "reshard*2"),
        ("reshard*1+keep", "reshard+keep"),
        ("keep+keep*2+reshard+keep", "keep*3+reshard+keep"),
        ("keep.offload.checkpoint*2", "keep.checkpoint.offload*2"),
        ("keep.offload.offload", "keep.offload"),
    ],
)
def test_equal_choices_have_one_text(written, text) -> None:
    assert canonical(written) == text
    assert STRATEGIES.parse(f"manual:{written}").text == f"manual:{text}"


CHOICES = st.builds(BlockChoice, reshard=st.booleans(), checkpoint=st.booleans(), offload=st.booleans())


@given(st.lists(st.tuples(CHOICES, st.integers(1, 3)), min_size=1, max_size=6))
def test_the_one_text_means_the_same_and_is_its_own(runs) -> None:
    written = "+".join(f"{choice.text}*{count}" for choice, count in runs)
    expected = [choice for choice, count in runs for _ in range(count)]
    assert read_choices(written) == expected
    assert read_choices(canonical(written)) == expected
    one_by_one = "+".join(choice.text for choice in expected)
    assert canonical(one_by_one) == canonical(written) == canonical(canonical(written))


@pytest.mark.parametrize(
    "text",
    ["", "whole", "reshard*0", "reshard*", "reshard*-1", "keep.fast", "keep+", "+keep", "keep*2*2", "keep 2",
     "keep*99999", "offload"],
)  # fmt: skip
def test_an_invalid_run_of_blocks_is_refused_with_the_grammar(text) -> None:
    with pytest.raises(SpecError, match=r"does not describe consecutive blocks: manual takes reshard"):
        canonical(text)


def test_options_of_all_blocks_go_with_it() -> None:
    spec = STRATEGIES.parse("manual:keep+keep:prefetch=1:tp=2")
    assert (spec.text, spec.integer("tp")) == ("manual:keep*2:prefetch=1:tp=2", 2)
    with pytest.raises(SpecError, match="has no option 'reshard'"):
        STRATEGIES.parse("manual:keep:reshard=true")
    with pytest.raises(SpecError, match="needs a choice for each block"):
        STRATEGIES.parse("manual")


@pytest.mark.parametrize(
    ("choices", "gatherings"),
    [("reshard+keep", 3), ("keep.checkpoint+reshard.checkpoint", 3), ("keep*2", 2)],
)
def test_blocks_that_are_kept_are_gathered_once(ranks, choices, gatherings) -> None:
    # Width d = 16: of a block 12 d^2 + 13 d elements, of what is around them 17 d, padded to 18, and 10 d.
    # All rows of a block divide by 2.
    d = 16
    block, around = 8 * (12 * d * d + 13 * d), 8 * (18 + 8 + 2) * d
    expected = gatherings * block // 2 + around // 2 + 2 * block + around
    settings = {"strategy": f"manual:{choices}", "optimizer": SGD}
    for payload, operations in ranks(2, split_models.traffic, "gpt", settings):
        assert (payload, operations) == (expected, gatherings + 1 + 3)


def test_the_model_has_as_many_blocks_as_choices() -> None:
    layout = ModelLayout(blocks=("a", "b"))
    with pytest.raises(UsageError, match=r"manual:keep\*3 chooses for 3 blocks, and the model has 2"):
        fsdp._choices(STRATEGIES.facts("manual:keep*3"), layout)
    assert fsdp._choices(STRATEGIES.facts("manual:keep+reshard"), layout) == {"a": KEEP, "b": RESHARD}


def treatment(rank: int, strategy: str) -> tuple[list[tuple[bool, bool]], list[int]]:
    """On a rank: what torch was asked for unit by unit, and how often each block's MLP ran in a step."""
    asked = []
    shard = shards.fully_shard

    def recorded(module: Any, **options: Any) -> Any:
        offloaded = isinstance(options.get("offload_policy"), CPUOffloadPolicy)
        asked.append((options["reshard_after_forward"], offloaded))
        return shard(module, **options)

    workload = build_gpt(GPTShape(layers=2, width=8, heads=2, context=4, vocabulary=6, seq=4))
    shards.fully_shard = recorded
    try:
        trainer = a_trainer(
            workload.module, workload.loss, layout=workload.layout, group=open_exchange(), strategy=strategy
        )
    finally:
        shards.fully_shard = shard
    runs = [0, 0]

    def count(index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            runs[index] += 1

        return hook

    for index in range(2):
        trainer.model.bare.get_submodule(f"h.{index}.mlp").register_forward_pre_hook(count(index))
    tokens = torch.arange(4).view(1, 4)
    trainer.step(iter([(tokens, tokens)]))
    return asked, runs


def test_each_block_gets_its_own_choice(ranks) -> None:
    # What is around the blocks stays whole, and on the device.
    expected = ([(True, False), (False, True), (False, False)], [2, 1])
    assert ranks(2, treatment, "manual:reshard.checkpoint+keep.offload") == [expected] * 2
