"""Pairs: two fresh process groups for each cell, whose blocks alternate, A B B A.

Where both sides can, the ranks of one launch fork a process for each pair, so that a pair costs neither
imports nor the start of a launch. Elsewhere both sides are launched anew for each pair.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev

import msgspec
import psutil

from harness.features.gate.effect import FEWEST_QUADS, quad_log
from harness.features.gate.paired.seat import LostError, Seat, Told
from harness.features.gate.paired.sources import Source
from harness.features.gate.records.paired import Alternation, Pair, PairedBlock, PairedCell, Side
from harness.features.gate.reduce import subject_key
from harness.launch.follow import LaunchState
from harness.launch.guarded import Guarded
from harness.launch.rank_output import OutputFile, last_lines, launcher_output, rank_output
from harness.worker.rank.usage import ForeignCpu
from harness.worker.turns import VARIABLE
from reports.text import listed
from results.cell import Cell
from results.errors import BenchError, MachineError, UsageError
from results.files import read_end
from results.foreign_text import shortened
from results.launch import rank_log_paths
from results.outcome import Outcome
from results.run import RunResult
from results.store import Study, utc_now

BLOCK_S = 0.05
"""About the length of a block, and one step at least. The speed of a machine hardly changes within about 0.1
s, and what two blocks share of it cancels if one follows the other at once (docs/evidence.md has other
lengths)."""
QUADS_S = 8.0
"""Seconds after which a pair that has the minimum number of quads of a cell begins no further one."""
ENOUGH = 0.008
"""The standard error of a pair's quads at which further quads add little: about the deviation between process
groups of identical code (0.9 %, docs/evidence.md), which quads cannot lower."""
GRACE_S = 30.0
"""Seconds for a side to end after it was asked to: its `bench` ends its workers first."""
POLL_S = 0.1


@dataclass(slots=True, kw_only=True)
class PairContext:
    """The settings that all pairs of a comparison share, and the side that the current pair waits for."""

    sides: Mapping[Side, Source]
    folder: Path
    """The folder of the comparison: a pair's studies are in `0001/base` and `0001/new`."""
    temporary: Path
    """A folder whose path is short enough for the path of a socket."""
    held: int
    """Descriptor that every process that works in `temporary` inherits."""
    spoiled_above: float
    """The share of the cores that others may take in a quad that counts."""
    repeats: int
    """Pairs that may be forked from one launch of each side; 1: a side cannot fork."""
    always_recorded: bool = False
    """Whether every pair records its exchange and ends with a proof, not only the first one of a launch."""
    awaited: tuple[int, Side] | None = None
    """The side that the pair waits for, with the number of the pair that its launch began with."""


class Pairs:
    """Runs pairs, and keeps launches alive from which the next ones can be forked."""

    def __init__(self, context: PairContext) -> None:
        self._context = context
        self._session: Session | None = None

    @property
    def waits_for(self) -> str:
        """The side that the pair waits for, its part, and its last lines; a clause."""
        return _standing(self._context, *self._context.awaited) if self._context.awaited else "no side"

    def run(self, number: int, alternation: Alternation) -> Pair:
        """Run one pair. A run that fails leaves its outcome in its study, and no blocks.

        Raises UsageError if a side refuses its options or its files were edited meanwhile, MachineError if
        one ends without a run.
        """
        first: Side = "base" if number % 2 else "new"
        order: tuple[Side, Side] = (first, "new" if first == "base" else "base")
        started = utc_now()
        since, repeat, forked = number, 1, False
        if alternation == "launches":
            self.close()
            cells = _by_launches(self._context, number, order)
        else:
            if self._session is None or not self._session.goes_on:
                self.close()
                self._session = Session(self._context, number, order)
            cells, repeat, forked = self._session.run(order)
            since = self._session.number
        for source in self._context.sides.values():
            source.require_unedited()
        return Pair(
            number=number,
            first=first,
            alternation=alternation,
            started_at=started,
            ended_at=utc_now(),
            cells=tuple(cells),
            launched_with=None if since == number else since,
            repeat=repeat,
            forked=forked,
        )

    def close(self) -> None:
        """End what still lives."""
        if self._session is not None:
            self._session.close()
            self._session = None


def study_of(folder: Path, pair: Pair, side: Side) -> Study:
    """The study that has the records of one side of a pair."""
    return _study(folder, pair.number if pair.launched_with is None else pair.launched_with, side)


def runs_of(pair: Pair, results: Sequence[RunResult]) -> list[RunResult]:
    """The runs of a study that belong to this pair.

    A run without a record has no repeat, and counts in each pair of its launch. A cancelled run belongs to an
    interrupted pair.
    """
    return [
        result
        for result in results
        if result.repeat in (0, pair.repeat) and result.outcome is not Outcome.CANCELLED
    ]


