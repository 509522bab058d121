"""The surface: help, errors of one line with the fix in them, and no torch where none is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import click
import msgspec
import pytest
from printed_schema import keep_the_schema

from harness.cli import COMMANDS, run
from harness.cli.matrix import matrix_command as matrix
from harness.matrix import Matrix
from harness.plan.options import PRECISIONS
from harness.plan.study_file import OPTIONS, StudyFile
from results.errors import SYNONYMS, bench_call
from results.features import features
from results.plan import Pattern
from results.store import Study
from strategies.catalog import STRATEGIES


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def _error(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = run(list(arguments))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err
    return code, captured.err


def test_no_help_is_longer_than_a_screen_and_all_options_are_one_flag_away(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in COMMANDS:
        assert run([name, "--help"]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert f"bench {name}" in shown[0]
        assert len(shown) <= 60, name
        assert max(map(len, shown)) <= 80, name
    run(["matrix", "--help-all"])
    every = " ".join(capsys.readouterr().out.split())
    for option in OPTIONS:
        default = f"[default: {option.default.strip('()')}]" if option.default else ""
        assert f"{option.flag} " in every
        assert default in every, option


@pytest.mark.parametrize(
    ("word", "meant"),
    [("run", "matrix"), ("go", "matrix"), ("search", "tune"), ("open", "report"), ("statsu", "status")],
)
def test_a_word_of_another_tool_gets_the_command_that_does_it(word, meant, capsys) -> None:
    assert f"(did you mean {meant!r}?)" in _error(capsys, word)[1]


def test_no_misspelt_command_gets_one_that_removes(capsys) -> None:
    for word in ("prnue", "prun", "cancle", "run"):
        assert not re.search("did you mean '(prune|cancel)'", _error(capsys, word)[1])


def test_the_examples_of_a_study_keep_the_schema_that_is_printed(capsys) -> None:
    keep_the_schema("study", "studies/*", capsys)


def test_a_launcher_without_a_profile_has_no_schema(capsys) -> None:
    code, error = _error(capsys, "schema", "local")
    assert code == 2
    assert "--launcher local reads no profile; name study" in error


MATRIX_ERRORS = [
    (["--gpus", "8..1"], "'8..1'", "write 1..8"),
    (["--gpus", "0"], "'0'", "start at 1"),
    (["--gpus", "two"], "'two'", "1..256 (doubling)"),
    ([], "--gpus is missing", "--gpus 1..8"),
    (["--gpus", "1", "--workload", "resnet81"], "'resnet81'", "did you mean 'resnet18'?"),
    (["--gpus", "1", "--workload", "nothing-like-it"], "'nothing-like-it'", "there are: gpt-nano"),
    (["--gpus", "1", "--strategy", "dpp"], "'dpp'", "did you mean 'ddp'?"),
    (["--gpus", "1", "--strategy", "ddp:bucket=1"], "'bucket'", "its options: bucket_mb"),
    (["--gpus", "1", "--strategy", "ddp:bucket_mb=inf"], "inf", "finite"),
    (["--gpus", "1", "--compression", "zip"], "'zip'", "there are: bf16, dgc"),
    (["--gpus", "1", "--batch-size", "0"], "--batch-size", "at least 1"),
    (["--gpus", "1", "--repeats", "0"], "--repeats", "at least 1"),
    (["--gpus", "1", "--dataset", "imagenet"], "'imagenet'", "synthetic"),
    (["--gpus", "1", "--workload", "py:absent:build"], "absent.py", "found neither"),
    (["--gpus", "1", "--budget", "soon"], "'soon'", "90s"),
    (["--gpus", "1", "--launcher", "slum"], "'slum'", "is not one of 'local'"),
    (["--gpus", "1", "--strategy", "FSDP"], "'FSDP'", "did you mean 'fsdp'?"),
    (["--gpus", "2", "--compression", "topk"], "needs the share that is sent", "write topk:0.01"),
    (["--gpu", "1"], "--gpu", "(did you mean '--gpus'?)"),
    (["absent.yaml"], "absent.yaml", "check the name"),
    (["resnet50"], "resnet50", "did you mean --workload resnet50?"),
    (["--gpus", "1", "--workload", "mymodel.py"], "'mymodel.py'", "did you mean 'py:mymodel:FUNCTION'?"),
    (["--gpus", "1", "--precision", "float16"], "'float16'", "did you mean 'fp16'?"),
    (["--gpus", "1", "--memory-limit-mb", "4GB"], "'4GB'", "did you mean 4096?"),
    (["--gpus", "1", "--compression", "topk:1%"], "'1%'", "did you mean 0.01?"),
    (["--nodes", "2"], "--nodes", "(did you mean '--gpus-per-node'?)"),
    (["--lr", "0.1"], "--lr", "(did you mean '--optimizer sgd:lr=0.1'?)"),
    (["--lr-scheduler", "cosine"], "--lr-scheduler", "--lr-scheduler; see"),
    (["--gpus", "1", "--activation-checkpointing=some"], "'some'", "all (true), none (false) or"),
]


@pytest.mark.parametrize(("arguments", "given", "fix"), MATRIX_ERRORS, ids=lambda value: str(value)[:40])
def test_a_wrong_call_says_what_was_given_and_what_to_do(arguments, given, fix, capsys) -> None:
    code, error = _error(capsys, "matrix", *arguments)
    assert code == 2
    assert given in error
    assert fix in error
    assert list(Path().iterdir()) == [], "a wrong call writes nothing"


def test_matrix_options_of_a_comparison_stand_after_the_dashes(capsys) -> None:
    code, error = _error(capsys, "compare", "--ab", "A", "B", "--gpus", "2")
    assert code == 2
    assert "bench compare --ab A B -- --gpus ..." in error


def test_every_synonym_names_an_option_or_a_value() -> None:
    known = {option.flag for option in OPTIONS} | set(PRECISIONS.choices)
    assert {meant.split(" ")[0] for meant in SYNONYMS.values()} <= known
    assert not known & SYNONYMS.keys()


@pytest.mark.parametrize("name", ["matirx", "Matrix"])
def test_an_unknown_command_is_refused(name, capsys) -> None:
    code, error = _error(capsys, name)
    assert code == 2
    assert f"there is no command {name!r} (did you mean 'matrix'?); there are: matrix, check," in error


def test_a_new_study_has_the_baseline_that_was_asked_for_and_a_started_one_stays(capsys) -> None:
    call = ["--gpus", "1,2", "--strategy", "ddp", "--workload", "mlp", "--device", "cpu", "--oversubscribe"]

    def planned(*more: str) -> tuple[bool, bool]:
        """Whether a dry run plans the baseline, and whether it says so."""
        assert run(["matrix", *call, *more, "--dry-run"]) == 0
        shown = capsys.readouterr()
        return "mlp-single-g001" in shown.out, "--no-baseline" in shown.err

    given = StudyFile(gpus="1,2", strategy="ddp", workload="mlp", device="cpu", oversubscribe=True)
    study = Study.for_planning(Path("runs") / Matrix(given, study_file=None)._root.name)
    assert planned() == (True, True)
    assert planned("--no-baseline") == (False, False)
    Matrix(msgspec.structs.replace(given, baseline=False), study_file=None)._kept_plans(study)
    assert planned() == (False, False)
    assert planned("--baseline") == (True, True)
    other = Study.for_planning(Path("other"))
    Matrix(msgspec.structs.replace(given, out="other"), study_file=None)._kept_plans(other)
    assert planned("--out", "other") == (True, True)
    Matrix(msgspec.structs.replace(given, out="other"), study_file=None)._kept_plans(other)
    assert len(other.plans()) == 1


@pytest.mark.parametrize("call", [(), ("matrix",)])
def test_help_has_a_short_form(call) -> None:
    # A process keeps the help option of a command's first context, which other tests make without its parent.
    done = subprocess.run([sys.executable, "-m", "harness.cli", *call, "-h"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["Usage:", "bench"])


def test_names_are_listed_by_kind(capsys) -> None:
    assert run(["list", "Optimizers"]) == 0
    text = capsys.readouterr().out
    assert "optimizers" in text
    assert "adamw" in text
    assert "strategies" not in text


def test_tables_are_printed_as_json(capsys) -> None:
    assert run(["list", "--json", "optimizers", "strategies"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in listed["optimizers"]][:1] == ["sgd"]
    assert {"single", "ddp:bucket_mb="} <= {row["name"] for row in listed["strategies"]}
    run(["doctor", "--json"])
    assert {row["what"] for row in json.loads(capsys.readouterr().out)["machine"]} >= {"torch", "CPU"}


PLANNED = ["matrix", "--gpus", "1,2", "--workload", "mlp", "--device", "cpu", "--oversubscribe", "--dry-run"]


def test_a_variable_gives_the_default_of_an_option_to_this_process_alone(capsys, monkeypatch) -> None:
    def planned(*more: str) -> str:
        monkeypatch.setenv("BENCH_MATRIX_STRATEGY", "scratch-ddp")
        monkeypatch.setenv("BENCH_MATRIX_BASELINE", "false")
        monkeypatch.setenv("BENCH_TRAIN_STRATEGY", "absent")
        assert run([*PLANNED, *more]) == 0
        assert not [name for name in os.environ if name.startswith(("BENCH_MATRIX_", "BENCH_TRAIN_"))]
        shown = capsys.readouterr()
        assert ("--strategy=scratch-ddp by the variable BENCH_MATRIX_STRATEGY" in shown.err) is not bool(more)
        return shown.out

    out = planned()
    assert "mlp-scratch-ddp-g002" in out
    assert "single-g001" not in out
    assert "scratch-ddp" not in planned("--strategy", "ddp", "--no-baseline")
    monkeypatch.setenv("BENCH_MATRIX_STRATGY", "ddp")
    code, error = _error(capsys, "matrix", "--gpus", "1")
    assert (code, "did you mean 'BENCH_MATRIX_STRATEGY'?" in error) == (2, True)


def test_quiet_leaves_out_notes_and_nothing_else(capsys) -> None:
    said = []
    for words in (["-q", *PLANNED], [*PLANNED, "--quiet"], PLANNED):
        assert run([*words, "--strategy", "ddp"]) == 0
        said.append(capsys.readouterr())
    assert (said[0].out, said[0].err, said[1].err) == (said[2].out, "", "")
    assert "--no-baseline" in said[2].err


def test_a_shell_completes_names_after_each_comma() -> None:
    parameter = next(each for each in matrix.params if each.name == "compression")
    context = click.Context(matrix)
    assert [item.value for item in parameter.shell_complete(context, "none,top")] == ["none,topk"]
    strategy = next(each for each in matrix.params if each.name == "strategy")
    assert "zero1" in [item.value for item in strategy.shell_complete(context, "")]


def test_a_call_to_type_is_quoted() -> None:
    assert bench_call("status", Path("my runs/a")) == "bench status 'my runs/a'"


def test_work_that_joins_another_study_by_its_name_is_told(small_study, capsys) -> None:
    study, _ = small_study
    run(["matrix", "--gpus", "1", "--workload", "gpt-nano", "--out", str(study.root), "--dry-run"])
    assert "holds the study of mlp, and gpt-nano will be in the same report" in capsys.readouterr().err
    run(["matrix", "--gpus", "1", "--workload", "mlp", "--out", str(study.root), "--dry-run"])
    assert "will be in the same report" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "dry", "code", "words"),
    [
        ({"PYTHONIOENCODING": "ascii"}, ("--dry-run",), 0, "/r\\xe9/launches/LAUNCH_ID/"),
        # Neither has the system's own encoding the character: no file can name it.
        (
            {"PYTHONUTF8": "0", "LC_ALL": "C"},
            (),
            2,
            "is not text of this environment, whose encoding is ascii: set LC_ALL=C.UTF-8",
        ),
    ],
)
def test_output_without_a_character_has_an_escape_in_its_place(variables, dry, code, words) -> None:
    command = ("matrix", "--workload", "mlp", "--gpus", "1", "--device", "cpu")
    call = [sys.executable, "-m", "harness.cli", *command, *dry, "--out", "r\xe9"]
    done = subprocess.run(call, capture_output=True, env={**os.environ, **variables}, check=False)
    said = done.stdout.decode("ascii") + done.stderr.decode("ascii")
    assert (done.returncode, words in said, "defect" in said) == (code, True, False), said


def test_an_interrupted_command_ends_as_shells_have_it(monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Study, "plan_paths", interrupted)
    assert run(["status", "study"]) == 128 + signal.SIGINT


def test_a_strategy_of_a_package_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    capsys, monkeypatch
) -> None:
    monkeypatch.setattr(STRATEGIES, "_offered", {})
    said = "is in a package that is not installed; install it: pip install ./docs/examples/horovod"
    code, error = _error(capsys, "matrix", "--gpus", "2", "--strategy", "ddp,horovod", "--dry-run")
    assert (code, error) == (2, f"error: strategy 'horovod' {said}\n")
    assert run(["list", "--json", "strategies"]) == 0
    listed = json.loads(capsys.readouterr().out)["strategies"]
    assert listed[-1] == {"name": "horovod", "default": "", "meaning": said}


def test_a_folder_that_is_no_study_is_refused(capsys, tmp_path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").touch()
    for command in ("report", "status", "collect"):
        code, error = _error(capsys, command, "letters")
        assert code == 2
        assert "is not a study" in error
    code, error = _error(capsys, "matrix", "--gpus", "1", "--out", "letters")
    assert code == 2
    assert "name a new folder" in error
    assert [path.name for path in (tmp_path / "letters").iterdir()] == ["dear.txt"]


def test_the_folder_of_another_study_is_refused(small_study, capsys, tmp_path) -> None:
    study, _ = small_study
    (tmp_path / "mine.yaml").write_text("name: mine\ngpus: 1\n")
    code, error = _error(capsys, "matrix", "mine.yaml", "--out", str(study.root))
    assert code == 2
    assert "holds the study 'study', not 'mine'" in error


@pytest.mark.parametrize(
    ("command", "text", "words"),
    [
        ("report", '{"schema": "bench/plan", "schema_version": 99}', "update bench"),
        ("status", '{"schema": "bench/plan", "sche', "s/plan-0001.json is not a readable plan"),
    ],
)
def test_a_plan_that_cannot_be_read_is_refused_with_advice(command, text, words, capsys, tmp_path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "plan-0001.json").write_text(text)
    code, error = _error(capsys, command, "s")
    assert (code, words in error) == (1, True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_matrix_of_which_nothing_can_be_measured_here_is_no_success(capsys, tmp_path, device) -> None:
    points = ("--workload", "mlp", "--strategy", "ddp", "--gpus", "2048,4096", "--device", device)
    code = run(["matrix", *points, "--no-report", "--out", str(tmp_path / "s")])
    assert code == 1
    assert "nothing was measured: 2 points skipped, no cell left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "excluded", "code"),
    # ddp needs two ranks, and what was excluded was not asked for.
    [("1,4096", None, 1), ("1,2", None, 0), ("1,4096", Pattern(gpus=4096), 0)],
)
def test_all_points_that_a_machine_could_hold_may_be_required(tmp_path, gpus, excluded, code) -> None:
    options = StudyFile(
        workload="mlp",
        strategy="single,ddp",
        gpus=gpus,
        device="cpu",
        out=str(tmp_path),
        require="all",
        exclude=[excluded] if excluded else None,
    )
    for given, expected in ((options, code), (msgspec.structs.replace(options, require=None), 0)):
        matrix = Matrix(given, study_file=None)
        assert matrix._without_cells(*matrix._plans(Study(tmp_path))) == expected


def test_runs_count_at_the_end_by_the_conditions_of_the_call(small_study) -> None:
    """Ranks with another Python, as in a container, may have another torch than this process."""
    study, _ = small_study
    plan, results = study.plans()[0], study.results()
    other = [
        msgspec.structs.replace(run, environment=msgspec.structs.replace(run.environment, torch="0.1"))
        for run in results
        if run.environment is not None
    ]
    options = StudyFile(workload="mlp", gpus="1", device="cpu", out=str(study.root))
    matrix = Matrix(options, study_file=None)
    assert matrix._finish(study, plan, other, report=False) == 1
    matrix._call.hosts = replace(matrix._call.hosts, same_python=False)
    assert matrix._finish(study, plan, other, report=False) == 0


def test_flags_win_over_the_study_file(capsys, tmp_path) -> None:
    (tmp_path / "study.yaml").write_text("workload: mlp\ngpus: 1\nstrategy: single\nbatch_size: [8, 16]\n")
    assert run(["matrix", "study.yaml", "--batch-size", "4", "--device", "cpu", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "mlp-single-g001-b4-" in out
    assert "-b8-" not in out


def test_without_torch_a_plan_is_shown_and_running_says_how_to_install_it(
    capsys, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(["matrix", "--gpus", "1..256", "--device", "cpu", "--dry-run"]) == 0
    capsys.readouterr()
    code, error = _error(capsys, "matrix", "--gpus", "1", "--device", "cpu")
    assert code == 1
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert error.partition("pip install '")[2].partition("'")[0] in project["dependencies"]
    assert list(tmp_path.iterdir()) == []


PROBE = """
import sys
from harness.cli import run
for line in sys.argv[1:]:
    code = run(line.split("|"))
    assert code == 0, (line, code)
    assert "torch" not in sys.modules, line
