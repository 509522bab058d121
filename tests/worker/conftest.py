"""Shared by the tests of the measured process: one thread, as the ranks have, and the proof of a cell."""

from __future__ import annotations

import io
import runpy
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import rank_builders
import torch
from rank_builders import CPU, a_context, a_rank

from harness.worker.cell.memory import MemoryLimit
from harness.worker.cell.setup import CellSetup
from harness.worker.exchange.group import open_exchange
from harness.worker.proof import proof
from harness.worker.rank.context import Run
from harness.worker.rank.control import Control
from harness.worker.rank.failure import DivergedError
from harness.worker.run import measure_cell
from results.cell import Cell, StepPolicy
from results.launch import Slot
from strategies.catalog import group_layout
from strategies.training.gathered import CopiesDifferError

Fields = dict[str, Any]
one_thread = rank_builders.one_thread


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
    with ExitStack() as stack:
        if broken is not None:
            path, name = broken
            stack.enter_context(runpy.run_path(path)[name](rank, size))
        cell = _cell(size, fields)
        setup = CellSetup(
            cell=cell,
            rank=a_rank(rank, size),
            device=CPU,
            source_folder=Path(folder),
            memory=MemoryLimit(cell.memory_limit_mb, CPU),
        )
        stack.enter_context(setup.memory.kept())
        workload = setup.workload()
        trainer = setup.trainer(workload, open_exchange())
        try:
            found = proof.prove(setup, trainer, setup.batches(workload, setup.replica), Control(CPU))
        except DivergedError as error:
            return {"diverged": str(error)}
        except CopiesDifferError as error:
            return {"copies": str(error)}
    return {name: getattr(found, name) for name in found.__struct_fields__}


POLICY = StepPolicy(block_steps=5, warmup_max_steps=5, min_blocks=2, max_blocks=2, quads=0)


def run_cell(
    rank: int,
    folder: str,
    fields: Fields,
    broken: tuple[str, str] | None,
    proved_by: str | None,
    proof: str,
) -> Fields:
    """On a rank: the record of a whole run of the cell."""
    size = torch.distributed.get_world_size()
    with ExitStack() as stack:
        if broken is not None:
            path, name = broken
            stack.enter_context(runpy.run_path(path)[name](rank, size))
        cell = _cell(size, {"steps": POLICY} | fields)
        launch = {"source_folder": str(Path(__file__).parent), "proof": proof}
        around = stack.enter_context(a_context(rank, folder, launch))
        slot = Slot(cell_id=cell.id, run_id="r", repeat=1, proved_by=proved_by)
        with redirect_stderr(io.StringIO()):
            record = Run(around, slot, cell).execute(measure_cell)
    return {name: getattr(record, name) for name in record.__struct_fields__}


def _place(broken: Callable[..., object] | None) -> tuple[str, str] | None:
    if broken is None:
        return None
    return getattr(broken, "__wrapped__", broken).__code__.co_filename, broken.__name__


@pytest.fixture(scope="session")
def whole_runs(ranks, tmp_path_factory) -> Callable[..., list[Fields]]:
    """`whole_runs(2, fields)` is what two ranks record of a run of a cell; `broken` as of `proofs`."""

    def run(
        size: int,
        fields: Fields,
        *,
        broken: Callable[..., object] | None = None,
        proved_by: str | None = None,
        proof: str = "strict",
    ) -> list[Fields]:
        folder = str(tmp_path_factory.mktemp("run"))
        return ranks(size, run_cell, folder, fields, _place(broken), proved_by, proof)

    return run


@pytest.fixture(scope="session")
def proofs(ranks) -> Callable[..., list[Fields]]:
    """`proofs(2, fields)` is what each of two ranks finds of a cell with these fields.

    `broken`, a context manager (rank, size) at the top of a test file, is open on every rank meanwhile;
    `folder` is where a `py:` workload is.
    """

    def run(
        size: int,
        fields: Fields,
        *,
        broken: Callable[..., object] | None = None,
        folder: Path = Path(__file__).parent,
    ) -> list[Fields]:
        return ranks(size, prove, str(folder), fields, _place(broken))

    return run