class Session:
    """Launches of both sides that live at the same time, and the pairs of their runs.

    The repeat of the runs identifies a pair. There is one repeat, or the most that may be needed if both
    sides can fork.
    """

    def __init__(self, context: PairContext, number: int, order: tuple[Side, Side]) -> None:
        self.number = number
        """The number of its first pair."""
        self._context = context
        self._repeat = 0
        self._lost = False
        with ExitStack() as stack:
            # The sockets exist before the launches start, so that no rank finds its socket missing.
            self._seats = {side: Seat(_socket_path(context, number, side)) for side in order}
            for seat in self._seats.values():
                stack.callback(seat.close)
            self._launches = {side: stack.enter_context(_launched(context, number, side)) for side in order}
            self._stack = stack.pop_all()
        self._next: dict[Side, Told | None] = {}
        """The run of a side that waits for its turn; None: it has no further one."""
        self._counterparts: dict[str, str] | None = None
        """Cell ids of NEW by cell ids of BASE; None until both sides have planned their cells."""

    @property
    def goes_on(self) -> bool:
        """Whether a further pair can be run; not after a run that was lost, as only one side would go on."""
        if self._lost or self._context.repeats == 1:
            return False
        repeats = {None if told is None else told.get("repeat", 1) for told in self._next.values()}
        return len(repeats) == 1 and None not in repeats

    def close(self) -> None:
        self._stack.close()

    def run(self, order: tuple[Side, Side]) -> tuple[list[PairedCell], int, bool]:
        """Run the next pair. Returns its cells, the repeat of their runs, and whether all were forked."""
        self._repeat += 1
        cells: list[PairedCell] = []
        forked: list[bool] = []
        while len(begun := self._begun(order)) == len(order):
            if alone := self._without_counterpart(order, begun):
                self._end(alone)
                continue
            cells.append(self._timed(order, begun))
            self._end(order)
            forked += [told.get("forked", False) for told in begun.values()]
        # Runs without a counterpart on the other side.
        while begun := self._begun(order):
            self._end(tuple(begun))
        for side in order:
            if self._next[side] is None:
                self._context.awaited = self.number, side
                exit_code = self._launches[side].process.wait()
                _require_runs(self._context, self.number, side, exit_code)
        return cells, self._repeat, bool(forked) and all(forked)

    def _without_counterpart(self, order: tuple[Side, Side], begun: Mapping[Side, Told]) -> tuple[Side, ...]:
        """The sides whose run cannot be paired with the run of the other side; empty if they are a pair."""
        if self._counterparts is None:
            self._counterparts = _counterparts(self._context, self.number)
        base, new = begun["base"]["cell"], begun["new"]["cell"]
        if self._counterparts.get(base) == new:
            return ()
        alone = without_counterpart(self._counterparts, base, new)
        if not alone:
            self._require_failure(begun)
        return alone or order

    def _timed(self, order: tuple[Side, Side], begun: Mapping[Side, Told]) -> PairedCell:
        """Time two runs; without blocks if one of them was lost."""
        base, new = begun["base"], begun["new"]
        wanted = self._repeat > 1 and not self._context.always_recorded
        only_timed = wanted and both_can_be_only_timed(begun)
        try:
            blocks = self._take_turns(order, base["cores"], only_timed=only_timed)
        except LostError:
            blocks, self._lost = (), True
        return PairedCell(
            base_cell=base["cell"],
            base_run=base["run"],
            new_cell=new["cell"],
            new_run=new["run"],
            blocks=blocks,
        )

    def _begun(self, order: tuple[Side, Side]) -> dict[Side, Told]:
        """Wait until each side starts its next run or ends. Returns, by side, the report of rank 0 if that
        run belongs to the current repeat."""
        for side in order:
            if side not in self._next:
                self._next[side] = self._seat(side).next_run(self._launches[side].poll)
        here = {side: told for side, told in self._next.items() if told is not None}
        return {side: told for side, told in here.items() if told.get("repeat", 1) == self._repeat}

    def _require_failure(self, begun: Mapping[Side, Told]) -> None:
        """Accept that the sides are at different cells because a run has failed: its side then leaves out
        cells that cannot run either.

        Raises MachineError if no run has failed.
        """
        for side, told in begun.items():
            results = _study(self._context.folder, self.number, side).results()
            self._lost |= any(run.outcome is not Outcome.OK for run in results if run.run_id != told["run"])
        if not self._lost:
            cells = ", ".join(told["cell"] for told in begun.values())
            raise MachineError(
                f"the sides run their cells in different orders ({cells}): compare one cell at a time"
            )

    def _take_turns(
        self, order: tuple[Side, Side], cores: Sequence[int], *, only_timed: bool
    ) -> tuple[PairedBlock, ...]:
        """Time the blocks of two runs. Raises LostError if one of them was lost."""
        ready = [told for side in order for told in self._seat(side).go(only_timed=only_timed)]
        steps = max(1, math.ceil(BLOCK_S * 1e9 / max(1.0, *(told["step_ns"] for told in ready))))
        quads: list[list[PairedBlock]] = []
        began = time.monotonic()
        while not _are_enough(quads, self._context.spoiled_above, time.monotonic() - began):
            # The others' share of the cores is of a quad: a block lasts a few of the kernel's ticks.
            foreign = ForeignCpu(cores, psutil.Process())
            reports = [(side, self._seat(side).go(steps)) for side in (*order, *order[::-1])]
            share = foreign.cores_used() / len(cores)
            quads.append(
                [
                    PairedBlock(
                        side=side, steps=told[0]["steps"], ns=max(rank["ns"] for rank in told), foreign=share
                    )
                    for side, told in reports
                ]
            )
        return tuple(block for quad in quads for block in quad)

    def _end(self, sides: Sequence[Side]) -> None:
        for side in sides:
            self._seat(side).end()
            del self._next[side]

    def _seat(self, side: Side) -> Seat:
        """The seat of a side that the pair waits for from now on."""
        self._context.awaited = self.number, side
        return self._seats[side]


