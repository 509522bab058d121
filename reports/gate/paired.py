"""The effect of a pair of launches, and when enough pairs have been seen.

A pair is the independent sample: with identical code the quads of one pair vary about an offset that the two
process groups keep as long as they live, so that an interval over quads reports changes that are none. Each
pair gives one value, the mean of its quads; all pairs give a t interval of their mean.

The pairs are looked at up to `LOOKS` times. Each look has the same share of the error rate: alpha spending
(Lan & DeMets, Biometrika 70, 1983, p. 659) with the function alpha * look / looks, and the bounds of the
union bound. These hold whatever the correlation of the looks is; the narrower recursive bounds are for normal
values of known variance, and pairs are few.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
from scipy.special import stdtrit

from reports.gate.effect import MOST_RUNS, QUIET, Change, Effect, judge
from reports.gate.metrics import TIMED
from results.baseline import Baseline, Subject
from results.paired import Alternation, Pair, PairedBlock, PairedCell, Side

V = TypeVar("V")

LOOKS = 4
PAIRS_A_LOOK = 6
"""Before the first look, and between two (docs/gate.md has what other numbers find, and take)."""
FEWEST_PAIRS = 4
"""For an interval: three give a t of 2 degrees of freedom."""
FEWEST_QUADS = 4
"""Of a pair that counts, after those that others have spoiled are left out."""
SPOILED_ABOVE = 0.25
"""The share of the launch's cores that others may take in a quad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedSample:
    """The pairs of one cell."""

    logs: tuple[float, ...]
    """Of each pair that counts: NEW's step time over BASE's, its logarithm."""
    means: tuple[float, float]
    """Step times of BASE and NEW, in ns: geometric means over the blocks that count (all, if none does)."""
    spoiled: int = 0
    """Pairs that do not count because others took too much of the machine."""
    failed: int = 0
    """Pairs without blocks: a run of theirs failed, or never began."""
    foreign: float | None = None
    """The share of the cores that others took, the mean over all blocks."""
    alternation: Alternation = "blocks"
    forked: bool = False
    """Whether the process groups of all pairs were forked from warm ranks."""


def quads(cell: PairedCell, alternation: Alternation) -> list[tuple[PairedBlock, ...]]:
    """The blocks that are compared with each other: A B B A, of whole launches A B."""
    each = 4 if alternation == "blocks" else 2
    return [cell.blocks[at : at + each] for at in range(0, len(cell.blocks) - each + 1, each)]


def quad_log(quad: Sequence[PairedBlock]) -> float:
    """The logarithm of NEW's step time over BASE's, from one quad; a linear drift cancels in A B B A."""
    return _mean_log(quad, "new") - _mean_log(quad, "base")


def pair_log(
    cell: PairedCell, alternation: Alternation, spoiled_above: float = SPOILED_ABOVE
) -> float | None:
    """The one value of a pair: the mean of its quads; None if too few are unspoiled.

    None is trimmed: a stall in one of 50 steps is in few quads, and makes the step longer all the same.
    """
    counting = _counting(cell, alternation, spoiled_above)
    return sum(quad_log(quad) for quad in counting) / len(counting) if counting else None


def paired_sample(
    pairs: Sequence[tuple[Pair, PairedCell]], spoiled_above: float = SPOILED_ABOVE, *, of: int
) -> PairedSample | None:
    """The pairs of one cell, in order; None without any block.

    `of` is the number of pairs that were run, with those in which a side never came to the cell.
    """
    ran = [(pair, cell) for pair, cell in pairs if cell.blocks]
    if not ran:
        return None
    found = [pair_log(cell, pair.alternation, spoiled_above) for pair, cell in ran]
    logs = tuple(value for value in found if value is not None)
    blocks = [block for _, cell in ran for block in cell.blocks]
    counting = [quad for pair, cell in ran for quad in _counting(cell, pair.alternation, spoiled_above)]
    shown = [block for quad in counting for block in quad] or blocks
    shares = [block.foreign for block in blocks if block.foreign is not None]
    return PairedSample(
        logs=logs,
        means=(math.exp(_mean_log(shown, "base")), math.exp(_mean_log(shown, "new"))),
        spoiled=len(found) - len(logs),
        failed=of - len(found),
        foreign=sum(shares) / len(shares) if shares else None,
        alternation="launches" if any(pair.alternation == "launches" for pair, _ in pairs) else "blocks",
        forked=all(pair.forked for pair, _ in pairs),
    )


