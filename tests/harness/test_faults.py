"""Faults of a program amid its steps: each end has its name, and a rerun trains as if nothing had been.

What is trained is counted in steps (`COUNTED`), so that losses, parameters and bytes must equal the
undisturbed study's bit for bit.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from results import schemas
from results.launch import Attempt
from results.outcome import Outcome
from results.run import RunResult

pytestmark = pytest.mark.slow

Bench = Any
OUTSIDE = "its processes were asked to end by a signal from outside"
FAULTS = {
    8: ("raise", Outcome.CRASHED, "rank 1: ValueError: as it was told"),
    16: ("kill rank", Outcome.CRASHED, "rank 1 was killed by SIGKILL"),
    32: ("kill torchrun", Outcome.MISSING_RANKS, "the process that started the ranks was killed by SIGKILL"),
    64: ("kill rank TERM", Outcome.CANCELLED, OUTSIDE),
    128: ("kill torchrun TERM", Outcome.CANCELLED, OUTSIDE),
    256: ("diverge", Outcome.DIVERGED, "not a finite number"),
    512: ("allocate", Outcome.OUT_OF_MEMORY, "can't allocate memory"),
    1: ("exit 0", Outcome.CRASHED, "rank 1: the program called sys.exit(0) before the run was over"),
    2: (
        "exit-now 0",
        Outcome.CRASHED,
        "rank 1 ended with exit code 0 before the run was over: the program must return, and not end its"
        " process (os._exit)",
    ),
}
"""The fault of rank 1 and the end of the run, by batch size. A batch of 4 is unharmed."""
PAIR = ("--gpus", "2", "--strategy", "ddp")
CELLS = (*PAIR, "--batch-size", ",".join(map(str, (4, *FAULTS))))


def at(batch: int) -> str:
    """The part that the ids of the cells with this batch size share."""
    return f"-b{batch}-"


def attempt_of(bench: Bench, run: RunResult) -> Attempt:
    return schemas.ATTEMPT.read(bench.study().launch_folder(run.launch_id) / "attempt.json")


@pytest.fixture(scope="module")
def faulty(bench_in, faulty_model, tmp_path_factory) -> tuple[Bench, Any]:
    """One study with all faults, run once with its report, and what that call has printed."""
    bench = bench_in(tmp_path_factory.mktemp("faulty"))
    faults = [f"1/2 {batch} {fault}" for batch, (fault, *_) in FAULTS.items()]
    call = (
        "matrix",
        *faulty_model(bench.folder, "1/2 8 flood", *faults),
        *bench.counted,
        *CELLS,
        "--out",
        "study",
    )
    return bench, bench(*call)


@pytest.mark.parametrize("batch", FAULTS)
def test_each_fault_costs_its_run_and_has_its_outcome_and_its_reason(faulty, batch) -> None:
    bench, _ = faulty
    fault, outcome, words = FAULTS[batch]
    (failed,) = bench.named(at(batch))
    assert failed.outcome is outcome
    if outcome in (Outcome.DIVERGED, Outcome.OUT_OF_MEMORY):
        assert words in str(failed.reason)
    else:
        assert failed.reason == words
    attempt = attempt_of(bench, failed)
    assert attempt.heartbeats.keys() == {"0", "1"}
    assert attempt.out_of_memory_kills == 0
    assert any(rank.signal == "SIGKILL" for rank in attempt.ranks) == (fault == "kill rank")


def test_a_log_that_grows_without_end_is_cut_while_its_rank_prints(faulty) -> None:
    bench, _ = faulty
    (failed,) = bench.named(at(8))
    logs = sorted(bench.study().launch_folder(failed.launch_id).glob("torchrun/*/attempt_0/*/*.log"))
    assert [b" bytes were left out here ---" in log.read_bytes() for log in logs] == [
        False,
        False,
        True,
        False,
    ]
    assert all(log.stat().st_size < 9 * 2**20 for log in logs)
    said = bench("logs", "study", "--cell", failed.cell_id, "--rank", "1").stdout
    assert said.endswith("ValueError: as it\nwas told\n")


def test_the_good_cell_beside_them_is_measured_and_reported(faulty) -> None:
    bench, done = faulty
    assert done.code == 1
    assert [result.outcome for result in bench.named(at(4))] == [Outcome.OK]
    assert "py:faulty:build" in done.stdout
    assert "SIGKILL" in (bench.study().root / "report.html").read_text()


def test_the_same_command_repeats_what_outsiders_ended_and_the_rest_when_it_is_asked_to(
    faulty, faulty_model, expected
) -> None:
    bench, _ = faulty
    call = (*faulty_model(bench.folder), *CELLS)
    raw = {path: path.read_bytes() for path in bench.folder.glob("study/cells/*/*/rank-*.json")}
    again = bench.matrix(*call)
    assert again.code == 1
    assert "3 of 10 runs to do" in again.stderr
    assert "0 of 10 runs to do" in bench.matrix(*call).stderr
    assert "6 of 10 runs to do" in bench.matrix(*call, "--rerun", "failed", "--dry-run").stdout
    assert bench.matrix(*call, "--rerun", "failed").code == 0
    figures = bench.figures()
    assert len(figures) == 10
    assert figures == {cell: expected[cell] for cell in figures}
    assert all(path.read_bytes() == data for path, data in raw.items())


def test_a_rank_that_the_kernel_ends_for_want_of_memory_is_out_of_memory(
    bench_in, faulty_model, tmp_path, memory_group
) -> None:
    bench = bench_in(tmp_path)
    call = (*faulty_model(tmp_path, "1/2 8 exhaust"), *PAIR, "--batch-size", "8")
    done = bench.run(*call, before=tuple(memory_group(3 * 2**30)))
    assert done.code == 1, done.stderr
    (failed,) = bench.results()
    assert (failed.outcome, failed.reason) == (
        Outcome.OUT_OF_MEMORY,
        "rank 1 was killed by SIGKILL, and meanwhile the kernel of its hosts ended 1 process because"
        " memory ran out",
    )
    assert attempt_of(bench, failed).out_of_memory_kills == 1


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _duplicate(path: Path) -> None:
    shutil.copy(path, path.with_name("rank-00000.json"))


def _from_another_cell(path: Path) -> None:
    (other,) = path.parents[2].glob(f"*g002*{at(4)}*/*/{path.name}")
    shutil.copy(other, path)


def test_a_damaged_rank_file_costs_its_run_and_the_same_command_makes_another(
    undisturbed, expected, bench_in, faulty_model, tmp_path
) -> None:
    shutil.copytree(undisturbed.study().root, tmp_path / "study")
    bench = bench_in(tmp_path)
    damages = {8: _cut, 16: _empty, 32: _duplicate, 64: _from_another_cell}
    for batch, damage in damages.items():
        (path,) = tmp_path.glob(f"study/cells/*g002*{at(batch)}*/*/rank-00001.json")
        damage(path)
    assert bench("collect", "study").code == 0
    for batch in damages:
        (result,) = [one for one in bench.named(at(batch)) if "g002" in one.cell_id]
        assert result.outcome is Outcome.UNKNOWN
        assert "rank-0000" in str(result.reason)
    assert len(bench.figures()) == len(expected) - len(damages)
    again = bench.matrix(*faulty_model(tmp_path), *CELLS)
    assert (again.code, "4 of 10 runs to do" in again.stderr) == (0, True)
    assert bench.figures() == expected
