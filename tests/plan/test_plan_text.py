"""The lines of a plan about `auto`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from builders import plan_of

from harness.launchers.plan_text import plan_header
from harness.plan.surroundings import Limit
from harness.terminal.console import Console
from results.store import Study

pytestmark = pytest.mark.usefixtures("eight_cores")


@pytest.fixture
def told(tmp_path) -> Callable[..., list[str]]:
    """The lines about what was chosen, and those after them."""

    def lines(**options: Any) -> list[str]:
        plan = plan_of(workload="gpt-nano", strategy="auto", **options)
        study: Any = Study(tmp_path)
        return [line.strip() for line in plan_header(study, plan, [])[3 + bool(plan.skips) :]]

    return lines


def test_points_are_told_apart_by_what_varies(told) -> None:
    def names(**options: Any) -> list[str]:
        return [line.split(":")[0] for line in told(**options)]

    assert names(gpus="1,2") == ["auto for gpt-nano on 1", "auto for gpt-nano on 2"]
    assert names(gpus=2, batch_size="4,8") == [
        "auto for gpt-nano on 2, batch 4",
        "auto for gpt-nano on 2, batch 8",
    ]
    assert names(gpus=2, batch_size=8, scaling="weak,strong", link="none,1gbit") == [
        "auto for gpt-nano on 2, scaling weak, link none",
        "auto for gpt-nano on 2, scaling strong, link none",
        "auto for gpt-nano on 2, scaling weak, link 1gbit",
        "auto for gpt-nano on 2, scaling strong, link 1gbit",
    ]


def test_skips_are_one_line_and_a_line_for_each_reason_where_one_asks(monkeypatch) -> None:
    limit = Limit(devices=2, word="cores", hint="h")
    plan = plan_of(workload="mlp", gpus="1,2,3,4", strategy="ddp,scratch-ddp", batch_size=8, limit=limit)
    study: Any = SimpleNamespace(root="runs/s")

    def told() -> list[str]:
        return [line.strip() for line in plan_header(study, plan, []) if "skipped" in line][1:]

    assert told() == [
        "skipped: 2 impossible; 4 x (3 to 4) needs 3, this machine has 2 cores; h; -v lists them"
    ]
    monkeypatch.setattr(Console, "loudness", 1)
    assert told() == [
        "skipped 4 x (3 to 4): needs 3, this machine has 2 cores; h",
        "skipped 1 x: ddp needs at least 2 ranks; on 1 use single",
        "skipped 1 x: scratch-ddp needs at least 2 ranks; on 1 use single",
    ]


def test_a_plan_names_what_it_cannot_check_with_the_reason(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def build(): ...\n", encoding="utf-8")
    plan = plan_of(workload="gpt-nano,py:mine:build", gpus="2,4", strategy="ddp,tp,pipeline:gpipe")
    study: Any = SimpleNamespace(root="runs/s")
    unknown = "is unknown, because planning does not run a user's own code; its ranks find out"
    assert [line.strip() for line in plan_header(study, plan, []) if "not checked" in line] == [
        f"not checked 2 x: whether {strategy} can split py:mine:build {unknown}"
        for strategy in ("tp", "pipeline:gpipe")
    ]


def test_each_assumption_is_stated_once(told) -> None:
    lines = told(gpus="1,2,4", device="cuda")
    assert len(lines) == 4
    assert lines[3] == "assumed: the GPU is like an A100-SXM4-80GB; which GPU it is, is not known"
    assert not [line for line in told(gpus="1,2") if line.startswith("assumed")]