def both_can_be_only_timed(begun: Mapping[Side, Told]) -> bool:
    """Whether both sides, by their first reports, can leave out what follows the timed blocks.

    If only one side did so, it would be timed after fewer steps of warm-up than the other.
    """
    return all(told.get("only_timed", False) for told in begun.values())


def without_counterpart(counterparts: Mapping[str, str], base: str, new: str) -> tuple[Side, ...]:
    """The sides whose cell the other side does not plan."""
    is_alone: dict[Side, bool] = {"base": base not in counterparts, "new": new not in counterparts.values()}
    return tuple(side for side, alone in is_alone.items() if alone)


def _are_enough(quads: Sequence[Sequence[PairedBlock]], spoiled_above: float, spent_s: float) -> bool:
    """Whether the pair has enough quads of a cell: the cell is steady, or `QUADS_S` are over."""
    if len(quads) < FEWEST_QUADS:
        return False
    logs = [quad_log(quad) for quad in quads if all((block.foreign or 0) <= spoiled_above for block in quad)]
    steady = len(logs) >= FEWEST_QUADS and stdev(logs) / math.sqrt(len(logs)) < ENOUGH
    return steady or spent_s > QUADS_S


def _by_launches(context: PairContext, number: int, order: tuple[Side, Side]) -> list[PairedCell]:
    """One side after the other: a block is a run's step time."""
    for side in order:
        context.awaited = number, side
        with _launched(context, number, side, takes_turns=False) as launched:
            while launched.poll() is None:
                time.sleep(POLL_S)
            _require_runs(context, number, side, launched.process.wait())
    base, new = (
        {result.cell_id: result for result in _study(context.folder, number, side).results()}
        for side in ("base", "new")
    )
    planned = _study(context.folder, number, "base")
    cells = []
    for one, other in sorted(_counterparts(context, number).items()):
        if one not in base or other not in new:
            continue
        runs: dict[Side, RunResult] = {"base": base[one], "new": new[other]}
        on_cpu = planned.cell(one).device == "cpu"
        blocks = [
            PairedBlock(
                side=side, steps=1, ns=round(step.value), foreign=share_of_others(runs[side], on_cpu=on_cpu)
            )
            for side in order
            if (step := runs[side].step_ns) is not None
        ]
        cells.append(
            PairedCell(
                base_cell=one,
                base_run=base[one].run_id,
                new_cell=other,
                new_run=new[other].run_id,
                blocks=tuple(blocks) if len(blocks) == len(order) else (),
            )
        )
    return cells


def _counterparts(context: PairContext, number: int) -> dict[str, str]:
    """Map cell ids of BASE to cell ids of NEW, for the cells that the sides of a pair have planned."""
    base, new = (
        [cell for plan in _study(context.folder, number, side).plans() for cell in plan.cells]
        for side in ("base", "new")
    )
    alike = context.sides["base"].options == context.sides["new"].options
    return counterparts(base, new, same_options=alike)


def share_of_others(run: RunResult, *, on_cpu: bool) -> float | None:
    """The share of a launch's cores that others used while it was measured; None: not known."""
    if run.foreign_cpu_cores is None or run.environment is None:
        return None
    ran = run.environment
    # Count the cores as a rank does: those of its host's ranks if it is pinned on CPU, else all cores.
    cores = ran.gpus_per_node * ran.threads if on_cpu and ran.pinned_cores else ran.cores
    return run.foreign_cpu_cores / cores


