"""`bench compare --ab`: run pairs of launches of two revisions, until they decide or four looks are over."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from harness.features.gate.baselines import require_figures
from harness.features.gate.comparison import FAILING, Comparison, Finding, Rules, compare
from harness.features.gate.effect import (
    LOOKS,
    PAIRS_A_LOOK,
    SPOILED_ABOVE,
    PairedSample,
    Verdict,
    pair_log,
    paired_sample,
)
from harness.features.gate.paired.pair import PairContext, Pairs, runs_of, study_of
from harness.features.gate.paired.sources import (
    WORKING_TREE,
    IncomparableError,
    Repository,
    Source,
    is_accepted_file,
    resolve_base,
)
from harness.features.gate.records.baseline import Baseline, Subject
from harness.features.gate.records.paired import (
    CALL,
    PAIR,
    PAIRED_CALL,
    Alternation,
    Pair,
    PairedCall,
    PairedCell,
    PairedSide,
    Side,
)
from harness.features.gate.reduce import merged_side, reduce_study, subject_key, without_launch
from harness.machine.processes import temporary_folder
from harness.matrix import RUNS, signals_are_ctrl_c
from harness.reporting.studies import read_results
from harness.terminal.console import Console
from reports.text import count, percent
from results import files
from results.errors import MachineError, UsageError
from results.files import study_lock
from results.outcome import Outcome
from results.run import RunResult
from results.store import new_id

SIDES: tuple[Side, Side] = ("base", "new")
Row = tuple[str, str | None]
"""A subject's key and a metric."""
MOST_LOST = 4
"""Limit of pairs that others spoiled or in which a run of BASE failed; one more ends the comparison."""
FINE = frozenset({Verdict.UNCHANGED, Verdict.IMPROVED, Verdict.NEW})
"""Verdicts that need no acceptance."""
OWN_OPTIONS = (
    *("--out", "--repeats", "--name", "--fresh", "--dry-run"),
    *("--launcher", "--no-report", "--isolation"),
)
"""Options of `bench matrix` that the comparison itself gives, or that make no run here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRequest:
    """One side, as the call gives it."""

    revision: str
    python: str | None = None
    options: tuple[str, ...] = ()
    """Options of `bench matrix`: first the options of both sides, then its own."""


@dataclass(kw_only=True)
class PairedComparison:
    """One comparison: the call, its folder, its pairs so far, and their verdict."""

    base: SideRequest
    new: SideRequest
    rules: Rules
    console: Console
    looks: int = LOOKS
    alternation: Alternation = "blocks"
    spoiled_above: float = SPOILED_ABOVE
    max_time_s: float | None = None
    """No pair begins after this time, and a pair that has not ended after twice this time is stopped."""
    out: Path | None = None
    """The folder of its records; one that is there is continued."""

    def __post_init__(self) -> None:
        """Raises UsageError for a wrong call."""
        if not 1 <= self.looks <= LOOKS:
            raise UsageError(f"--looks {self.looks}: 1 to {LOOKS}")
        for side in (self.base, self.new):
            for word in side.options:
                if word.partition("=")[0] in OWN_OPTIONS:
                    raise UsageError(f"{word.partition('=')[0]} is not for a paired comparison: leave it out")
        self.rules = replace(self.rules, looks=self.looks)
        self.folder = self.out or RUNS / f"ab-{new_id()}"

    def run(self) -> Comparison:
        """Run pairs until the verdict is clear. A call with the folder of an earlier one continues it.

        Raises UsageError for a wrong revision or option, MachineError if a side has no run at all.
        """
        repository = Repository(Path.cwd())
        try:
            revision, self.rules = resolve_base(self.base.revision, self.rules, repository, self.console)
        except IncomparableError as error:
            return _incomparable(self.base.revision, self.new.revision, str(error))
        revisions = {"base": revision, "new": self.new.revision}
        if WORKING_TREE not in revisions.values():
            repository.require_committed({name: repository.commit(name) for name in revisions.values()})
        with signals_are_ctrl_c(), temporary_folder("bench-ab-") as (temporary, held):
            requests = zip(SIDES, (self.base, self.new), strict=True)
            sources = {
                side: repository.source(side.upper(), revisions[side], one.python, temporary, one.options)
                for side, one in requests
            }
            try:
                fork = [source.require_protocol() for source in sources.values()]
            except IncomparableError as error:
                return _incomparable(str(sources["base"]), str(sources["new"]), str(error))
            self._require_own_folder()
            most = self.looks * PAIRS_A_LOOK + MOST_LOST + 1
            context = PairContext(
                sides=sources,
                folder=self.folder,
                temporary=temporary,
                held=held,
                spoiled_above=self.spoiled_above,
                repeats=most if all(fork) else 1,
                always_recorded=not {"exposed", "wait"}.isdisjoint(self.rules.margins),
            )
            with study_lock(self.folder), closing(Pairs(context)) as source:
                self._claim(sources)
                return self._run_pairs(source, {side: str(sources[side]) for side in SIDES})

    def _require_own_folder(self) -> None:
        there = {path.name for path in self.folder.glob("*")} - {".lock"}
        if there and CALL not in there:
            raise UsageError(
                f"{self.folder} is not empty and holds no comparison: name a new folder with --out"
            )

    def _run_pairs(self, source: Pairs, names: Mapping[Side, str]) -> Comparison:
        self.console.note(f"records: {self.folder}")
        began, limit_s = time.monotonic(), self.max_time_s
        while True:
            pairs = read_pairs(self.folder)
            late = limit_s is not None and time.monotonic() - began > limit_s
            if pairs and self._ends(pairs, names, late=late):
                # The start-up of a launch is on record when the launch has ended.
                source.close()
                last = decide(self.folder, pairs, self.rules, names, self.spoiled_above)
                self._warn_of_stale(last)
                return last
            try:
                with _alarm(None if limit_s is None else began + 2 * limit_s - time.monotonic()):
                    self._add_pair(source)
            except _AlarmError:
                # The reason is read before the side is ended, because ending the side changes its last lines.
                stopped = f"twice --max-time was over while the pair waited for {source.waits_for}"
                source.close()
                if not pairs:
                    raise MachineError(f"{stopped}; mend that side, or give it more time") from None
                self.console.warn(stopped)

    def _warn_of_stale(self, found: Comparison) -> None:
        """Warn of accepted changes that no longer show: they would hide the next change of the metric."""
        if not is_accepted_file(self.base.revision):
            return
        for name in sorted(self.rules.accepted):
            verdicts = {f.verdict for f in found.findings if f.metric in (name, None)}
            # A metric may have no figure on this machine, and so no finding. A missing cell always has one.
            if verdicts <= FINE and (verdicts or name == Verdict.MISSING):
                where = "if this call plans every cell, " if name == Verdict.MISSING else ""
                self.console.warn(
                    f"{self.base.revision} accepts a change of {name}, which no longer shows: "
                    f"{where}remove the line, or it hides the next change"
                )

    def _ends(self, pairs: Sequence[Pair], names: Mapping[Side, str], *, late: bool) -> bool:
        found = decide(self.folder, pairs, self.rules, names, self.spoiled_above)
        over = self._is_over(found, pairs)
        if late and not over:
            self.console.note(f"--max-time was reached after {count(len(pairs), 'pair')}")
        return over or late

    def _is_over(self, found: Comparison, pairs: Sequence[Pair]) -> bool:
        # Step times are judged only at looks; between two looks only a counter or a run can fail.
        certain = (*FAILING, Verdict.INCOMPARABLE)
        if any(finding.effect is None and finding.verdict in certain for finding in found.findings):
            return True
        samples = paired_samples(self.folder, pairs, self.spoiled_above).values()
        if not samples or max(sample.spoiled + sample.failed for sample in samples) > MOST_LOST:
            return True
        counted = _counted(samples)
        if not counted or counted % PAIRS_A_LOOK:
            return False
        if counted == _counted(paired_samples(self.folder, pairs[:-1], self.spoiled_above).values()):
            # The last pair did not count, so the same number of counted pairs has been looked at before.
            return False
        return counted >= self.looks * PAIRS_A_LOOK or not found.is_open

    def _add_pair(self, source: Pairs) -> None:
        number = max((int(path.name) for path in self.folder.glob("[0-9][0-9][0-9][0-9]")), default=0) + 1
        pair = source.run(number, self.alternation)
        runs = [run for side in SIDES for run in runs_of(pair, study_of(self.folder, pair, side).results())]
        lacks_memory = any(run.outcome is Outcome.OUT_OF_MEMORY for run in runs)
        if self.alternation == "blocks" and lacks_memory:
            source.close()
            self.alternation = "launches"
            self.console.warn(
                "both sides do not fit in memory together: from here on whole launches alternate, which is "
                "noisier"
            )
            return
        files.write_once(self.folder / f"{number:04d}" / "pair.json", PAIR.encode(pair))
        for cell in pair.cells:
            self.console.note(f"pair {pair.number}, {cell.new_cell}: {self._told(pair, cell)}")

    def _told(self, pair: Pair, cell: PairedCell) -> str:
        """The value of a pair, and the share of the cores that others took."""
        log = pair_log(cell, pair.alternation, self.spoiled_above) if cell.blocks else None
        shares = [block.foreign for block in cell.blocks if block.foreign is not None]
        what = "no value" if log is None else f"{log:+.2%}"
        if not shares:
            return what
        return f"{what}, other processes took {percent(sum(shares) / len(shares))} of the cores"

    def _claim(self, sources: Mapping[Side, Source]) -> None:
        """Write the call of the comparison: its sides, and the rules of this call.

        Raises UsageError if the folder holds another comparison.
        """
        base, new = (msgspec.convert(sources[side], PairedSide, from_attributes=True) for side in SIDES)
        path = self.folder / CALL
        if path.exists():
            there = PAIRED_CALL.read(path)
            if (there.base, there.new) != (base, new):
                raise UsageError(
                    f"{self.folder} holds another comparison, or one of files that were edited since: name a "
                    f"new folder with --out"
                )
        call = PairedCall(
            base=base,
            new=new,
            changes=dict(self.rules.accepted),
            fail_above=dict(self.rules.margins),
            across=tuple(sorted(self.rules.across)),
            looks=self.looks,
            others_above=self.spoiled_above,
        )
        files.replace(path, PAIRED_CALL.encode(call))


class _AlarmError(Exception):
    """A pair did not end in time."""


@contextmanager
def _alarm(seconds: float | None) -> Iterator[None]:
    """Raise _AlarmError in a block after `seconds` (None: never). Only the main thread may enter it."""

    def ring(number: int, frame: object) -> None:
        raise _AlarmError

    if seconds is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read_pairs(folder: Path) -> list[Pair]:
    """The completed pairs, in order; an interrupted pair does not count."""
    return [PAIR.read(path) for path in sorted(folder.glob("[0-9][0-9][0-9][0-9]/pair.json"))]


def decide_again(folder: Path, rules: Rules, *, looks: int | None, spoiled_above: float | None) -> Comparison:
    """Decide from the records of a folder, by the rules of its last call and those given here.

    Raises UsageError if it holds no pairs.
    """
    pairs = read_pairs(folder)
    if not pairs:
        raise UsageError(f"{folder} holds no pairs: name the folder of a bench compare --ab")
    call = PAIRED_CALL.read(folder / CALL)
    rules = replace(
        rules,
        accepted=call.changes,
        margins=call.fail_above | dict(rules.margins),
        across=rules.across | frozenset(call.across),
        looks=looks or call.looks,
    )
    names: dict[Side, str] = {"base": call.base.revision, "new": call.new.revision}
    return decide(folder, pairs, rules, names, spoiled_above or call.others_above)


def decide(
    folder: Path, pairs: Sequence[Pair], rules: Rules, names: Mapping[Side, str], spoiled_above: float
) -> Comparison:
    """Compare the sides of these pairs: step times by alternating blocks, all else by the records of the
    runs.

    Raises UsageError if no run of BASE has figures.
    """
    samples = paired_samples(folder, pairs, spoiled_above)
    renamed = _renamed(folder, pairs)
    parts = {side: _parts(folder, pairs, side) for side in SIDES}

    def as_in_base(subject: Subject) -> Subject:
        return msgspec.structs.replace(subject, key=renamed.get(subject.key, subject.key))

    parts["new"] = [
        msgspec.structs.replace(part, subjects=tuple(map(as_in_base, part.subjects))) for part in parts["new"]
    ]
    sides = {side: merged_side(names[side], parts[side], any_failure=side == "new") for side in SIDES}
    require_figures(sides["base"])
    return compare(sides["base"], sides["new"], replace(rules, paired=samples))


def _parts(folder: Path, pairs: Sequence[Pair], side: Side) -> list[Baseline]:
    """Reduce the runs of each pair. Of pairs forked from one launch, only the first has a start-up."""
    kept: dict[Path, list[RunResult]] = {}
    parts = []
    for pair in pairs:
        study = study_of(folder, pair, side)
        is_first = study.root not in kept
        if is_first:
            kept[study.root] = read_results(study)
        part = reduce_study(study, runs_of(pair, kept[study.root]) or kept[study.root], over_seeds=False)
        parts.append(without_launch(part) if pair.forked and not is_first else part)
    return parts


def paired_samples(folder: Path, pairs: Sequence[Pair], spoiled_above: float) -> dict[str, PairedSample]:
    """The pairs of each cell, by the key of its subject in BASE."""
    found: dict[str, list[tuple[Pair, PairedCell]]] = {}
    for pair in pairs:
        study = study_of(folder, pair, "base")
        for cell in pair.cells:
            found.setdefault(subject_key(study.cell(cell.base_cell)), []).append((pair, cell))
    samples = {key: paired_sample(same, spoiled_above, of=len(pairs)) for key, same in found.items()}
    return {key: sample for key, sample in samples.items() if sample is not None}


def _counted(samples: Iterable[PairedSample]) -> int:
    """Pairs that every cell has."""
    return min((len(sample.logs) for sample in samples), default=0)


def _renamed(folder: Path, pairs: Sequence[Pair]) -> dict[str, str]:
    """Map NEW's keys to BASE's keys, which differ if the two sides have different options.

    Raises MachineError if one cell was paired with two, because the sides run their cells in different
    orders.
    """
    found: dict[str, str] = {}
    same_order = True
    for pair in pairs:
        base, new = (study_of(folder, pair, side) for side in SIDES)
        for cell in pair.cells:
            before, after = subject_key(base.cell(cell.base_cell)), subject_key(new.cell(cell.new_cell))
            same_order &= found.setdefault(after, before) == before
    crossed = any(key != other and key in found.values() for key, other in found.items())
    if crossed or not same_order:
        raise MachineError(
            f"the sides run the cells of {folder} in different orders: compare one cell at a time"
        )
    return found


def _incomparable(base: str, new: str, reason: str) -> Comparison:
    finding = Finding(subject="all cells", key="", metric=None, verdict=Verdict.INCOMPARABLE, reason=reason)
    return Comparison(base=base, new=new, findings=(finding,), confidence=1.0)


def status(folder: Path) -> str | None:
    """Say that a folder has paired comparisons; None if it lacks them."""
    pairs = sorted(folder.glob(f"*/{CALL}"))
    if not pairs:
        return None
    return (
        f"{folder} holds paired comparisons and no study: bench compare --again {pairs[-1].parent} says "
        f"what one found"
    )
