"""Pools: the runs of a cell in one environment, with one kind of evidence.

The newest environment with a successful run counts; every other run is named with the facts that differ.
Runs of that environment that other processes disturbed are left out if at least two other runs remain, so
that one slow run does not move a figure. Runs whose proof failed count only where no other run of their cell
does. All figures of a study rest on the same runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from results.cell import Cell
from results.environment import LATER_FACTS, Environment, unlike_facts
from results.outcome import Evidence, Outcome
from results.run import RunResult

FEWEST_UNDISTURBED = 2
"""Undisturbed runs of a cell from which on its disturbed ones are left out."""
DISTURBED = "other processes disturbed it"
"""Why a disturbed run is left out."""
T = TypeVar("T")
_UNKNOWN = "unknown"
_NO_RUNS: Mapping[str, str] = MappingProxyType({})
_NAMED = 3
"""Differences of two programs that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A successful or excluded run that is not in its cell's figure, and why."""

    run: RunResult
    reason: str
    excluded: bool = False
    """Whether a reviewer excluded it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The runs of one cell: those that count, those that are left out, and those that failed."""

    cell: Cell
    planned: int
    """Repeats that were asked for."""
    runs: tuple[RunResult, ...]
    """Successful runs of one environment and one kind of evidence, oldest first; may be empty."""
    left_out: tuple[LeftOut, ...]
    lost: tuple[RunResult, ...]
    """Runs that did not succeed, and successful ones without steps, oldest first."""
    by_rounds: bool = False
    """Whether its study grows by rounds; the `repeat` of a run is then its round."""

    @property
    def every(self) -> list[RunResult]:
        """All runs, by their ids, which sort by time."""
        runs = (*self.runs, *(left.run for left in self.left_out), *self.lost)
        return sorted(runs, key=lambda run: run.run_id)

    @property
    def unproven(self) -> str | None:
        """Why the proof of the newest run that counts failed; None if it did not."""
        return self.runs[-1].unproven if self.runs else None

    @property
    def excluded(self) -> tuple[LeftOut, ...]:
        """The runs that reviewers excluded."""
        return tuple(left for left in self.left_out if left.excluded)

    @property
    def disturbed_out(self) -> int:
        """The number of runs that are left out because other processes disturbed them."""
        return sum(left.reason == DISTURBED for left in self.left_out)

    @property
    def with_disturbed(self) -> tuple[RunResult, ...]:
        """The runs of the pool's environment, oldest first, whether disturbed or not."""
        disturbed = (left.run for left in self.left_out if left.reason == DISTURBED)
        return tuple(sorted((*self.runs, *disturbed), key=_age))


def undisturbed(runs: Sequence[T], disturbed: Sequence[bool]) -> Sequence[T]:
    """Leave the disturbed runs out if enough others are left."""
    kept = [run for run, one in zip(runs, disturbed, strict=True) if not one]
    return kept if len(kept) >= FEWEST_UNDISTURBED else runs


def pool(
    cell: Cell,
    results: Sequence[RunResult],
    *,
    planned: int,
    excluded: Mapping[str, str] = _NO_RUNS,
    need_steps: bool = True,
    by_rounds: bool = False,
) -> Pool:
    """Sort one cell's results; `planned` is how many repeats were asked for, `excluded` has the reason why
    each excluded run is left out. Runs without steps count if none `need_steps`."""
    every = sorted(results, key=_age)
    ordered = [run for run in every if run.run_id not in excluded]
    ok = _usable(ordered, need_steps=need_steps)
    counted = _comparable(ok)
    chosen = {run.run_id for run in counted}
    others = [(run, _why_not(run, counted[-1])) for run in ok if run.run_id not in chosen]
    gone = [(run, excluded[run.run_id]) for run in every if run.run_id in excluded]
    return Pool(
        cell=cell,
        planned=planned,
        runs=tuple(counted),
        left_out=(
            *(LeftOut(run=run, reason=why) for run, why in others),
            *(LeftOut(run=run, reason=why, excluded=True) for run, why in gone),
        ),
        lost=tuple(result for result in ordered if result not in ok),
        by_rounds=by_rounds,
    )


def _usable(runs: Sequence[RunResult], *, need_steps: bool) -> list[RunResult]:
    """The good runs, with steps if they `need_steps`; those without a failed proof if there are any."""
    good = (run for run in runs if run.outcome is Outcome.OK)
    timed = [run for run in good if run.step_ns is not None or not need_steps]
    return [run for run in timed if run.unproven is None] or timed


def _comparable(ok: Sequence[RunResult]) -> Sequence[RunResult]:
    """The runs in the environment of the newest one, measured ones before emulated ones."""
    same = [run for run in ok if _alike(run, ok[-1])]
    alike = [run for run in same if run.evidence is Evidence.MEASURED] or same
    return undisturbed(alike, [run.disturbed for run in alike])


def differing(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """Return the facts in which two sets differ, each as a pair of strings, by name.

    `LATER_FACTS` are compared only if both sets have them. For two programs the strings name the facts that
    differ, at most `_NAMED` of them.
    """
    both = first.keys() & second.keys()
    names = sorted((first.keys() | second.keys()) - ({*LATER_FACTS} - both))
    pairs = {name: (fact_text(first.get(name)), fact_text(second.get(name))) for name in names}
    if "program" in both:
        programs: tuple[Any, Any] = (first["program"], second["program"])
        unlike = unlike_facts(*programs)[:_NAMED]
        old, new = (", ".join(f"{name} {of.get(name, 'none')}" for name in unlike) for of in programs)
        pairs["program"] = (old, new)
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def machine_facts(environment: Environment) -> dict[str, object]:
    """Facts that two cells of different sizes must share before one is divided by the other.

    These are the facts of pooling without the placement, which a scaling study changes on purpose, the
    network, which follows from it, and the code of other packages and of the workload, which is not of the
    machine.
    """
    own = ("placement", "packages", "network", "program")
    return {name: fact for name, fact in environment.pooling_facts().items() if name not in own}


def _age(run: RunResult) -> tuple[str, str]:
    return run.started_at or "", run.run_id


def _alike(run: RunResult, newest: RunResult) -> bool:
    if run.environment is None or newest.environment is None:
        return run.fingerprint == newest.fingerprint
    return not differing(run.environment.pooling_facts(), newest.environment.pooling_facts())


def _why_not(run: RunResult, newest: RunResult) -> str:
    if _alike(run, newest) and run.evidence == newest.evidence:
        return DISTURBED
    if _alike(run, newest):
        return f"{run.evidence}, while the runs that count are {newest.evidence}"
    if run.environment is None or newest.environment is None:
        return "of another environment"
    facts = differing(run.environment.pooling_facts(), newest.environment.pooling_facts())
    return "; ".join(
        f"{name}: {old} here, {new} in the runs that count" for name, (old, new) in facts.items()
    )


def fact_text(value: object) -> str:
    """A fact of an environment in words."""
    if value is None:
        return _UNKNOWN
    if isinstance(value, dict):
        return " ".join(f"{key}={value[key]}" for key in sorted(value)) or "none"
    if isinstance(value, list):
        return " x ".join(str(item) for item in value)
    return str(value)
