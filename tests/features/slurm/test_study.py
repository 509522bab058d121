"""Whole studies on a real Slurm: what is submitted, what it runs, and what the same call does later."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.features.slurm import call as slurm_call
from results.files import study_lock
from results.job_store import JobStore
from results.outcome import Outcome

MLP = ("--workload", "mlp", "--batch-size", "16")
FOUR = (*MLP, "--gpus", "1,4", "--strategy", "single,ddp")
NOTHING = "nothing to submit"
Bench = Any


@pytest.fixture(scope="module")
def four(running_lab, bench_in, tmp_path_factory) -> tuple[Bench, list[Any]]:
    """A study on one and on four nodes, and its calls: before there was any, while jobs lived, and after."""
    bench = bench_in(tmp_path_factory.mktemp("four"), running_lab)
    running_lab.wait_idle()
    call = (*FOUR, "--gpus-per-node", "1")
    shown = bench.matrix(*call, "--dry-run", "--scripts")
    assert not bench.study().root.exists()
    calls = [shown, bench.matrix(*call), bench.matrix(*call)]
    with study_lock(bench.study().root):
        calls.append(bench.matrix(*call))
    bench.settle()
    return bench, [*calls, bench.matrix(*call)]


@pytest.mark.slow
def test_cells_train_on_nodes_and_are_proven(four) -> None:
    bench, _ = four
    results = bench.results()
    assert {result.outcome for result in results} == {Outcome.OK}
    # Against one process that simulates four ranks; test_study_faults.py compares with this machine.
    methods = {result.proof.method for result in results if "g004" in result.cell_id}
    assert methods == {"serial-simulation"}
    assert all(result.proof.passed for result in results)
    assert {len(kinds) for kinds in bench.figures().values()} == {1}


@pytest.mark.slow
def test_every_job_has_timed_the_baseline_cell(four) -> None:
    bench, _ = four
    study = bench.study()
    baseline = {cell for cell in study.cell_ids() if study.cell(cell).strategy == "single"}
    assert len(baseline) == 1
    timed = {
        launch.job_id
        for launch in study.launches()
        for slot in launch.slots
        if slot.cell_id in baseline and launch.placement.gpus == 1
    }
    store = JobStore(study.root)
    assert timed == {job.job_id for job in store.jobs()}
    assert len(timed) == 2
    ends = [store.ended(job.job_id) for job in store.jobs()]
    assert [end.outcome for end in ends if end] == [Outcome.OK] * 2
    assert [len(end.nodes) for job in store.jobs() for end in store.starts(job.job_id)] == [1, 4]


@pytest.mark.slow
def test_the_same_call_submits_nothing_twice(four) -> None:
    bench, (_, first, second, busy, last) = four
    assert [call.code for call in (first, second, busy, last)] == [0, 0, 1, 0]
    assert len(re.findall(r"^job \d+: ", first.stderr, re.MULTILINE)) == 2
    assert f"{NOTHING}: 2 jobs of it are still live" in second.stderr
    assert "is in use by another bench" in busy.stderr
    assert f"{NOTHING}: every cell has its runs" in last.stderr
    assert len(bench.jobs()) == 2


@pytest.mark.slow
def test_a_dry_run_shows_the_very_scripts(four) -> None:
    bench, (shown, *_) = four
    scripts = sorted(bench.study().root.glob("jobs/*/script.sh"))
    assert len(scripts) == 2
    tail = "".join(f"\n# {_name(path)}\n{path.read_text()}\n" for path in scripts)
    assert shown.stdout.endswith(tail)
    assert shown.stdout.count("#!/bin/bash") == 2


def _name(script: Path) -> str:
    match = re.search(r"--job-name=(\S+)", script.read_text())
    return match[1]


def test_a_plan_has_a_job_for_each_size_that_the_partition_holds(bench) -> None:
    (bench.folder / "site.yaml").write_text("{gpus_per_node: 8, partition: main}")
    wide = (*MLP, "--gpus", "1..256", "--strategy", "single,ddp", "--site", "site.yaml", "--device", "cuda")
    shown = bench.matrix(*wide, "--dry-run", "--scripts")
    assert shown.code == 0, shown.stderr
    nodes = re.findall(r"^#SBATCH --nodes=(\d+)$", shown.stdout, re.MULTILINE)
    gpus = re.findall(r"^#SBATCH --gres=gpu:(\d+)$", shown.stdout, re.MULTILINE)
    assert [int(n) for n in nodes] == [1, 1, 1, 1, 2, 4]
    assert [int(n) for n in gpus] == [1, 2, 4, 8, 8, 8]
    assert "needs 64, the partition has 32 devices" in shown.stdout
    short = bench.matrix(*wide, "--dry-run").stdout
    assert short.count("#!/bin/bash") == 1
    others = short.rpartition("--scripts prints them)\n")[2].splitlines()[1:]
    assert [re.search(r"--gres=gpu:(\d+)", line)[1] for line in others[:3]] == ["2", "4", "8"]
    assert "--nodes=4" in others[-1]
    assert not bench.study().root.exists()


ONE = (*MLP, "--gpus", "1", "--strategy", "single")
TWO = (*MLP, "--gpus", "1,2", "--gpus-per-node", "1", "--strategy", "single,ddp")
STRAY = {"SBATCH_PARTITION": "nonsense", "SBATCH_TIMELIMIT": "1", "SBATCH_HOLD": "1"}


@pytest.fixture
def drained(lab) -> Any:
    """The cluster with no node that starts anything: jobs wait."""
    lab.drain()
    return lab


def test_variables_of_the_shell_change_no_job(drained, bench) -> None:
    shown = bench.matrix(*ONE, "--dry-run")
    done = bench.matrix(*ONE, **STRAY)
    assert done.code == 0, done.stderr
    (job_id,) = bench.jobs()
    kept = drained.command("scontrol", "show", "job", str(job_id))
    assert "Partition=main " in kept
    assert re.search(r"TimeLimit=00:10:00 ", kept)
    assert "Reason=JobHeldUser" not in kept
    (script,) = bench.study().root.glob("jobs/*/script.sh")
    assert script.read_text() in shown.stdout
    # What Slurm itself has kept of it.
    drained.command("scontrol", "write", "batch_script", str(job_id), str(bench.folder / "kept.sh"))
    assert (bench.folder / "kept.sh").read_text() == script.read_text()


def test_the_budget_is_held_before_anything_is_written(bench) -> None:
    (bench.folder / "site.yaml").write_text("{gpus_per_node: 8}")
    call = (*ONE, "--site", "site.yaml", "--device", "cuda", "--max-gpu-hours")
    # One GPU for ten minutes, the shortest limit: 0.17 hours.
    refused = bench.matrix(*call, "0.16")
    assert refused.code == 2
    assert "may take 0.17 by their time limits" in refused.stderr
    assert not list(bench.study().root.glob("jobs/*"))
    taken = bench.matrix(*call, "0.17")
    assert taken.code == 0, taken.stderr
    assert len(bench.jobs()) == 1


def test_a_full_queue_takes_what_it_can(drained, bench) -> None:
    (bench.folder / "site.yaml").write_text("{gpu_request: none, submit_limit: 1}")
    call = (*TWO, "--site", "site.yaml")
    first = bench.matrix(*call)
    assert first.code == 0, first.stderr
    assert "1 job had no room in the queue" in first.stderr
    assert len(bench.jobs()) == 1
    again = bench.matrix(*call)
    assert len(bench.jobs()) == 1
    assert "1 job had no room in the queue" in again.stderr
    drained.command("scancel", *map(str, bench.jobs()))
    bench.settle()
    # Whose runs nobody has done: both are left again, the cancelled one first.
    bench.matrix(*call)
    assert [job.placement.nodes for job in JobStore(bench.study().root).jobs()] == [1, 1]
    assert len(bench.jobs()) == 2


@pytest.mark.slow
def test_waiting_for_room_submits_all(lab, bench, monkeypatch) -> None:
    monkeypatch.setattr(slurm_call, "POLL_S", 0.5)
    (bench.folder / "site.yaml").write_text("{gpu_request: none, submit_limit: 1}")
    cells = (*ONE, "--batch-size", "16,32", "--jobs-per-cell")
    done = bench.matrix(*cells, "--site", "site.yaml", "--feed", "wait")
    assert done.code == 0, done.stderr
    assert "1 job wait for room in the queue" in done.stderr
    first, second = bench.jobs()
    assert lab.command("squeue", "--noheader", "--format=%A").split() == [str(second)]
    bench.settle()
    assert {result.outcome for result in bench.results()} == {Outcome.OK}
    assert first < second


@pytest.mark.slow
def test_a_job_that_submits_the_rest(lab, bench) -> None:
    (bench.folder / "site.yaml").write_text("{gpu_request: none, submit_limit: 3}")
    cells = (*ONE, "--batch-size", "16,32,64,128", "--jobs-per-cell")
    done = bench.matrix(*cells, "--site", "site.yaml", "--feed", "depend")
    assert done.code == 0, done.stderr
    # Two, and the one that submits the other two.
    assert len(bench.jobs()) == 3
    bench.settle()
    store = JobStore(bench.study().root)
    assert [job.purpose for job in store.jobs()] == ["run", "run", "feed", "run", "run"]
    results = bench.results()
    assert {result.outcome for result in results} == {Outcome.OK}
    # Three of the jobs have timed the fourth one's cell beside their own.
    assert (len({result.cell_id for result in results}), len(results)) == (4, 7)


def test_a_job_that_submits_the_rest_needs_room_for_itself_and_the_next(bench, drained) -> None:
    """It runs, a job waits, and the next one that submits waits for that job: three at once."""
    cells = (*ONE, "--batch-size", "16,32,64,128", "--jobs-per-cell", "--site", "site.yaml")
    for limit in (1, 2):
        (bench.folder / "site.yaml").write_text(f"{{gpu_request: none, submit_limit: {limit}}}")
        done = bench.matrix(*cells, "--feed", "depend")
        assert done.code == 2
        assert "--feed depend needs room for three jobs" in done.stderr
        assert bench.jobs() == []


def test_nobody_is_left_to_submit_the_rest_and_says_so(bench, drained) -> None:
    """The queue is full of other jobs of the same user."""
    for _ in range(3):
        drained.command("sbatch", "--output=/dev/null", "--wrap=true")
    (bench.folder / "site.yaml").write_text("{gpu_request: none, submit_limit: 3}")
    done = bench.matrix(*TWO, "--site", "site.yaml", "--feed", "depend")
    assert done.code == 0
    assert "2 jobs had no room in the queue" in done.stderr
    assert bench.jobs() == []


def test_a_refused_job_does_not_stop_the_others(drained, bench) -> None:
    # Four nodes are there, and eight are not.
    call = (*MLP, "--gpus", "1,8", "--gpus-per-node", "1", "--strategy", "single,ddp")
    done = bench.matrix(*call)
    assert done.code == 1
    assert "was refused" in done.stderr
    assert "Node count specification invalid" in done.stderr
    assert len(bench.jobs()) == 1
    store = JobStore(bench.study().root)
    ends = [store.ended(job.job_id) for job in store.jobs()]
    assert [end and end.outcome for end in ends] == [None, Outcome.CANCELLED]


@pytest.fixture
def lenient(drained) -> Iterator[Any]:
    """A cluster that takes jobs beyond the limits of their partition and keeps them waiting: the default."""
    path = drained.folder / "slurm.conf"
    text = path.read_text()
    other = text.replace("EnforcePartLimits=ALL", "EnforcePartLimits=NO")
    path.write_text(other.replace("Nodes=n[1-2]", "Nodes=n[1-2] MaxNodes=1"))
    drained.command("scontrol", "reconfigure")
    yield drained
    path.write_text(text)
    drained.command("scontrol", "reconfigure")


def test_a_job_beyond_the_limits_of_its_partition_is_refused_and_the_others_are_submitted(
    lenient, bench
) -> None:
    done = bench.matrix(*TWO, "--partition", "short")
    assert (done.code, len(bench.jobs())) == (1, 1)
    assert "was refused: it asks for 2 nodes, and a job in short has at most 1;" in done.stderr
    long = bench.matrix(*ONE, "--partition", "short", "--time", "31m", out="long")
    assert (long.code, bench.jobs("long")) == (1, [])
    assert "was refused: it asks for 31m, and a job in short has at most 30m;" in long.stderr
    # The second one takes it.
    assert bench.matrix(*ONE, "--partition", "short,main", "--time", "31m", out="long").code == 0


def test_cancel_ends_what_waits_and_the_same_call_submits_it_again(drained, bench) -> None:
    assert bench.matrix(*TWO).code == 0
    assert len(bench.jobs()) == 2
    done = bench("cancel", "study")
    assert (done.code, done.stdout.startswith("2 jobs cancelled: ")) == (0, True)
    bench.settle()
    assert bench("cancel", "study").stdout.startswith("0 jobs cancelled")
    assert bench.matrix(*TWO).code == 0
    assert len(bench.jobs()) == 4


NASTY = 'it\'s a "study" $(touch pwned) `id` \u00e9 100% #1;'


@pytest.mark.slow
def test_a_job_for_each_cell_and_one_that_reports_in_a_folder_with_every_special_character(
    lab, bench
) -> None:
    (bench.folder / "site.yaml").write_text(
        "gpu_request: none\nsetup:\n  - 'echo \"it''s $(echo 5 + 5)\"'\n  - 'export MINE=\"a b\"'\n"
    )
    (bench.folder / "a place").mkdir()
    call = (*ONE, "--batch-size", "16,32", "--jobs-per-cell", "--report-job", "--site", "site.yaml")
    done = bench.matrix(*call, out=f"a place/../{NASTY}")
    assert done.code == 0, done.stderr
    bench.settle()
    root = bench.study(NASTY).root
    store = JobStore(root)
    assert [(job.purpose, len(job.cells)) for job in store.jobs()] == [("run", 1), ("run", 1), ("report", 0)]
    assert {result.outcome for result in bench.results(NASTY)} == {Outcome.OK}
    assert "mlp" in (root / "report.html").read_text()
    assert not list(bench.folder.rglob("pwned"))
    logs = [path.read_text() for path in root.glob("jobs/*/job-*.log")]
    assert len(logs) == 3
    assert all("it's 5 + 5" in log for log in logs)
    assert NOTHING in bench.matrix(*call, out=NASTY).stderr
    assert store.ended(store.jobs()[2].job_id).outcome is Outcome.OK


def test_names_that_no_script_can_hold_are_refused(bench) -> None:
    for out in ("two\nlines", "back\\slash"):
        done = bench.matrix(*ONE, out=out)
        assert done.code == 2, out
        assert done.stderr.startswith("error: "), out
        assert done.stderr.count("\n") == 1
        assert bench.jobs(out) == []


def test_a_partition_is_a_word_to_slurm_whatever_it_holds(bench) -> None:
    (bench.folder / "site.yaml").write_text("gpu_request: none\npartition: 'no \"$(touch pwned)\" such'\n")
    done = bench.matrix(*ONE, "--site", "site.yaml")
    assert done.code == 1
    assert "invalid partition" in done.stderr.lower()
    assert not list(bench.folder.rglob("pwned"))