def paired_effect(logs: Sequence[float], alpha: float) -> Effect | None:
    """The change with its interval, `alpha` on each side; None with fewer than `FEWEST_PAIRS`."""
    if len(logs) < FEWEST_PAIRS:
        return None
    values = np.array(logs)
    centre, error = float(values.mean()), float(values.std(ddof=1))
    half = float(stdtrit(len(logs) - 1, 1 - alpha)) * error / math.sqrt(len(logs))
    return Effect(
        value=math.expm1(centre),
        low=math.expm1(centre - half),
        high=math.expm1(centre + half),
        error=error,
        runs=(len(logs), len(logs)),
    )


def pairs_that_tell(effect: Effect, margin: float, alpha: float) -> int | None:
    """Pairs with which any effect can be judged, as `runs_that_tell`; None: more than `MOST_RUNS`."""
    wanted = (1 - QUIET) * margin / 2
    for pairs in range(FEWEST_PAIRS, MOST_RUNS + 1):
        if float(stdtrit(pairs - 1, 1 - alpha)) * effect.error / math.sqrt(pairs) <= wanted:
            return pairs
    return None


def judge_pairs(effect: Effect, margin: float, *, lower_is_better: bool = True) -> Change:
    """As `judge`; what is not worse for certain needs no further pair, whether or not it is better."""
    change = judge(effect, margin, lower_is_better=lower_is_better)
    worst = effect.high if lower_is_better else -effect.low
    if change is Change.INCONCLUSIVE and worst < margin:
        return Change.UNCHANGED
    return change


def _counting(
    cell: PairedCell, alternation: Alternation, spoiled_above: float
) -> list[tuple[PairedBlock, ...]]:
    """The quads of a pair that others have not spoiled; none where they are too few for a value."""
    clean = [
        quad
        for quad in quads(cell, alternation)
        if {block.side for block in quad} == {"base", "new"}
        and all(block.foreign is None or block.foreign <= spoiled_above for block in quad)
    ]
    return clean if len(clean) >= (FEWEST_QUADS if alternation == "blocks" else 1) else []


def _mean_log(blocks: Sequence[PairedBlock], side: Side) -> float:
    logs = [math.log(block.step_ns) for block in blocks if block.side == side]
    return sum(logs) / len(logs)


def merged_side(name: str, parts: Sequence[Baseline], *, any_failure: bool) -> Baseline:
    """One side of all pairs as one baseline: figures of all runs, and the different values of each counter.

    `any_failure`: a subject has failed if one of its runs has; else only if all have.
    """
    found: dict[str, list[Subject]] = {}
    for part in parts:
        for subject in part.subjects:
            found.setdefault(subject.key, []).append(subject)
    subjects = tuple(_merged(same, any_failure=any_failure) for same in found.values())
    return msgspec.structs.replace(parts[-1], name=name, study=None, subjects=subjects)


def without_launch(part: Baseline) -> Baseline:
    """The same without the metrics of launches, for runs of a launch that has been counted."""
    return msgspec.structs.replace(
        part,
        subjects=tuple(
            msgspec.structs.replace(
                subject,
                timed={name: v for name, v in subject.timed.items() if not TIMED[name].of_launch},
            )
            for subject in part.subjects
        ),
    )


def _merged(same: Sequence[Subject], *, any_failure: bool) -> Subject:
    failed = [subject.failed for subject in same if subject.failed is not None]
    newest = next((subject for subject in reversed(same) if subject.failed is None), same[-1])
    return msgspec.structs.replace(
        newest,
        timed=_joined([subject.timed for subject in same]),
        exact={
            name: tuple(dict.fromkeys(values))
            for name, values in _joined([subject.exact for subject in same]).items()
        },
        # Not every pair records its exchange.
        collectives=next((subject.collectives for subject in reversed(same) if subject.collectives), ()),
        runs=sum(subject.runs for subject in same),
        run_ids=tuple(run_id for subject in same for run_id in subject.run_ids),
        disturbed=sum(subject.disturbed for subject in same),
        failed=failed[0] if failed and (any_failure or len(failed) == len(same)) else None,
    )


def _joined(columns: Sequence[Mapping[str, tuple[V, ...]]]) -> dict[str, tuple[V, ...]]:
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: tuple(value for column in columns for value in column.get(name, ())) for name in names}
