"""Studies as one JSON document: cells with their figures and intervals, and the facts of the verdict.

Its history: 1, the first; 2, the verdict of a workload is its answer and records, instead of facts of each
sentence. `docs/exports.md` describes its contents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from reports.analysis.over import over_groups
from reports.analysis.scaling import CurvePoint, Efficiency
from reports.analysis.side_by_side import SideBySide, side_by_side
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.verdict import verdict
from reports.page.columns import CellRow, cell_rows, declared
from results.foreign_text import in_json
from results.schema import WRITER, Json

SCHEMA = "bench/export"
VERSION = 2


def json_document(studies: Sequence[StudyFigures]) -> str:
    """The document as indented text; the same studies give the same bytes. Unknown values are null."""
    head: Json = {"schema": SCHEMA, "schema_version": VERSION, "writer": WRITER}
    # msgspec writes numbers that JSON lacks (infinity) as null.
    document = head | {"studies": [_study(study) for study in studies]}
    if len(studies) > 1:
        document["comparison"] = _comparison(side_by_side(studies))
    data = msgspec.json.encode(document)
    return in_json(msgspec.json.format(data, indent=2).decode()) + "\n"


def _study(study: StudyFigures) -> Json:
    found = verdict(study)
    return {
        "name": study.name,
        "planned_at": [plan.created_at for plan in study.plans],
        "commands": list(study.commands),
        "sizes_count": study.devices_word,
        "runs": study.run_counts,
        "verdict": {"sentences": found.sentences, "workloads": found.workloads, "next_run": found.next_run},
        **({} if study.compare_over is None else {"compare_over": _over(study, study.compare_over)}),
        **({"review": study.review.entries, "approval": study.approval} if study.review.entries else {}),
        "cells": [_cell(row) for row in cell_rows(study)],
        "skipped": [
            {"gpus": group.gpus, **_fields(group.skip, without=("gpus",))} for group in study.skipped
        ],
    }


def _over(study: StudyFigures, axis: str) -> Json:
    return {
        "axis": axis,
        "groups": [
            {
                "samples": group.samples,
                "cells": [
                    {
                        "id": row.cell.id,
                        "value": getattr(row.cell, axis),
                        "ratio": row.ratio,
                        "absent": row.absent,
                        "memory_bytes": row.memory_bytes,
                        "loss": row.loss,
                    }
                    for row in group.rows
                ],
            }
            for group in over_groups(study, axis)
        ],
    }


def _comparison(found: SideBySide) -> Json:
    return {
        "findings": found.findings,
        "unlike": found.unlike,
        "cells": [
            {
                "id": entry.cell.id,
                "study": entry.study,
                "first": first.study,
                "first_id": first.figures.cell.id,
                "ratio": entry.ratio,
                "change": entry.change,
                "absent": entry.absent,
                "differs": entry.differs,
                "disturbed": [one.runs for one in entry.disturbed],
                "runs": [one.of for one in entry.disturbed],
            }
            for first, *others in found.cells
            for entry in others
        ],
    }


def _cell(row: CellRow) -> Json:
    return {
        "id": row.cell.id,
        # All fields, including defaults.
        "cell": {
            **_fields(row.cell, without=("steps",)),
            "global_batch": row.cell.global_batch,
            "steps": _fields(row.cell.steps),
        },
        "scaling": row.study.scalings.get(row.cell.id, ()),
        **declared(row, "outcome", "reason"),
        "runs": [run.run_id for run in row.pool.runs],
        "runs_planned": row.pool.planned,
        "runs_lost": [run.run_id for run in row.pool.lost],
        "runs_left_out": {left.run.run_id: left.reason for left in row.pool.left_out},
        "figures": _figures(row),
    }


def _fields(struct: msgspec.Struct, *, without: Sequence[str] = ()) -> Json:
    return {name: getattr(struct, name) for name in struct.__struct_fields__ if name not in without}


def _figures(row: CellRow) -> Json | None:
    """The figures of a cell; None without a successful run."""
    figures = row.figures
    if figures is None:
        return None
    return {
        **declared(row, "evidence"),
        "proof": figures.proof,
        **declared(row, "disturbed", "fingerprint"),
        "environment": figures.newest.environment,
        **declared(row, "step_ns", "samples_per_s", "units_per_s"),
        "phase_ns": figures.phase_ns,
        **declared(row, "exposed_ns", "exposed_share", "exposed_absent"),
        "budget": row.budget
        and {
            "method": row.budget.method,
            "part_ns": dict(row.budget.part_ns),
            "transfer_ns": row.budget.transfer_ns,
            "wait_ns": row.budget.wait_ns,
        },
        **declared(row, "bubble_ideal", "bubble_replayed"),
        "dimensions": row.network.dimensions if row.network else (),
        **declared(row, "dimension_overlap_ns"),
        "efficiency": {"weak": _point(row.weak), "strong": _point(row.strong)},
        # Null if the workload was measured with only one exchange.
        "exchange": row.exchange
        and {
            "dense": row.exchange.dense.cell.id if row.exchange.dense else None,
            **declared(row, "speed_up"),
            "verdict": row.exchange.verdict,
            "absent": row.exchange.reason,
        },
        "cost": row.cost
        and {
            **declared(row, "usd_per_hour", "usd_per_1000_steps", "usd_per_million_samples"),
            **declared(row, "usd_per_billion_tokens", "usd_per_epoch"),
            "price": row.cost.quote.price if row.cost.quote else None,
            "absent": row.cost.absent,
        },
        "mfu": row.mean("mfu") if figures.mfu is not None else None,
        **declared(row, "energy_j", "rss_peak_bytes", "rss_over_idle_bytes", "device_allocated_peak_bytes"),
    }


def _point(point: CurvePoint | None) -> Mapping[str, Json] | None:
    """Both efficiencies of a cell in a series; None if it is not in a series of this kind."""
    return None if point is None else {"single": _efficiency(point.single), "own": _efficiency(point.own)}


def _efficiency(efficiency: Efficiency) -> Json:
    return {
        "metric": efficiency.metric,
        "baseline": efficiency.baseline.cell.id if efficiency.baseline else None,
        "absent": efficiency.reason,
    }
