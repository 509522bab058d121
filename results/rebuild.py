"""Rebuild a lost plan from the cells and the launches of its study, as far as they record it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from results.cell import Cell, Names, named
from results.launch import Launch
from results.plan import Plan, Request, Scaling, Series, values_name


def rebuilt_plan(study: str, cells: Sequence[Cell], launches: Sequence[Launch]) -> Plan:
    """A plan of these cells (at least one), with the repeats that were launched.

    Skipped points are not recorded there, so the plan lacks them. Cells with one batch per replica are a weak
    series, and with one global batch a strong one.
    """
    first = cells[0]
    own = {cell.id for cell in cells}
    mine = [launch for launch in launches if own & {slot.cell_id for slot in launch.slots}]
    per_node = {launch.placement.gpus_per_node for launch in mine if launch.placement.nodes > 1}
    series = tuple(_series(cells))
    return Plan(
        study=study,
        created_at="",
        request=Request(
            gpus=tuple(sorted({cell.gpus for cell in cells})),
            **{values_name(axis): _each(cells, axis) for axis in Names.__struct_fields__},
            batch_sizes=tuple(sorted({cell.batch_per_replica for cell in cells})),
            scalings=tuple(dict.fromkeys(one.kind for one in series)),
            repeats=max((slot.repeat for launch in mine for slot in launch.slots), default=1),
            dataset=first.dataset,
            device=first.device,
            backend=first.backend,
            precision=first.precision,
            accumulation=first.accumulation,
            optimizer=first.optimizer,
            seed=first.seed,
            steps=first.steps,
            gpus_per_node=max(per_node, default=None),
            source_folder=mine[-1].source_folder if mine else None,
        ),
        cells=tuple(cells),
        series=series,
        skips=(),
        order=mine[-1].order if mine else None,
    )


def _each(cells: Sequence[Cell], axis: str) -> Any:
    return tuple(dict.fromkeys(getattr(cell, axis) for cell in cells))


def _series(cells: Sequence[Cell]) -> Iterable[Series]:
    """The strong series that have several sizes, and weak series of all other cells."""
    in_strong: set[str] = set()
    for group in _groups(cells, lambda cell: cell.global_batch):
        if len({cell.gpus for cell in group}) == len(group) > 1:
            in_strong |= {cell.id for cell in group}
            yield _one("strong", group)
    for group in _groups(cells, lambda cell: cell.batch_per_replica):
        if len(group) > 1 or group[0].id not in in_strong:
            yield _one("weak", group)


def _groups(cells: Sequence[Cell], batch: Callable[[Cell], int]) -> list[list[Cell]]:
    """Groups of cells that differ only in size and have the same `batch`, by ascending size."""
    found: dict[tuple[str, int], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.gpus):
        alike = msgspec.structs.replace(cell, gpus=1, model_parallel=1, micro_batch=1, accumulation=1).id
        found.setdefault((alike, batch(cell)), []).append(cell)
    return list(found.values())


def _one(kind: Scaling, group: Sequence[Cell]) -> Series:
    largest = group[-1]
    return Series(
        kind=kind,
        **named(largest),
        batch_size=largest.batch_per_replica,
        global_batch=largest.global_batch if kind == "strong" else None,
        cells=tuple(cell.id for cell in group),
    )
