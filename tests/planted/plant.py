"""Plants each defect of `defects.toml` in a copy of the checkout: the tests that it names must fail.

    python tests/planted/plant.py [WORD ...]      all defects, or those with a WORD in their name or function

Run by `make planted`. Ends with 1 if a named test fails without its defect, or passes with it.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("harness", "reports", "results", "slurm", "strategies", "workloads")
DEFECTS = Path(__file__).with_name("defects.toml")
NAMES = "PLANTED_TESTS"
"""The environment variable with the names of the tests that pytest is to run, a line each."""
TEST_TIMEOUT_S = 120
"""For one test: a defect may make it wait for ever, which counts as a failure."""


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One mistake in our code, and the tests that must fail with it."""

    name: str
    function: str
    """Qualified name of a function or class, such as `Lane.start`, or of a module, such as `terms.py`."""
    place: str
    """Text that occurs exactly once in the function, and in no other function of that name."""
    becomes: str
    tests: tuple[str, ...]
    """Ids of tests, FILE::NAME or FILE::NAME[PARAMETERS]: see `is_named`."""

    def locate(self, sources: Iterable[tuple[Path, str]]) -> tuple[Path, int]:
        """The file, and the offset of the place in its text. Raises ValueError unless it is there once."""
        found = [
            (path, text.index(self.place, begin))
            for path, text in sources
            if self.place in text
            for name, begin, end in _bodies(path.stem, text)
            if name == self.function and text.count(self.place, begin, end) == 1
        ]
        if len(found) != 1:
            raise ValueError(f"{self.name}: {len(found)} places in {self.function}, not one")
        return found[0]

    def plant(self, root: Path) -> None:
        """Replace the place. Raises ValueError unless there is exactly one."""
        path, offset = self.locate(sources(root))
        text = path.read_text()
        path.write_text(text[:offset] + self.becomes + text[offset + len(self.place) :])


