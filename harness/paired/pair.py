"""One pair: both sides are launched anew, and blocks of their runs alternate, A B B A."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.launch.guarded import Guarded
from harness.paired.seat import LostError, Seat, Told
from harness.paired.sources import Source
from harness.worker.turns import VARIABLE
from harness.worker.usage import ForeignCpu
from results.errors import BenchError, MachineError, UsageError
from results.paired import Alternation, Block, Pair, PairedCell, Side
from results.run import RunResult
from results.store import Study, utc_now

BLOCK_S = 0.25
"""About the length of a block: long against the kernel's ticks of CPU time, short against a drift."""
FEWEST_QUADS, MOST_QUADS = 4, 16
QUADS_S = 12.0
"""After which a pair begins no further quad of a cell, beyond the fewest."""
GRACE_S = 30.0
"""For a side that is asked to end: its `bench` ends its workers first."""
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SideCall:
    """What is started for one side."""

    source: Source
    options: tuple[str, ...]
    """Of its `bench matrix`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairContext:
    """What all pairs of a comparison have in common."""

    sides: Mapping[Side, SideCall]
    folder: Path
    """Of the comparison: a pair's studies are in `0001/base` and `0001/new`."""
    temporary: Path
    """Short enough for the path of a socket."""
    held: int
    """Descriptor that every process inherits which works in `temporary`."""


def run_pair(context: PairContext, number: int, alternation: Alternation) -> Pair:
    """Run one pair. A run that fails leaves its outcome in its study, and no blocks.

    Raises UsageError if a side refuses its options, MachineError if one ends without a run.
    """
    first: Side = "base" if number % 2 else "new"
    order: tuple[Side, Side] = (first, "new" if first == "base" else "base")
    started = utc_now()
    cells = (_in_blocks if alternation == "blocks" else _by_launches)(context, number, order)
    return Pair(
        number=number,
        first=first,
        alternation=alternation,
        started_at=started,
        ended_at=utc_now(),
        cells=tuple(cells),
    )


def study_of(folder: Path, number: int, side: Side) -> Study:
    """Where the records of one side of a pair are."""
    return Study(folder / f"{number:04d}" / side)


def _in_blocks(context: PairContext, number: int, order: tuple[Side, Side]) -> list[PairedCell]:
    """Both sides live at the same time."""
    cells: list[PairedCell] = []
    with ExitStack() as stack:
        # Before the launches, so that no rank finds its socket missing.
        seats = {side: Seat(_socket_path(context, number, side)) for side in order}
        for seat in seats.values():
            stack.callback(seat.close)
        launches = {side: stack.enter_context(_launched(context, number, side)) for side in order}
        while True:
            begun = {side: seats[side].next_run(launches[side].poll) for side in order}
            base, new = begun["base"], begun["new"]
            if base is None or new is None:
                break
            blocks = _take_turns(seats, order, base["cores"])
            for side in order:
                seats[side].end()
            cells.append(
                PairedCell(
                    base_cell=base["cell"],
                    base_run=base["run"],
                    new_cell=new["cell"],
                    new_run=new["run"],
                    blocks=tuple(blocks),
                )
            )
        for side in order:
            if begun[side] is None:
                _require_runs(context, number, side, launches[side].process.wait())
        for side in order:
            # Runs that the other side has no counterpart of.
            while begun[side] is not None:
                seats[side].end()
                begun[side] = seats[side].next_run(launches[side].poll)
            _require_runs(context, number, side, launches[side].process.wait())
    return cells


def _take_turns(seats: Mapping[Side, Seat], order: tuple[Side, Side], cores: Sequence[int]) -> list[Block]:
    """The blocks of two runs; empty if one of them was lost."""
    try:
        ready = [told for side in order for told in seats[side].go()]
        steps = max(1, math.ceil(BLOCK_S * 1e9 / max(1.0, *(told["step_ns"] for told in ready))))
        blocks: list[Block] = []
        began = time.monotonic()
        while len(blocks) < 4 * FEWEST_QUADS or (
            len(blocks) < 4 * MOST_QUADS and time.monotonic() - began < QUADS_S
        ):
            blocks += [_block(seats[side], side, steps, cores) for side in (*order, *order[::-1])]
    except LostError:
        return []
    return blocks


