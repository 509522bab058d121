"""The models of docs/examples, by plain and sharded strategies and with a compressor, proven on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
NEEDS_TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install transformers"
)


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
def test_a_model_from_outside_is_proven(
    proofs: Callable[..., list[dict[str, Any]]], model: str, more: dict[str, Any]
) -> None:
    cell = {"workload": f"py:{model}:build", "micro_batch": 2, "optimizer": "adamw"}
    found = proofs(2, cell | more, folder=EXAMPLES)[0]
    assert (found["passed"], found["method"]) == (True, "serial-simulation"), found["detail"]
