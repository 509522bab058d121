"""The space of `bench tune`: every combination of the values of its options, and which of them may fit.

The declarations of options say which values are tried. The rules of a plan (`harness.plan.expand`) refuse
points, and a lower bound of memory excludes settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, get_args

import msgspec

from harness.plan.auto import AUTO
from harness.plan.estimate import estimated_step_time
from harness.plan.expand import expand
from harness.plan.points import micro_batch_of
from harness.plan.predict import certain_bytes, predicted_bytes
from harness.plan.study_file import BY_NAME, SEARCHED, StudyFile, by_heading, check_values
from harness.plan.surroundings import MIB, Devices, Hardware, Limit, Surroundings
from harness.tune.race import Setting
from results.cell import Cell, StepPolicy
from results.errors import UsageError
from results.parts import Unknown
from results.plan import Request, Rule
from results.strict_yaml import FileKind, Where
from results.tuning import told
from strategies.catalog import STRATEGIES, group_layout
from strategies.facts import AutoPoint
from workloads.catalog import MEMBERS, WORKLOADS, facts

MOST_POINTS, MOST_SETTINGS = 20_000, 2_000
"""A larger space is refused: to plan more points takes minutes, and to weigh more settings gigabytes."""
_SHARES = (1.0, 2.0, 4.0, 0.5, 8.0, 0.25)
"""Batches per replica that are tried where no batch is given, over the workload's own."""
_PARTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of micro-batches in which a given batch is tried."""
_OF_CLUSTER = ("launcher", "site", "partition", "account", "qos", "cpus_per_gpu")
"""Options under the heading of a cluster that say where the work runs."""
_UNREPEATED = ("baseline", "isolation", "require", "keep_unfit")
"""Options under the headings of a cell that say nothing about its work."""


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
    """A setting with its options and its cell."""

    setting: Setting
    options: StudyFile
    cell: Cell
    """Its step policy is the default one."""
    certain_bytes: int
    """A lower bound of the memory of the fullest rank."""
    predicted_bytes: int | None
    memory: int
    """Memory of a rank; 0 if it is not known."""
    room: int
    """Bytes that a prediction may take; 0 if they are not known."""

    @property
    def fits_by_prediction(self) -> bool:
        return not self.room or (self.predicted_bytes or 0) <= self.room

    @property
    def words(self) -> str:
        return told(self.setting.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All settings that may fit, the default first."""

    candidates: tuple[Candidate, ...]
    refused: Mapping[str, int]
    """The number of refused points by an example of the reason."""
    too_large: int
    """Settings that certainly exceed the memory."""
    free: bool
    """Whether the global batch is searched, too."""

    @property
    def default(self) -> Candidate:
        return self.candidates[0]

    @property
    def settings(self) -> tuple[Setting, ...]:
        return tuple(candidate.setting for candidate in self.candidates)

    @property
    def by_id(self) -> dict[str, Candidate]:
        return {candidate.setting.id: candidate for candidate in self.candidates}


def make_space(
    options: StudyFile,
    file: StudyFile,
    requested: Callable[[StudyFile], Request],
    limit: Limit,
    devices: Devices,
) -> Space:
    """Enumerate the space of a call. Flags win over the space file, and both over the declarations.

    `requested` makes the request of a point. Raises UsageError for a space that is too large, that has no
    setting, or in which none can fit.
    """
    plain = msgspec.structs.replace(options, **dict.fromkeys(SEARCHED))
    if options.batch_size is not None and str(options.batch_size).isdecimal():
        # All strategies keep the global batch, however many replicas they have.
        ranks = requested(plain).gpus[0]
        plain = msgspec.structs.replace(plain, global_batch_size=int(str(options.batch_size)) * ranks)
    if plain.global_batch_size is not None:
        plain = msgspec.structs.replace(plain, scaling="strong")
    values = _values(options, file, requested(plain), devices)
    _require_few(prod(len(each) for each in values.values()), MOST_POINTS, "points")
    refused: Counter[str] = Counter()
    examples: dict[str, str] = {}
    found: dict[str, Candidate] = {}
    for each in product(*values.values()):
        point = msgspec.structs.replace(plain, **dict(zip(values, each, strict=True)))
        request = requested(point)
        plan = expand(request, study="", created_at="", limit=replace(limit, gpus=None))
        for skip in plan.skips:
            # One example stands for all points that a rule refuses.
            refused[examples.setdefault(str(skip.rule), skip.reason)] += 1
        for cell in plan.cells:
            one = _candidate(point, cell, devices, limit.gpu_bytes, request.gpus_per_node)
            found.setdefault(one.setting.id, one)
    if not found:
        # A point that a later rule refuses has passed the earlier ones: it is nearest to running.
        last = max(examples, key=get_args(Rule).index)
        raise UsageError(
            f"no point of the space makes sense: {examples[last]}; change that, or widen the space"
        )
    fitting = [one for one in found.values() if not one.memory or one.certain_bytes <= one.memory]
    _require_few(len(fitting), MOST_SETTINGS, "settings")
    if not fitting:
        every = list(found.values())
        raise UsageError(nothing_fits(list(_compared(every, every)), certain=True))
    return Space(
        candidates=tuple(_compared(fitting, found.values())),
        refused=dict(refused.most_common()),
        too_large=len(found) - len(fitting),
        free="batch_size" in values,
    )


