"""A cell that does not fit: each change of its options is tried by itself, and the cheapest is named."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import ceil

import msgspec
import pytest
from builders import nano_cell, parts_of, plan_of

from harness.plan import surroundings
from harness.plan.auto import lighter
from harness.plan.surroundings import MIB, SHARE, Devices, Limit, Measured, Surroundings, local_work
from results.cell import Cell
from strategies.closed_form.replay import Work
from strategies.predictions import footprint

HOST = Devices(cores=8, host_bytes=64 * 2**30)


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch) -> None:
    monkeypatch.setattr(surroundings, "devices_here", lambda: HOST)


def limit_of(room: int) -> int:
    """MiB of a limit under which `room` bytes may be planned."""
    return ceil((room + 64 * MIB) / (SHARE * MIB))


def told(cell: Cell, room: int, devices: Devices = HOST) -> str | None:
    """Return what is said of a cell whose memory may be planned up to `room` bytes."""
    cell = msgspec.structs.replace(cell, memory_limit_mb=limit_of(room))
    return lighter(cell, Surroundings.of(cell, devices, None))


def size(cell: Cell) -> int:
    return footprint(cell, parts_of(cell.workload)).total


CELL = nano_cell("ddp", 2, micro_batch=64)


def test_accumulation_is_named_where_it_costs_nothing() -> None:
    words = told(CELL, size(CELL) - MIB)
    assert words.startswith("--accumulation 2 fits by prediction")
    quarter = msgspec.structs.replace(CELL, micro_batch=16, accumulation=4)
    assert str(told(CELL, size(quarter) + MIB)).startswith("--accumulation 4 ")


@pytest.mark.parametrize(
    ("room", "options"),
    [
        (75_000, "--activation-checkpointing selective "),
        (60_000, "--strategy fsdp "),
        (50_000, "--activation-checkpointing all "),
    ],
)
def test_one_sample_is_helped_by_the_cheapest_change_that_is_enough(room, options) -> None:
    """Selective checkpointing costs least by prediction, then gathering again, then a forward pass."""
    kept = nano_cell("fsdp:reshard=false", 8, workload="llama-7b", micro_batch=1)
    assert str(told(kept, room * MIB)).startswith(f"{options}fits by prediction")


def test_what_no_single_change_helps_is_not_told() -> None:
    assert told(nano_cell("ddp", 2, micro_batch=1), 6 * MIB) is None


def test_a_cell_that_fits_by_prediction_needs_a_change_that_saves_memory() -> None:
    """It is asked about because it ran out of memory all the same."""
    words = str(told(CELL, 4 * size(CELL)))
    assert words.startswith("--accumulation 2 ")


def test_measured_computation_goes_before_assumed_one() -> None:
    cell = nano_cell("ddp", 2, workload="gpt2-small:seq=1024", micro_batch=4)
    room = int(0.9 * size(cell))
    assert str(told(cell, room)).startswith("--accumulation")
    changed = partial(msgspec.structs.replace, cell, memory_limit_mb=limit_of(room))
    cells = [changed(micro_batch=2, accumulation=2), changed(micro_batch=1, accumulation=4)]
    slow = Work(forward_s=900.0, backward_s=900.0, update_s=1.0, micro_batches=2)
    devices = replace(HOST, measured=Measured(works={local_work(one): slow for one in cells}))
    assert str(told(cell, room, devices)).startswith("--activation-checkpointing")


def test_a_skip_for_memory_names_it() -> None:
    options = {"workload": "gpt2-xl", "gpus": 2, "device": "cuda", "batch_size": 1, "strategy": "fsdp"}
    [skip] = plan_of(**options, limit=Limit(gpus=Devices(gpu_name="A10", gpu_bytes=11 * 2**30))).skips
    assert skip.rule == "memory"
    assert "--strategy fsdp:offload=cpu fits by prediction" in skip.reason
