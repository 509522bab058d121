from __future__ import annotations

import math
import re

import msgspec
import pytest
from builders import a_cell
from hypothesis import given
from hypothesis import strategies as st

from results.cell import Cell, StepPolicy, differing_fields
from results.store import Study


class LaterCell(Cell, frozen=True, kw_only=True, omit_defaults=True, dict=True, weakref=True):
    """A cell of a later program, with one field more."""

    gradient_noise: float = 0.0


def test_the_hash_is_over_the_fields_that_are_not_default(cell_of) -> None:
    cell = cell_of(steps=StepPolicy(quads=3, target=0.02), seed=0, compression="none")
    assert differing_fields(cell) == {
        "workload": "resnet18",
        "dataset": "synthetic",
        "strategy": "ddp",
        "gpus": 2,
        "micro_batch": 8,
        "device": "cpu",
        "backend": "gloo",
        "optimizer": "sgd",
        "steps": {"quads": 3},
    }


def test_a_field_that_is_added_with_a_default_renames_no_cell(cell_of) -> None:
    for fields in ({}, {"clip_norm": 0.5}, {"steps": StepPolicy(quads=1)}):
        cell = cell_of(**fields)
        facts = {name: getattr(cell, name) for name in cell.__struct_fields__}
        assert LaterCell(**facts).id == cell.id
        assert LaterCell(**facts, gradient_noise=0.1).id != cell.id


@given(
    gpus=st.integers(1, 10**6),
    clip_norm=st.none() | st.integers(1, 9) | st.floats(0.001, 1e6),
    target=st.sampled_from([0, 0.02, 0.5]),
    budget_s=st.integers(0, 100) | st.floats(0.5, 100),
)
def test_equal_cells_have_equal_ids_in_memory_and_from_a_file(
    cell_of, gpus, clip_norm, target, budget_s
) -> None:
    steps = StepPolicy(target=target, budget_s=budget_s)
    cell = cell_of(gpus=gpus, clip_norm=clip_norm, steps=steps)
    again = msgspec.json.decode(msgspec.json.encode(cell), type=Cell)
    assert again == cell
    assert again.id == cell.id


@given(workload=st.text(max_size=200), compression=st.sampled_from(["none", "topk:0.01"]))
def test_an_id_is_one_harmless_name_of_a_folder(cell_of, workload, compression) -> None:
    cell_id = cell_of(workload=workload, compression=compression, gpus=10**6, micro_batch=10**9).id
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", cell_id)
    assert len(cell_id) < 120


@pytest.mark.parametrize(
    "workload",
    ["../../etc/passwd", "/", "..", "-rf", "a\\b:c*?", "py:a.b:build", "x" * 5000, "\u65e5", "\0\n"],
)
def test_a_hostile_name_stays_inside_the_study(cell_of, tmp_path, workload) -> None:
    study = Study(tmp_path / "study")
    cell = cell_of(workload=workload)
    study.add_cell(cell)
    assert [path.name for path in (tmp_path / "study" / "cells").iterdir()] == [cell.id]
    assert [path.name for path in tmp_path.iterdir()] == ["study"]
    assert study.cell(cell.id) == cell


def test_names_that_look_alike_in_the_prefix_differ_in_the_id(cell_of) -> None:
    one, other = cell_of(workload="py:a:b").id, cell_of(workload="py-a-b").id
    assert one[:-16] == other[:-16] == "py-a-b-ddp-g002-b8-"
    assert one != other


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpus": 0}, "gpus is at least 1, not 0"),
        ({"micro_batch": -8}, "micro_batch is at least 1, not -8"),
        ({"accumulation": 0}, "accumulation is at least 1, not 0"),
        ({"clip_norm": 0.0}, "clip_norm is finite and more than 0, not 0.0"),
        ({"clip_norm": math.nan}, "clip_norm is finite and more than 0, not nan"),
        # JSON has no infinity: it would be read back as null, which is another cell.
        ({"clip_norm": math.inf}, "clip_norm is finite and more than 0, not inf"),
        ({"node_size": 0}, "node_size is at least 1, not 0"),
        ({"link_mbit_per_s": 0.5}, "link_mbit_per_s is at least 1, not 0.5"),
        ({"link_mbit_per_s": math.inf}, "link_mbit_per_s is a finite number, not inf"),
        ({"link_mbit_per_s": math.nan}, "link_mbit_per_s is at least 1, not nan"),
    ],
)
def test_a_cell_names_the_field_and_the_rule_it_breaks(cell_of, fields, message) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        cell_of(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_steps": 0}, "block_steps is at least 1, not 0"),
        ({"min_blocks": 0}, "min_blocks is at least 1, not 0"),
        ({"quads": -1}, "quads is at least 0, not -1"),
        ({"warmup_max_steps": -1}, "warmup_max_steps is at least 0, not -1"),
        ({"target": float("nan")}, "target is at least 0, not nan"),
        ({"budget_s": float("inf")}, "budget_s is a finite number, not inf"),
        ({"min_blocks": 9, "max_blocks": 8}, "max_blocks (8) is less than min_blocks (9)"),
    ],
)
def test_a_step_policy_names_the_field_and_the_rule_it_breaks(fields, message) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        StepPolicy(**fields)


def test_a_misspelt_step_policy_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `budget`"):
        msgspec.json.decode(b'{"budget": 3}', type=StepPolicy)


@pytest.mark.parametrize(
    ("gpus", "model_parallel", "replicas", "global_batch"),
    [(4, 1, 4, 64), (4, 2, 2, 32), (4, 4, 1, 16), (256, 8, 32, 512)],
)
def test_ranks_of_one_replica_count_once(cell_of, gpus, model_parallel, replicas, global_batch) -> None:
    # Eight samples at once, twice: 16 of each replica.
    cell = cell_of(gpus=gpus, model_parallel=model_parallel, micro_batch=8, accumulation=2)
    assert (cell.replicas, cell.batch_per_replica, cell.global_batch) == (replicas, 16, global_batch)


@pytest.mark.parametrize(
    "fields", [{"gpus": 4, "model_parallel": 3}, {"model_parallel": 0}, {"memory_limit_mb": 0}]
)
def test_replicas_that_ranks_cannot_form_are_refused(fields) -> None:
    with pytest.raises(ValueError, match=r"model_parallel|memory_limit_mb|do not divide into replicas"):
        a_cell(**fields)
