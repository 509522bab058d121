"""`--batch-size auto` on CPU ranks against a linear scan, and 200 steps with its batch.

    python docs/studies/tuning_batch.py FOLDER [GROUP ...]

runs the groups of cases (all, or those with these numbers) that FOLDER does not have yet, and prints the
table of docs/evidence.md of all that it has. The scan runs one micro-batch after another in its own study,
which the search does not see. The study of the search then runs 200 steps with the batch that was found,
under the whole limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.features.tune.batches import BATCH_RUNS
from results.cell import StepPolicy
from results.outcome import Outcome
from results.plan import FittingBatch
from results.run import RunResult
from results.store import Study

SHARE, GROWTH_MB = 0.95, 4
"""A run of the scan must end well within this share of the limit, less the MiB by which longer runs grow.
Both are stated here a second time. The search leaves 2 MiB more, because equal runs differ."""
STEPS = 200
AT_ONCE = 4
"""Micro-batches of the scan in one launch."""
AXES = ("workload", "strategy")
SHARDED = "ddp,zero1,fsdp,scratch-fsdp,local-sgd:2,scratch-ddp"
GROUPS = (
    ("gpt-nano", SHARDED, 2, 1, 44),
    ("gpt-nano,llama-nano", "single", 1, 1, 44),
    ("llama-nano", SHARDED, 2, 1, 44),
    ("gpt-nano", "ddp,fsdp,fsdp:reshard=false", 2, 2, 44),
    ("llama-nano", "ddp,fsdp,fsdp:reshard=false", 2, 2, 44),
)
"""Workloads, strategies, ranks, accumulation and MiB: 20 cases."""
SHORT = ("--budget", 0, "--warmup-steps", 0, "--quads", 0, "--repeats", 1, "--no-report", "--no-baseline")


def bench(*words: object) -> None:
    """Run bench. Cells that fail (exit code 1) are a part of the scan."""
    call = [str(Path(sys.executable).with_name("bench")), *map(str, words)]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(call)}\n{done.stderr}")


def ran(study: Study, batch: FittingBatch) -> dict[int, RunResult]:
    """The runs of a series, by micro-batch."""
    found: dict[int, RunResult] = {}
    for run in study.results():
        cell = study.cell(run.cell_id)
        if (cell.workload, cell.strategy) == (batch.series.workload, batch.series.strategy):
            found[cell.micro_batch] = run
    return found


def largest(runs: dict[int, RunResult]) -> int:
    """The last micro-batch, counted from 1, up to which all runs ended well."""
    best = 0
    while (run := runs.get(best + 1)) is not None and run.outcome is Outcome.OK:
        best += 1
    return best


def group(folder: Path, number: int) -> list[dict[str, Any]]:
    """Search, train and scan a group of cases. Returns the rows of the table."""
    workloads, strategies, gpus, accumulation, limit_mb = GROUPS[number]
    work = ("--gpus", gpus, "--accumulation", accumulation)
    work += ("--device", "cpu", "--oversubscribe", "--no-prune")
    axes = ("--workload", workloads, "--strategy", strategies, "--memory-limit-mb", limit_mb)
    blocks = ("--isolation", "fork", "--block-steps", STEPS // StepPolicy().min_blocks + 1)
    bench("matrix", *axes, *work, *SHORT, *blocks, "--batch-size", "auto", "--out", folder / "auto")
    auto, scan = Study(folder / "auto"), Study(folder / "scan")
    batches = auto.plan(1).request.batches or ()
    first, best, left = 1, dict.fromkeys(batches, 0), batches
    short_mb = int(SHARE * limit_mb - GROWTH_MB)
    limit = ("--memory-limit-mb", short_mb, "--isolation", "fork", "--block-steps", 2)
    while left:
        sizes = ",".join(str(accumulation * size) for size in range(first, first + AT_ONCE))
        names = [",".join(dict.fromkeys(getattr(one.series, axis) for one in left)) for axis in AXES]
        axes = ("--workload", names[0], "--strategy", names[1], *limit)
        bench("matrix", *axes, *work, *SHORT, "--batch-size", sizes, "--out", scan.root)
        best |= {batch: largest(ran(scan, batch)) for batch in left}
        first += AT_ONCE
        left = tuple(batch for batch in left if best[batch] >= first - 1)
    rows = []
    for batch in batches:
        size = batch.series.batch_size // accumulation
        run = ran(auto, batch)[size]
        rows.append(
            {
                "workload": batch.series.workload,
                "strategy": f"{batch.series.strategy} on {gpus}",
                "accumulation": accumulation,
                "limit": limit_mb,
                "scan": best[batch],
                "auto": size,
                "runs": len(ran(Study(auto.root / BATCH_RUNS), batch)),
                "steps": run.steps or str(run.outcome),
            }
        )
    return rows


def main() -> None:
    folder, *numbers = sys.argv[1:]
    for number in map(int, numbers or map(str, range(len(GROUPS)))):
        path = Path(folder) / f"group-{number}"
        if not (path / "rows.json").exists():
            path.mkdir(parents=True, exist_ok=True)
            (path / "rows.json").write_text(json.dumps(group(path, number)))
    files = sorted(Path(folder).glob("group-*/rows.json"))
    rows: list[dict[str, Any]] = [row for path in files for row in json.loads(path.read_text())]
    print("| workload | strategy | accumulation | limit, MiB | scan | auto | runs | steps after |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(f"| {' | '.join(map(str, row.values()))} |")
    larger = sum(row["auto"] > row["scan"] for row in rows)
    near = sum(row["scan"] - row["auto"] <= max(1, 0.03 * row["scan"]) for row in rows)
    steps = sum(isinstance(row["steps"], int) and row["steps"] >= STEPS for row in rows)
    print(
        f"\nlarger: {larger} of {len(rows)}; at most one step or 3 % smaller: {near}; {STEPS} steps: {steps}"
    )


if __name__ == "__main__":
    main()
