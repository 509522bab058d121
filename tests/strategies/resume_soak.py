"""Runs killed at random moments and resumed, until they end: `make resume`.

Each round takes a strategy, a compressor and settings, trains once without a kill, and once with SIGKILL of a
rank, or of all, at up to `KILLS` random moments. Both must end with the same bits. A line of the ledger is a
round; the same command continues with the next one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
STEPS, KILLS = 10, 4


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def combinations(cases: ModuleType) -> list[tuple[str, dict[str, Any]]]:
    """Every strategy with every setting, and those that compress with every compressor as well."""
    plain = [
        (strategy, settings)
        for strategy in cases.STRATEGIES
        for settings in ({}, {"accumulation": 2}, {"clip_norm": 0.1}, {"precision": "bf16"}, cases.SCALED)
        if not (strategy.startswith("local-sgd") and settings == cases.SCALED)
    ]
    compressed = [
        (strategy, {"compression": compression, **settings})
        for strategy in (cases.DDP, cases.SCRATCH)
        for compression in cases.COMPRESSIONS
        for settings in ({}, {"accumulation": 2}, {"clip_norm": 0.1}, {"precision": "fp16"})
    ]
    return plain + compressed


def killed_and_resumed(
    conftest: ModuleType,
    resuming: ModuleType,
    case: tuple[str, dict[str, Any]],
    folder: Path,
    drawn: random.Random,
) -> tuple[list[str], list[str], int]:
    """The digests of a run without a kill and of one with some, and how many kills came before its end."""
    start = time.monotonic()
    expected = finished(conftest, resuming, case, folder / "whole", None)
    took = time.monotonic() - start
    assert expected is not None
    kills = 0
    for _ in range(KILLS):
        moment = (drawn.uniform(0, took), drawn.choice(("one", "all")))
        found = finished(conftest, resuming, case, folder / "killed", moment)
        if found is not None:
            return expected, found, kills
        kills += 1
    found = finished(conftest, resuming, case, folder / "killed", None)
    assert found is not None
    return expected, found, kills


def finished(
    conftest: ModuleType,
    resuming: ModuleType,
    case: tuple[str, dict[str, Any]],
    folder: Path,
    kill: tuple[float, str] | None,
) -> list[str] | None:
    """The digests of the ranks; None if they were killed before."""
    store = Path(tempfile.mkdtemp()) / "store"
    pool = conftest.Pool(2, store)
    victims = pool._processes if kill is None or kill[1] == "all" else pool._processes[:1]
    timer = threading.Timer(0 if kill is None else kill[0], lambda: [victim.kill() for victim in victims])
    try:
        if kill is not None:
            timer.start()
        return pool.run(resuming.run_to_end, case, folder, STEPS, timeout_s=60, dying=())
    except (pytest.fail.Exception, OSError):
        if kill is None:
            raise
        return None
    finally:
        timer.cancel()
        pool.end(patience_s=0)
        shutil.rmtree(store.parent, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ledger", type=Path, default=Path("resume.jsonl"))
    given = parser.parse_args()
    # As pytest has it: modules that several tests share.
    sys.path.insert(0, str(HERE.parent / "laws"))
    conftest, resuming = load(HERE.parent / "conftest.py"), load(HERE / "resuming.py")
    every = combinations(load(HERE / "test_resume.py"))
    random.Random(given.seed).shuffle(every)
    done = (
        [json.loads(line) for line in given.ledger.read_text().splitlines()] if given.ledger.exists() else []
    )
    end = time.monotonic() + given.seconds
    while time.monotonic() < end:
        number = len(done)
        case = every[number % len(every)]
        folder = Path(tempfile.mkdtemp(prefix="resume-"))
        expected, found, kills = killed_and_resumed(
            conftest, resuming, case, folder, random.Random(f"{given.seed} {number}")
        )
        shutil.rmtree(folder)
        done.append({"round": number, "case": case, "kills": kills, "equal": expected == found})
        with given.ledger.open("a") as ledger:
            ledger.write(json.dumps(done[-1]) + "\n")
    wrong = [each for each in done if not each["equal"]]
    print(
        f"{len(done)} rounds of {len(every)} combinations, {sum(each['kills'] for each in done)} kills, "
        f"{len(wrong)} runs that ended otherwise"
    )
    for each in wrong:
        print(each)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
