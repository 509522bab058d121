"""Models that bench does not ship are proven on two ranks: those in docs/examples and eight other kinds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
NEEDS_TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install transformers"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"strategy": "ddp", "accumulation": 2},
        {"strategy": "fsdp"},
        {"strategy": "scratch-fsdp:prefetch=1"},
        {"strategy": "scratch-ddp", "compression": "topk:0.1"},
    ],
    ids=lambda more: more["strategy"],
)
@pytest.mark.parametrize("model", [pytest.param("bert", marks=NEEDS_TRANSFORMERS), "unet", "lstm"])
def test_a_model_from_outside_is_proven(proofs, model, more) -> None:
    cell = {"workload": f"py:{model}:build", "micro_batch": 2, "optimizer": "adamw"}
    found = proofs(2, cell | more, folder=EXAMPLES)[0]
    assert (found["passed"], found["method"]) == (True, "serial-simulation"), found["detail"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        *(pytest.param(strategy, marks=pytest.mark.slow) for strategy in ("single", "scratch-ddp")),
        *("ddp", "fsdp", "scratch-fsdp", "zero1"),
    ],
)
@pytest.mark.parametrize(
    "model",
    [
        *("encoder_decoder", "mixture_of_experts", "lora", "diffusion"),
        *("sparse_recommender", "tied", "ragged_speech", "graph"),
    ],
)
def test_a_model_of_another_kind_is_proven_or_refused_by_name(proofs, model, strategy) -> None:
    cell = {
        "workload": f"py:foreign_models:{model}", "micro_batch": 4, "strategy": strategy,
        "optimizer": "sgd:lr=0.05",
    }  # fmt: skip

    def found() -> dict[str, Any]:
        return proofs(1 if strategy == "single" else 2, cell, folder=Path(__file__).parent)[0]

    if model == "sparse_recommender" and strategy in ("fsdp", "zero1"):
        with pytest.raises(
            pytest.fail.Exception, match=f"UsageError: {strategy}.* does not support sparse gradients"
        ):
            found()
    else:
        proof = found()
        assert (proof["passed"], proof["method"]) == (True, "serial-simulation"), proof["detail"]
