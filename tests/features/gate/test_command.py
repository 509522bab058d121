"""`bench compare` and `bench baseline` as they are called: on studies, runs, kept files, pytest-benchmark."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from launching import a_launch, an_attempt

from harness.cli import run
from harness.features.gate.prune import Origins, candidates, named_studies, remove
from harness.features.gate.records.baseline import BASELINE
from harness.features.gate.records.paired import PAIR, PAIRED_CALL, Pair, PairedCall, PairedCell, PairedSide
from harness.launchers import nights
from harness.plan.request import fresh_study
from harness.plan.study_file import StudyFile
from results.environment import CodeVersion
from results.files import study_lock
from results.launch import Slot
from results.outcome import Outcome
from results.store import Study


@pytest.fixture
def study(tmp_path, new_study, monkeypatch) -> Callable[..., str]:
    """`study("before", [10.0, 10.1, 10.2])` plants one cell with these step times; gives its folder."""
    monkeypatch.chdir(tmp_path)
    started = itertools.count(0, 100)

    def make(name: str, step_ms: list[float], **timing: object) -> str:
        made = new_study(tmp_path / name, runs_before=next(started))
        made.points("ddp", {2: step_ms}, **timing)
        made.plan()
        return name

    return make


def benchmark_file(path: Path, median_s: float, **cpu: object) -> None:
    """Write the fields of a file of pytest-benchmark 5 that are read."""
    found = {
        "machine_info": {"cpu": {"brand_raw": "Example", **cpu}, "python_version": "3.11.9"},
        "commit_info": {"id": "abc", "dirty": False},
        "benchmarks": [{"fullname": "test_a.py::test_sum", "stats": {"median": median_s}, "extra_info": {}}],
        "datetime": f"2026-01-0{path.stem[-1]}T00:00:00",
        "version": "5.3.1",
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found))


def test_two_studies_and_the_exit_code(study, capsys) -> None:
    before = study("before", [10.0, 10.05, 10.1])
    assert run(["compare", before, study("same", [10.02, 10.07, 10.1])]) == 0
    assert "6 unchanged" in capsys.readouterr().out
    after = study("after", [11.0, 11.05, 11.1])
    assert run(["compare", before, after]) == 1
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("regressed ")]
    assert re.split(r"  +", row)[:6] == [
        "regressed",
        "gpt-nano, ddp, 2 x 8",
        "step time",
        "10.1 ms",
        "11.1 ms",
        "+10.0 %",
    ]
    assert run(["compare", before, after, "--fail-above", "step_time=20%"]) == 0


def test_a_torn_rank_record_costs_its_run_with_a_sentence(study, capsys) -> None:
    before, after = study("before", [10.0, 10.05, 10.1]), study("after", [10.0, 10.05, 10.1, 10.1])
    torn = sorted(Path(after).glob("cells/*/*/rank-00001.json"))[0]
    torn.write_bytes(torn.read_bytes()[:50])
    assert run(["compare", before, after]) == 0
    (told,) = capsys.readouterr().err.splitlines()
    assert re.search(
        r"1 of 4 runs of \S+ in after left out \(unreadable or unfinished record: .*rank-00001.json", told
    ), told


def started(folder: Path, launch_id: str, run_ids: Sequence[str], startup_s: float) -> None:
    """Plant the launch of these runs with this start-up time."""
    made = Study(folder)
    slots = tuple(Slot(cell_id="c", run_id=run_id, repeat=1) for run_id in run_ids)
    made.add_launch(a_launch(launch_id=launch_id, slots=slots))
    made.add_attempt(an_attempt(launch_id=launch_id, startup_ns=round(startup_s * 10**9)))


def test_more_memory_and_a_slower_start_are_named(tmp_path, new_study, new_timing, capsys) -> None:
    """10 % more memory is beyond the margin; a start is judged where a margin is given, once a launch."""
    for name, memory_mib, startup_s in (("before", 1000, 5.0), ("after", 1100, 6.0)):
        made = new_study(tmp_path / name)
        (cell,) = made.series("weak", "ddp", [2], batch=8)
        made.plan()
        for number in range(3):
            launch_id = f"20260102T03040{number}Z-00000f"
            runs = [
                made.run(cell, new_timing(step_ms=10.0, memory_mib=memory_mib, launch_id=launch_id))
                for _ in range(2)
            ]
            started(tmp_path / name, launch_id, runs, startup_s + number / 100)
    words = ["compare", str(tmp_path / "before"), str(tmp_path / "after")]
    assert run([*words, "--fail-above", "startup=10%"]) == 1
    rows = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    assert [row[2:6] for row in rows if row[0] == "regressed"] == [
        ["peak memory", "1,000 MiB", "1.07 GiB", "+10.0 %"],
        ["start-up", "5.01 s", "6.01 s", "+20.0 %"],
    ]
    assert run(["compare", *words[1:], "--format", "json"]) == 1
    (found,) = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["metric"] == "startup"]
    assert found["effect"]["runs"] == [3, 3], "six runs of three launches"


def test_a_run_has_one_value_and_counters_are_held_all_the_same(study, capsys) -> None:
    before = study("before", [10.0, 10.05, 10.1])
    after = study("after", [10.0], payload_bytes=5)
    (folder,) = [path.parent for path in Path(after).glob("cells/*/*/rank-00000.json")]
    assert run(["compare", before, str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "improved" in printed
    assert "an interval needs 3 runs on each side" in printed


def test_faces_go_to_files_or_one_of_them_to_stdout(study, capsys) -> None:
    before, after = study("before", [10.0, 10.05, 10.1]), study("after", [11.0, 11.05, 11.1])
    code = run(["compare", before, after, "--format", "junit=gate.xml", "--format", "json"])
    assert code == 1
    printed = capsys.readouterr().out
    assert json.loads(printed)["exit_code"] == 1
    assert run(["compare", before, after, "--json"]) == 1
    assert capsys.readouterr().out == printed
    assert 'failures="1"' in Path("gate.xml").read_text()


def test_a_baseline_is_kept_shown_compared_and_promoted(study, capsys) -> None:
    before = study("before", [10.0, 10.05, 10.1])
    after = study("after", [10.0, 10.05, 10.1], payload_bytes=8_000_000)
    assert run(["baseline", "save", "main", before]) == 0
    kept = Path("baselines/main.json")
    assert kept.read_text().count("\n") > 20, "one figure a line, for reviewers"
    assert run(["baseline", "save", "main", before]) == 2
    assert run(["compare", "main", after]) == 1
    assert run(["baseline", "promote", "main", after, "--reason", "the second buffer is new"]) == 0
    assert run(["compare", "main", after]) == 0
    capsys.readouterr()
    assert run(["baseline", "show", "main"]) == 0
    assert "the second buffer is new (payload_bytes 4,000,000 to 8,000,000)" in capsys.readouterr().out
    assert run(["baseline", "list"]) == 0
    assert "main" in capsys.readouterr().out


def test_a_cell_that_is_no_longer_measured_is_removed_by_name(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(1, 4):
        benchmark_file(tmp_path / "before" / f"run{number}.json", 1.0 + number / 1000)
        benchmark_file(tmp_path / "after" / f"run{number}.json", 1.0 + number / 1000)
    for path in (tmp_path / "after").iterdir():
        path.write_text(path.read_text().replace("test_sum", "test_new_sum"))
    promotion = ["baseline", "promote", "perf", "after", "--reason", "renamed"]
    assert run(["baseline", "save", "perf", "before"]) == 0
    assert run(promotion) == 0
    # Nothing that stopped running goes unnoticed.
    assert run(["compare", "perf", "after"]) == 1
    capsys.readouterr()
    assert run([*promotion, "--remove", "test_new_sum"]) == 2
    said = "--remove test_new_sum: after lacks no cell of perf called so: test_a.py::test_sum"
    assert said in capsys.readouterr().err
    assert run([*promotion, "--remove", "test_sum"]) == 0
    assert run(["compare", "perf", "after"]) == 0
    capsys.readouterr()
    assert run(["baseline", "show", "perf"]) == 0
    assert "test_a.py::test_sum: renamed (cell removed)" in capsys.readouterr().out


def test_files_of_pytest_benchmark_are_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(1, 5):
        benchmark_file(tmp_path / "before" / f"run{number}.json", 1.0 + number / 1000)
        benchmark_file(tmp_path / "after" / f"run{number}.json", 1.1 + number / 1000)
    assert run(["compare", "before", "after"]) == 1
    assert "test_a.py::test_sum" in capsys.readouterr().out
    assert run(["compare", "before/run1.json", "after/run1.json"]) == 0
    assert "an interval needs 3 runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cpu", "told"),
    [
        ({"count": 64}, "cores is 64 in"),
        ({"family": 25, "model": 17, "stepping": 1}, "cpu_revision is 25.17.1 in"),
        ({"brand_raw": "Other"}, "cpu_model is Other in"),
    ],
)
def test_a_run_of_another_machine_is_named_by_what_differs_and_not_pooled(
    cpu, told, tmp_path, monkeypatch, capsys
) -> None:
    """Two virtual machines may both be called `Example`."""
    monkeypatch.chdir(tmp_path)
    for number in range(1, 4):
        benchmark_file(tmp_path / "before" / f"run{number}.json", 1.0, **cpu)
        benchmark_file(tmp_path / "after" / f"run{number}.json", 1.0)
    assert run(["compare", "before", "after"]) == 3
    assert f"{told} BASE" in capsys.readouterr().out
    benchmark_file(tmp_path / "before" / "run4.json", 1.0)
    assert run(["compare", "before", "after"]) == 2
    assert f"before holds runs of several machines ({told} run1.json" in capsys.readouterr().err


def test_a_file_of_the_installed_pytest_benchmark_is_read(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("test_sum.py").write_text("def test_sum(benchmark):\n    benchmark(sum, range(100))\n")
    words = ["-q", "-p", "no:cacheprovider", "--benchmark-json", "one.json", "--benchmark-max-time", "0.01"]
    # Beneath a process of pytest-xdist pytest-benchmark would measure nothing.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    subprocess.run([sys.executable, "-m", "pytest", *words], check=True, capture_output=True, env=outside)
    assert run(["baseline", "save", "perf", "one.json"]) == 0
    (subject,) = BASELINE.read(Path("baselines/perf.json")).subjects
    assert subject.key == "test_sum.py::test_sum"
    assert subject.facts["python"] == platform.python_version()
    assert subject.facts["timer"] == "perf_counter"
    assert int(subject.facts["cores"]) >= 1
    assert subject.timed["time"][0] > 0


BAD_INPUT = (
    ("compare failed before", "no cell with a figure (crashed: rank 0: rank 1 ended)"),
    ("baseline save main failed", "no cell with a figure (crashed: rank 0: rank 1 ended)"),
    ("history add failed", "has no cell with a figure"),
    ("compare empty.json before", "no cell with a figure (it is empty)"),
    ("compare newer before --baselines .", "update bench to read it"),
    ("compare before nothing", "names no study, run or file, and no baseline"),
    ("compare before empty", "has no JSON file"),
    ("compare before planned", "has no run yet"),
    ("compare before torn.json", "not a file of pytest-benchmark"),
    ("compare kept.json before", "kept.json is not a readable baseline"),
    ("compare --again torn", "is not a readable pair"),
    ("compare --again planned", "holds no pairs"),
    ("compare before before --format xml", "forms are markdown, json, junit"),
    ("compare before before --format json --format junit", "all but one a file"),
    ("compare before before --fail-above step=5%", "there is no metric"),
    (
        "compare before before --fail-above step_time=0.05",
        "a percentage above 0 and at most 100%, such as 5%",
    ),
    (
        "compare before before --fail-above step_time=101%",
        "a percentage above 0 and at most 100%, such as 5%",
    ),
    ("compare before before --format junit=/proc/no.xml", "cannot write /proc/no.xml"),
    ("compare typo before --baselines .", "no metric 'step-time' (did you mean 'step_time'?)"),
    (
        "compare percent before --baselines .",
        "fail_above has step_time 5: a share above 0 and at most 1; 0.05 is 5 %",
    ),
    ("compare before before --looks 2", "--looks is for a paired comparison: add --ab"),
    ("compare timeless.json before", "the datetime '../up'"),
    ("compare hollow before --baselines .", "Expected `array` of length >= 1"),
    ("compare main before --baselines kept", "the baseline of that name is kept/main.json"),
    ("prune --keep 0s --baselines baslines", "--baselines baslines is not a folder"),
    ("report before -o /dev/null --figures svg", "give -o FILE.html, not /dev/null"),
    ("prune --keep 30", "--keep 30 has no unit: write 30d for days"),
    ("status pairs", "pairs holds paired comparisons and no study: bench compare --again pairs/ab"),
    ("compare before before --format json=x --format junit=x", "two --format name the same file"),
    ("compare kept.json before", "restore it (git checkout), or write it again from its study"),
    ("baseline save ../up before", "the name of a baseline is a file name"),
    ("baseline promote none before --reason x", "there is no baseline"),
    ("baseline promote none before --reason ' '", "--reason is empty"),
)
"""Calls, and what the one line on stderr says of each."""


def test_bad_input_gets_one_line_with_the_fix(study, capsys) -> None:
    study("before", [10.0, 10.1])
    study("planned", [])
    study("failed", [10.0, 10.1], outcome=Outcome.CRASHED, reason="rank 1 ended")
    Path("empty.json").write_text('{"benchmarks": [], "datetime": "2026-01-01T00:00:00"}')
    Path("newer.json").write_text('{"schema": "bench/baseline", "schema_version": 99, "writer": "bench 9"}')
    Path("timeless.json").write_text('{"benchmarks": [], "datetime": "../up"}')
    Path("empty").mkdir()
    Path("main").mkdir()
    Path("pairs/ab").mkdir(parents=True)
    Path("pairs/ab/call.json").touch()
    run(["baseline", "save", "main", "before", "--baselines", "kept"])
    run(["baseline", "save", "main", "before", "--baselines", "."])
    for name, margin in (("typo", '"step-time": 0.05'), ("percent", '"step_time": 5')):
        main = Path("main.json").read_text()
        Path(f"{name}.json").write_text(main.replace('"fail_above": {}', f'"fail_above": {{{margin}}}'))
    Path("hollow.json").write_text(re.sub(r'"step_time": \[[^]]*\]', '"step_time": []', main))
    capsys.readouterr()
    Path("torn.json").write_text('{"benchmarks": [')
    Path("kept.json").write_text('{"schema": "bench/baseline", ')
    Path("torn/0001").mkdir(parents=True)
    Path("torn/0001/pair.json").write_text('{"schema": ')
    for words, told in BAD_INPUT:
        assert run(shlex.split(words)) == 2, words
        errors = capsys.readouterr().err
        assert told in errors, words
        assert errors.count("\n") == 1, words


@pytest.mark.parametrize(("changes", "code"), [({}, 1), ({"payload_bytes": "meant"}, 0)])
def test_a_comparison_is_decided_again_with_the_changes_that_it_accepted(
    changes, code, study, capsys
) -> None:
    """In the only pair of runs NEW exchanges more."""
    names = {
        "base": study("ab/0001/base", [10.0]),
        "new": study("ab/0001/new", [10.0], payload_bytes=90_000_000),
    }
    found = {side: Study(Path(name)).results()[0] for side, name in names.items()}
    pair = Pair(
        number=1,
        first="base",
        alternation="launches",
        started_at="2026-01-02T03:04:05.000Z",
        ended_at="2026-01-02T03:05:05.000Z",
        cells=(
            PairedCell(
                base_cell=found["base"].cell_id,
                base_run=found["base"].run_id,
                new_cell=found["new"].cell_id,
                new_run=found["new"].run_id,
            ),
        ),
    )
    Path("ab/0001/pair.json").write_bytes(PAIR.encode(pair))
    sides = [PairedSide(revision=name, commit=None, python="python", options=()) for name in names]
    call = PairedCall(base=sides[0], new=sides[1], changes=changes, fail_above={"throughput": 0.1}, looks=2)
    Path("ab/call.json").write_bytes(PAIRED_CALL.encode(call))
    assert run(["compare", "--again", "ab"]) == code
    assert ("accepted: meant" in capsys.readouterr().out) == bool(changes)
    # As the last call judged them, unless told otherwise.
    for words, margin, looks in (((), 0.1, 2), (("--fail-above", "throughput=20%", "--looks", "4"), 0.2, 4)):
        assert run(["compare", "--again", "ab", "--format", "json", *words]) == code
        found = json.loads(capsys.readouterr().out)
        margins = {finding["metric"]: finding["margin"] for finding in found["findings"]}
        assert margins["throughput"] == margin
        judged = sum(one is not None for one in margins.values())
        assert found["confidence"] == pytest.approx(1 - 2 * 0.01 / looks / judged)


def test_a_closed_pipe_ends_a_comparison_with_exit_code_141(study, monkeypatch, capsys) -> None:
    before, after = study("before", [10.0, 10.05, 10.1]), study("after", [11.0, 11.05, 11.1])
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody:
        monkeypatch.setattr("sys.stdout", nobody)
        assert run(["compare", before, after]) == 141
    assert capsys.readouterr().err == ""


def test_studies_of_other_work_are_incomparable_in_one_line(study, tmp_path, new_study, capsys) -> None:
    before = study("before", [10.0, 10.1, 10.2])
    made = new_study(tmp_path / "other")
    made.points("ddp", {4: [10.0, 10.1, 10.2]})
    made.plan()
    assert run(["compare", before, "other"]) == 3
    printed = capsys.readouterr().out
    assert "BASE has gpt-nano, ddp, 2 x 8, NEW has gpt-nano, ddp, 4 x 8; compare" in printed
    assert "missing" not in printed


def test_a_run_is_named_from_its_own_folder(study, monkeypatch, tmp_path) -> None:
    before = study("before", [10.0, 10.1, 10.2])
    (folder,) = [path.parent for path in Path(before).glob("cells/*/*-000001/rank-00000.json")]
    monkeypatch.chdir(folder)
    assert run(["compare", str(tmp_path / before), "."]) == 0


def test_a_damaged_baseline_is_named_beside_the_others(study, capsys) -> None:
    assert run(["baseline", "save", "main", study("before", [10.0])]) == 0
    Path("baselines/torn.json").write_text('{"schema": "bench/baseline", ')
    assert run(["baseline", "list"]) == 1
    told = capsys.readouterr()
    assert told.out.splitlines()[-1].startswith("main ")
    assert "baselines/torn.json is not a readable baseline" in told.err


def test_a_study_that_is_measured_is_not_kept(study, capsys) -> None:
    with study_lock(Path(study("before", [10.0]))):
        for words in (["save", "main", "before"], ["promote", "main", "before", "--reason", "x"]):
            assert run(["baseline", *words]) == 1
    assert not Path("baselines").exists()


def test_a_promotion_says_what_it_accepts(study, new_environment, capsys) -> None:
    assert run(["baseline", "save", "main", study("before", [10.0])]) == 0
    there = new_environment(torch="2.99.0", cpu_model="Example Two")
    after = study("after", [11.0], environment=there)
    capsys.readouterr()
    assert run(["baseline", "promote", "main", after, "--reason", "a new machine"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "accepted 20" in told
    assert "gpt-nano, ddp, 2 x 8: a new machine (cpu_model Example CPU to Example Two; torch" in told
    assert "to 2.99.0; step_time 10.0 ms to 11.0 ms)" in told
    assert run(["baseline", "show", "main"]) == 0
    assert "cpu_model Example Two" in capsys.readouterr().out


def test_a_fact_that_no_side_has_is_told(study, capsys) -> None:
    before = study("before", [10.0, 10.05, 10.1])
    assert run(["compare", before, before, "--across", "torhc"]) == 0
    assert "--across torhc: no side has that fact (did you mean 'torch'?)" in capsys.readouterr().err


def test_a_baseline_of_uncommitted_code_is_kept_with_a_warning(study, new_environment, capsys) -> None:
    there = new_environment(code=CodeVersion(code_hash="c0de", commit="abc1234", dirty=True))
    assert run(["baseline", "save", "main", study("edited", [10.0], environment=there)]) == 0
    assert "was measured with uncommitted changes: commit abc1234" in capsys.readouterr().err
    assert run(["history", "add", "edited"]) == 0
    assert "was measured with uncommitted changes: commit abc1234" in capsys.readouterr().err


@pytest.fixture
def of_two(tmp_path, new_study, new_environment, monkeypatch) -> Callable[[], None]:
    """Adds the study `both`, with a cell on each of two machines. Gives what measures the first one again."""
    monkeypatch.chdir(tmp_path)
    made = new_study(tmp_path / "both")
    cells = made.series("weak", "ddp", [2, 4], batch=8)
    made.plan()
    there = [new_environment(cpu_model=cpu) for cpu in ("Example One", "Example Two")]
    for cell, machine in zip(cells, there, strict=True):
        made.runs(cell, [10.0], environment=machine)
    assert run(["history", "add", "both"]) == 0
    return lambda: made.runs(cells[0], [10.1], environment=there[0])


def test_a_night_of_two_machines_that_was_cut_off_between_them_is_completed(of_two) -> None:
    [first, second] = sorted(Path("history").glob("*/*.json"))
    kept = second.read_bytes()
    second.unlink()
    assert run(["history", "add", "both"]) == 0
    assert second.read_bytes() == kept
    assert sorted(Path("history").glob("*/*.json")) == [first, second]
    assert run(["history", "add", "both"]) == 2
    # A study that has grown is no night that was cut off.
    second.unlink()
    of_two()
    assert run(["history", "add", "both"]) == 2
    assert not second.exists()


def test_a_night_that_lies_elsewhere_than_it_belongs_is_named_and_left_out(
    study, new_environment, capsys
) -> None:
    """A copy under another name, and a night in the folder of another machine."""
    assert run(["history", "add", study("here", [10.0])]) == 0
    there = new_environment(cpu_model="Example Two")
    assert run(["history", "add", study("there", [20.0], environment=there)]) == 0
    [here, other] = sorted(Path("history").glob("*/*.json"), key=lambda path: path.stat().st_mtime_ns)
    copy, moved = here.with_name("copy.json"), here.parent / other.name
    shutil.copy(here, copy)
    other.rename(moved)
    capsys.readouterr()
    assert run(["history", "show"]) == 0
    told = capsys.readouterr()
    assert f"{copy} is left out: its night belongs to {here.parent.name}/{here.name}" in told.err
    assert f"{moved} is left out: its night belongs to {other.parent.name}/{other.name}" in told.err
    assert [re.split(r"  +", line)[3] for line in told.out.splitlines()[1:]] == ["1"]
    assert run(["history", "show", "--cell", "resnet"]) == 2
    assert "no series has that in its name; there are gpt-nano, ddp, 2 x 8" in capsys.readouterr().err


def night(number: int, factor: float, python: str = "3.11") -> None:
    found = {
        "machine_info": {"cpu": {"brand_raw": "Example"}, "python_version": python},
        "commit_info": {"id": f"c{number:02d}", "dirty": False},
        "benchmarks": [{"fullname": "sum", "stats": {"median": factor * (1 + 0.001 * (number % 3))}}],
        "datetime": f"2026-01-{number + 1:02d}T03:00:00+00:00",
    }
    Path("night.json").write_text(json.dumps(found))


def test_a_history_names_the_night_the_commits_and_what_changed(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(20):
        night(number, *((1.2, "3.12") if number >= 12 else (1.0, "3.11")))
        assert run(["history", "add", "night.json"]) == 0
    assert run(["history", "add", "night.json"]) == 2
    assert "this night was added before" in capsys.readouterr().err
    (torn,) = Path("history").glob("*/20260105*.json")
    torn.write_bytes(torn.read_bytes()[:100])
    assert run(["history", "show"]) == 0
    printed = capsys.readouterr()
    assert "was damaged or edited" in printed.err
    (sentence,) = [line for line in printed.out.splitlines() if line.startswith("time of sum")]
    assert "worse, +20.0 % from 2026-01-13 on (the night before was 2026-01-12, " in sentence
    assert "commits c11 to c12 with odds of over 99 %, python 3.11 to 3.12" in sentence
    assert run(["history", "show", "--metric", "step"]) == 2
    assert run(["history", "show", "--folder", "none"]) == 2


def test_the_night_that_shows_a_change_for_the_worse_sets_a_command_off(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    told = ["--on-regression", "cp $BENCH_VERDICT told.json"]
    for number in range(20):
        night(number, 1.2 if number >= 12 else 1.0)
        assert run(["history", "add", "night.json", *told]) == 0
        if Path("told.json").exists():
            break
    (change,) = json.loads(Path("told.json").read_text())["changes"]
    assert change["seen"]["commit"] == f"c{number:02d}"
    assert (change["before"]["commit"], change["after"]["commit"]) == ("c11", "c12")
    assert (change["range"]["before"]["commit"], change["range"]["after"]["commit"]) == ("c11", "c12")
    assert change["range"]["odds"] > 0.99
    assert change["sentence"] in capsys.readouterr().out
    Path("told.json").unlink()
    night(number + 1, 1.2)
    assert run(["history", "add", "night.json", *told]) == 0
    assert not Path("told.json").exists(), "only the night that first shows a change reports it"


def test_a_report_shows_the_nights_that_it_is_given_or_finds(study, capsys) -> None:
    first = study("first", [10.0, 10.1, 10.2])
    assert run(["report", first]) == 0
    assert '<section id="history"' not in Path(first, "report.html").read_text()
    for name in ("first", "second"):
        assert run(["history", "add", study(name, [10.0]) if name == "second" else first]) == 0
    assert run(["report", first]) == 0
    assert '<section id="history"' in Path(first, "report.html").read_text()
    assert run(["report", first, "--redact"]) == 0
    assert '<section id="history"' not in Path(first, "report.html").read_text()
    assert run(["report", first, "--history", "nothing"]) == 2
    assert "nothing/ holds no night" in capsys.readouterr().err


def test_a_history_of_torn_files_costs_no_report(study, capsys) -> None:
    measured = study("first", [10.0, 10.1, 10.2])
    assert run(["history", "add", measured]) == 0
    [kept] = Path("history").glob("*/*.json")
    kept.write_text("{")
    assert run(["report", measured]) == 0
    assert f"{kept} is not a readable baseline" in capsys.readouterr().err


def test_a_defect_is_no_regression(study, capsys, monkeypatch) -> None:
    """CI takes a 1 for a regression."""
    before = study("before", [10.0, 10.05, 10.1])

    def broken(*_: object, **__: object) -> None:
        raise ValueError("oops")

    monkeypatch.setattr("harness.features.gate.compare.compare_sides", broken)
    assert run(["compare", before, before]) == 2
    assert "ValueError: oops; this is a defect of bench" in capsys.readouterr().err


def test_a_night_before_the_last_one_is_added_with_a_warning(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for number, warned in ((5, False), (4, True), (6, False)):
        night(number, 1.0)
        assert run(["history", "add", "night.json"]) == 0
        assert ("if the clock went back" in capsys.readouterr().err) == warned


def test_a_regression_sets_a_command_off_whose_failure_changes_no_exit_code(study, capsys) -> None:
    before, after = study("before", [10.0, 10.05, 10.1]), study("after", [11.0, 11.05, 11.1])
    told = ["--on-regression", "cp $BENCH_VERDICT told.json; exit 7"]
    assert run(["compare", before, before, *told]) == 0
    assert not Path("told.json").exists()
    assert run(["compare", before, after, *told]) == 1
    assert "ended with exit code 7; the verdict stands" in capsys.readouterr().err
    assert json.loads(Path("told.json").read_text())["findings"][0]["verdict"] == "regressed"


def test_the_newest_night_has_a_word_and_one_that_is_measured_is_not_added(study, capsys) -> None:
    assert run(["history", "add"]) == 2
    assert "runs/ holds no such night" in capsys.readouterr().err
    study("runs/weekly-20260103T030405Z-0123ab", [10.0, 10.1, 10.2])
    newer = study("runs/nightly-20260102T030405Z-0123ab", [10.0, 10.1, 10.2])
    study("runs/nightly-20260101T030405Z-ffffff", [10.0, 10.1, 10.2])
    # A paired comparison of this morning is no night.
    Path("runs/ab-20260104T030405Z-0123ab/0001").mkdir(parents=True)
    assert run(["baseline", "save", "last", "nightly@latest"]) == 0
    assert BASELINE.read(Path("baselines/last.json")).study == Path(newer).name
    with study_lock(Path(newer)):
        assert run(["history", "add", "nightly@latest"]) == 1
        assert "is in use by another bench" in capsys.readouterr().err
    assert run(["history", "add", "nightly@latest"]) == 0
    assert run(["history", "add", "@latest", "--folder", "other"]) == 0


def test_two_nights_on_one_host_do_not_meet(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nightly.yaml").write_text("workload: mlp\ngpus: 1\n")
    with nights.night("other", Path("runs")):
        assert run(["matrix", "nightly.yaml", "--fresh"]) == 4
    assert "another night measures on this host" in capsys.readouterr().err
    assert [path.name for path in Path("runs").iterdir()] == [f".night-{platform.node()}"]


def test_old_studies_go_but_those_that_are_named_or_young_or_in_use(study, tmp_path, capsys) -> None:
    for name in ("kept", "night", "old", "busy", "young"):
        study(f"runs/{name}", [10.0, 10.1, 10.2])
        if name != "young":
            for path in (tmp_path / "runs" / name).glob("plan-*.json"):
                os.utime(path, (0, 0))
    assert run(["baseline", "save", "main", "runs/kept"]) == 0
    assert run(["history", "add", "runs/night"]) == 0
    with study_lock(tmp_path / "runs" / "busy"):
        assert run(["prune", "--keep", "30d"]) == 0
        assert "1 of 5 studies would go, older than 30d" in capsys.readouterr().out
        assert (tmp_path / "runs" / "old").exists()
        assert run(["prune", "--keep", "30d", "--yes"]) == 0
    told = dict(re.split(r"  +", line)[::3] for line in capsys.readouterr().out.splitlines()[1:])
    assert told == {
        "kept": "stays: a baseline or a night was made from it",
        "night": "stays: a baseline or a night was made from it",
        "old": "removed",
        "busy": "stays: another bench works on it",
        "young": "stays: written 0.0 days ago",
    }
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"kept", "night", "busy", "young"}


def test_a_link_to_a_study_elsewhere_is_left_alone(study, tmp_path) -> None:
    study("elsewhere/big", [10.0])
    study("runs/old", [10.0])
    (tmp_path / "runs/link").symlink_to(tmp_path / "elsewhere/big")
    assert run(["prune", "--keep", "0s", "--yes"]) == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["link"]
    assert Study(tmp_path / "elsewhere/big").plan_paths()


def test_a_study_with_checkpoints_is_never_removed(new_study, tmp_path) -> None:
    made = new_study(tmp_path / "one")
    (cell,) = made.points("ddp", {2: [10.0]})
    made.plan()
    nothing = Origins(runs=frozenset(), studies=frozenset())
    (found,) = candidates(tmp_path, keep_s=-60, named=nothing)
    assert found.kept is None
    (made.study.kept_folder(cell.id) / "checkpoints" / "step-000000009").mkdir(parents=True)
    (found,) = candidates(tmp_path, keep_s=-60, named=nothing)
    assert "it has checkpoints of training" in str(found.kept)


def test_named_studies_stay_from_whatever_folder_prune_is_called(
    study, tmp_path, monkeypatch, capsys
) -> None:
    for name in ("kept", "night", "old"):
        study(f"runs/{name}", [10.0, 10.1, 10.2])
    assert run(["baseline", "save", "main", "runs/kept"]) == 0
    assert run(["history", "add", "runs/night"]) == 0
    # What an interrupted removal of an earlier `old` left.
    (tmp_path / "runs/.removed-old/cells").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run(["prune", str(tmp_path / "runs"), "--keep", "0s", "--yes"]) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["kept", "night"]
    assert "removed" in capsys.readouterr().out


def test_leftovers_of_an_interrupted_removal_are_removed(tmp_path, capsys) -> None:
    (tmp_path / "runs/.removed-old/cells").mkdir(parents=True)
    (tmp_path / "baselines").mkdir()
    words = ["prune", str(tmp_path / "runs"), "--baselines", str(tmp_path / "baselines"), "--keep"]
    assert run([*words, "soon", "--yes"]) == 2
    assert list((tmp_path / "runs").iterdir())
    assert run([*words, "0s", "--yes"]) == 2
    assert "holds no study" in capsys.readouterr().err
    assert not list((tmp_path / "runs").iterdir())


def test_another_process_may_finish_a_removal(study, tmp_path, monkeypatch) -> None:
    study("runs/old", [10.0])
    removed = shutil.rmtree

    def after_another(path: Path) -> None:
        removed(path)
        removed(path)

    monkeypatch.setattr("harness.features.gate.prune.shutil.rmtree", after_another)
    remove(tmp_path / "runs/old")
    assert not list((tmp_path / "runs").iterdir())


def test_a_study_is_known_by_its_runs_under_any_name(study, tmp_path, capsys) -> None:
    runs = tmp_path / "runs"
    study("runs/first", [10.0, 10.1, 10.2])
    assert run(["baseline", "save", "main", "runs/first"]) == 0
    (runs / "first").rename(runs / "moved")
    study("runs/first", [10.0, 10.1, 10.2])
    assert run(["prune", "--keep", "0s"]) == 0
    rows = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    told = {row[0]: row[-1] for row in rows}
    assert told["moved"] == "stays: a baseline or a night was made from it"
    assert told["first"] == "would be removed"


def test_a_study_that_a_promoted_baseline_still_has_a_cell_of_stays(tmp_path, new_study, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, before in (("old", 0), ("new", 100)):
        made = new_study(tmp_path / "runs" / name, runs_before=before)
        made.points("ddp", {2: [10.0, 10.1, 10.2], 4: [10.0, 10.1, 10.2]})
        made.plan()
    assert run(["baseline", "save", "main", "runs/old"]) == 0
    assert run(["baseline", "promote", "main", "runs/new", "--reason", "x", "--cell", "2 x 8"]) == 0
    named = named_studies([Path("baselines")], [Path("history")])
    assert all(named.has(Study(Path("runs") / name)) for name in ("old", "new"))


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("ddp", ["ddp"]),
        ("ddp + topk:0.01", ["ddp + topk:0.01"]),
        ("2 x 8", ["ddp", "ddp + topk:0.01", "scratch-ddp"]),
        ("gpt-nano, scratch-ddp, 2 x 8", ["scratch-ddp"]),
    ],
)
def test_a_name_accepts_the_cells_that_it_equals(tmp_path, new_study, monkeypatch, name, accepted) -> None:
    monkeypatch.chdir(tmp_path)
    for number, study in enumerate(("old", "new")):
        made = new_study(tmp_path / study, runs_before=100 * number)
        for strategy, fields in (("ddp", {}), ("ddp", {"compression": "topk:0.01"}), ("scratch-ddp", {})):
            made.points(strategy, {2: 10.0 + number}, **fields)
        made.plan()
    assert run(["baseline", "save", "main", "old"]) == 0
    assert run(["baseline", "promote", "main", "new", "--reason", "x", "--cell", name]) == 0
    kept = BASELINE.read(Path("baselines/main.json"))
    assert [one.subject.split(", ")[1] for one in kept.accepted] == accepted
    assert run(["baseline", "promote", "main", "new", "--reason", "x", "--cell", "dd"]) == 2


def test_a_baseline_keeps_its_commit_as_long_as_a_cell_keeps_its_figures(
    tmp_path, new_study, new_environment, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for commit in ("old", "new"):
        made = new_study(tmp_path / commit, runs_before=100 * (commit == "new"))
        there = new_environment(code=CodeVersion(code_hash="c0de", commit=commit, dirty=False))
        made.points("ddp", {2: 10.0, 4: 10.0}, environment=there)
        made.plan()
    promotion = ["baseline", "promote", "main", "new", "--reason", "x"]
    assert run(["baseline", "save", "main", "old"]) == 0
    assert run([*promotion, "--cell", "2 x 8"]) == 0
    kept = BASELINE.read(Path("baselines/main.json"))
    assert (kept.commit, kept.study, [one.commit for one in kept.accepted]) == ("old", "old", ["new"])
    assert run(promotion) == 0
    kept = BASELINE.read(Path("baselines/main.json"))
    assert (kept.commit, kept.study) == ("new", "new")


def test_a_comparison_goes_or_stays_with_all_of_its_studies(study, tmp_path, capsys) -> None:
    runs = tmp_path / "runs"
    folders = {
        "ab-busy": "0002/new",
        "ab-kept": "0001/base",
        "ab-old": "0001/new",
    }
    for name, place in folders.items():
        study(f"runs/{name}/{place}", [10.0, 10.1, 10.2])
        (runs / name / place).parents[1].joinpath("call.json").write_text("{}")
    assert run(["baseline", "save", "main", "runs/ab-kept/0001/base"]) == 0
    capsys.readouterr()
    with study_lock(runs / "ab-busy"):
        assert run(["prune", "--keep", "0s", "--yes"]) == 0
    told = dict(re.split(r"  +", line)[::3] for line in capsys.readouterr().out.splitlines()[1:])
    assert told == {
        "ab-busy": "stays: another bench works on it",
        "ab-kept": "stays: a baseline or a night was made from it",
        "ab-old": "removed",
    }
    assert {path.name for path in runs.iterdir()} == {"ab-busy", "ab-kept"}


def test_nothing_goes_while_a_baseline_cannot_be_read(study, capsys) -> None:
    study("runs/old", [10.0])
    Path("baselines").mkdir()
    Path("baselines/main.json").write_text('{"schema": "bench/baseline", ')
    assert run(["prune", "--keep", "0s", "--yes"]) == 1
    assert "baselines/main.json" in capsys.readouterr().err
    assert Path("runs/old").exists()
    assert run(["prune", "nothing", "--keep", "30d"]) == 1


def test_status_of_a_folder_of_studies_is_a_line_each(study, capsys) -> None:
    study("runs/one", [10.0, 10.1, 10.2])
    study("runs/two", [])
    assert run(["status", "runs"]) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["study", "one", "two"]
    assert run(["status", "runs", "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert [(one["study"], one["planned"]) for one in (first, second)] == [("one", 3), ("two", 3)]
    assert run(["status", "runs", "--watch"]) == 2
    assert "--watch follows one study: name one in runs, such as runs/two" in capsys.readouterr().err
    for plan in Path("runs/one").glob("plan-*.json"):
        plan.write_text("{")
    for cell in Path("runs/one").glob("cells/*/cell.json"):
        cell.write_text("{")
    assert run(["status", "runs"]) == 1
    shown, warned = capsys.readouterr()
    assert [line.split()[0] for line in shown.splitlines()] == ["study", "two"]
    assert "warning: runs/one: " in warned


def test_a_fresh_call_has_a_study_of_its_own(tmp_path, monkeypatch, capsys) -> None:
    one, two = (fresh_study(StudyFile(workload="mlp"), Path("nightly.yaml")) for _ in range(2))
    assert re.fullmatch(r"nightly-\d{8}T\d{6}Z-[0-9a-f]{6}", str(one.name))
    assert one.name != two.name
    assert str(fresh_study(StudyFile(name="mine"), None).name).startswith("mine-")
    monkeypatch.chdir(tmp_path)
    for words, told in (
        (["--out", "x"], "leave out --out x"),
        ([], "--fresh needs a name"),
    ):
        assert run(["matrix", "--workload", "mlp", "--gpus", "1", "--fresh", *words]) == 2
        assert told in capsys.readouterr().err
