"""The space of `bench tune`: every combination of the values of its options, and which of them may fit.

The declarations of options say which values are tried. The rules of a plan (`harness.plan.expand`) refuse
points, and a lower bound of memory excludes settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, Literal, get_args

import msgspec

from harness.features.tune.records import TunedSetting, told
from harness.plan.auto import AUTO, point_of
from harness.plan.estimate import certain_bytes, estimated_step_time
from harness.plan.expand import base_cell, expand
from harness.plan.points import micro_batch_of
from harness.plan.study_file import BY_NAME, StudyFile, by_heading, check_values, merge
from harness.plan.surroundings import MIB, Devices, Limit, Surroundings, devices_here
from results.cell import Cell, StepPolicy
from results.errors import UsageError
from results.parts import Unknown
from results.plan import Request, Rule
from results.spec import split
from results.strict_yaml import FileKind, Where
from strategies.catalog import STRATEGIES, group_layout
from workloads.catalog import MEMBERS, WORKLOADS

Learning = Literal["same", "rounding", "changed"]
SEARCHED: Mapping[str, tuple[Learning, tuple[Any, ...]]] = {
    "strategy": ("same", ()),
    "batch_size": ("changed", ()),
    "precision": ("changed", ()),
    "accumulation": ("same", ()),
    "optimizer": ("changed", ()),
    "clip_norm": ("changed", ()),
    "activation_checkpointing": ("same", (False, "selective", True)),
    "compile": ("rounding", (False, True)),
    "memory_format": ("rounding", ("contiguous", "channels_last")),
    "env": ("rounding", ()),
    "compression": ("changed", ()),
    "collective": ("rounding", ()),
}
"""The options that `bench tune` searches: whether another value leaves training the same, rounds otherwise or
changes what is learnt; and the values that it tries by default."""
MOST_POINTS, MOST_SETTINGS = 20_000, 2_000
"""A larger space is refused: to plan more points takes minutes, and to weigh more settings gigabytes."""
_SHARES = (1.0, 2.0, 4.0, 0.5, 8.0, 0.25)
"""Batches per replica that are tried where no batch is given, over the workload's own."""
_PARTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of micro-batches in which a given batch is tried."""
_REPEATED = ("What is run", "Where it runs", "Exchange", "Cluster")
"""The headings of options that a call which uses a setting repeats, except limits of the tune itself."""
_LIMITS = ("time", "max_gpu_hours")


def _check_space(space: StudyFile, where: Where) -> None:
    check_values(space, where)
    for field in msgspec.structs.fields(space):
        if field.name not in SEARCHED and getattr(space, field.name) is not None:
            raise UsageError(
                f"{where(field.name)} is not searched: a space has values of {', '.join(SEARCHED)}; give "
                f"anything else as a flag"
            )


SPACE_FILE = FileKind(
    type=StudyFile,
    name="space file",
    example="accumulation: [1, 2]",
    advice="check the name, or leave --space out",
    check=_check_space,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A setting with its cell."""

    setting: TunedSetting
    cell: Cell
    """Its step policy is the default one."""
    fits_by_prediction: bool
    complexity: int
    """The number of choices that differ from the default."""

    @property
    def words(self) -> str:
        return told(self.setting.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All settings that may fit, the default and the simplest first."""

    candidates: tuple[Candidate, ...]
    asked: StudyFile
    """The options of the call, with every value that is searched."""
    refused: Mapping[str, int]
    """The number of refused points by an example of the reason."""
    too_large: int
    """Settings that certainly exceed the memory."""
    memory: int
    """Memory of a rank; 0 if it is not known."""

    @property
    def free(self) -> bool:
        """Whether the global batch is searched, too."""
        return self.asked.batch_size is not None

    @property
    def default(self) -> Candidate:
        return self.candidates[0]

    @property
    def settings(self) -> tuple[TunedSetting, ...]:
        return tuple(candidate.setting for candidate in self.candidates)

    @property
    def by_id(self) -> dict[str, Candidate]:
        return {candidate.setting.id: candidate for candidate in self.candidates}

    def options_of(self, one: Candidate) -> StudyFile:
        """Return the options of the call with the values of one setting."""
        names = [name for name in SEARCHED if getattr(self.asked, name) is not None]
        own = {name: getattr(one.cell, name) for name in names if name != "batch_size"}
        own |= {"env": list(one.cell.env) or None}
        own |= {"batch_size": one.cell.batch_per_replica if self.free else None}
        return msgspec.structs.replace(self.asked, **own)


def make_space(
    options: StudyFile, file: StudyFile, requested: Callable[[StudyFile], Sequence[Request]], limit: Limit
) -> Space:
    """Enumerate the space of a call. Flags win over the space file, and both over the declarations.

    `requested` makes the requests of options. Raises UsageError for a space that is too large, that has no
    setting, or in which none can fit.
    """
    devices = limit.gpus or devices_here()
    asked = _filled(options, file, requested(options)[0], devices)
    _require_few(prod(len(items_of(asked, name)) for name in SEARCHED), MOST_POINTS, "points")
    requests = [msgspec.structs.replace(one, steps=StepPolicy()) for one in requested(asked)]
    plans = [expand(one, study="", created_at="", limit=replace(limit, gpus=None)) for one in requests]
    skips = [skip for plan in plans for skip in plan.skips]
    # One example stands for all points that a rule refuses.
    examples = {skip.rule: skip.reason for skip in reversed(skips)}
    # What `auto` among the strategies chose comes last.
    order = [*requests[0].strategies, *(cell.strategy for plan in plans for cell in plan.cells)]
    cells = sorted((cell for plan in plans for cell in plan.cells), key=lambda one: order.index(one.strategy))
    if not cells:
        # A point that a later rule refuses has passed the earlier ones: it is nearest to running.
        last = examples[max(examples, key=get_args(Rule).index)]
        raise UsageError(f"no point of the space makes sense: {last}; change that, or widen the space")
    per_node = requests[0].gpus_per_node
    around = Surroundings.of(cells[0], devices, per_node)
    # An assumed GPU excludes nothing.
    of_gpu = cells[0].device == "cuda" and cells[0].memory_limit_mb is None
    memory = limit.gpu_bytes or 0 if of_gpu else around.memory
    room = around.room if memory else 0
    needs, choices = {cell: certain_bytes(cell, per_node) for cell in cells}, _choices(cells)
    fitting = [cell for cell in cells if not memory or needs[cell] <= memory]
    _require_few(len(fitting), MOST_SETTINGS, "settings")
    if not fitting:
        each = ((need, told(choices[cell])) for cell, need in needs.items())
        raise UsageError(nothing_fits(each, memory, "needs at least"))
    predicted = {key: size for plan in plans for key, size in plan.predicted_bytes.items()}
    hardware, usual = Devices(cores=devices.cores, gpu_name=devices.gpu_name), choices[fitting[0]]

    def candidate(cell: Cell) -> Candidate:
        mine, need = choices[cell], predicted.get(cell.id)
        step = estimated_step_time(cell, known_ns=None, hardware=hardware, gpus_per_node=per_node).seconds
        rate = None if isinstance(step, Unknown) or not step else cell.global_batch / step
        return Candidate(
            setting=TunedSetting(id=cell.id, choices=mine, predicted_rate=rate, predicted_bytes=need),
            cell=cell,
            fits_by_prediction=not room or (need or 0) <= room,
            complexity=len(differing(mine, usual) | (mine.keys() - usual.keys())),
        )

    return Space(
        candidates=tuple(sorted(map(candidate, fitting), key=lambda one: one.complexity)),
        asked=asked,
        refused=dict(Counter(examples[skip.rule] for skip in skips).most_common()),
        too_large=len(cells) - len(fitting),
        memory=memory,
    )


def _require_few(number: int, most: int, what: str) -> None:
    if number > most:
        raise UsageError(
            f"the space has {number:,} {what}, and at most {most:,} are searched: narrow it by --space or by "
            f"flags"
        )


def nothing_fits(needs: Iterable[tuple[int | None, str]], memory: int, how: str) -> str:
    """Say that no setting fits, which is nearest and by how much it does not, and what may help.

    `needs` has the bytes and the words of each setting, and `how` says how the bytes are known.
    """
    fix = "give more --gpus, a smaller --global-batch-size, or a wider --space"
    known = [(need, words) for need, words in needs if need]
    if not known:
        return f"no setting of the space fits: all that were tried ran out of memory: {fix}"
    need, nearest = min(known)
    has = f", and a rank has {memory / MIB:,.0f}" if memory else ""
    over = f", {(need - memory) / MIB:,.0f} too few" if has and need > memory else ""
    return (
        f"no setting of the space fits: the nearest, {nearest}, {how} {need / MIB:,.0f} MiB{has}{over}: {fix}"
    )


def items_of(options: StudyFile, name: str) -> Sequence[Any]:
    """The values of an option; None is the default of `bench matrix`."""
    value, option = getattr(options, name), BY_NAME[name]
    return (None,) if value is None else option.kind.items(value, option.flag)


def _filled(options: StudyFile, file: StudyFile, base: Request, devices: Devices) -> StudyFile:
    """The options of a call, whose request is `base`, with every value that is searched."""
    for name, (learning, _) in SEARCHED.items():
        if learning == "changed" and len(items_of(options, name)) > 1:
            raise UsageError(
                f"{BY_NAME[name].flag} {getattr(options, name)} changes what is learnt: give one value, or "
                f"name the values in a space file (--space)"
            )
    if options.strategy == AUTO:
        options = msgspec.structs.replace(options, strategy=None)
    asked, [gpus] = merge(file, options), base.gpus
    own = MEMBERS[WORKLOADS.parse(base.workloads[0]).name].batch
    # All strategies keep the global batch, however many replicas they have.
    batches = base.global_batch_sizes or [size * gpus for size in base.batch_sizes]
    batch = next(iter(batches), own * gpus)
    given = [name for name in items_of(asked, "strategy") if name is not None]
    asked_for = {name: ":" not in name for name in given} or _proposed(base, batch, devices)
    texts = [text for name, varied in asked_for.items() for text in (_variants(name) if varied else [name])]
    filled: dict[str, Any] = {name: list(tuned) for name, (_, tuned) in SEARCHED.items() if tuned}
    if batches:
        filled["accumulation"] = [parts for parts in _PARTS if batch % parts == 0]
    else:
        filled["batch_size"] = [int(share * own) for share in _SHARES if share * own >= 1]
    filled = {name: values for name, values in filled.items() if getattr(asked, name) is None}
    if batches:
        filled |= {"batch_size": None, "global_batch_size": batch, "scaling": "strong"}
    return msgspec.structs.replace(asked, **filled, strategy=texts)


def _proposed(base: Request, batch: int, devices: Devices) -> dict[str, bool]:
    """The strategies that `auto` weighs, the simplest first, and whether their other options are varied."""
    [gpus], workload = base.gpus, base.workloads[0]
    cell = msgspec.structs.replace(base_cell(base, workload), gpus=gpus)
    size = Surroundings.of(cell, devices, base.gpus_per_node).node_size

    def micro_batch(strategy: str) -> int | str:
        groups = group_layout(STRATEGIES.parse(strategy).text, gpus, size)
        return micro_batch_of(batch, accumulation=1, replicas=gpus // groups.model_parallel)

    point = point_of(cell, size, micro_batch)
    STRATEGIES.admit_all()
    found = [one for known in STRATEGIES.all_facts for one in known.proposals(point) if one.refused is None]
    return {one.strategy: one.varied for one in sorted(found, key=lambda one: one.complexity)}


def _variants(text: str) -> Iterator[str]:
    """Yield a strategy with each combination of the declared values of options that are at their default."""
    spec = STRATEGIES.parse(text)
    options = STRATEGIES.entries[spec.name].options.items()
    free = {key: one.tuned for key, one in options if one.tuned and spec.options[key] == one.default}
    for values in product(*free.values()):
        yield ":".join([spec.text, *map("=".join, zip(free, values, strict=True))])


def differing(mine: Mapping[str, str], theirs: Mapping[str, str]) -> Set[str]:
    """The choices in which two settings differ.

    An option that a setting lacks is at its default, or, if its strategy has no such option, not compared.
    """
    differ = {key for key, _ in mine.items() ^ theirs.items()}
    if "strategy" not in differ:
        return differ
    declared = [
        {*one, *STRATEGIES.entries[one["strategy"].partition(":")[0]].options} for one in (mine, theirs)
    ]
    return differ & declared[0] & declared[1]


def _choices(cells: Sequence[Cell]) -> dict[Cell, dict[str, str]]:
    """The strategy of each cell, and its other choices that not all cells share."""
    every = {cell: _all_choices(cell) for cell in cells}
    shared = set.intersection(*(set(one.items()) for one in every.values()))
    kept = {key for one in every.values() for key, value in one.items() if (key, value) not in shared}
    # One of these follows from the others, and from the strategy.
    kept -= {"global_batch"} if "global_batch" in kept else {"micro_batch"}
    return {
        cell: {key: value for key, value in one.items() if key in kept or key == "strategy"}
        for cell, one in every.items()
    }


def _all_choices(cell: Cell) -> dict[str, str]:
    """Every choice of a cell by name: its strategy, the options of that which are given, its settings."""
    name, positional, options = split(cell.strategy)
    others = [name for name in SEARCHED if name not in ("strategy", "batch_size")]
    return {
        "strategy": ":".join(filter(None, (name, positional))),
        **options,
        **{name: _text(getattr(cell, name)) for name in ("micro_batch", "global_batch", *others)},
    }


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def call_words(options: StudyFile) -> list[str]:
    """The options of `bench matrix` and `bench train` that ask for the work of a point."""
    headings, words = by_heading(), list[str]()
    for option in (each for heading in _REPEATED for each in headings[heading]):
        value = getattr(options, option.name)
        if value is None or option.name in _LIMITS:
            continue
        if option.kind.repeated:
            words += [word for each in value for word in (option.flag, str(each))]
        elif option.kind.flag_type is bool:
            words.append(option.flag if value else f"--no-{option.flag[2:]}")
        else:
            words += [option.flag, _text(value)]
    return words
