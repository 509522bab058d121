"""`bench tune` on a real Slurm: one job makes the same call in its allocation, by srun."""

from __future__ import annotations

import pytest

from results.job_store import JobStore
from results.outcome import Outcome

records = pytest.importorskip("harness.features.tune.records")
pytestmark = pytest.mark.slow
CALL = (
    *("tune", "--workload", "mlp", "--gpus", "2", "--gpus-per-node", "1", "--device", "cpu"),
    *("--global-batch-size", "64", "--strategy", "ddp:bucket_mb=5,ddp:bucket_mb=50", "--accumulation", "1"),
    *("--activation-checkpointing", "false", "--compile", "false", "--budget", "0", "--quads", "0"),
    *("--repeats", "1", "--max-time", "10m", "--launcher", "slurm", "--out", "study"),
)


def test_a_tune_is_one_job_that_ends_with_the_answer(lab, bench) -> None:
    done = bench(*CALL)
    assert done.code == 0, done.stderr
    (job,) = bench.jobs()
    assert "still live" in bench(*CALL).stderr
    status = bench("status", "study")
    assert (status.code, str(job) in status.stdout) == (0, True), status
    bench.settle()
    found = records.read_record(bench.study().root)
    assert found.answer is not None
    assert len(found.trials) >= 2
    hosts = {host for run in bench.study().results() for host in run.hosts}
    assert hosts, "the final was measured"
    assert found.answer.sentence in bench(*CALL).stdout
    assert bench.jobs() == [job]
    assert bench("status", "study").code == 0
    store = JobStore(bench.study().root)
    (end,) = [store.ended(one.job_id) for one in store.jobs()]
    assert end.outcome is Outcome.OK, end.reason
