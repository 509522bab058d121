"""`bench check` says of models of transformers, where that is installed, which strategies work."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.launch.check import check, check_request

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "docs/examples"
CONTEXT, GATHERED, EXPERTS = "fsdp:cp=2", "fsdp:attention=gathered:cp=2", "fsdp:ep=2"


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install transformers"
)
@pytest.mark.parametrize(
    ("model", "proven", "refused"),
    [
        (
            "llama",
            ("fsdp", CONTEXT, "tp"),
            {
                GATHERED: "attention=ulysses",
                "tp:sequence=true": "model.layers.0",
                "fsdp:sequence=true:tp=2": "use tp:sequence=true",
                "pipeline:1f1b": "stem and head",
            },
        ),
        ("masked", (CONTEXT, GATHERED), {}),
        ("padded", ("fsdp",), {CONTEXT: "attention_mask", GATHERED: "attention_mask"}),
        ("packed", ("fsdp",), {CONTEXT: "packed documents", GATHERED: "packed documents"}),
        ("eager", ("tp",), {CONTEXT: "does not call scaled_dot_product_attention"}),
        ("shifting", ("fsdp",), {CONTEXT: "shifts the targets itself"}),
        ("t5", ("fsdp",), {CONTEXT: "neither positions nor position_ids", "tp": "layout"}),
        ("mixtral", ("fsdp",), {EXPERTS: "layout names its layers of experts"}),
        ("mixtral:build", (EXPERTS, "fsdp:cp=2:ep=2"), {}),
        ("mixtral:qwen", (EXPERTS,), {}),
    ],
)
def test_a_check_says_which_strategies_work(model, proven, refused, monkeypatch) -> None:
    # Its ranks may be of an environment over the one that bench is installed into.
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))
    name, folder = (model, EXAMPLES) if ":" in model else (f"transformers_models:{model}", HERE)
    request = check_request(f"py:{name}", micro_batch=4, folder=folder, strategies=(*proven, *refused))
    report = check(request)
    assert report.failure is None
    said = {word.strategy: word for word in report.strategies}
    verdicts = dict.fromkeys(proven, "proven") | dict.fromkeys(refused, "refused")
    assert {name: word.verdict for name, word in said.items()} == verdicts, report.strategies
    for strategy, words in refused.items():
        assert words in said[strategy].words
