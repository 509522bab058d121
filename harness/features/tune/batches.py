"""The short runs of `--batch-size auto`: a nested study in the folder of the study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from harness.features.tune.fitting import place_of, with_batches
from harness.launch.conduct import conduct_of
from harness.plan.surroundings import Limit
from harness.terminal.console import Console
from results.cell import Cell, point
from results.outcome import Outcome
from results.plan import FittingBatch, Order, Plan, Request
from results.rebuild import rebuilt_plan
from results.run import RunResult
from results.store import Study, utc_now

BATCH_RUNS = "batch"
"""The folder of the study of the short runs."""
Execute = Callable[[Study, Plan], int | None]
"""Runs what is left of a plan of a study. Returns an exit code if the command is to end with it."""


def find_batches(
    study: Study, request: Request, execute: Execute, *, limit: Limit, order: Order | None, console: Console
) -> Request | int:
    """Give each series of a request the batch that earlier plans of the study or short runs have found.

    The runs are of the cells that `Curve.search` names. They follow `order`; None: a few steps of them are
    measured. Returns an exit code if the runs did not end; a later call continues from there.
    """
    request, curves = with_batches(request, earlier=study.plans(), limit=limit)
    probes = Study(study.root / BATCH_RUNS)
    before: list[Cell] = []
    while True:
        seen = _seen(probes)
        found = [curve.search(seen) for curve in curves]
        wanted = list(dict.fromkeys(one for one in found if isinstance(one, Cell)))
        if not wanted:
            return _with_found(request, [one for one in found if isinstance(one, FittingBatch)])
        # Runs that were to say something new, and were not made, are not asked for again.
        ended: int | None = 1
        plan = _kept_plan(probes, wanted, request, order)
        if wanted != before:
            tried = ", ".join(f"{cell.workload} {point(cell)}" for cell in wanted)
            console.note(f"batch size auto tries {tried}")
            ended = execute(probes, plan)
        if ended is not None:
            console.note("batch sizes are not found yet; the same command continues from here")
            return ended
        for cell in wanted:
            conduct_of(plan).forget(probes, cell.id)
        before = wanted


def _with_found(request: Request, found: Sequence[FittingBatch]) -> Request:
    known = {one.work: one for one in found}
    every = tuple(known.get(one.work, one) for one in request.batches or ())
    return msgspec.structs.replace(request, batches=every)


def _seen(study: Study) -> dict[str, dict[int, int | str]]:
    """Return the memory that runs of a study took, by the place of their cells and by micro-batch."""
    seen: dict[str, dict[int, int | str]] = {}
    for run in study.results(keep=True) if study.is_there else ():
        if not run.outcome.runs_again:
            cell = study.cell(run.cell_id)
            seen.setdefault(place_of(cell), {})[cell.micro_batch] = _taken(study, run)
    return seen


def _taken(study: Study, run: RunResult) -> int | str:
    """Return the bytes of the fullest rank, or how the run failed, as a predicate."""
    if run.outcome is Outcome.OUT_OF_MEMORY:
        return "ran out of memory"
    memories = [record.memory for record in study.rank_records(run.cell_id, run.run_id)]
    if run.outcome is not Outcome.OK or None in memories:
        return f"failed ({run.outcome}: {run.reason or 'its memory is not known'})"
    return max(memory.taken_bytes for memory in memories if memory is not None)


def _kept_plan(study: Study, cells: Sequence[Cell], request: Request, order: Order | None) -> Plan:
    """Add a plan of one run of each cell to the study, or return the one that an interrupted call added."""
    for plan in study.plans():
        if list(plan.cells) == cells:
            return plan
    return short_plan(study, cells, request, {}, order=order)


def short_plan(
    study: Study, cells: Sequence[Cell], like: Request, changes: Mapping[str, object], **facts: object
) -> Plan:
    """Add a plan of cells to a study of short runs, on nodes like another request's, with `changes`."""
    plan = rebuilt_plan(study.name, cells, ())
    place = {name: getattr(like, name) for name in ("source_folder", "gpus_per_node", "node_size")}
    request = msgspec.structs.replace(plan.request, **place, **changes)
    plan = msgspec.structs.replace(plan, created_at=utc_now(), request=request, **facts)
    study.add_plan(plan)
    return plan
