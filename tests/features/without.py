"""A copy of the tree without one feature, and what the core must still do there.

python tests/features/without.py [FEATURE...]    the quick tests of the core, without each feature in turn
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = "harness/features/__init__.py"
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "runs", "site", "__pycache__", ".*_cache", ".hypothesis", ".benchmarks", "*.egg-info"
)


def names() -> list[str]:
    """The features that have a folder here."""
    return sorted(file.parent.name for file in (ROOT / TABLE).parent.glob("*/__init__.py"))


def copy_without(feature: str, to: Path) -> Path:
    """Copy the tree without the feature's folder, its line and its tests."""
    shutil.copytree(ROOT, to, ignore=LEFT_OUT)
    shutil.rmtree(to / "harness" / "features" / feature)
    shutil.rmtree(to / "tests" / "features" / feature, ignore_errors=True)
    table = (to / TABLE).read_text(encoding="utf-8")
    line = f'    "{feature}",\n'
    assert table.count(line) == 1
    (to / TABLE).write_text(table.replace(line, ""), encoding="utf-8")
    return to


def call(*words: str, at: Path) -> subprocess.CompletedProcess[str]:
    """Run Python on the code of a copy, in all its processes."""
    # Variables of a pytest that calls this would say that its plugins are at work here, too.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(at), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=at, env=environment, text=True, capture_output=True, check=False
    )


def main() -> int:
    failed = []
    for feature in sys.argv[1:] or names():
        with tempfile.TemporaryDirectory() as folder:
            copy = copy_without(feature, Path(folder) / "bench")
            options = ["-q", "-n", "2", "--dist", "loadgroup", "-m", "not slow", "-p", "no:cacheprovider"]
            done = call("-m", "pytest", *options, "tests", at=copy)
        print(f"without {feature}: {done.stdout.strip().splitlines()[-1] if done.stdout else done.stderr}")
        if done.returncode:
            failed.append(feature)
            print(done.stdout, done.stderr, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
