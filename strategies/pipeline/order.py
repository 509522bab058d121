"""The order in which each rank of a pipeline computes, without torch, and the idle time that it leaves.

1F1B and its descendants: Narayanan et al. 2021, arXiv:2104.04473, section 2.2. `zero-bubble` and `zbv` divide
a backward pass into the gradient of the input, for which the stage before waits, and the gradients of
weights, which fill gaps: ZB-H1 with v stages a rank, and ZB-V, of Qi et al. 2023, arXiv:2401.10241.
`looped-bfs` is breadth first (Lamy-Poirier 2022, arXiv:2211.05953). `dualpipev` is DualPipe (DeepSeek-AI
2024, arXiv:2412.19437, section 3.2.1) folded into a V, and divides only some backward passes; torch computes
both passes of a pair one after another.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

Part = Literal["forward", "backward", "input", "weights"]
LOOPED = ("interleaved", "looped-bfs", "zero-bubble")
"""The schedules whose stage s is on rank s mod p; the number of stages a rank is chosen."""
FOLDED = ("zbv", "dualpipev")
"""The schedules whose rank r has the stages r and 2 p - 1 - r."""
SPLITTING = ("zero-bubble", *FOLDED)
"""The schedules that divide the backward pass."""


class Action(NamedTuple):
    """A rank computes one part of a pass of one microbatch through one stage; `backward` is both parts of a
    backward pass."""

    part: Part
    stage: int
    microbatch: int


class Shape(NamedTuple):
    """A schedule of `pieces` microbatches over `ranks` ranks that have `chunks` stages each."""

    schedule: str
    ranks: int
    chunks: int
    pieces: int

    @property
    def per_round(self) -> int:
        """Microbatches that pass through one stage of a rank before the rank begins with its next stage."""
        return self.pieces // max(1, self.pieces // self.ranks)

    @property
    def last(self) -> int:
        return self.ranks * self.chunks - 1


def stages_of(schedule: str, rank: int, ranks: int, stages: int) -> list[int]:
    """Return the stages of a rank, by `LOOPED` and `FOLDED`; with one stage a rank, rank r has stage r."""
    return [rank, stages - 1 - rank] if schedule in FOLDED else list(range(rank, stages, ranks))


def order(shape: Shape, rank: int) -> list[Action]:
    """Return what `rank` computes, one after another, as torch's schedules do it."""
    if shape.schedule == "looped-bfs":
        return _breadth_first(shape, stages_of(shape.schedule, rank, shape.ranks, shape.last + 1))
    if shape.schedule in FOLDED:
        parts = _v(shape, rank) if shape.schedule == "zbv" else _dual(shape, rank)
        return list(_numbered(shape, parts))
    return list(_looped(shape, rank))


def _breadth_first(shape: Shape, own: list[int]) -> list[Action]:
    """Go through each stage with all microbatches, and back in the opposite order."""
    forward = [Action("forward", stage, at) for stage in own for at in range(shape.pieces)]
    return forward + [one._replace(part="backward") for one in reversed(forward)]


def _looped(shape: Shape, rank: int) -> Iterator[Action]:
    """Warm up by forward passes, alternate, and end by backward passes; weights follow `rank` passes late."""
    schedule, ranks, chunks, pieces = shape
    total, per_round = chunks * pieces, shape.per_round
    hops = 2 if schedule == "interleaved" else 1
    warm = total if schedule == "gpipe" else (chunks - 1) * per_round + hops * (ranks - 1 - rank)
    warm, splits = min(warm, total), schedule in SPLITTING
    seen: Counter[tuple[Part, int]] = Counter()

    def action(part: Part, at: int) -> Action:
        chunk = at // per_round % chunks
        stage = (chunk if part == "forward" else chunks - 1 - chunk) * ranks + rank
        seen[part, stage] += 1
        return Action(part, stage, seen[part, stage] - 1)

    yield from (action("forward", at) for at in range(warm))
    for at in range(total):
        if warm + at < total:
            yield action("forward", warm + at)
        yield action("input" if splits else "backward", at)
        if splits and at >= rank:
            yield action("weights", at - rank)
    yield from (action("weights", at) for at in range(max(0, total - rank), total) if splits)


def _v(shape: Shape, rank: int) -> list[tuple[Part, int]]:
    """Go down to the last rank and up again, as if there were at least 2 p - 1 microbatches."""
    ranks, pieces, away = shape.ranks, max(2 * shape.ranks - 1, shape.pieces), shape.ranks - rank
    down, up = stages_of("zbv", rank, ranks, 2 * ranks)
    parts: list[tuple[Part, int]] = [("forward", down)] * (2 * away - 1)
    parts += [("forward", up), ("forward", down)] * rank
    through: list[tuple[Part, int]] = [("forward", up), ("input", up), ("weights", up)]
    parts += through * away
    for at in range(pieces - ranks):
        parts += [("forward", down)] * (2 * ranks - 1 - rank + at < pieces)
        parts += [("input", down), ("weights", down), *through]
    parts += [("input", down), ("input", up)] * rank
    parts += [("input", down), ("weights", down)] * away
    parts += [("weights", up)] * rank
    parts += [("weights", down)] * rank
    return parts