"""
"""Commands, with a bar between their words, one after the other in one process."""


def _probe(folder: Path, *commands: str) -> None:
    call = [sys.executable, "-c", PROBE, *commands]
    done = subprocess.run(call, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_planning_loads_no_torch(tmp_path) -> None:
    dry = "matrix|--gpus|1..256|--dry-run"
    _probe(tmp_path, "--help", dry, "matrix|--gpus|2|--device|cpu|--launcher|manual", "list", "doctor")


def test_reporting_loads_no_torch(small_study, tmp_path) -> None:
    root = small_study[0].root
    _probe(tmp_path, f"report|{root}|--output|page.html", f"status|{root}", f"collect|{root}")
    assert (tmp_path / "page.html").exists()
    assert (tmp_path / "page.cells.csv").exists()


def test_help_loads_nothing_heavy(tmp_path) -> None:
    code = (
        "import sys; from harness.cli import run; run(['--help']);"
        "heavy = {'torch', 'pandas', 'matplotlib', 'numpy', 'scipy', 'msgspec', 'rich'} & sys.modules.keys();"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True)


def test_debug_shows_the_traceback(tmp_path) -> None:
    bench = str(Path(sys.executable).with_name("bench"))
    done = subprocess.run([bench, "matrix", "--gpus", "8..1", "--debug"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "GpuCountsError" in done.stderr


def test_a_study_whose_plan_was_damaged_is_told_and_the_same_command_goes_on(
    small_study, tmp_path, monkeypatch, capsys
) -> None:
    shutil.copytree(small_study[0].root, tmp_path / "study")
    monkeypatch.chdir(tmp_path)
    raw = {path: path.read_bytes() for path in tmp_path.glob("study/cells/*/*/rank-*.json")}
    runs = len(Study(Path("study")).results())
    path = tmp_path / "study" / "plan-0001.json"
    path.write_bytes(path.read_bytes()[:100])
    advice = "is not a readable plan"
    assert run(["status", "study"]) == 0
    said = capsys.readouterr()
    assert said.out.count(" done ") == len(Study(Path("study")).cell_ids())
    assert advice in said.err
    # And where the advice was followed.
    path.rename(tmp_path / "moved away")
    assert run(["collect", "study"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{runs} runs in ")
    assert "in no plan that can be read (a plan is missing)" in said.err
    assert run(["report", "study"]) == 0
    words = ["matrix", "--workload", "mlp", "--batch-size", "32", "--gpus", "1..2"]
    words += ["--device", "cpu", "--budget", "0", "--block-steps", "2", "--quads", "1"]
    words += ["--scaling", "weak,strong", "--repeats", "2", "--out", "study"]
    capsys.readouterr()
    assert run(words) == 0
    assert f"; 0 of {runs} runs to do" in capsys.readouterr().err
    assert Study(Path("study")).unplanned_cells() == []
    assert {path: path.read_bytes() for path in raw} == raw


def test_a_batch_is_not_found_by_an_installation_without_the_feature_that_finds_it(
    monkeypatch, capsys
) -> None:
    monkeypatch.setattr("harness.features.FEATURES", ())
    features.cache_clear()
    try:
        call = "matrix --gpus 1 --device cpu --batch-size auto --memory-limit-mb 400"
        code, said = _error(capsys, *call.split())
    finally:
        features.cache_clear()
    assert code == 2
    assert "needs short runs of a feature that this installation lacks: give a number" in said
    assert not Path("runs").exists()
