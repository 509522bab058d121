from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from builders import a_cell, cell_of
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.plan.schedule import PlannedLaunch, Progress, schedule
from results.cell import StepPolicy
from results.errors import UsageError
from results.plan import Placement

CELLS = [
    a_cell(strategy="single" if gpus == 1 else "ddp", gpus=gpus, micro_batch=batch, optimizer="adamw")
    for gpus in (1, 2, 4, 8)
    for batch in (8, 16, 32)
]


def visits(launches: list[PlannedLaunch], repeat: int) -> list[int]:
    return [launch.placement.gpus for launch in launches if launch.repeat == repeat]


def runs(launches: list[PlannedLaunch]) -> list[tuple[int, str]]:
    return [(launch.repeat, cell.id) for launch in launches for cell in launch.cells]


def test_a_new_pair_of_repeats_draws_a_new_order() -> None:
    launches = schedule(CELLS, repeats=40)
    orders = {tuple(visits(launches, repeat)) for repeat in range(1, 41, 2)}
    # 20 draws from 24 orders: one alone would mean that nothing is drawn.
    assert len(orders) > 5


def test_the_order_is_the_seeds_and_not_the_inputs() -> None:
    assert schedule(CELLS, repeats=3, seed=1) == schedule(CELLS[::-1], repeats=3, seed=1)
    assert schedule(CELLS, repeats=3, seed=1) != schedule(CELLS, repeats=3, seed=2)


def test_the_drawn_order_stays_between_versions() -> None:
    launches = schedule(CELLS, repeats=3, seed=0)
    assert [visits(launches, repeat) for repeat in (1, 2, 3)] == [[8, 4, 1, 2], [2, 1, 4, 8], [8, 1, 4, 2]]


def test_another_cell_or_other_code_of_the_users_changes_the_order_of_no_two_cells() -> None:
    """The sides of a paired comparison plan on their own, and take turns cell by cell."""
    fewer = [cell for number, cell in enumerate(CELLS) if number % 3]
    brief = StepPolicy(block_steps=1)
    edited = [msgspec.structs.replace(cell, source_hash="0123", steps=brief) for cell in CELLS]
    whole, part, other = (runs(schedule(cells, repeats=4, seed=3)) for cells in (CELLS, fewer, edited))
    kept = {cell.id for cell in fewer}
    assert part == [(repeat, id) for repeat, id in whole if id in kept]
    before = {edited.id: cell.id for cell, edited in zip(CELLS, edited, strict=True)}
    assert [(repeat, before[id]) for repeat, id in other] == whole


def test_a_permanent_failure_is_not_run_again() -> None:
    launches = schedule(CELLS[:2], repeats=2, progress=Progress(closed={CELLS[0].id}))
    assert runs(launches) == [(1, CELLS[1].id), (2, CELLS[1].id)]


@settings(max_examples=50)
@given(done=st.integers(0, len(CELLS) * 2), seed=st.integers(0, 100))
def test_an_interrupted_study_goes_on_in_the_order_it_had(done, seed) -> None:
    order = runs(schedule(CELLS, repeats=2, seed=seed))
    so_far = Counter(id for _, id in order[:done])
    rest = runs(schedule(CELLS, repeats=2, seed=seed, progress=Progress(ok_runs=so_far)))
    assert rest == order[done:]


def test_cells_share_a_launch_only_with_device_and_backend() -> None:
    cells = [
        cell_of(device="cpu", backend="gloo"),
        cell_of(device="cuda", backend="gloo"),
        cell_of(device="cuda", backend="nccl"),
        cell_of(device="cuda", backend="nccl", micro_batch=8),
    ]
    launches = schedule(cells, repeats=1)
    assert sorted((launch.device, launch.backend, len(launch.cells)) for launch in launches) == [
        ("cpu", "gloo", 1),
        ("cuda", "gloo", 1),
        ("cuda", "nccl", 2),
    ]


