"""`--batch-size auto`: the command finds a batch, keeps it, continues after a kill, and it trains."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from builders import request_of
from launching import until
from packages import module_at

from harness.cli import run as bench_here
from harness.features.tune.batches import BATCH_RUNS, find_batches
from harness.features.tune.fitting import PROBE, Candidate
from harness.plan.surroundings import SHARE, Devices, Limit, Surroundings
from harness.terminal.console import Console
from results.files import is_busy
from results.outcome import Outcome
from results.plan import Plan
from results.store import Study

SHORT = ("--budget", "0", "--block-steps", "2", "--warmup-steps", "0", "--quads", "0", "--repeats", "1")
CALL = (
    *("matrix", "--workload", "gpt-nano", "--strategy", "ddp", "--gpus", "2", "--device", "cpu"),
    *("--batch-size", "auto", "--memory-limit-mb", "52", "--oversubscribe", "--no-report", "--out", "study"),
)


def probes(folder: Path) -> dict[int, list[Outcome]]:
    """The outcomes of the short runs, by micro-batch."""
    study, found = Study(folder / "study" / BATCH_RUNS), dict[int, list[Outcome]]()
    for run in study.results():
        found.setdefault(study.cell(run.cell_id).micro_batch, []).append(run.outcome)
    return found


def test_a_dry_run_says_what_is_predicted_and_writes_nothing(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench_here([*CALL, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "for gpt-nano, ddp: by prediction a micro-batch of " in said
    assert not (tmp_path / "study").exists()


def test_runs_that_are_not_made_end_the_search_until_the_next_call(tmp_path) -> None:
    options = {"workload": "gpt-nano", "gpus": 2, "device": "cpu", "strategy": "ddp"}
    request = request_of(**options, batch_size="auto", memory_limit_mb=400)
    study, asked = Study(tmp_path), list[str]()

    def execute(study: Study, plan: Plan) -> int | None:
        asked.extend(cell.id for cell in plan.cells)
        return None

    for _ in range(2):
        found = find_batches(study, request, execute, limit=Limit(), order=None, console=Console())
        assert found == 1
    assert len(asked) == 2
    assert len(Study(tmp_path / BATCH_RUNS).plans()) == len(set(asked)) == 1


@pytest.mark.slow
def test_it_is_found_once_and_a_killed_search_goes_on(bench, tmp_path) -> None:
    call = [str(Path(sys.executable).with_name("bench")), *CALL, *SHORT]
    first = subprocess.Popen(call, cwd=tmp_path, stderr=subprocess.DEVNULL)
    index = tmp_path / "study" / BATCH_RUNS
    until(lambda: len(list(index.glob("cells/*/*/rank-*.json"))) >= 2)
    first.kill()
    first.wait()
    # Its workers hold the lock until they have noticed.
    until(lambda: not is_busy(tmp_path / "study"))
    begun = probes(tmp_path)
    assert bench(*CALL, *SHORT).returncode == 0
    found = probes(tmp_path)
    # What had its result when the command was killed did not run again.
    assert all(outcomes == found[size] for size, outcomes in begun.items() if Outcome.OK in outcomes)
    settled = Counter(size for size, those in found.items() for one in those if not one.runs_again)
    assert set(settled.values()) == {1}
    study = Study(tmp_path / "study")
    [batch] = study.plan(1).request.batches or ()
    assert batch.basis == "measured"
    size = batch.series.batch_size
    assert found[size] == [Outcome.OK]
    assert size + 1 in found
    ran = {study.cell(run.cell_id).micro_batch: run.outcome for run in study.results()}
    assert ran == {size: Outcome.OK}
    again = bench(*CALL, *SHORT, "--dry-run")
    assert "0 of 1 run to do" in again.stdout
    assert f"auto is {size} for gpt-nano, ddp: of the " in again.stdout
    assert probes(tmp_path) == found


@pytest.mark.slow
def test_it_finds_what_a_scan_of_the_devices_peaks_finds(ranks, tmp_path) -> None:
    """Each rank records the peak of the device's allocator, in steps with all micro-batches and updates."""
    # The cells of GPUs on a simulated device, and what a rank does with them.
    streams = module_at(Path(__file__).parents[2] / "worker" / "test_streams.py")
    base = streams.MLP | {"strategy": "ddp", "accumulation": 2, "steps": PROBE}
    cells = [base | {"micro_batch": size} for size in range(1, 5)]
    results = ranks(2, streams.run_cells, str(tmp_path), cells)
    peaks = [
        max(record["memory"].taken_bytes for record in records) for records in zip(*results, strict=True)
    ]
    assert peaks == sorted(set(peaks))
    for scan, most in enumerate(peaks, 1):
        gpu = Devices(gpu_name="A100-SXM4-80GB", gpu_bytes=round((most + 2**30 + 1) / SHARE))
        cell = streams.cell_of(2, base | {"micro_batch": 1})
        one, taken = Candidate(cell, Surroundings.of(cell, gpu, None)), dict[int, int | str]()
        while (size := one.next_size(taken, 1, len(peaks))) is not None:
            taken[size] = peaks[size - 1]
        assert one.bracket(taken)[0] == scan
