"""`--batch-size auto` on CPU ranks against a linear scan under the same margin, and 200 steps with its batch.

    python docs/studies/tuning_batch.py FOLDER [GROUP ...]

runs the groups of cases (all, or those with these numbers) that FOLDER does not have yet, and prints the
table of docs/tuning.md of all that it has. The scan measures one micro-batch after another in its own study,
which the search does not see. `bench train` then takes 200 steps with the batch that was found, under the
same limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from results.outcome import Outcome
from results.plan import FittingBatch
from results.store import BATCH_RUNS, Study

MIB = 2**20
SHARE = 0.95
"""The share of the limit that a rank may be measured to take, stated here a second time. The search leaves
2 MiB more, since equal runs differ."""
STEPS = 200
AT_ONCE = 4
"""Micro-batches of the scan in one launch."""
AXES = ("workload", "strategy")
SHARDED = "ddp,zero1,fsdp,scratch-fsdp,local-sgd:2,scratch-ddp"
GROUPS = (
    ("gpt-nano", SHARDED, 2, 1, 56),
    ("gpt-nano,llama-nano", "single", 1, 1, 56),
    ("llama-nano", SHARDED, 2, 1, 56),
    ("gpt-nano", "ddp,fsdp,fsdp:reshard=false", 2, 2, 72),
    ("llama-nano", "ddp,fsdp,fsdp:reshard=false", 2, 2, 72),
)
"""Workloads, strategies, ranks, accumulation and MiB: 20 cases."""
SHORT = ("--budget", 0, "--block-steps", 2, "--warmup-steps", 0, "--quads", 0, "--repeats", 1, "--no-report")


def bench(*words: object) -> None:
    """Run bench. Cells that fail (exit code 1) are a part of the scan."""
    call = [str(Path(sys.executable).with_name("bench")), *map(str, words)]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(call)}\n{done.stderr}")


def taken(study: Study, batch: FittingBatch) -> dict[int, int | None]:
    """The bytes of the fullest rank by micro-batch, in runs of a series; None for a run that failed."""
    found: dict[int, int | None] = {}
    for run in study.results():
        cell = study.cell(run.cell_id)
        if (cell.workload, cell.strategy) == (batch.series.workload, batch.series.strategy):
            memories = [record.memory for record in study.rank_records(run.cell_id, run.run_id)]
            sizes = [one.rss_peak_bytes - one.rss_idle_bytes for one in memories if one is not None]
            found[cell.micro_batch] = max(sizes) if run.outcome is Outcome.OK else None
    return found


def largest(sizes: dict[int, int | None], limit_mb: int) -> int:
    """The last micro-batch, counted from 1, up to which all fit."""
    best = 0
    while (what := sizes.get(best + 1)) is not None and what <= SHARE * limit_mb * MIB:
        best += 1
    return best


def group(folder: Path, number: int) -> list[dict[str, Any]]:
    """Search, scan and train a group of cases. Returns the rows of the table."""
    workloads, strategies, gpus, accumulation, limit_mb = GROUPS[number]
    work = ("--gpus", gpus, "--accumulation", accumulation, "--memory-limit-mb", limit_mb)
    work += ("--device", "cpu", "--oversubscribe")
    axes = ("--workload", workloads, "--strategy", strategies)
    more = (*SHORT, "--no-baseline", "--no-prune", "--isolation", "fork")
    bench("matrix", *axes, *work, *more, "--batch-size", "auto", "--out", folder / "auto")
    auto, scan = Study(folder / "auto"), Study(folder / "scan")
    batches = auto.plan(1).request.batches or ()
    first, best, left = 1, dict.fromkeys(batches, 0), batches
    while left:
        sizes = ",".join(str(accumulation * size) for size in range(first, first + AT_ONCE))
        names = [",".join(dict.fromkeys(getattr(one.series, axis) for one in left)) for axis in AXES]
        axes = ("--workload", names[0], "--strategy", names[1])
        bench("matrix", *axes, *work, *more, "--batch-size", sizes, "--out", scan.root)
        best |= {batch: largest(taken(scan, batch), limit_mb) for batch in left}
        first += AT_ONCE
        left = tuple(batch for batch in left if best[batch] >= first - 1)
    rows = []
    for at, batch in enumerate(batches):
        series, train = batch.series, Study(folder / f"train-{at}")
        one = (
            "--workload",
            series.workload,
            "--strategy",
            series.strategy,
            "--batch-size",
            series.batch_size,
        )
        often = ("--steps", STEPS, "--checkpoint-every", STEPS, "--restarts", 0)
        bench("train", *one, *work, *often, "--out", train.root)
        [cell] = train.cell_ids()
        rows.append(
            {
                "workload": series.workload,
                "strategy": f"{series.strategy} on {gpus}",
                "accumulation": accumulation,
                "limit": limit_mb,
                "scan": best[batch],
                "auto": series.batch_size // accumulation,
                "runs": len(taken(Study(auto.root / BATCH_RUNS), batch)),
                "steps": train.training_log(cell).step,
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
    print("| workload | strategy | accumulation | limit MiB | scan | auto | runs | steps after |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(f"| {' | '.join(map(str, row.values()))} |")
    larger = sum(row["auto"] > row["scan"] for row in rows)
    near = sum(row["scan"] - row["auto"] <= max(1, 0.03 * row["scan"]) for row in rows)
    steps = sum(row["steps"] >= STEPS for row in rows)
    print(
        f"\nlarger: {larger} of {len(rows)}; at most one step or 3 % smaller: {near}; {STEPS} steps: {steps}"
    )


if __name__ == "__main__":
    main()
