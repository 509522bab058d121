"""The placement of a cell's workers: on real nodes, or on virtual nodes with a link between them."""

from __future__ import annotations

import pytest

from results.errors import UsageError
from results.plan import Placement, has_virtual_nodes, placement_of


@pytest.mark.parametrize(
    ("fields", "gpus_per_node", "nodes", "per_node"),
    [
        ({"gpus": 4}, None, 1, 4),
        ({"gpus": 4}, 8, 1, 4),
        ({"gpus": 4}, 2, 2, 2),
        # Virtual nodes without a link are inside of one process group on one host.
        ({"gpus": 4, "node_size": 2}, None, 1, 4),
        ({"gpus": 8, "node_size": 2}, 4, 2, 4),
        # Under a link every node is a place of its own; one rank each unless said otherwise.
        ({"gpus": 4, "link_mbit_per_s": 1000.0}, None, 4, 1),
        ({"gpus": 4, "link_mbit_per_s": 1000.0, "node_size": 2}, None, 2, 2),
        ({"gpus": 2, "link_mbit_per_s": 1000.0, "node_size": 4}, None, 1, 2),
    ],
)
def test_a_placement_is_whole_nodes(cell_of, fields, gpus_per_node, nodes, per_node) -> None:
    placement = placement_of(cell_of(**fields), gpus_per_node)
    assert placement == Placement(nodes=nodes, gpus_per_node=per_node)
    assert placement.gpus == fields["gpus"]


@pytest.mark.parametrize(
    ("fields", "gpus_per_node", "message"),
    [
        ({"gpus": 3}, 2, "3 workers do not fill whole nodes of 2"),
        (
            {"gpus": 3, "link_mbit_per_s": 100.0, "node_size": 2},
            None,
            "3 workers do not fill whole virtual nodes of 2",
        ),
    ],
)
def test_workers_that_leave_a_node_half_empty_are_refused(cell_of, fields, gpus_per_node, message) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        placement_of(cell_of(**fields), gpus_per_node)


@pytest.mark.parametrize(
    ("fields", "virtual"),
    [
        ({"gpus": 4}, False),
        ({"gpus": 4, "node_size": 4}, False),
        ({"gpus": 4, "node_size": 8}, False),
        ({"gpus": 4, "node_size": 2}, True),
        ({"gpus": 4, "link_mbit_per_s": 1000.0}, True),
        ({"gpus": 4, "link_mbit_per_s": 1000.0, "node_size": 4}, True),
    ],
)
def test_nodes_are_virtual_under_a_link_or_where_they_divide_a_real_one(cell_of, fields, virtual) -> None:
    cell = cell_of(**fields)
    assert has_virtual_nodes(cell, placement_of(cell, None)) is virtual


def test_a_virtual_node_as_large_as_a_real_one_is_that_one(cell_of) -> None:
    cell = cell_of(gpus=8, node_size=4)
    assert has_virtual_nodes(cell, placement_of(cell, 8))
    assert not has_virtual_nodes(cell, placement_of(cell, 4))
