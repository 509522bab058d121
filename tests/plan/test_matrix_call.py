"""The command that a report proposes plans the very cells that the study has."""

from __future__ import annotations

import shlex

import pytest
from builders import a_request

from harness.cli.matrix import matrix_command as command
from harness.plan.expand import expand
from harness.plan.study_file import StudyFile
from reports.analysis.next_run import matrix_call
from reports.analysis.study import analyse
from results.plan import Plan

CALLS = [
    "--workload mlp --strategy single,ddp --gpus 1..4",
    "--workload mlp --strategy single,ddp --gpus 1..4 --scaling weak,strong --batch-size 8,16",
    "--workload mlp --strategy ddp --gpus 2..4 --scaling strong --global-batch-size 96 --accumulation 2",
    "--workload mlp --strategy ddp --gpus 2,4 --compression none,topk:0.01 --collective default,ring",
    "--workload gpt-nano --strategy ddp,fsdp --gpus 4 --precision bf16 --optimizer sgd:lr=0.2 --seed 3 "
    "--clip-norm 1 --budget 90s --target 0.1 --warmup-steps 7 --block-steps 3 --quads 0",
    "--workload gpt-nano --strategy ddp --gpus 4 --memory-limit-mb 900",
    "--workload gpt-nano --strategy ddp --gpus 4 --dataset text --selective-checkpointing --compile "
    "--device cuda --backend gloo",
    "--workload gpt-nano --strategy ddp --gpus 4 --activation-checkpointing --device cuda --gpus-per-node 2",
    "--workload mlp --strategy ddp --gpus 4 --link 100mbit --node-size 2",
]


def planned(words: list[str], earlier: tuple[Plan, ...] = ()) -> Plan:
    params = command.make_context("matrix", words).params
    given = {name: params[name] for name in StudyFile.__struct_fields__ if name in params}
    request = a_request(StudyFile(**given))
    return expand(request, study="s", created_at="2026-01-02T03:04:05.000Z", earlier=earlier)


@pytest.mark.parametrize("call", CALLS)
def test_the_command_of_each_series_plans_its_cells_again(call) -> None:
    plan = planned(shlex.split(call))
    study = analyse("s", [plan], [])
    assert study.curves
    for curve in study.curves:
        sizes = [gap.gpus for gap in curve.gaps if not gap.skipped]
        words = shlex.split(matrix_call(study, curve.key, sizes, repeats=9, rerun=True))
        assert words[:2] == ["bench", "matrix"]
        again = planned(words[2:], earlier=(plan,))
        assert again.request.repeats == 9
        both = analyse("s", [plan, again], [])
        assert both.pools.keys() == study.pools.keys()
        assert {one.key for one in both.curves} == {one.key for one in study.curves}


def test_one_call_runs_sizes_of_a_series_and_their_single_device() -> None:
    plan = planned(shlex.split("--workload mlp --strategy single,ddp --gpus 1,2,4,8 --scaling weak,strong"))
    study = analyse("s", [plan], [])
    cells = {cell.id: cell for cell in plan.cells}
    for curve in study.curves:
        if curve.key.strategy == "ddp":
            words = shlex.split(matrix_call(study, curve.key, (1, 8), alone="single"))
            again = planned(words[2:], earlier=(plan,))
            assert [(one.strategy, one.gpus) for one in again.cells] == [("single", 1), ("ddp", 8)]
            assert all(cells[one.id] == one for one in again.cells)
