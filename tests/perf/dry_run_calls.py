"""Count what a dry run of one cell enters: `python tests/perf/dry_run_calls.py [--list]`.

It prints the files and the functions of the repository that are entered while `bench matrix --gpus 2
--workload mlp --strategy ddp --dry-run` runs, and the deepest stack of their frames. All modules are loaded
beforehand. Bodies of modules and classes, lambdas and comprehensions are not counted.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import sys
import tempfile
from pathlib import Path
from types import FrameType

from harness.cli import run

CALL = ("matrix", "--gpus", "2", "--workload", "mlp", "--strategy", "ddp", "--dry-run")
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("results", "workloads", "strategies", "slurm", "reports", "harness")


def is_counted(frame: FrameType) -> bool:
    """Whether a frame is a call of a named function of the repository."""
    path, code = Path(frame.f_code.co_filename), frame.f_code
    is_ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
    return is_ours and bool(code.co_flags & inspect.CO_OPTIMIZED) and not code.co_name.startswith("<")


def main() -> None:
    """Run the call once to load all modules, then count the second run."""
    os.chdir(tempfile.mkdtemp())
    functions: set[tuple[str, int, str]] = set()
    counted: dict[object, bool] = {}
    deepest = 0

    def enter(frame: FrameType, event: str, argument: object) -> None:
        nonlocal deepest
        if event != "call" or not counted.setdefault(frame.f_code, is_counted(frame)):
            return
        code, depth, caller = frame.f_code, 0, frame
        functions.add((code.co_filename, code.co_firstlineno, code.co_name))
        while caller is not None:
            depth += counted.get(caller.f_code, False)
            caller = caller.f_back
        deepest = max(deepest, depth)

    with contextlib.redirect_stdout(io.StringIO()):
        assert run([*CALL]) == 0
        sys.setprofile(enter)
        run([*CALL])
        sys.setprofile(None)
    print(f"{len({path for path, *_ in functions})} files, {len(functions)} functions, {deepest} frames deep")
    if "--list" in sys.argv:
        for path, line, name in sorted(functions):
            print(f"{Path(path).relative_to(ROOT)}:{line} {name}")


if __name__ == "__main__":
    main()
