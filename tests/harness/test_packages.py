"""Code of other packages that cells use: planned with them, and refused by a worker when it is another."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from builders import a_cell, a_request
from packages import install

from harness.launch.tally import Conditions
from harness.machine.code import (
    checkout,
    code_hash,
    code_version,
    packages_of,
    planned_code,
    require_planned_packages,
    with_packages,
)
from harness.plan.expand import expand
from harness.plan.study_file import StudyFile
from results.environment import CodeVersion
from results.errors import MachineError
from results.extensions import forget_packages
from results.features import MEASURED, home_of_kind, own_kinds
from results.plan import Order
from strategies.catalog import STRATEGIES

CODE = CodeVersion(code_hash="c0de")
PLAIN, OTHER = a_cell(), a_cell(strategy="elsewhere:speed=3")


@pytest.fixture
def module(tmp_path, monkeypatch) -> Iterator[Path]:
    """The module of a package that adds a strategy and a kind of study."""
    points = {"bench.strategies": {"elsewhere": "elsewhere:Facts"}, "bench.kinds": {"far": "elsewhere:FAR"}}
    install(tmp_path, "a-package", points, version="2.1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(STRATEGIES, "_offered", None)
    forget_packages()
    (tmp_path / "elsewhere.py").write_text("raise RuntimeError('not to be imported')\n")
    yield tmp_path / "elsewhere.py"
    if "elsewhere" in STRATEGIES:
        STRATEGIES.forget("elsewhere")
    sys.modules.pop("elsewhere", None)
    forget_packages()


def test_a_cell_has_the_code_that_it_uses_and_no_other(module) -> None:
    (code,) = packages_of([PLAIN, OTHER]).values()
    assert code.startswith("a-package 2.1 ")
    assert packages_of([OTHER]) == {"strategy elsewhere": code}
    assert packages_of([PLAIN]) == {}
    assert with_packages(CODE, [PLAIN]) == CODE


def test_a_plan_and_a_launch_have_the_code_of_the_kind_that_they_order(module) -> None:
    far = Order(kind="far")
    (code,) = packages_of([OTHER]).values()
    assert packages_of([PLAIN], far, None) == {"kind far": code}
    planned = with_packages(CODE, [PLAIN], far)
    require_planned_packages(planned, [PLAIN], far)
    module.write_text("EDITED = True\n")
    require_planned_packages(planned, [PLAIN])
    with pytest.raises(MachineError, match="the package of kind far was changed after this launch"):
        require_planned_packages(planned, [PLAIN], far)


ENGINE = """
from results.engine import Engine
from strategies.facts import StrategyFacts

class Facts(StrategyFacts):
    name, help, model = "elsewhere", "trains by an engine", "elsewhere:Model"
    engine = Engine(package="pytest", module="pytest", release="0", install="pip install pytest")

    def terms(self, cell, parts):
        return iter(())
"""


def test_the_code_of_an_extension_with_an_engine_is_the_same_before_and_after_its_import(module) -> None:
    module.write_text(ENGINE)
    cell = a_cell(strategy="elsewhere")
    planned = packages_of([cell])
    assert planned["strategy elsewhere"].startswith("a-package 2.1 ")
    assert STRATEGIES.facts("elsewhere").engine is not None
    assert packages_of([cell]) == planned


def test_what_was_edited_after_the_plan_is_not_run(module) -> None:
    planned = with_packages(CODE, [PLAIN, OTHER])
    require_planned_packages(planned, [OTHER])
    module.write_text("edited = True\n")
    require_planned_packages(planned, [PLAIN])
    with pytest.raises(
        MachineError,
        match=r"the package of strategy elsewhere was changed .*a-package 2\.1 \w+ then, a-package",
    ):
        require_planned_packages(planned, [OTHER])
    with pytest.raises(MachineError, match=r"not installed then"):
        require_planned_packages(CODE, [OTHER])


def test_conditions_have_the_code_of_other_packages(module) -> None:
    assert Conditions.elsewhere(with_packages(CODE, [OTHER])).packages == packages_of([OTHER])
    assert Conditions.here(CODE).packages == {}


def test_the_users_commit_is_that_of_the_folder_that_a_plan_reads_files_from(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    request = a_request(StudyFile(workload="mlp", gpus=1))
    plain, reading = (
        expand(msgspec.structs.replace(request, source_folder=folder), study="s", created_at="")
        for folder in (None, str(tmp_path))
    )
    assert planned_code([plain, reading]).user_commit == head.strip()
    assert planned_code([plain]).user_commit == code_version().user_commit != head.strip()
    (tmp_path / "models").mkdir()
    code, own = code_version(tmp_path / "models"), code_version().commit
    assert (code.measured_commit, code.measured_dirty, code.commit) == (head.strip(), False, own)
    monkeypatch.setenv("BENCH_COMMIT", "0123abcd")
    assert code_version(tmp_path / "models").measured_commit == "0123abcd"


def test_the_code_of_a_kind_of_bench_is_all_of_its_feature(tmp_path: Path) -> None:
    for kind in own_kinds():
        home = home_of_kind(kind.name)
        assert (home is None) is (kind is MEASURED)
        found = packages_of([], Order(kind=kind.name))
        assert list(found) == ([] if home is None else [f"kind {kind.name}"])
        if home is not None:
            copy = tmp_path / home
            shutil.copytree(checkout() / home, copy)
            assert found[f"kind {kind.name}"].endswith(code_hash(tmp_path, (home,)))
            last = sorted(copy.rglob("*.py"))[-1]
            last.write_text(f"{last.read_text()}\nEDITED = 1\n")
            assert not found[f"kind {kind.name}"].endswith(code_hash(tmp_path, (home,)))
