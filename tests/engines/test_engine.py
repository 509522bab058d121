"""An engine that is missing, of another version or installed in part; its version in fingerprints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from builders import a_cell, plan_of
from launching import a_launch
from packages import install

from harness.cli import run
from harness.launch.command import torchrun_command
from harness.machine.code import packages_of, require_planned_packages, with_packages
from harness.plan.schedule import schedule
from results.engine import Engine, forget_engines
from results.environment import CodeVersion
from results.errors import MachineError, SpecError, UsageError
from strategies.catalog import STRATEGIES
from strategies.deepspeed.facts import DeepSpeed
from strategies.refusal import refusal, require_possible

GONE = Engine(package="goneengine", module="goneengine", release="0.19.8", install="pip install goneengine")
Put = Callable[..., None]


@pytest.fixture
def put(tmp_path, monkeypatch) -> Put:
    """`put("0.19.8", needs=...)` installs the package `goneengine`, with or without its module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(DeepSpeed, "engine", GONE)
    forget_engines()

    def put(version: str, *, needs: tuple[str, ...] = (), module: bool = True) -> None:
        install(tmp_path, "goneengine", {}, version=version)
        metadata = tmp_path / f"goneengine-{version}.dist-info" / "METADATA"
        metadata.write_text(metadata.read_text() + "".join(f"Requires-Dist: {need}\n" for need in needs))
        if module:
            (tmp_path / "goneengine.py").write_text("raise RuntimeError('not to be imported')\n")
        forget_engines()

    yield put
    forget_engines()


INSTALL = "; install it: pip install goneengine"


@pytest.mark.parametrize(
    ("installed", "missing"),
    [
        (None, f"goneengine is not installed{INSTALL}"),
        (("0.19.7", (), True), f"goneengine 0.19.7 is installed, and bench works with 0.19.8{INSTALL}"),
        (("0.19.80", (), True), f"goneengine 0.19.80 is installed, and bench works with 0.19.8{INSTALL}"),
        (
            ("0.19.8", (), False),
            f"goneengine 0.19.8 is installed in part, without its own module goneengine{INSTALL}",
        ),
        (
            ("0.19.8", ("torch>=2", "no-such-one>=1.0", "nor-this", 'other; extra == "dev"'), True),
            f"goneengine 0.19.8 is installed in part, without no-such-one, nor-this{INSTALL}",
        ),
        (("0.19.8", ("torch>=2.0.0", 'other ; extra == "dev"'), True), None),
    ],
)
def test_what_is_missing_of_an_engine_is_named_with_its_installation(put, installed, missing) -> None:
    if installed is not None:
        version, needs, module = installed
        put(version, needs=needs, module=module)
    assert GONE.missing == missing


def test_a_plan_skips_the_cells_of_a_missing_engine_with_the_sentence(put) -> None:
    plan = plan_of(workload="mlp", strategy="ddp,deepspeed:stage=1", gpus="1,2", batch_size=8, device="cpu")
    assert {cell.strategy for cell in plan.cells} == {"ddp"}
    (skip,) = [one for one in plan.skips if one.gpus == 2]
    assert skip.reason == f"deepspeed cannot run here: goneengine is not installed{INSTALL}"
    with pytest.raises(SpecError, match="goneengine is not installed"):
        require_possible(
            **{"strategy": "deepspeed", "gpus": 2, "device": "cpu", "backend": "gloo", "optimizer": "sgd"},
            compression="none",
            collective="default",
        )
    put("0.19.8")
    assert refusal(a_cell(strategy="deepspeed:stage=1")) is None


def test_the_list_says_what_is_missing(put, capsys) -> None:
    def help_of_the_engine() -> str:
        assert run(["list", "--json", "strategies"]) == 0
        rows = json.loads(capsys.readouterr().out)["strategies"]
        return next(row["meaning"] for row in rows if row["name"] == "deepspeed")

    assert help_of_the_engine() == f"{DeepSpeed.help} (goneengine is not installed{INSTALL})"
    put("0.19.8")
    assert help_of_the_engine() == DeepSpeed.help


def test_the_version_of_an_engine_is_of_its_own_cells_alone(put, monkeypatch) -> None:
    put("0.19.8")
    cells = [a_cell(), a_cell(strategy="deepspeed:stage=2")]
    assert packages_of(cells[:1]) == {}
    assert packages_of(cells) == {"strategy deepspeed": "goneengine 0.19.8"}
    planned = with_packages(CodeVersion(code_hash="c0de"), cells)
    require_planned_packages(planned, cells)
    monkeypatch.setattr(DeepSpeed, "engine", replace(GONE, package="pytest"))
    with pytest.raises(MachineError, match=r"goneengine 0\.19\.8 then, pytest "):
        require_planned_packages(planned, cells)