def sources(root: Path) -> Iterator[tuple[Path, str]]:
    """The files of the packages below `root`, each with its text."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            yield path, path.read_text()


def _bodies(module: str, text: str) -> Iterator[tuple[str, int, int]]:
    """The module (`terms.py`), and its functions and classes by qualified name, each with its first and last
    offset."""
    lines = [0, *accumulate(len(line) for line in text.splitlines(keepends=True))]
    yield f"{module}.py", 0, len(text)
    nodes: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    while nodes:
        prefix, parent = nodes.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min(one.lineno for one in (node, *node.decorator_list))
                assert node.end_lineno is not None
                yield f"{prefix}{node.name}", lines[first - 1], lines[node.end_lineno]
                nodes.append((f"{prefix}{node.name}.", node))


def defects(path: Path = DEFECTS) -> list[Defect]:
    """The whole list, in its order."""
    entries = tomllib.loads(path.read_text())
    return [
        Defect(name=name, **fields | {"tests": tuple(fields["tests"])}) for name, fields in entries.items()
    ]


def is_named(test: str, names: Iterable[str]) -> bool:
    """Whether a test's id is among `names`: a name without parameters means the test with any, and `*` in
    parameters means anything."""
    function, _, parameters = test.partition("[")
    for name in names:
        wanted, bracket, pattern = name.partition("[")
        if function == wanted and (not bracket or fnmatchcase(parameters, pattern.replace("[", "[[]"))):
            return True
    return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the pytest that runs tests against a defect, of which this file is a plugin."""
    names = os.environ[NAMES].split("\n")
    chosen = [item for item in items if is_named(item.nodeid, names)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@dataclass(frozen=True)
class Outcome:
    """One word for the end of each named test, by the name that pytest gives it."""

    words: Mapping[str, str]
    output: str

    def other_than(self, expected: str) -> str:
        """The tests that did something else than expected, in one line; empty if all did."""
        if not self.words:
            return f"no test ran: {self.output.strip()[-400:]}"
        return ", ".join(f"{name} {word}" for name, word in self.words.items() if word != expected)


class Copy:
    """A folder with the tracked files of the checkout, where tests can run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bench"
        self._temporary = folder / "pytest"
        self._report = folder / "report.xml"
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                target = self.folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        # By time and size, Python would take a file that changed within a second for the one it compiled.
        compileall.compile_dir(self.folder, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)

    def with_defect(self, defect: Defect) -> Outcome:
        path, _ = defect.locate(sources(self.folder))
        whole = path.read_bytes()
        try:
            defect.plant(self.folder)
            return self.run(defect.tests)
        finally:
            path.write_bytes(whole)

    def run(self, tests: Iterable[str]) -> Outcome:
        self._report.unlink(missing_ok=True)
        tests = sorted(set(tests))
        functions = dict.fromkeys(test.partition("[")[0] for test in tests)
        options = ["-q", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}", "--tb=line"]
        written = [f"--basetemp={self._temporary}", f"--junitxml={self._report}"]
        variables = {
            # The copy before the checkout itself, which is installed in editable form.
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(Path(__file__).parent)]),
            "OMP_NUM_THREADS": "1",
            NAMES: "\n".join(tests),
        }
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, *options, *written, *functions],
            cwd=self.folder,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Outcome(_words(self._report) if self._report.exists() else {}, done.stdout)


def _words(report: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = [child.tag for child in case]
        word = next((tag for tag in ("error", "failure", "skipped") if tag in tags), "passed")
        name = case.get("name", "")
        # What a test that has failed leaves behind may be an error in its teardown, too.
        if found.get(name) != "failed":
            found[name] = {"failure": "failed"}.get(word, word)
    return found


class Copies:
    """Copies for tests that run at the same time."""

    def __init__(self, folder: Path, number: int) -> None:
        self._free: SimpleQueue[Copy] = SimpleQueue()
        for index in range(number):
            self._free.put(Copy(folder / str(index)))
        self._pool = ThreadPoolExecutor(number)
        self._number = number

    def each(self, use: Callable[[Copy, Defect], bool], chosen: Sequence[Defect]) -> list[bool]:
        def with_a_copy(defect: Defect) -> bool:
            copy = self._free.get()
            try:
                return use(copy, defect)
            finally:
                self._free.put(copy)

        return list(self._pool.map(with_a_copy, chosen))

    def unbroken(self, tests: Sequence[str]) -> list[str]:
        """Return one line for each copy in which tests do not pass without any defect."""
        copies = [self._free.get() for _ in range(self._number)]
        # Neighbours are of one file, and often share what they are slow to set up.
        size = -(-len(tests) // len(copies))
        parts = [tests[start : start + size] for start in range(0, len(tests), size)]
        found = self._pool.map(lambda copy, part: copy.run(part).other_than("passed"), copies, parts)
        said = [text for text in found if text]
        for copy in copies:
            self._free.put(copy)
        return said


def _is_caught(copy: Copy, defect: Defect) -> bool:
    start = time.monotonic()
    wrong = copy.with_defect(defect).other_than("failed")
    verdict = "caught " if not wrong else "ESCAPED"
    print(f"{verdict} {time.monotonic() - start:5.1f} s  {defect.function}: {defect.name}", flush=True)
    if wrong:
        print(f"        {wrong}", flush=True)
    return not wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="plant those with one of these in their name or function")
    # One more than cores: tests of ranks and of launches mostly wait.
    parser.add_argument(
        "--jobs", type=int, default=(os.cpu_count() or 1) + 1, help="defects at once (cores and one)"
    )
    given = parser.parse_args(arguments)
    chosen = [
        defect
        for defect in defects()
        if not given.words or any(word in f"{defect.function} {defect.name}" for word in given.words)
    ]
    if not chosen:
        print(f"no defect has {' or '.join(given.words)} in its name or function")
        return 2
    start = time.monotonic()
    with TemporaryDirectory(prefix="planted-") as folder:
        copies = Copies(Path(folder), min(given.jobs, len(chosen)))
        said = copies.unbroken(sorted({test for defect in chosen for test in defect.tests}))
        for text in said:
            print(f"without a defect: {text}")
        caught = copies.each(_is_caught, chosen)
    print(f"{sum(caught)} of {len(chosen)} defects caught, in {time.monotonic() - start:.0f} s")
    return 0 if all(caught) and not said else 1


if __name__ == "__main__":
    sys.exit(main())
