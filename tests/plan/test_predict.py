"""The time of a step by hand: what hides behind which passes, and what an update moves."""

from __future__ import annotations

import pytest
from builders import nano_cell, parts_of

from harness.plan.predict import predicted_bytes, predicted_times, unpredicted
from harness.plan.surroundings import Devices, Surroundings
from results.parts import VALUE_BYTES
from strategies.closed_form.terms import Overlap, Term

HOST = Devices(cores=8, host_bytes=64 * 2**30)


def term_beside(overlap: Overlap, seconds: float) -> Term:
    """One of 2 ranks that sends 1 GB a second, without operations."""
    return Term(
        what="", collective="all-reduce", dimension="replicate", ranks=2, payload_bytes=1e9 * seconds,
        operations=0, wire_factor=1, overlap=overlap,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("beside", "exposed"),
    [
        # With C = 12 and accumulation 2: forward 4, of which a first 2; backward 8, of which a last 4.
        ({"none": 3}, 3),
        ({"first forward": 5}, 3),
        ({"forward": 5}, 1),
        ({"first forward": 3, "forward": 2}, 1),
        ({"first forward": 3, "forward": 0.5}, 1),
        ({"last backward": 5}, 1),
        ({"backward": 9}, 1),
        ({"last backward": 3, "backward": 6}, 1),
        ({"compute": 13}, 1),
        ({"first forward": 3, "last backward": 6}, 3),
        ({"forward": 4, "backward": 7, "compute": 2}, 1),
        ({"none": 1, "forward": 2, "backward": 3, "compute": 4}, 1),
    ],
)
def test_what_runs_beside_computation_hides_behind_its_passes(beside, exposed) -> None:
    cell = nano_cell("ddp", 2, accumulation=2)
    parts = parts_of("gpt-nano")
    around = Surroundings.of(cell, HOST, None)
    unit = predicted_times(cell, parts, [], around).compute / 12
    terms = [term_beside(overlap, unit * seconds) for overlap, seconds in beside.items()]
    assert predicted_times(cell, parts, terms, around).exposed == pytest.approx(unit * exposed)


def test_a_forward_pass_that_is_repeated_is_part_of_backward() -> None:
    """With checkpointing C is 16: forward 4 as before, backward 12."""
    parts = parts_of("gpt-nano")
    cell = nano_cell("ddp", 2, activation_checkpointing=True)
    around = Surroundings.of(cell, HOST, None)
    unit = predicted_times(cell, parts, [], around).compute / 16
    for overlap, most in (("forward", 4), ("backward", 12)):
        terms = [term_beside(overlap, unit * (most + 1))]
        assert predicted_times(cell, parts, terms, around).exposed == pytest.approx(unit)


@pytest.mark.parametrize(("momentum", "moved"), [(0.0, 3), (0.9, 5)])
def test_sgd_moves_what_it_keeps(momentum, moved) -> None:
    """Parameters are read and written, gradients read, a momentum read and written."""
    parts = parts_of("gpt-nano")
    cell = nano_cell("ddp", 2, optimizer=f"sgd:momentum={momentum}")
    times = predicted_times(cell, parts, [], Surroundings.of(cell, HOST, None))
    assert times.update == pytest.approx(moved * 4 * parts.values / 10e9)


def test_a_plan_predicts_the_memory_of_the_cells_that_a_closed_form_covers() -> None:
    """gpt-nano under AdamW: alone P + 2 P and activations; data parallel P of buckets more."""
    alone, dense = nano_cell("single", 1), nano_cell("ddp", 2)
    compressed = nano_cell("ddp", 2, compression="bf16")
    by_us = nano_cell("ddp", 2, collective="ring")
    found = predicted_bytes([alone, dense, compressed, by_us], None)
    parts = parts_of("gpt-nano")
    assert found.keys() == {alone.id, dense.id}
    assert found[dense.id] - found[alone.id] == VALUE_BYTES * parts.values
    own = nano_cell("ddp", 2, workload="py:mine:build")
    assert predicted_bytes([own], None) == {}
    assert unpredicted([alone, own]) == {"py:mine:build": "planning does not run a user's own code"}
