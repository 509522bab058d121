"""The list of planted defects fits the code and the tests; that the tests catch them, `make planted` says."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packages import module_at

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LEAST = {"strategies": 50, "harness": 45}
"""Defects of each package: of code that runs in ranks, and of the proof."""


plant = module_at(HERE / "plant.py")
DEFECTS = plant.defects()


@cache
def names_in(file: str) -> frozenset[str]:
    """The functions of a test file."""
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def unfit(defect) -> Iterator[str]:
    """Yield a sentence for each part of a defect that does not fit the tests, or changes nothing."""
    if defect.becomes == defect.place:
        yield f"{defect.name}: nothing is changed"
    for test in defect.tests:
        file, _, name = test.partition("::")
        if not (ROOT / file).is_file() or name.partition("[")[0] not in names_in(file):
            yield f"{defect.name}: there is no test {test}"


def test_every_named_test_exists() -> None:
    assert all(defect.tests for defect in DEFECTS)
    assert [sentence for defect in DEFECTS for sentence in unfit(defect)] == []


def test_every_place_is_there_once_and_every_package_has_its_share() -> None:
    sources = list(plant.sources(ROOT))
    places = [defect.locate(sources)[0] for defect in DEFECTS]
    found = Counter(path.relative_to(ROOT).parts[0] for path in places)
    assert {package: found[package] for package in LEAST if found[package] < LEAST[package]} == {}


def test_a_defect_is_planted_in_a_copy_and_judged_by_what_its_tests_do(tmp_path) -> None:
    code = "one = 1\n\n\nclass A:\n    def f(self):\n        one = 1\n"
    path = tmp_path / "results/code.py"
    path.parent.mkdir()
    path.write_text(code)
    defect = plant.Defect(name="more", function="A.f", place="one = 1", becomes="one = 3", tests=("t",))
    defect.plant(tmp_path)
    assert path.read_text() == "one = 1\n\n\nclass A:\n    def f(self):\n        one = 3\n"
    with pytest.raises(ValueError, match=r"0 places in A\.f"):
        defect.plant(tmp_path)
    outcome = plant.Outcome({"test_a": "failed", "test_b": "passed", "test_c": "error"}, "")
    assert outcome.other_than("failed") == "test_b passed, test_c error"
    assert plant.Outcome({}, "ERROR: not found").other_than("failed") == "no test ran: ERROR: not found"


def test_a_test_that_fails_is_no_error_because_what_it_leaves_behind_is_one(tmp_path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n\n@pytest.fixture\ndef left():\n    yield\n    raise OSError\n\n\n"
        "def test_both(left):\n    assert False\n\n\ndef test_left(left):\n    pass\n"
    )
    report = tmp_path / "report.xml"
    call = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run(call, cwd=tmp_path, capture_output=True, check=False)
    assert plant._words(report) == {"test_both": "failed", "test_left": "error"}


def test_a_name_means_a_test_with_all_of_its_parameters_or_with_those_that_it_has() -> None:
    test = "tests/a.py::test_b[4-[x]-2]"
    assert plant.is_named(test, ["tests/c.py::test_d", "tests/a.py::test_b"])
    assert plant.is_named(test, ["tests/a.py::test_b[4-*]"])
    assert plant.is_named(test, ["tests/a.py::test_b[*-[x]-2]"])
    assert not plant.is_named(
        test, ["tests/a.py::test_b[4]", "tests/a.py::test_bc", "tests/a.py::test_b[*-3]"]
    )
