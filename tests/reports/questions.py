"""The six pages on which readers are asked the ten questions of questions.md, and what was planted in them.

    PYTHONPATH=tests/laws python tests/reports/questions.py OUT --real STUDY [--seed N]

Five studies are generated: three of drawn yields, one that mostly failed, one with a slow host. Their step
times are drawn as in `knee_quality`: every yield is at least 0.1 from what pays, the noise at most 3 %. The
sixth is the folder of a real study. `answers.json` has the planted facts; a reader sees only the pages.
"""

from __future__ import annotations

import json
import random as standard
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
from builders import a_cell
from generated_study import Trouble, base_fields, measured
from knee_quality import GPUS, drawn_steps

from reports.analysis.assumptions import Assumptions
from reports.analysis.study import StudyFigures, analyse
from reports.page.render import render_figures
from results.cell import Cell
from results.outcome import Outcome
from results.plan import Plan, Request, Series
from results.run import RunResult
from results.store import Study

PER_NODE = 8
WORKLOADS = ("resnet50-224px", "gpt2-small")
EPOCH = {"resnet50-224px": 1_281_167, "gpt2-small": 8_800_000}
FAILURES = {
    Outcome.CRASHED: "rank 3: RuntimeError: CUDA error: an illegal memory access was encountered",
    Outcome.OUT_OF_MEMORY: "rank 0: CUDA out of memory: tried to allocate 3.71 GiB",
    Outcome.HUNG: "no rank made progress for 300 s",
}


@dataclass(frozen=True, kw_only=True)
class Planted:
    """The facts of a generated study."""

    study: StudyFigures
    facts: dict[str, Any]


@dataclass(kw_only=True)
class _Making:
    """Collects the cells and runs of a study while they are drawn."""

    random: np.random.Generator
    cells: dict[str, Cell] = field(default_factory=dict)
    series: list[Series] = field(default_factory=list)
    runs: list[RunResult] = field(default_factory=list)


def generated(
    random: np.random.Generator, name: str, *, failing: float = 0.0, slow_host: str | None = None
) -> Planted:
    """Draw a study of two workloads, weak, on 1 to 128 GPUs; a part of its cells fails."""
    making = _Making(random=random)
    facts: dict[str, Any] = {"noise": float(random.uniform(0.01, 0.03)), "runs": int(random.integers(3, 7))}
    for workload in WORKLOADS:
        condition = facts["noise"], facts["runs"], int(random.integers(0, 3))
        wanted, size = int(random.choice(GPUS)), 0
        while size != wanted:
            size, steps, disturbed = drawn_steps(random, condition, margin=0.1, marked=True)
        lost_to = str(random.choice(["transfer", "wait"]))
        facts[workload] = {"size": size, "lost to": lost_to, "disturbed runs": int(disturbed.sum())}
        failed = _cells(making, workload, failing)
        facts[workload]["failed"] = {f"on {cell.gpus}": outcome for cell, outcome in failed.values()}
        for cell in [cell for cell in making.cells.values() if cell.workload == workload]:
            at = GPUS.index(cell.gpus)
            for repeat in range(facts["runs"]):
                if cell.id in failed:
                    making.runs.append(_failed(cell, repeat, failed[cell.id][1]))
                    continue
                run = _measured_run(making, cell, repeat, steps[:, repeat], lost_to, slow_host)
                making.runs.append(msgspec.structs.replace(run, disturbed=bool(disturbed[at, repeat])))
    facts["slow host"] = slow_host
    plan = _plan(name, making, facts["runs"])
    told = Assumptions(workload_samples=EPOCH)
    return Planted(study=analyse(name, [plan], making.runs, told), facts=facts)


def _cells(making: _Making, workload: str, failing: float) -> dict[str, tuple[Cell, Outcome]]:
    """Add the series of a workload, and return its cells that fail; of each the smallest two never do."""
    failed: dict[str, tuple[Cell, Outcome]] = {}
    for strategy, sizes in (("single", GPUS[:1]), ("ddp", GPUS[1:])):
        own = [
            a_cell(
                **{"workload": workload, "strategy": strategy, "gpus": gpus, "micro_batch": 8},
                **{"device": "cuda", "backend": "nccl", "precision": "bf16", "optimizer": "adamw"},
            )
            for gpus in sizes
        ]
        making.cells |= {cell.id: cell for cell in own}
        making.series.append(
            Series(
                kind="weak",
                workload=workload,
                strategy=strategy,
                compression="none",
                batch_size=8,
                global_batch=None,
                cells=tuple(cell.id for cell in own),
            )
        )
        for cell in own:
            if cell.gpus > 2 and making.random.random() < failing:
                outcome = list(FAILURES)[int(making.random.integers(len(FAILURES)))]
                failed[cell.id] = cell, outcome
    return failed


