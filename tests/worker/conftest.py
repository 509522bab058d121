"""Shared by the tests of the measured process: one thread, as the ranks have, and the proof of a cell."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.worker import proof
from harness.worker.cell_setup import CellSetup
from harness.worker.control import Control
from harness.worker.exchange import open_exchange
from harness.worker.measure import DivergedError
from harness.worker.rank import Rank
from results.cell import Cell
from strategies.catalog import group_layout
from strategies.training.gathered import CopiesDifferError

Fields = dict[str, Any]
Ranks = Callable[..., list[Any]]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _cell(size: int, fields: Fields) -> Cell:
    base = {
        "dataset": "synthetic",
        "strategy": "single" if size == 1 else "ddp",
        "gpus": size,
        "device": "cpu",
        "backend": "gloo",
    }
    fields = base | fields
    groups = group_layout(fields["strategy"], size, fields.get("node_size"))
    return Cell(model_parallel=groups.model_parallel, **fields)


def prove(rank: int, folder: str, fields: Fields, broken: tuple[str, str] | None) -> Fields:
    """On a rank: the fields of the cell's Proof; `broken` names a file and a context manager in it."""
    size = torch.distributed.get_world_size()
    who = Rank(rank=rank, local_rank=rank, node_rank=0, gpus=size, local_gpus=size)
    device = torch.device("cpu")
    with ExitStack() as stack:
        if broken is not None:
            path, name = broken
            stack.enter_context(runpy.run_path(path)[name](rank, size))
        setup = CellSetup(cell=_cell(size, fields), rank=who, device=device, source_folder=Path(folder))
        workload = setup.workload()
        trainer = setup.trainer(workload, open_exchange())
        try:
            found = proof.prove(setup, trainer, setup.batches(workload, setup.replica), Control(device))
        except DivergedError as error:
            return {"diverged": str(error)}
        except CopiesDifferError as error:
            return {"copies": str(error)}
    return {name: getattr(found, name) for name in found.__struct_fields__}


@pytest.fixture(scope="session")
def proofs(ranks: Ranks) -> Callable[..., list[Fields]]:
    """`proofs(2, fields)` is what each of two ranks finds of a cell with these fields.

    `broken`, a context manager (rank, size) at the top of a test file, is open on every rank meanwhile.
    """
    folder = Path(__file__).parent

    def run(size: int, fields: Fields, *, broken: Callable[..., object] | None = None) -> list[Fields]:
        where = None
        if broken is not None:
            code = getattr(broken, "__wrapped__", broken).__code__
            where = (code.co_filename, broken.__name__)
        return ranks(size, prove, str(folder), fields, where)

    return run