@pytest.fixture
def interpreter(tmp_path, put, monkeypatch) -> Callable[[str], Path]:
    """`interpreter(script)` names a shell script in engines.yaml as the interpreter of `goneengine`."""
    monkeypatch.chdir(tmp_path)

    def named(script: str) -> Path:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        Path("engines.yaml").write_text("python: {goneengine: python}\n")
        forget_engines()
        return path

    return named


def test_cells_of_an_engine_with_its_own_interpreter_are_launched_apart_by_it(
    tmp_path, put, interpreter, monkeypatch
) -> None:
    install(tmp_path / "there", "goneengine", {}, version="0.19.8")
    (tmp_path / "there" / "goneengine.py").touch()
    python = interpreter(f'PYTHONPATH="$PYTHONPATH:{tmp_path}/there" exec {sys.executable} "$@"')
    assert (GONE.missing, GONE.code, GONE.python) == (None, "goneengine 0.19.8", str(python))
    cells = [a_cell(strategy=name) for name in ("ddp", "fsdp", "deepspeed:stage=1")]
    launches = schedule(cells, repeats=1)
    assert {(one.python, len(one.cells)) for one in launches} == {(None, 2), (str(python), 1)}
    launch = a_launch(python=str(python))
    assert torchrun_command(launch, tmp_path / "launch.json")[0] == str(python)
    # The ranks of that launch are in the interpreter itself.
    monkeypatch.setattr(sys, "executable", str(python))
    assert GONE.python is None


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 3", "does not run bench"),
        ("echo nonsense", "does not run bench"),
        (
            """echo '{"version": "0.19.8", "missing": null, "python": "3.2.1", "torch": "1.0"}'""",
            "has Python 3.2.1 and torch 1.0, and bench runs with Python",
        ),
    ],
)
def test_an_interpreter_that_cannot_run_the_cells_is_named(interpreter, script, words) -> None:
    python = interpreter(script)
    assert f"its interpreter {python}" in str(GONE.missing)
    assert words in str(GONE.missing)


def test_a_wrong_file_of_engines_is_an_error_with_its_line(tmp_path, put, monkeypatch) -> None:
    monkeypatch.setenv("BENCH_ENGINES", str(tmp_path / "engines.yaml"))
    with pytest.raises(UsageError, match="there is no engines file"):
        assert GONE.python
    (tmp_path / "engines.yaml").write_text("pythons: {goneengine: python}\n")
    with pytest.raises(UsageError, match="line 1"):
        assert GONE.python


PLANNING = """
import sys
from harness.cli import run
code = run(["matrix", "--workload", "mlp", "--gpus", "2", "--device", "cpu", "--dry-run",
            "--strategy", "ddp,deepspeed:stage=3", "--out", sys.argv[1]])
sys.exit(code or " ".join({"torch", "deepspeed"} & set(sys.modules)) or None)
"""


def test_planning_imports_no_engine(tmp_path) -> None:
    words = [sys.executable, "-c", PLANNING, str(tmp_path / "study")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, "deepspeed" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("strategy", "fields", "words"),
    [
        ("deepspeed", {"gpus": 1}, "needs at least 2 ranks; on 1 use single"),
        ("deepspeed:stage=2", {"precision": "fp16"}, "use bf16"),
        ("deepspeed", {"compile": True}, "leave --compile out"),
        ("deepspeed", {"memory_format": "channels_last"}, "--memory-format contiguous"),
        ("deepspeed:stage=3", {"compression": "bf16"}, "--compression none"),
        ("deepspeed:stage=3", {"activation_checkpointing": "selective"}, "use --activation-checkpointing"),
        ("deepspeed:offload=cpu", {}, "offload needs stage=1 at least, and the stage is 0"),
        ("deepspeed:overlap_comm=false", {}, "overlap_comm needs stage=1 at least"),
        ("deepspeed:stage=2:max_live_parameters=5", {}, "max_live_parameters needs stage=3 at least"),
        ("deepspeed:stage=3:prefetch_bucket_size=5", {}, "prefetch_bucket_size needs max_live_parameters"),
        ("deepspeed:stage=1:prefetch_bucket_size=5", {}, "prefetch_bucket_size needs stage=3 at least"),
    ],
)
def test_a_configuration_that_contradicts_the_cell_is_refused(strategy, fields, words) -> None:
    assert words in str(refusal(a_cell(strategy=strategy, **fields)))


@pytest.mark.parametrize("text", ["deepspeed:stage=4", "deepspeed:stage=-1", "deepspeed:zero=1"])
def test_an_option_that_deepspeed_does_not_have_is_refused(text) -> None:
    with pytest.raises(SpecError, match=re.compile("stage")):
        STRATEGIES.parse(text)
