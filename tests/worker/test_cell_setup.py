"""The size of a node that a cell's Trainer is given."""

from __future__ import annotations

import pytest
import torch
from builders import a_cell

from harness.worker.cell.setup import CellSetup
from harness.worker.rank.rank import Rank


@pytest.mark.parametrize(("node_size", "expected"), [(None, 3), (2, 2)])
def test_a_node_is_the_virtual_one_or_the_ranks_beside_this_one(node_size, expected) -> None:
    cell = a_cell(strategy="single", gpus=1, node_size=node_size, seed=7)
    setup = CellSetup(
        cell=cell,
        rank=Rank(rank=0, local_rank=0, node_rank=0, gpus=6, local_gpus=3),
        device=torch.device("cpu"),
        source_folder=None,
    )
    settings = setup.trainer(setup.workload(), None).settings
    assert settings.node_size == expected
    assert (settings.strategy, settings.optimizer, settings.seed) == ("single", "sgd", 7)
