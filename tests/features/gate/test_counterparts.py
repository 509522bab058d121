"""Which cells of two revisions are compared with each other, whatever else their studies plan."""

from __future__ import annotations

import msgspec
import pytest
from builders import a_cell

from harness.features.gate.paired.pair import counterparts, without_counterpart
from results.cell import Cell
from results.errors import UsageError


def cell(**fields: object) -> Cell:
    return a_cell(**{"strategy": "ddp", "gpus": 2, "micro_batch": 8, **fields})


def test_equal_work_corresponds_whatever_the_users_code_and_the_order_are() -> None:
    base = [cell(strategy=strategy, source_hash="01") for strategy in ("ddp", "zero1", "fsdp")]
    new = [msgspec.structs.replace(one, source_hash="02") for one in base]
    found = counterparts(base, new[::-1], same_options=True)
    assert found == {one.id: other.id for one, other in zip(base, new, strict=True)}


def test_a_cell_of_one_side_alone_has_no_counterpart() -> None:
    ddp, zero, fsdp = (cell(strategy=strategy) for strategy in ("ddp", "zero1", "fsdp"))
    assert counterparts([ddp], [zero, ddp], same_options=True) == {ddp.id: ddp.id}
    assert counterparts([ddp, fsdp], [ddp], same_options=False) == {ddp.id: ddp.id}
    # A study file that names another cell in the place of one; with other options it is that cell's setting.
    assert counterparts([ddp, zero], [ddp, fsdp], same_options=True) == {ddp.id: ddp.id}
    assert counterparts([ddp, zero], [ddp, fsdp], same_options=False) == {ddp.id: ddp.id, zero.id: fsdp.id}


def test_cells_correspond_by_what_the_options_of_the_sides_have_in_common() -> None:
    base = [cell(gpus=gpus, strategy="ddp") for gpus in (2, 4, 8)]
    new = [cell(gpus=gpus, strategy="ddp:bucket_mb=50", precision="bf16") for gpus in (8, 2, 4)]
    found = counterparts(base, new, same_options=False)
    assert {one.gpus: next(other.gpus for other in new if other.id == found[one.id]) for one in base} == {
        2: 2,
        4: 4,
        8: 8,
    }
    # Of 8 and 32 against 16 and 64 samples nothing says which belong together.
    batches = [[cell(micro_batch=batch) for batch in sizes] for sizes in ((8, 32), (16, 64))]
    for sides in (batches, [base[:1], new[:2]], [base[:2], new[:1]]):
        with pytest.raises(UsageError, match="it is not clear which cells of BASE, such as "):
            counterparts(*sides, same_options=False)


def test_a_side_that_comes_to_a_cell_of_its_own_runs_it_alone() -> None:
    pairs = {"a": "A", "b": "B"}
    assert without_counterpart(pairs, "a", "X") == ("new",)
    assert without_counterpart(pairs, "x", "A") == ("base",)
    assert without_counterpart(pairs, "x", "X") == ("base", "new")
    assert without_counterpart(pairs, "a", "B") == ()
