"""A batch that ran out of memory rules out larger ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.cell import inferred_out_of_memory, pruning_reason


def test_larger_batches_of_the_same_cell_are_inferred_from_the_smallest_that_failed(cell_of) -> None:
    cells = [cell_of(micro_batch=size) for size in (64, 8, 16, 32)]
    by_size = {cell.micro_batch: cell.id for cell in cells}
    failed = {by_size[16], by_size[32]}
    # 8 may fit, 16 and 32 have their own ends, and 64 is larger than both: 16 is named.
    assert inferred_out_of_memory(cells, failed) == {by_size[64]: by_size[16]}


@pytest.mark.parametrize(
    "other", [{"strategy": "single", "gpus": 1}, {"precision": "bf16"}, {"accumulation": 2}, {"gpus": 4}]
)
def test_a_cell_that_differs_in_more_than_its_batch_is_not_inferred(other, cell_of) -> None:
    small, large = cell_of(micro_batch=8), cell_of(micro_batch=64, **other)
    assert inferred_out_of_memory([small, large], {small.id}) == {}


@given(
    points=st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([2, 4])), unique=True),
    data=st.data(),
)
def test_the_result_equals_a_comparison_of_all_pairs(cell_of, points, data) -> None:
    cells = [cell_of(micro_batch=size, gpus=gpus) for size, gpus in points]
    failed = {cell.id for cell in cells if data.draw(st.booleans())}
    expected = {}
    for cell in cells:
        smaller = [
            one for one in cells if one.id in failed and one.gpus == cell.gpus
            and one.micro_batch < cell.micro_batch
        ]  # fmt: skip
        if smaller and cell.id not in failed:
            expected[cell.id] = min(smaller, key=lambda one: one.micro_batch).id
    assert inferred_out_of_memory(cells, failed) == expected


def test_the_reason_names_the_cell_that_failed() -> None:
    assert pruning_reason("c-8") == "inferred out of memory: c-8 has a smaller batch and ran out of it"