def _study(folder: Path, number: int, side: Side) -> Study:
    return Study(folder / f"{number:04d}" / side)


@contextmanager
def _launched(
    context: PairContext, number: int, side: Side, *, takes_turns: bool = True
) -> Iterator[Guarded]:
    """One side's `bench matrix`, which is ended with all of its workers when this block is left."""
    source = context.sides[side]
    study = _study(context.folder, number, side)
    study.root.parent.mkdir(parents=True, exist_ok=True)
    variables = source.environment()
    variables.pop(VARIABLE, None)
    if takes_turns:
        variables[VARIABLE] = str(_socket_path(context, number, side))
    repeats = context.repeats if takes_turns else 1
    command = [
        *(source.python, "-m", "harness.cli", "matrix", *source.options),
        *("--repeats", str(repeats)),
        *(["--isolation", "fork"] if repeats > 1 else []),
        *("--out", str(study.root.resolve()), "--no-report"),
        # A study file may name another launcher, for whose jobs nobody would wait.
        *("--launcher", "local"),
    ]
    with _log_path(context, number, side).open("wb") as log:
        launched = Guarded(
            ["env", "-C", str(source.folder), *command],
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
    study = _study(context.folder, number, side)
    if exit_code != 2 and any(study.run_ids(cell) for cell in study.cell_ids()):
        return
    path = _log_path(context, number, side)
    lines = read_end(path).text.strip().splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said = (errors or lines or ["it said nothing"])[-1]
    kind: type[BenchError] = UsageError if exit_code == 2 else MachineError
    raise kind(f"bench matrix of {context.sides[side]} has no run: {said} ({path})")


def _standing(context: PairContext, number: int, side: Side) -> str:
    """The side with its commit, the part of its run that its ranks are in, and its last lines; a clause."""
    study, log = _study(context.folder, number, side), _log_path(context, number, side)
    files, run_id = [OutputFile(path=log, rank=None, stream="log")], ""
    phases: dict[str, list[str]] = {}
    if launches := study.launches():
        folder = study.launch_folder(launches[-1].launch_id)
        states = {rank: LaunchState.of(path) for rank, path in sorted(rank_log_paths(folder).items())}
        for rank, state in states.items():
            phases.setdefault(state.phase, []).append(str(rank))
        run_id = next((state.started[-1] for state in states.values() if state.started), "")
        printed = rank_output(folder, launches[-1])
        # Ranks report failures on stderr.
        printed.sort(key=lambda file: file.stream != "stderr")
        files = [*printed, *launcher_output(folder), *files]
    ranks = [f"{phase} (rank{'s' if len(of) > 1 else ''} {listed(of)})" for phase, of in phases.items()]
    part = f"{context.sides[side]}: {listed(ranks) if ranks else 'starting'}"
    found = last_lines(files, run_id, 3)
    if found is None:
        return f"{part}; it has printed nothing ({log})"
    file, lines = found
    return f"{part}; last lines of {file.words} ({file.path}): {' | '.join(map(shortened, lines))}"


def counterparts(base: Sequence[Cell], new: Sequence[Cell], *, same_options: bool) -> dict[str, str]:
    """Map cell ids of BASE to cell ids of NEW, for the cells that both sides plan.

    Cells with the same subject key correspond. If the sides have different options, two of the remaining
    cells also correspond if they agree in every field that has the same values on both sides. A cell that is
    then left has no counterpart: it is missing in NEW, or new there.

    Raises UsageError if two of the remaining cells of a side are equal in these fields.
    """
    there, here = ({subject_key(cell): cell for cell in cells} for cells in (base, new))
    found = {cell.id: here[key].id for key, cell in there.items() if key in here}
    rest = [cell for key, cell in there.items() if key not in here]
    others = [cell for key, cell in here.items() if key not in there]
    if same_options or not rest or not others:
        return found
    return found | _alike(rest, others)


def _alike(rest: Sequence[Cell], others: Sequence[Cell]) -> dict[str, str]:
    names = [name for name in Cell.__struct_fields__ if _column(rest, name) == _column(others, name)]
    mine, theirs = ({_values(cell, names): cell.id for cell in cells} for cells in (rest, others))
    if len(theirs) < len(others) or len(mine) < len(rest):
        raise UsageError(
            f"it is not clear which cells of BASE, such as {rest[0].id}, to compare with which of "
            f"NEW, such as {others[0].id}: compare one cell at a time"
        )
    return {cell: theirs[values] for values, cell in mine.items() if values in theirs}


def _column(cells: Sequence[Cell], name: str) -> Counter[bytes]:
    """How often a field has each of its values."""
    return Counter(value for cell in cells for value in _values(cell, [name]))


def _values(cell: Cell, names: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(msgspec.json.encode(getattr(cell, name), order="sorted") for name in names)
