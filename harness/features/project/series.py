"""The measured sizes of a series, and what answers for the others: a replay or a law of step times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

import msgspec

from harness.features.project.bands import shipped
from harness.features.project.laws import LAWS, Steps, chosen_law
from reports.analysis.figures import CellFigures
from reports.analysis.knee import cells_of
from reports.analysis.scaling import Curve
from reports.text import percent, whole_percent
from results.cell import Cell
from results.statistics import Metric

REPLAY = "replay"
REPRODUCES = 0.05
"""Relative error of a replay on the largest measured size up to which it answers."""
CLAMP = (0.7, 1.4)
"""Ends of the one scale of a replay: beyond them the replay lacks a part of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One size of a series by a replay, before its scale."""

    step_ns: float
    loss: str
    """The part of the step that costs most, a clause."""
    levels: int = 0
    """Levels of the network that were not measured."""


Replays = Mapping[int, Replayed | str] | str
"""The measured sizes and near targets of a series by a replay, or the reason why one or all are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measured sizes of a series, by which its others are projected."""

    curve: Curve
    cells: tuple[CellFigures, ...]
    """The cells by size, with the single device in front; without emulated ones if others are there."""
    steps: Steps
    """Without sizes that divide a replica over another number of ranks: a rank there does other work."""
    per_node: int
    """Devices of a node, as far as the study shows."""
    targets: tuple[int, ...]
    """Sizes to project."""

    @property
    def last(self) -> CellFigures:
        """The largest measured size."""
        return self.cells[-1]

    @property
    def largest(self) -> int:
        return self.last.cell.gpus

    @property
    def weak(self) -> bool:
        return self.curve.key.kind == "weak"

    def samples(self, gpus: int) -> float:
        """Samples of a step on `gpus` devices."""
        if not self.weak:
            return self.curve.key.constant_batch
        return self.last.cell.global_batch / self.largest * gpus

    def batch(self, gpus: int) -> float:
        """Samples of a replica in a step on `gpus` devices."""
        return self.samples(gpus) / gpus * self.last.cell.model_parallel

    def cell(self, gpus: int) -> Cell:
        """The cell of a weak series on `gpus` devices."""
        return msgspec.structs.replace(self.last.cell, gpus=gpus)


def measured(curve: Curve, *, to: int, per_node: int) -> Measured:
    """The sizes of a curve that have figures."""
    every = tuple(cells_of(curve))
    cells = tuple(one for one in every if one.no_claim is None) or every
    largest, ranks = cells[-1].cell.gpus, cells[-1].cell.model_parallel
    alike = [one for one in cells if one.cell.model_parallel == ranks]
    doubled = [largest * 2**times for times in range(1, max(1, to // largest).bit_length())]
    return Measured(
        curve=curve,
        cells=cells,
        steps=Steps(
            # Lists: a generator is a call for each item, in a loop over all cells of a study.
            gpus=tuple([one.cell.gpus for one in alike]),
            ns=tuple([fmean(one.run_step_ns) for one in alike]),
            pool_slope=shipped().slope,
            noise=max([_noise(one.step_ns) for one in alike]),
        ),
        per_node=per_node,
        targets=tuple(sorted({*doubled, *((to,) if to > largest else ())})),
    )


def _noise(step_ns: Metric) -> float:
    if step_ns.low is None or step_ns.high is None:
        return 0.0
    return (step_ns.high - step_ns.low) / 2 / step_ns.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The law that answers for a series."""

    law: str
    skill: float | None
    """1 less its error over the error of constant efficiency, on measured sizes; None: not tested."""
    step_ns: Mapping[int, float]
    """The targets that it answers."""
    roughness: float
    """Unevenness of the curve, or the error of a replay on the largest size, which widens the band."""
    replays: Replays
    """The replay that answers, or why none does."""


def answer(of: Measured, replays: Replays) -> Answer:
    """The replay if it reproduces the largest size, with a scale that was fitted without it; else a law."""
    scale = replays if isinstance(replays, str) else scaled(of.steps, replays)
    if not isinstance(replays, str):
        targets = [replays[gpus] for gpus in of.targets if gpus in replays]
        if all(isinstance(one, str) for one in targets):
            scale = str(targets[0])
    if isinstance(replays, str) or isinstance(scale, str):
        law, skill = chosen_law(of.steps)
        return Answer(
            law=law,
            skill=skill,
            step_ns={gpus: LAWS[law](of.steps, gpus) for gpus in of.targets},
            roughness=of.steps.roughness,
            replays=str(scale),
        )
    factor, error, skill = scale
    return Answer(
        law=REPLAY,
        skill=skill,
        step_ns={gpus: factor * one.step_ns for gpus, one in replays.items() if isinstance(one, Replayed)},
        roughness=error,
        replays=replays,
    )


def scaled(steps: Steps, replays: Mapping[int, Replayed | str]) -> tuple[float, float, float | None] | str:
    """The scale of a replay, its error and skill on the largest size, or why the replay does not answer.

    One device is left out of the fit, as it does not exchange.
    """
    if isinstance(last := replays[steps.gpus[-1]], str):
        return last
    logs = [
        math.log(ns / one.step_ns)
        for gpus, ns in zip(steps.gpus, steps.ns, strict=True)
        if gpus > 1 and isinstance(one := replays[gpus], Replayed)
    ]
    before = fmean(logs[:-1]) if len(logs) > 1 else 0.0
    if not CLAMP[0] <= math.exp(before) <= CLAMP[1]:
        scale = f"its scale is {math.exp(before):.2f}, beyond {CLAMP[0]:g} to {CLAMP[1]:g}"
        return f"{scale}, so it lacks a part of the step"
    error = abs(math.expm1(before - logs[-1]))
    if error > REPRODUCES:
        fitted = f"fitted without the {steps.gpus[-1]:,} devices" if len(logs) > 1 else "unscaled"
        return f"{fitted} it is {percent(error)} off there, more than {whole_percent(REPRODUCES)}"
    if len(logs) == 1:
        return 1.0, error, None
    constant = abs(steps.ns[-2] / steps.ns[-1] - 1)
    factor = min(max(math.exp(fmean(logs)), CLAMP[0]), CLAMP[1])
    return factor, error, 1 - error / constant if constant else None