def _dual(shape: Shape, rank: int) -> list[tuple[Part, int]]:
    """Go down and up at the same time: forward passes of one stage pair with backward passes of the other,
    and the second half of the last backward passes is divided."""
    away = shape.ranks - 1 - rank
    down, up = stages_of("dualpipev", rank, shape.ranks, 2 * shape.ranks)
    parts: list[tuple[Part, int]] = [("forward", down)] * (2 * away)
    parts += [("forward", down), ("forward", up)] * (rank + 1)
    parts += [("input", up), ("weights", up), ("forward", up)] * away
    turned: list[tuple[Part, int]] = [("backward", up), ("forward", up), ("backward", down)]
    parts += [("forward", down), *turned] * (shape.pieces - 2 * shape.ranks + rank + 1)
    parts += turned * away
    last = [up, down] * (rank + 1)
    parts += [("backward" if at <= rank else "input", stage) for at, stage in enumerate(last)]
    left = last[rank + 1 :] + [down] * away
    for stage in left[:away]:
        parts += [("weights", stage), ("input", down)]
    return parts + [("weights", stage) for stage in left[away:]]


def _numbered(shape: Shape, parts: list[tuple[Part, int]]) -> Iterator[Action]:
    """Yield each part with its microbatch, one after another, which a complete backward pass counts for both
    of its parts; of those beyond the last microbatch none."""
    seen: Counter[tuple[Part, int]] = Counter()
    for part, stage in parts:
        first: Part = "input" if part == "backward" else part
        at = seen[first, stage]
        seen[first, stage] += 1
        seen["weights", stage] += part == "backward"
        if at < shape.pieces:
            yield Action(part, stage, at)


EQUAL: Mapping[Part, float] = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weights": 1.0}
"""Relative times of the parts of a stage whose FLOPs are all products with weights."""


def idle_share(shape: Shape, seconds: Mapping[Part, float] = EQUAL) -> float:
    """Return the idle time of a rank relative to its computation, by a replay of the schedule.

    `seconds` are the times of each part of a pass through one stage; all stages are alike and messages take
    no time.
    """
    every: dict[tuple[int, str], float] = {
        (stage, part): seconds[part] for stage in range(shape.last + 1) for part in seconds
    }
    span, busy = _replay(shape, every)
    return (span - busy[0]) / busy[0]


def replayed_bubble(shape: Shape, seconds: Mapping[tuple[int, str], float]) -> float:
    """Return the share of the schedule's time in which its busiest rank idles, by the time of each part of a
    pass through each stage; the loss is a part of the last stage's forward pass. Other ranks idle more: they
    wait for the busiest one."""
    forward = seconds[shape.last, "forward"] + seconds.get((shape.last, "loss"), 0.0)
    span, busy = _replay(shape, {**seconds, (shape.last, "forward"): forward})
    return (span - max(busy)) / span


def _replay(shape: Shape, seconds: Mapping[tuple[int, str], float]) -> tuple[float, list[float]]:
    """Return the time of the schedule, and the time for which each rank computes."""
    orders = [order(shape, rank) for rank in range(shape.ranks)]
    ends: dict[Action, float] = {}
    now, at = [0.0] * shape.ranks, [0] * shape.ranks
    waiting = deque(range(shape.ranks))
    while waiting:
        rank = waiting.popleft()
        while at[rank] < len(orders[rank]):
            action = orders[rank][at[rank]]
            needed = _needed(action, shape)
            if needed is not None and needed not in ends:
                waiting.append(rank)
                break
            begin = max(now[rank], ends[needed] if needed else 0.0)
            now[rank] = begin + seconds[action.stage, action.part]
            ends[_result(action)] = now[rank]
            at[rank] += 1
    return max(now), [sum(seconds[one.stage, one.part] for one in own) for own in orders]


def _needed(action: Action, shape: Shape) -> Action | None:
    """Return the action of a neighbour, or of this rank, whose result it takes; None for the first stage."""
    part, stage, microbatch = action
    if part == "forward":
        return Action("forward", stage - 1, microbatch) if stage else None
    if part == "weights":
        return Action("input", stage, microbatch)
    if stage == shape.last:
        return Action("forward", stage, microbatch)
    return Action("input", stage + 1, microbatch)


def _result(action: Action) -> Action:
    """Return the action that neighbours wait for: a complete backward pass has the gradient of the input."""
    return action._replace(part="input") if action.part == "backward" else action