def _block(seat: Seat, side: Side, steps: int, cores: Sequence[int]) -> Block:
    foreign = ForeignCpu(cores, psutil.Process())
    told: list[Told] = seat.go(steps)
    return Block(
        side=side,
        steps=told[0]["steps"],
        ns=max(rank["ns"] for rank in told),
        foreign=foreign.cores_used() / len(cores),
    )


def _by_launches(context: PairContext, number: int, order: tuple[Side, Side]) -> list[PairedCell]:
    """One side after the other: a block is a run's step time."""
    for side in order:
        with _launched(context, number, side, takes_turns=False) as launched:
            while launched.poll() is None:
                time.sleep(POLL_S)
            _require_runs(context, number, side, launched.process.wait())
    base, new = (
        {result.cell_id: result for result in study_of(context.folder, number, side).results()}
        for side in ("base", "new")
    )
    # In the order of the ids: where the sides have other options, cells correspond by their place.
    return [
        _launched_pair({"base": base[one], "new": new[other]}, order)
        for one, other in zip(sorted(base), sorted(new), strict=False)
    ]


def _launched_pair(results: Mapping[Side, RunResult], order: tuple[Side, Side]) -> PairedCell:
    base, new = results["base"], results["new"]
    times = [(side, results[side].step_ns) for side in order]
    blocks = [Block(side=side, steps=1, ns=round(step.value)) for side, step in times if step is not None]
    return PairedCell(
        base_cell=base.cell_id,
        base_run=base.run_id,
        new_cell=new.cell_id,
        new_run=new.run_id,
        blocks=tuple(blocks) if len(blocks) == len(order) else (),
    )


def _has_runs(study: Study) -> bool:
    return any(study.run_ids(cell) for cell in study.cell_ids())


@contextmanager
def _launched(
    context: PairContext, number: int, side: Side, *, takes_turns: bool = True
) -> Iterator[Guarded]:
    """One side's `bench matrix`, which is ended with all of its workers when this block is left."""
    call = context.sides[side]
    study = study_of(context.folder, number, side)
    study.root.parent.mkdir(parents=True, exist_ok=True)
    variables = call.source.environment()
    variables.pop(VARIABLE, None)
    if takes_turns:
        variables[VARIABLE] = str(_socket_path(context, number, side))
    command = [call.source.python, "-m", "harness.cli", "matrix", *call.options]
    command += ["--repeats", "1", "--out", str(study.root.resolve()), "--no-report"]
    with _log_path(context, number, side).open("wb") as log:
        launched = Guarded(
            ["env", "-C", str(call.source.folder), *command],
            log=log,
            environment=variables,
            descriptors=(context.held,),
            grace_s=GRACE_S,
        )
        try:
            yield launched
        finally:
            launched.end()


def _socket_path(context: PairContext, number: int, side: Side) -> Path:
    return context.temporary / f"{side}-{number}"


def _log_path(context: PairContext, number: int, side: Side) -> Path:
    return context.folder / f"{number:04d}" / f"{side}.log"


def _require_runs(context: PairContext, number: int, side: Side, exit_code: int) -> None:
    """Raises an error with the side's own words if it has ended without a run."""
    if exit_code != 2 and _has_runs(study_of(context.folder, number, side)):
        return
    path = _log_path(context, number, side)
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")] or lines or ["it said nothing"]
    kind: type[BenchError] = UsageError if exit_code == 2 else MachineError
    raise kind(f"bench matrix of {context.sides[side].source} has no run: {errors[-1]} ({path})")
