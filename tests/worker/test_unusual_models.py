"""A model that a strategy cannot train is refused by the user's own names, and with the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from results.outcome import Outcome

WholeRuns = Callable[..., list[dict[str, Any]]]


def refused(whole_runs: WholeRuns, model: str, strategy: str) -> str:
    """Return why both ranks refuse a model."""
    workload = {"workload": f"py:unusual_models:{model}", "micro_batch": 4, "optimizer": "sgd"}
    found = whole_runs(2, workload | {"strategy": strategy})
    assert [one["outcome"] for one in found] == [Outcome.SKIPPED] * 2, [one["reason"] for one in found]
    reasons = {one["reason"] for one in found}
    assert len(reasons) == 1
    return reasons.pop()


@pytest.mark.parametrize("strategy", ["fsdp", "manual:reshard.checkpoint*3"])
def test_a_parameter_without_a_dimension_is_refused_with_two_ways_out(
    whole_runs: WholeRuns, strategy: str
) -> None:
    reason = refused(whole_runs, "scalar", strategy)
    assert "temperature" in reason
    assert "torch.tensor([" in reason
    assert "use scratch-fsdp" in reason