def test_cells_of_another_link_are_in_another_launch() -> None:
    """A link is put around the whole process; the compressor and the collective are the cell's."""
    two = {"strategy": "ddp", "gpus": 4, "node_size": 2}
    cells = [
        cell_of(**two),
        cell_of(**two, collective="ring"),
        cell_of(**two, link_mbit_per_s=1000.0),
        cell_of(**two, link_mbit_per_s=1000.0, compression="bf16"),
        cell_of(**two, link_mbit_per_s=100.0),
        cell_of(strategy="ddp", gpus=4, link_mbit_per_s=100.0),
    ]
    launches = schedule(cells, repeats=1)
    found = [(launch.link_mbit_per_s or 0, launch.placement, len(launch.cells)) for launch in launches]
    assert sorted(found) == [
        (0, Placement(nodes=1, gpus_per_node=4), 2),
        (100.0, Placement(nodes=2, gpus_per_node=2), 1),
        (100.0, Placement(nodes=4, gpus_per_node=1), 1),
        (1000.0, Placement(nodes=2, gpus_per_node=2), 2),
    ]
    assert all(launch.virtual for launch in launches)


@pytest.mark.parametrize(("node_size", "virtual"), [(None, False), (4, False), (2, True)])
def test_a_launch_knows_whether_its_nodes_are_made_up(node_size, virtual) -> None:
    (launch,) = schedule([cell_of(strategy="ddp", gpus=4, node_size=node_size)], repeats=1)
    assert (launch.virtual, launch.link_mbit_per_s) == (virtual, None)


def test_isolation_gives_each_cell_a_launch_in_the_same_order() -> None:
    together = schedule(CELLS, repeats=2)
    apart = schedule(CELLS, repeats=2, isolation="cell")
    assert all(len(launch.cells) == 1 for launch in apart)
    assert runs(apart) == runs(together)


def test_forked_repeats_share_a_launch_where_the_cells_do() -> None:
    alike = [cell for cell in CELLS if cell.gpus == 2]
    [forked] = schedule(alike, repeats=3, isolation="fork")
    apart = schedule(alike, repeats=3)
    assert forked.forks
    assert list(forked.cells) == [cell for launch in apart for cell in launch.cells]
    # Launches of several placements alternate as ever.
    several = schedule(CELLS, repeats=2, isolation="fork")
    assert all(launch.forks for launch in several)
    assert runs(several) == runs(schedule(CELLS, repeats=2))
    # A device must not have been opened before a fork.
    devices = [msgspec.structs.replace(cell, device="cuda", backend="nccl") for cell in alike]
    assert schedule(devices, repeats=3, isolation="fork") == schedule(devices, repeats=3)


def test_nodes_make_the_placement() -> None:
    launches = schedule(CELLS, repeats=1, gpus_per_node=4)
    assert {launch.cells[0].gpus: launch.placement for launch in launches} == {
        1: Placement(nodes=1, gpus_per_node=1),
        2: Placement(nodes=1, gpus_per_node=2),
        4: Placement(nodes=1, gpus_per_node=4),
        8: Placement(nodes=2, gpus_per_node=4),
    }
    with pytest.raises(UsageError, match="4 workers do not fill whole nodes of 3"):
        schedule(CELLS, repeats=1, gpus_per_node=3)


def test_a_steady_drift_cancels_over_two_repeats() -> None:
    """Each run takes its place in the order as its time; every cell then has the same sum."""
    places: dict[str, list[int]] = {}
    for place, (_, id) in enumerate(runs(schedule(CELLS, repeats=2, seed=5))):
        places.setdefault(id, []).append(place)
    # 12 cells: places p and 23 - p.
    assert {sum(both) for both in places.values()} == {23}
    assert all(one < two for one, two in places.values())
    assert all(a != b for a, b in pairwise(sorted(place for both in places.values() for place in both)))


def test_cells_under_a_limit_on_memory_have_launches_of_their_own() -> None:
    limited = [msgspec.structs.replace(cell, memory_limit_mb=64) for cell in CELLS]
    launches = schedule([*CELLS, *limited], repeats=1)
    assert len(launches) == 8
    assert all(len({cell.memory_limit_mb for cell in launch.cells}) == 1 for launch in launches)
