"""Whether a model goes into the parts that a strategy makes of it."""

from __future__ import annotations

import pytest
from builders import cell_of

from harness.plan.points import unsplittable


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        # Four blocks: at most four stages, which interleaved has two of on each rank.
        ({"strategy": "pipeline:gpipe", "gpus": 5}, "4 blocks, too few for 5 stages; use at most 4 ranks"),
        ({"strategy": "pipeline:interleaved", "gpus": 3}, "too few for 6 stages; use at most 2 ranks"),
        (
            {"strategy": "pipeline:interleaved:chunks=3", "gpus": 2},
            "gpt-nano has 4 blocks, too few for 6 stages; use fewer chunks",
        ),
        (
            {"workload": "mlp", "strategy": "pipeline:gpipe"},
            "mlp has no blocks that a pipeline could be made of; use ddp",
        ),
        ({"strategy": "tp", "gpus": 3}, "4 attention heads of gpt-nano do not divide by 3"),
        ({"strategy": "fsdp:tp=8", "gpus": 8}, "4 attention heads of gpt-nano do not divide by 8"),
        # Two of keys and values.
        ({"workload": "llama-nano", "strategy": "tp", "gpus": 4}, "2 attention heads of llama-nano"),
        ({"workload": "resnet18-32px", "strategy": "tp"}, "no layers that tensor parallelism knows how to"),
        # 4 / 4 is one sample, and BatchNorm over one pixel of it has no variance.
        (
            {"workload": "resnet18-32px", "strategy": "pipeline:gpipe", "micro_batch": 4},
            "BatchNorm of resnet18-32px needs at least 2 samples in a microbatch",
        ),
        (
            {"workload": "resnet18-32px", "strategy": "scratch-fsdp:params=bf16", "precision": "bf16"},
            "no BatchNorm for scratch-fsdp:params=bf16",
        ),
    ],
)
def test_a_size_that_does_not_divide_is_refused_with_the_numbers(fields, reason) -> None:
    found = unsplittable(cell_of(**({"workload": "gpt-nano", "gpus": 2, "micro_batch": 8} | fields)))
    assert reason in found


@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": "pipeline:gpipe", "gpus": 4},
        {"strategy": "pipeline:gpipe:dp=2", "gpus": 8},
        {"strategy": "pipeline:interleaved", "gpus": 2},
        {"strategy": "tp", "gpus": 4},
        {"strategy": "fsdp:tp=2", "gpus": 6},
        {"workload": "llama-nano", "strategy": "tp", "gpus": 2},
        {"workload": "resnet18-32px", "strategy": "pipeline:gpipe", "micro_batch": 8},
        {"workload": "resnet18-32px", "strategy": "pipeline:gpipe:microbatches=2", "micro_batch": 4},
        {"strategy": "scratch-fsdp:params=bf16", "precision": "bf16"},
        # What a user's model is made of, the worker finds out.
        {"workload": "py:mymodel:build", "strategy": "pipeline:gpipe", "gpus": 64},
        {"workload": "py:mymodel:build", "strategy": "tp", "gpus": 7},
        {"strategy": "ddp", "gpus": 256},
    ],
)
def test_a_size_that_divides_is_accepted(fields) -> None:
    assert unsplittable(cell_of(**({"workload": "gpt-nano", "gpus": 2, "micro_batch": 8} | fields))) is None