def _measured_run(
    making: _Making, cell: Cell, repeat: int, steps: np.ndarray, lost_to: str, slow_host: str | None
) -> RunResult:
    """A run of a generated study whose step, of 50 ms on one device, is as drawn and loses to one part."""
    rng = standard.Random(int(making.random.integers(2**32)))
    run = measured(cell, repeat, rng, False, Trouble())
    one, step = 50e6 * steps[0], 50e6 * steps[GPUS.index(cell.gpus)]
    lost = max(0.0, step - one)
    parts = {"transfer": 0.15 * lost, "wait": 0.15 * lost, lost_to: 0.85 * lost}
    scale = step / run.step_ns.value
    columns = run.ranks
    if columns is not None:
        hosts = [f"node-{rank // PER_NODE:02d}" for rank in range(cell.gpus)]
        paces = [1.09 if host == slow_host else 1.0 + 0.004 * rng.random() for host in hosts]
        columns = msgspec.structs.replace(
            columns, compute_ns=[round(0.95 * one * pace) for pace in paces], host=hosts
        )
    exposed = None if run.exposed_ns is None else _like(run.exposed_ns, parts["transfer"] + parts["wait"])
    return msgspec.structs.replace(
        run,
        step_ns=_like(run.step_ns, step),
        samples_per_s=cell.global_batch * 1e9 / step,
        units_per_s=cell.global_batch * 1e9 / step,
        unit="samples",
        exposed_ns=exposed,
        budget=msgspec.structs.replace(
            run.budget,
            input_ns=0.01 * one,
            compute_ns=0.99 * min(one, step),
            transfer_ns=_like(run.budget.transfer_ns, parts["transfer"]),
            wait_ns=_like(run.budget.wait_ns, parts["wait"]),
            other_ns=0.0,
        ),
        phase_ns={phase: ns * scale for phase, ns in run.phase_ns.items()},
        ranks=columns,
    )


def _like(metric: Any, value: float) -> Any:
    """The metric with another value, and ends as far from it as before, in shares."""
    by = value / metric.value if metric.value else 0.0
    return metric.times(by)


def _failed(cell: Cell, repeat: int, outcome: Outcome) -> RunResult:
    base = base_fields(cell, repeat, Trouble())
    return RunResult(**base, outcome=outcome, reason=FAILURES[outcome], ranks_present=cell.gpus)


def _plan(name: str, making: _Making, repeats: int) -> Plan:
    command = (
        "matrix",
        "--name",
        name,
        "--workload",
        ",".join(WORKLOADS),
        "--gpus",
        ",".join(map(str, GPUS)),
    )
    return Plan(
        study=name,
        created_at="2026-03-14T08:00:00.000Z",
        request=Request(
            workloads=WORKLOADS,
            gpus=tuple(GPUS),
            strategies=("single", "ddp"),
            batch_sizes=(8,),
            scalings=("weak",),
            repeats=repeats,
            device="cuda",
            backend="nccl",
            precision="bf16",
        ),
        cells=tuple(making.cells.values()),
        series=tuple(making.series),
        skips=(),
        command=command,
    )


def six(seed: int) -> Iterator[Planted]:
    """The five generated studies; the real one is the sixth."""
    random = np.random.default_rng(seed)
    for name in ("alder", "birch", "cedar"):
        yield generated(random, name)
    yield generated(random, "dogwood", failing=0.75)
    yield generated(random, "elm", slow_host="node-05")


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--real", required=True, type=click.Path(path_type=Path), help="The folder of a real study.")
@click.option("--seed", type=int, help="Seed of the generated studies; drawn if it is not given.")
def main(out: Path, real: Path, seed: int | None) -> None:
    """Write the six pages, and `answers.json` with what was planted."""
    seed = secrets.randbelow(2**32) if seed is None else seed
    out.mkdir(parents=True, exist_ok=True)
    answers: dict[str, Any] = {"seed": seed}
    for made in six(seed):
        answers[made.study.name] = made.facts
        (out / f"{made.study.name}.html").write_text(render_figures(made.study), encoding="utf-8")
    measured = Study(real)
    study = analyse("fir", measured.plans(), measured.collect())
    (out / "fir.html").write_text(render_figures(study), encoding="utf-8")
    (out / "answers.json").write_text(json.dumps(answers, indent=1, default=str), encoding="utf-8")
    print(f"seed {seed}: {out}")


if __name__ == "__main__":
    main()
