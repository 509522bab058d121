"""`--proof report`: a run whose proof fails measures on, and its record keeps what differed."""

from __future__ import annotations

import re
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest
from planting import GRADIENT, MLP, Fields, Planted, after, gradients_times, wrapped
from rank_builders import a_context

from harness.worker import run as run_module
from harness.worker.rank.context import Run
from results.cell import Cell, StepPolicy
from results.launch import Slot
from results.record import Proof
from strategies.trainer import Trainer


def _gradients_doubled_from(first: int) -> Planted:
    steps = count()
    double = gradients_times(2)
    return after(Trainer, "compute_gradients", lambda self: double(self) if next(steps) >= first else None)


def _gradients_doubled(rank: int, size: int) -> Planted:
    return _gradients_doubled_from(0)


def _gradients_doubled_after_step_8(rank: int, size: int) -> Planted:
    return _gradients_doubled_from(8)


def _updates_left_out(rank: int, size: int) -> Planted:
    steps = count()

    def wrong(original: Any, self: Trainer) -> Any:
        return self.optimizer.zero_grad() if next(steps) % 10 == 9 else original(self)

    return wrapped(Trainer, "update", wrong)


def _one_replica_moved_at_the_end(rank: int, size: int) -> Planted:
    def hashed(original: Any, self: Any, trainer: Trainer) -> None:
        for parameter in trainer.model.bare.parameters() if rank else ():
            parameter.data.add_(1.0)
        original(self, trainer)

    return wrapped(run_module.Run, "add_parameters_hash", hashed)


def _a_check_that_breaks(rank: int, size: int) -> Planted:
    def broken(*given: Any, **named: Any) -> None:
        raise RuntimeError("the check itself broke")

    return wrapped(run_module, "prove", broken)


LATE = "in a step after the timed blocks"


@pytest.mark.parametrize(
    ("mutation", "method", "reason"),
    [
        (_gradients_doubled, "serial-simulation", GRADIENT),
        (_gradients_doubled_after_step_8, "serial-simulation", f"{GRADIENT}.*{LATE}"),
        (_updates_left_out, "serial-simulation", "rank 0 made 9 updates in 10 measured steps"),
        (_one_replica_moved_at_the_end, "serial-simulation", "parameters differ at the end"),
    ],
)
def test_a_failed_proof_measures_on_where_the_launch_reports_it(whole_runs, mutation, method, reason) -> None:
    records = whole_runs(2, MLP, broken=mutation, proof="report")
    for record in records:
        assert (record["outcome"], record["reason"]) == ("ok", None)
        assert len(record["blocks_ns"]) == 2
        assert record["recorded"] is not None
        assert (record["proof"].method, record["proof"].passed) == (method, False)
    assert re.search(reason, records[0]["proof"].detail), records[0]["proof"].detail


def _right_after_wrong(rank: int, folder: str) -> list[Proof]:
    steps = StepPolicy(block_steps=5, warmup_max_steps=5, min_blocks=2, max_blocks=2, quads=0)
    of_one: Fields = {"dataset": "synthetic", "strategy": "single", "gpus": 1}
    cell = Cell(**of_one | MLP, device="cpu", backend="gloo", steps=steps)
    found = []
    with a_context(rank, folder, {"proof": "report"}) as around:
        for run, before, planted in (("a", None, _gradients_doubled(0, 1)), ("b", "a", ExitStack())):
            slot = Slot(cell_id=cell.id, run_id=run, repeat=1, proved_by=before)
            with planted:
                record = Run(around, slot, cell).execute(run_module.measure_cell)
            around.study.add_rank_record(record)
            assert record.proof is not None
            found.append(record.proof)
    return found


def test_no_run_leans_on_a_proof_that_failed(ranks, tmp_path) -> None:
    """In a launch that forks, the later runs name the first one as their proof before it has run."""
    [(wrong, right)] = ranks(1, _right_after_wrong, str(tmp_path))
    assert (wrong.method, wrong.passed) == ("serial-simulation", False)
    assert (right.method, right.passed) == ("serial-simulation", True)


def test_an_error_in_the_proof_stays_an_error(whole_runs) -> None:
    record: Fields = whole_runs(2, MLP, broken=_a_check_that_breaks, proof="report")[0]
    assert (record["outcome"], record["proof"]) == ("crashed", None)
    assert "the check itself broke" in record["reason"]
