"""`bench network` on a real Slurm: one job over nodes, whose table the same call writes later."""

from __future__ import annotations

import pytest

from results import schemas
from results.network import NETWORK_FILE

CALL = ("network", "--gpus", "3", "--gpus-per-node", "1", "--collectives", "all-reduce", "--max-mib", "1")


@pytest.mark.slow
@pytest.mark.needs("slurm")
def test_a_job_measures_the_groups_over_its_nodes(running_lab, bench_in, tmp_path) -> None:
    bench = bench_in(tmp_path, running_lab)
    running_lab.wait_idle()
    call = (
        *CALL,
        "--budget",
        "0s",
        "--device",
        "cpu",
        "--launcher",
        "slurm",
        "--out",
        "study",
        "--no-report",
    )
    done = bench(*call)
    assert done.code == 0, done.stderr
    bench.settle()
    study = bench.study()
    assert not (study.root / NETWORK_FILE).exists()
    # No baseline of steps was timed in the job.
    assert len(study.cell_ids()) == 1
    again = bench(*call)
    assert again.code == 0, again.stderr
    table = schemas.NETWORK.read(study.root / NETWORK_FILE)
    assert {(row.ranks, row.nodes) for row in table.measurements} == {(2, 2), (3, 3)}
    assert table.facts.backend == "gloo"