def _require_few(number: int, most: int, what: str) -> None:
    if number > most:
        raise UsageError(
            f"the space has {number:,} {what}, and at most {most:,} are searched: narrow it by --space or by "
            f"flags"
        )


def nothing_fits(candidates: Sequence[Candidate], *, certain: bool) -> str:
    """Say that no setting fits, which is nearest and by how much it does not, and what may help."""
    fix = "give more --gpus, a smaller --global-batch-size, or a wider --space"
    needs = [(one.certain_bytes if certain else one.predicted_bytes, one.words) for one in candidates]
    known = [(need, words) for need, words in needs if need]
    if not known:
        return f"no setting of the space fits: all that were tried ran out of memory: {fix}"
    (need, nearest), memory = min(known), candidates[0].memory
    how = "needs at least" if certain else "ran out of memory, and is predicted to need"
    has = f", and a rank has {memory / MIB:,.0f}" if memory else ""
    over = f", {(need - memory) / MIB:,.0f} too few" if has and need > memory else ""
    return (
        f"no setting of the space fits: the nearest, {nearest}, {how} {need / MIB:,.0f} MiB{has}{over}: {fix}"
    )


def _values(
    options: StudyFile, file: StudyFile, base: Request, devices: Devices
) -> dict[str, tuple[Any, ...]]:
    """The values of each searched option; None is the default of `bench matrix`."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, (learning, tuned) in SEARCHED.items():
        flag, listed, kind = getattr(options, name), getattr(file, name), BY_NAME[name].kind
        given = listed if flag is None or flag == AUTO else flag
        items = (None,) if given is None else tuple(kind.items(given, BY_NAME[name].flag))
        items = tuple(list(item) if isinstance(item, tuple) else item for item in items)
        if given is flag and len(items) > 1 and learning == "changed":
            raise UsageError(
                f"{BY_NAME[name].flag} {flag} changes what is learnt: give one value, or name the values in "
                f"a space file (--space)"
            )
        found[name] = tuned if given is None and tuned else items
    own = MEMBERS[WORKLOADS.parse(base.workloads[0]).name].batch
    batch = own * base.gpus[0]
    if base.global_batch_sizes:
        del found["batch_size"]
        [batch] = base.global_batch_sizes
        if found["accumulation"] == (None,):
            found["accumulation"] = tuple(parts for parts in _PARTS if batch % parts == 0)
    elif found["batch_size"] == (None,):
        found["batch_size"] = tuple(int(share * own) for share in _SHARES if share * own >= 1)
    names = [name for name in found["strategy"] if name is not None]
    texts = [
        text
        for name in names or _proposed(base, batch, devices)
        for text in ([name] if names and ":" in name else _variants(name))
    ]
    return found | {"strategy": tuple(dict.fromkeys(STRATEGIES.parse(text).text for text in texts))}


def _proposed(base: Request, batch: int, devices: Devices) -> list[str]:
    """The strategies that `auto` weighs, the simplest first."""
    gpus, workload = base.gpus[0], base.workloads[0]
    kind = {"device": base.device, "backend": base.backend, "node_size": base.node_size}
    cell = msgspec.convert(
        {"workload": workload, "dataset": "", "strategy": "", "optimizer": "", "gpus": gpus, "micro_batch": 1}
        | kind,
        Cell,
    )
    parts = facts(WORKLOADS.parse(workload)).parts
    size = Surroundings.of(cell, devices, base.gpus_per_node).node_size

    def micro_batch(strategy: str) -> int | str:
        groups = group_layout(STRATEGIES.parse(strategy).text, gpus, size)
        return micro_batch_of(batch, accumulation=1, replicas=gpus // groups.model_parallel)

    blocks = 0 if isinstance(parts, Unknown) else len(parts.blocks)
    point = AutoPoint(cell=cell, node_size=size, blocks=blocks, micro_batch=micro_batch)
    STRATEGIES.admit_all()
    found = [one for known in STRATEGIES.all_facts for one in known.proposals(point) if one.refused is None]
    return [one.strategy for one in sorted(found, key=lambda one: one.complexity)]


def _variants(text: str) -> Iterator[str]:
    """Yield a strategy with each combination of the declared values of options that are at their default."""
    spec = STRATEGIES.parse(text)
    options = STRATEGIES.entries[spec.name].options.items()
    free = [key for key, option in options if option.tuned and spec.options[key] == option.default]
    for values in product(*(STRATEGIES.entries[spec.name].options[key].tuned for key in free)):
        yield ":".join([spec.text, *(f"{key}={value}" for key, value in zip(free, values, strict=True))])


def _candidate(
    options: StudyFile, cell: Cell, devices: Devices, gpu_bytes: int | None, per_node: int | None
) -> Candidate:
    cell = msgspec.structs.replace(cell, steps=StepPolicy())
    around = Surroundings.of(cell, devices, per_node)
    hardware = Hardware(cores=devices.cores, gpu_name=devices.gpu_name)
    step = estimated_step_time(cell, known_ns=None, hardware=hardware, gpus_per_node=per_node).seconds
    rate = None if isinstance(step, Unknown) or not step else cell.global_batch / step
    # An assumed GPU excludes nothing.
    of_gpu = cell.device == "cuda" and cell.memory_limit_mb is None
    memory = gpu_bytes or 0 if of_gpu else around.memory
    return Candidate(
        setting=Setting(id=cell.id, choices=_choices(cell), predicted_rate=rate, complexity=0),
        options=options,
        cell=cell,
        certain_bytes=certain_bytes(cell, per_node),
        predicted_bytes=predicted_bytes([cell], per_node).get(cell.id),
        memory=memory,
        room=around.room if memory else 0,
    )


def _choices(cell: Cell) -> dict[str, str]:
    """Every choice of a cell by name: its strategy, the options of that which matter, its settings."""
    spec = STRATEGIES.parse(cell.strategy)
    options = STRATEGIES.entries[spec.name].options.items()
    positional = "" if spec.positional is None else f":{spec.positional}"
    chosen: dict[str, object] = {"strategy": f"{spec.name}{positional}"}
    values = spec.options
    chosen |= {key: values[key] for key, one in options if one.tuned or values[key] != one.default}
    chosen |= {"micro_batch": cell.micro_batch, "global_batch": cell.global_batch}
    others = [name for name in SEARCHED if name not in ("strategy", "batch_size")]
    chosen |= {name: getattr(cell, name) for name in others}
    return {key: _text(value) for key, value in chosen.items()}


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _compared(fitting: Sequence[Candidate], every: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the settings with the choices in which the space varies, and their distance from the first."""
    seen: dict[str, set[str]] = {"strategy": {"", "-"}}
    for one in every:
        for key, value in one.setting.choices.items():
            seen.setdefault(key, set()).add(value)
    if len(seen["micro_batch"]) > 1:
        # It follows from the micro-batch, the accumulation and the strategy.
        seen["global_batch"] = set()
    for one in fitting:
        varied = {key: value for key, value in one.setting.choices.items() if len(seen[key]) > 1}
        # Of a global batch, the accumulation follows from the micro-batch.
        keys = [key for key in varied if key != "accumulation" or "micro_batch" not in varied]
        away = len(list(moved(one.setting.choices, fitting[0].setting.choices, keys)))
        yield replace(one, setting=replace(one.setting, choices=varied, complexity=away))


def moved(mine: Mapping[str, str], default: Mapping[str, str], keys: Iterable[str]) -> Iterator[str]:
    """Yield the choices of `keys` that differ from the default's; an option that the default's strategy lacks
    is compared with its own default."""
    options = STRATEGIES.entries[mine["strategy"].partition(":")[0]].options
    for key in keys:
        own = options[key].default if key in options else None
        if mine[key] != default.get(key, _text(own)):
            yield key


def call_words(options: StudyFile) -> list[str]:
    """The options of `bench matrix` and `bench train` that ask for the work of a point."""
    headings = by_heading()
    kept = [each for name in ("What is run", "Where it runs", "Exchange") for each in headings[name]]
    kept += [BY_NAME[name] for name in _OF_CLUSTER]
    words: list[str] = []
    for option in kept:
        value = getattr(options, option.name)
        if value is None or option.name in _UNREPEATED:
            continue
        if option.kind.repeated:
            words += [word for each in value for word in (option.flag, str(each))]
        elif option.kind.flag_type is bool:
            words.append(option.flag if value else f"--no-{option.flag[2:]}")
        else:
            items = value if isinstance(value, list | tuple) else [value]
            words += [option.flag, ",".join(map(_text, items))]
    return words
