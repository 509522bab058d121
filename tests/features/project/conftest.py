"""A study on GPUs in nodes of eight with given step times, without training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from builders import a_cell
from generated_study import GPU
from launching import a_result

from reports.analysis.assumptions import Assumptions
from reports.analysis.study import StudyFigures, analyse
from results.catalogue.prices import Price
from results.cell import Cell
from results.plan import Plan, Request, Scaling, Series
from results.record import Proof
from results.run import RunResult
from results.statistics import Metric

MS = 1e6
TOLD = Assumptions(price=Price(usd_per_gpu_hour=3.6, source="given"), epoch_samples=1_000_000)
NewStudy = Callable[..., StudyFigures]


def _cell(strategy: str, gpus: int, batch: int, fields: Mapping[str, Any]) -> Cell:
    own = {"workload": "gpt2-small", "strategy": strategy, "gpus": gpus, "micro_batch": batch}
    return a_cell(**own | {"device": "cuda", "backend": "nccl", "precision": "bf16"} | fields)


def _run(cell: Cell, number: int, ms: float, per_node: int, changes: Mapping[str, Any]) -> RunResult:
    there = msgspec.structs.replace(
        GPU, nodes=-(-cell.gpus // per_node), gpus_per_node=min(per_node, cell.gpus)
    )
    facts = {
        "cell_id": cell.id,
        "run_id": f"20260314T0900{number:02d}Z-{cell.id[-6:]}",
        "launch_id": "launch",
        "repeat": number,
        "started_at": f"2026-03-14T09:00:{number:02d}.000Z",
        "ranks_expected": cell.gpus,
        "ranks_present": cell.gpus,
        "environment": there,
        "fingerprint": there.fingerprint,
        "steps": 60,
        "warmup_steps": 10,
        "setup_ns": round(4000 * MS),
        "step_ns": Metric(value=ms * MS, unit="ns", low=None, high=None, samples=10, interval=None),
        "device_allocated_peak_bytes": 2**30,
        "proof": Proof(method="serial-simulation", passed=True, detail="3 steps"),
    }
    return a_result(**facts | changes)


@pytest.fixture
def new_study() -> NewStudy:
    """Makes a study: `steps` are milliseconds by size, or several of a size; one device is `single`.

    `changed` are fields of the runs of a size.
    """

    def made(
        steps: Mapping[int, float | list[float]],
        *,
        strategy: str = "ddp",
        kind: Scaling = "weak",
        batch: int = 8,
        per_node: int = 8,
        changed: Mapping[int, Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> StudyFigures:
        cells, results = [], []
        for gpus, ms in steps.items():
            own = batch // gpus if kind == "strong" else batch
            cell = _cell("single" if gpus == 1 else strategy, gpus, own, {} if gpus == 1 else fields)
            cells.append(cell)
            for number, each in enumerate(ms if isinstance(ms, list) else [ms, ms], 1):
                results.append(_run(cell, number, each, per_node, (changed or {}).get(gpus, {})))
        series = [
            Series(
                kind=kind,
                workload="gpt2-small",
                strategy=those[0].strategy,
                compression=those[0].compression,
                batch_size=batch,
                global_batch=batch if kind == "strong" else None,
                cells=tuple(cell.id for cell in those),
            )
            for those in ([cell for cell in cells if (cell.gpus == 1) == alone] for alone in (True, False))
            if those
        ]
        request = Request(
            workloads=("gpt2-small",), gpus=tuple(steps), strategies=("single", strategy), device="cuda"
        )
        plan = Plan(
            study="s",
            created_at="2026-03-14T08:00:00.000Z",
            request=request,
            cells=tuple(cells),
            series=tuple(series),
            skips=(),
        )
        return analyse("s", [plan], results, TOLD)

    return made
